"""`hostdev quickstart`: from raw Criteo text, or synthetic text, to a trained model in one command."""

import argparse
import json
import shlex
import time
from hashlib import sha256
from itertools import chain
from pathlib import Path

from hostdev.core.errors import HostdevError, UserError
from hostdev.data import manifest
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.command import summary
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.inputs import STANDARD_INPUT
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.ext.training.command import train
from hostdev.ext.training.config import CommandConfig

SMALL_ROWS, SMALL_BATCH = 1_000_000, 1000


def run(arguments: argparse.Namespace, options: Options, rows: int) -> None:
    """Prepare the data and train.

    Args:
        arguments: Parsed flags of the training.
        options: Options of the preprocessing.
        rows: Number of synthetic samples to create if no file is given.
    """
    text = arguments.criteo
    if text is None:
        text = arguments.datasets / f"lookalike-{rows}-{options.seed}.tsv"
        if not text.exists():
            _announce("hostdev.data.preprocess", "synthetic", "--rows", rows, "--tsv", text, "--seed", options.seed)
            try:
                write_text(Synthetic(rows, options.seed), text, wait=True)
            except HostdevError:  # another process may have made it first
                if not text.exists():
                    raise
    data = prepare(text, arguments.datasets, options)

    training = manifest.read(data).rows("train")
    if arguments.batch_size is None and training < SMALL_ROWS:
        arguments.batch_size = min(SMALL_BATCH, training)
    arguments.data = data
    settings = CommandConfig.from_flags(arguments)
    _announce("hostdev.train", *settings.to_flags())
    train(settings)


def prepare(text: Path, datasets: Path, options: Options) -> Path:
    """Return the data set prepared from a text file; reuse an existing one if the text has not changed."""
    if text == STANDARD_INPUT:
        raise UserError(
            "--criteo must be a file, because later calls reuse its data set; for standard input use "
            "python -m hostdev.data.preprocess criteo - --out DIR"
        )
    source = CriteoText([text])
    stamp = [*source.describe(), text.stat().st_mtime_ns, vars(options), manifest.VERSION]
    mark = sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:8]
    out = datasets / f"{text.stem}-{mark}"
    if (out / manifest.FILE_NAME).is_file():
        print(f"using {out}, made earlier from {text}")
        return out
    flags = {name: value for name, value in vars(options).items() if value is not None}
    pairs = (("--" + name.replace("_", "-"), value) for name, value in flags.items())
    _announce("hostdev.data.preprocess", "criteo", text, "--out", out, *chain.from_iterable(pairs))
    start = time.monotonic()
    try:
        print(summary(build(source, out, options), out, time.monotonic() - start))
    except HostdevError:
        if not (out / manifest.FILE_NAME).is_file():
            raise
        print(f"using {out}, which another process has just made from {text}")
    return out


def _announce(module: str, *arguments: object) -> None:
    """Print the command that runs only the next step."""
    print(f"$ python -m {module} {shlex.join(map(str, arguments))}", flush=True)
