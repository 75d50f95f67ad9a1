"""Runs `hostdev predict`, once its flags are parsed."""

import hostdev.core.environment  # noqa: F401  # isort: skip  (before torch)

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from hostdev.core.addresses import address_of, data_path, shown_place
from hostdev.core.errors import UserError, naming
from hostdev.core.outputs import new_file
from hostdev.core.progress import bar, counted, note
from hostdev.core.stores import Store
from hostdev.core.sync import sending
from hostdev.data import manifest
from hostdev.data.folder import require
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.meaning import difference, with_known_ids
from hostdev.data.preprocess.reading import ReadSettings, all_readings
from hostdev.data.preprocess.unlabelled import EncodedPart, rows_in
from hostdev.data.shards import ShardReader
from hostdev.ext.predict.measures import By, Measures
from hostdev.ext.predict.output import Output, kept_columns
from hostdev.ext.predict.predictor import Predictor, UnknownValues, open_for_command
from hostdev.train.target_scores import TargetScores

_AT = 10  # default k of NDCG@k and recall@k


def run(arguments: argparse.Namespace, prog: str) -> None:
    """Predict according to the parsed flags; `prog` is the command's name in messages."""
    out: Path = arguments.out
    arguments.data = _find_data(arguments.data)
    with sending(out):
        report = _predict(arguments, prog, out)
    report()


def _predict(arguments: argparse.Namespace, prog: str, out: Path) -> Callable[[], None]:
    """Write the predictions; return a function that prints what was done."""
    predictor = open_for_command(
        lambda line: note(f"{prog}: {line}"),
        arguments.checkpoint,
        arguments.device,
        model=arguments.model,
        which=arguments.which,
        query=arguments.query,
        _encodes=not arguments.data.is_dir(),
    )
    schema = predictor.data.schema
    kept = kept_columns(arguments.keep, schema)
    work = _open_rows(arguments, predictor, kept, prog)
    chosen = f" ({predictor.why})" if predictor.why else ""
    print(f"model    {predictor.settings['model']} of {shown_place(predictor.path)}{chosen}", flush=True)
    unknown = None if arguments.data.is_dir() else UnknownValues(predictor.encoding)
    start = time.monotonic()
    lines = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_file(out) as partial:  # noqa: SIM117  (an error of new_file names its own file)
        with (
            naming(out),
            TargetScores(schema.labels, schema.targets, out.parent) as scores,
            Output(partial, schema, is_csv=out.suffix.lower() == ".csv", more=kept) as output,
            bar(work.total, "predicting", work.unit, unit_scale=True) as progress,
        ):
            measures = Measures(schema, _by(arguments, predictor), scores)
            for part in work.parts:
                logits = predictor.logits_by_batch(part.batch)
                if unknown is not None:
                    unknown.count(part.batch)
                output.write(logits, part)
                measures.add(logits, part)
                lines += part.lines
                progress.update(part.size)
            quality = list(measures.lines(arguments.at or _AT))

    def report() -> None:
        predicted, seconds = measures.predicted, time.monotonic() - start
        print(f"rows     {predicted:,} in {seconds:.1f} s to {shown_place(out)}")
        if lines > predicted:
            have = "has" if lines - predicted == 1 else "have"
            what = "prediction" if schema.targets.numeric else "probability"
            print(f"         {counted(lines - predicted, 'malformed line')} {have} no {what}")
        if measures.unlabelled and work.labelled:
            print(f"         {counted(measures.unlabelled, 'row')} without a label that can be read")
        for line in unknown.lines() if unknown is not None else ():
            note(f"{prog}: warning: {line}")
        for line in quality:
            print(line)

    return report


def _by(arguments: argparse.Namespace, predictor: Predictor) -> By | None:
    """Return how --by groups the rows; None without --by."""
    name, path = arguments.by, arguments.data
    if name is None:
        return None
    if not path.is_dir():
        return By(name, all_readings(predictor.data.options, [name])[name])
    found = manifest.read(path)
    if name not in found.schema.ids:
        return By(name, ReadSettings())  # `Groups` refuses the name at the first rows
    encoding = Encoding(found, None if found.vocabulary is None else path / found.vocabulary)
    [missing] = encoding.find_ids(name, pa.nulls(1, pa.string())).tolist()
    return By(name, ReadSettings(), -1 if missing < found.schema.first_value else missing)


def _find_data(path: Path) -> Path:
    """Return the path of the rows; for the address of a data set in a store, that of its local folder."""
    address = address_of(path)
    if address is None or Store(address).read_if_there(manifest.FILE_NAME) is None:
        return path
    found = data_path(address)
    require(found)
    return found


class _Work(NamedTuple):
    """The rows to predict. `total` is in `unit`: "row", or "B" for bytes. `labelled` tells whether there are labels."""

    total: int
    unit: str
    labelled: bool
    parts: Iterator[EncodedPart]


def _open_rows(arguments: argparse.Namespace, predictor: Predictor, kept: list[str], prog: str) -> _Work:
    path: Path = arguments.data
    if path.is_dir():
        if arguments.query is not None:
            raise UserError(f"--query has no effect on {path}, a data set, which has ids only; give a file of raw rows")
        if kept:
            raise UserError(f"--keep has no effect on {path}, a data set, which has ids only; give a file of raw rows")
        split = arguments.split or "test"
        found = manifest.read(path)
        differs = difference(predictor.data, predictor.data_folder, found, path)
        if differs is not None:
            raise UserError(
                f"--data {path} has different columns, ids or scales than the data that {predictor.path} was trained "
                f"on ({differs}); give a file of raw rows"
            )
        if not found.rows(split):
            other = next((name for name in found.splits if found.rows(name)), None)
            raise UserError(f"--data {path} has no {split} rows" + (f"; give --split {other}" if other else ""))
        reader = ShardReader(path, found, split)
        known = predictor.data.schema.rows
        batches = (
            with_known_ids(batch, found.schema, known) for batch in reader.batches(predictor.batch_size)
        )  # ids that are newer than the checkpoint's vocabulary count as unknown
        return _Work(reader.rows, "row", True, (EncodedPart(batch, None, len(batch), len(batch)) for batch in batches))
    if arguments.split is not None:
        raise UserError(f"--split has no effect on {path}, which is not a data set; leave out --split")
    by = [] if arguments.by is None else [arguments.by]
    names = [*dict.fromkeys([*kept, *by])]
    is_given = arguments.query is not None
    source = rows_in(path, predictor.encoding, predictor.data.options, names, lambda: predictor.raw_query, raw=is_given)
    if not source.computes and predictor.ambiguity is not None:
        note(f"{prog}: warning: {predictor.ambiguity}")
    return _Work(source.total, "B", source.labelled, source.parts())
