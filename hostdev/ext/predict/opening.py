"""Opens a checkpoint of the `train` command for predictions: chooses it in a folder, and checks its content."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hostdev.checkpoint.folder import Chain, Found, check_file, is_checkpoint
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import values_of
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.checkpoint.remote import fetch, newest
from hostdev.checkpoint.state import DENSE, find_file
from hostdev.core.errors import HostdevError, UserError, in_words
from hostdev.data import manifest
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess.encoding import Encoding
from hostdev.ext.checkpoints import best
from hostdev.ext.predict import WHICH
from hostdev.models import registry

_DAMAGE = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, RuntimeError),
    OSError,
)
_LONGEST = 480  # maximum characters of a message about a file


class Opened(NamedTuple):
    """The content of a checkpoint of the `train` command.

    Attributes:
        why: Why this checkpoint was chosen, such as "the best: AUC 0.8100 after epoch 4"; "" for a single checkpoint,
            or for the newest of a run without --early-stop.
    """

    found: Found
    settings: dict[str, Any]
    dense: Any  # the model's state_dict
    data: Manifest
    data_folder: Path
    encoding: Encoding
    vocabulary: str | None  # checksum of the vocabulary's file
    why: str

    @property
    def chain(self) -> Chain:
        """The checkpoint and its parents."""
        return self.found.chain

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.chain[-1].path


def open_checkpoint(path: Path, which: str | None) -> Opened:
    """Open the checkpoint at `path`, or choose one in a folder or run directory.

    Args:
        path: The checkpoint or the folder.
        which: "best" (see `best.Best`), "newest", or None: the best for a run with --early-stop, otherwise
            the newest.

    Raises:
        UserError: There is no checkpoint, the `train` command did not write it, or its content is invalid.
    """
    if which not in (None, *WHICH):
        raise UserError(f"there is no {which!r} checkpoint; use {' or '.join(WHICH)}, or name a checkpoint's folder")
    with reading(path):
        found, why = _chosen(path, which)
    newest_one = found.chain[-1]
    with reading(newest_one.path):
        for checkpoint in found.chain:
            for file in checkpoint.manifest.others:
                if file.file == DENSE and checkpoint is newest_one:
                    check_file(checkpoint.path / file.file, file)
        state = newest_one.manifest.state
        if not isinstance(state, dict) or "more" not in state:
            raise UserError(
                f"{newest_one.path} was written by Runtime.save, which does not record the model; use "
                "hostdev.open for its tables, or Runtime.load in the program that saved it"
            )
        values = values_of(found.chain)
        settings, dense = _settings(values["more"]["settings"]), values["dense"]["model"]
        layers = Layers(found.chain)
        of_data = find_file(layers, f"data/{manifest.FILE_NAME}")
        if of_data is None:
            raise BrokenCheckpointError(f"{newest_one.path} is broken (it has no data/{manifest.FILE_NAME})")
        data = manifest.read(of_data.parent)
        vocabulary = None if data.vocabulary is None else find_file(layers, f"data/{data.vocabulary}")
        if vocabulary is None and data.vocabulary is not None:
            raise BrokenCheckpointError(f"{newest_one.path} is broken (it has no data/{data.vocabulary})")
        encoding = Encoding(data, vocabulary)
        words = None if vocabulary is None else _checksum(found.chain, f"data/{data.vocabulary}")
    return Opened(found, settings, dense, data, of_data.parent, encoding, words, why)


def _checksum(chain: Chain, name: str) -> str | None:
    """Return the checksum of a file of `CheckpointManifest.others` in the newest checkpoint that has it."""
    found = (checkpoint.manifest.other(name) for checkpoint in reversed(chain))
    return next((file.sha256 for file in found if file is not None), None)


def _chosen(path: Path, which: str | None) -> tuple[Found, str]:
    """Return the chosen checkpoint, and the reason for the choice."""
    found = newest(path)
    if is_checkpoint(path):
        if which is not None:
            raise UserError(f"{path} is a single checkpoint; name its parent folder, or do not ask for the {which} one")
        return found, ""
    known = best.of_run(found.chain[-1])
    if which == "newest" or (which is None and (known is None or not known.stops_early)):
        return found, "" if known is None or not known.stops_early else "the newest, as requested"
    if known is None:
        raise UserError(
            f"the newest checkpoint in {path} has no evaluation, so the best one is unknown; use the newest"
        )
    fetch(path, step=known.step)
    chain = best.find_best_chain(found.chain[-1].path.parent, known)
    if chain is None:
        told = f"the best checkpoint (step {known.step:,}, after epoch {known.epoch}) is not in {path}"
        if which == "best":
            raise UserError(f"{told}; only runs with --early-stop keep the best; use the newest")
        return Found(found.chain, found.broken), f"the newest; {told}"
    is_newest = chain[-1].path == found.chain[-1].path
    return Found(chain, found.broken), (
        f"the best{', and the newest' if is_newest else ''}: {known.metric} {known.value:.4f} after epoch {known.epoch}"
    )


def _settings(found: Any) -> dict[str, Any]:
    """Return a run's options; raise KeyError or TypeError if a required option is missing or invalid."""
    right: dict[str, Callable[[Any], bool]] = {
        "model": lambda value: isinstance(value, str),
        "emb_dim": lambda value: value is None or (type(value) is int and 1 <= value <= 1 << 20),
        "seed": lambda value: type(value) is int,
        "batch_size": lambda value: type(value) is int and value >= 1,
        "precision": lambda value: value in ("fp32", "bf16"),
    }
    for name, is_right in right.items():
        if not is_right(found[name]):
            raise TypeError(f"the run's {name} is invalid: {found[name]!r}")
    return dict(found)


def choose_model(settings: dict[str, Any], model: "str | type[Any] | None", path: Path) -> "str | type[Any]":
    """Return the model's name or class; raise UserError for a custom class that `model` does not name."""
    if model is not None:
        return model
    if settings["model"] not in registry.names():
        shown = str(settings["model"])[:100]
        raise UserError(
            f"{path} has the custom model class {shown!r}, and predicting imports its module; if you trust it, name it "
            "with --model, or in Python with Predictor(..., model=)"
        )
    return str(settings["model"])


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert any error from a damaged or foreign file to a one-line HostdevError about the checkpoint."""
    try:
        yield
    except HostdevError as error:
        if len(str(error)) <= _LONGEST:
            raise
        raise type(error)(f"{str(error)[:_LONGEST]}...") from None  # names in a file may have any length
    except _DAMAGE as error:
        why = in_words(error)[:200] or type(error).__name__
        raise BrokenCheckpointError(f"{path} is broken ({type(error).__name__}: {why})") from error
