"""python -m hostdev.train.quickstart: from raw Criteo text, or a look-alike, to a trained model in one command."""

if __name__ == "__main__":  # first of all, as imports take seconds: Ctrl-C ends these, too, with one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.commands.quickstart", "hostdev.train.quickstart"))

import argparse
import json
import shlex
import time
from hashlib import sha256
from pathlib import Path

from hostdev.core import cli
from hostdev.core.errors import HostdevError, UserError
from hostdev.data import manifest
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.command import summary
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.inputs import STANDARD_INPUT
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.train import config
from hostdev.train.command import train

SMALL_ROWS, SMALL_BATCH = 1_000_000, 1000


def run(arguments: argparse.Namespace, options: Options, rows: int) -> None:
    """Do what parsed flags say: `arguments` are those of training, `options` how rows become shards.

    rows  of the synthetic data, without a file
    """
    text = arguments.criteo
    if text is None:
        text = arguments.datasets / f"lookalike-{rows}-{options.seed}.tsv"
        if not text.exists():
            _announce("hostdev.data.preprocess", "synthetic", "--rows", rows, "--tsv", text, "--seed", options.seed)
            try:
                write_text(Synthetic(rows, options.seed), text, wait=True)
            except HostdevError:  # another process may have made it meanwhile
                if not text.exists():
                    raise
    data = prepare(text, arguments.datasets, options)

    training = manifest.read(data).rows("train")
    if arguments.batch_size is None and training < SMALL_ROWS:
        arguments.batch_size = min(SMALL_BATCH, training)
    arguments.data = data
    settings = config.from_flags(arguments)
    _announce("hostdev.train", *config.to_flags(settings))
    train(settings)


def prepare(text: Path, datasets: Path, options: Options) -> Path:
    """Return the data set of a text with these options; an existing one is used while the text has not changed."""
    if text == STANDARD_INPUT:
        raise UserError("--criteo takes a file, which tells whether its data set is there already; for standard input "
                        "use python -m hostdev.data.preprocess criteo - --out DIR")  # fmt: skip
    source = CriteoText([text])
    stamp = [*source.describe(), text.stat().st_mtime_ns, vars(options), manifest.VERSION]
    mark = sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:8]
    out = datasets / f"{text.stem}-{mark}"
    if (out / manifest.FILE_NAME).is_file():
        print(f"using {out}, made from {text} before")
        return out
    flags = {name: value for name, value in vars(options).items() if value is not None}
    _announce("hostdev.data.preprocess", "criteo", text, "--out", out,
              *(part for name, value in flags.items() for part in ("--" + name.replace("_", "-"), value)))  # fmt: skip
    start = time.monotonic()
    try:
        print(summary(build(source, out, options), out, time.monotonic() - start))
    except HostdevError:
        if not (out / manifest.FILE_NAME).is_file():
            raise
        print(f"using {out}, which another process has made from {text} meanwhile")
    return out


def _announce(module: str, *arguments: object) -> None:
    """Print the command that does the next step alone."""
    print(f"$ python -m {module} {shlex.join(map(str, arguments))}", flush=True)
