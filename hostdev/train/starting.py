"""--start-from CHECKPOINT: a new run that begins with the tables and the layers of an earlier one."""

from pathlib import Path
from typing import Any, NamedTuple

from hostdev.checkpoint.fitting import fit_tables, load_shared
from hostdev.checkpoint.folder import Chain, read_chain
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import find_newest_valid, values_of
from hostdev.checkpoint.state import find_file
from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.manifest import FILE_NAME, Manifest
from hostdev.data.preprocess.meaning import difference
from hostdev.distributed.process_group import Ranks
from hostdev.train.config import TrainConfig
from hostdev.train.trainer import Trainer

_REMEDY = "prepare the data with preprocess ... --vocabulary FROM, where FROM is the data set of the checkpoint"


class Origin(NamedTuple):
    """The checkpoint that a new run begins with.

    notes  lines about newer ones that are damaged, and about what could not be compared
    """

    chain: Chain
    notes: list[str]

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.chain[-1].path


def find(settings: TrainConfig, root: Path, data: Manifest) -> Origin:
    """Return the checkpoint that --start-from names, the newest whole one of a folder.

    Raises UserError where there is none, where it is of another model, or where the data's ids, columns or scaled
    numbers have another meaning than those that it was trained with.
    """
    assert settings.start_from is not None
    if not settings.start_from.exists():
        raise UserError(f"--start-from {settings.start_from}: there is no such checkpoint")
    found = find_newest_valid(settings.start_from)
    origin = Origin(found.chain, [f"start    {line}" for line in found.notes()])
    more = _values(origin).get("more")
    if isinstance(more, dict) and more["settings"]["model"] != settings.model:
        raise UserError(
            f"{origin.path} was trained with --model {more['settings']['model']}, not --model {settings.model}; give "
            "the same"
        )
    layers = Layers(origin.chain)
    file = find_file(layers, f"data/{FILE_NAME}")
    if file is None:
        origin.notes.append(f"start    {origin.path} has no data set's vocabulary: that its rows are of the same ids "
                            "as the data's is not checked")  # fmt: skip
        return origin
    require_same_meaning(origin.path, file.parent, manifest.read(file.parent), root, data)
    return origin


def find_together(settings: TrainConfig, root: Path, data: Manifest, ranks: Ranks) -> Origin:
    """Do `find` as several processes: the first looks; all begin with the same checkpoint."""
    origin = find(settings, root, data) if ranks.rank == 0 else None
    told = ranks.control.share(None if origin is None else [str(origin.path.resolve()), origin.notes])[0]
    return origin or Origin(read_chain(Path(told[0])), told[1])


def load(origin: Origin, trainer: Trainer) -> list[str]:
    """Load rows, slots, layers and their optimizer's state into a new run; return lines that say what was taken.

    Steps count from 0, learning rates are the run's own, and rows that the checkpoint does not have keep their initial
    values. Raises UserError, before anything changes, for another model.
    """
    chain = origin.chain
    fit = fit_tables(chain, trainer.tables)
    dense = _values(origin).get("dense")
    if isinstance(dense, dict) and {"model", "optimizer"} <= set(dense):
        rates = [group["lr"] for group in trainer.adam.param_groups]
        trainer.load_dense(chain, dense)
        for group, lr in zip(trainer.adam.param_groups, rates, strict=True):
            group["lr"] = lr
        layers = "dense layers and their optimizer's state are taken"
    else:
        layers = "dense layers have their initial values: the checkpoint has none of this command"
    load_shared(chain, trainer.tables, fit)
    step = chain[-1].manifest.step
    return [
        *origin.notes,
        f"start    from {origin.path}, after step {step:,}; steps of this run count from 0",
        *(f"start    {line}" for line in fit.lines()),
        f"start    {layers}; learning rates are this run's",
    ]


def require_same_meaning(path: Path, theirs: Path, there: Manifest, root: Path, here: Manifest) -> None:
    """Raise UserError unless ids, columns and scaled numbers of a data set mean what they meant in a checkpoint.

    path    the checkpoint's; theirs: the folder with its manifest and vocabulary
    there   its data set's manifest
    root    the folder of the data set at hand; here: its manifest
    """
    differs = difference(there, theirs, here, root)
    if differs is not None:
        raise UserError(f"{root} does not fit {path}, which was trained on {differs}; {_REMEDY}")
    if there.schema.rows > here.schema.rows:
        raise UserError(
            f"{path} was trained with {there.schema.rows:,} ids, and {root} has only {here.schema.rows:,}; {_REMEDY}"
        )


def _values(origin: Origin) -> dict[str, Any]:
    values = values_of(origin.chain)
    return values if isinstance(values, dict) else {}
