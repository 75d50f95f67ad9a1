"""Write small files in the formats of CIFAR-10 and MNIST, for machines without the real ones.

python examples/parallel/generate.py cifar10 DIR [--train 2000 --test 500 --seed 1]
python examples/parallel/generate.py mnist DIR [--train 2000 --test 500 --seed 1]
python examples/parallel/generate.py digits DIR

Every random value is a function of the seed, the split and the image's number.

Shapes: n images.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import cifar10
import mnist
import numpy as np
import numpy.typing as npt

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.kernels.counter import key64, permutation, uniform

CHUNK = 500  # images at a time, because their noise takes several times 8 bytes per value
DIGITS_TRAIN = 1437

# Class c has the waves TEXTURES[c % 5], in cycles across and down the image (none is another's mirror image), and the
# colour COLOURS[c // 5], the waves' amplitudes in red, green and blue.
TEXTURES = ((3, 0), (0, 3), (3, 3), (6, 0), (0, 6))
COLOURS = ((4, 1, -2), (-2, 1, 4))

# The seven segments (x, y, width, height), and the segments that are lit in each of the digits 0 to 9.
SEGMENTS = (
    (9, 5, 10, 3),
    (9, 5, 3, 10),
    (16, 5, 3, 10),
    (9, 13, 10, 3),
    (9, 13, 3, 10),
    (16, 13, 3, 10),
    (9, 20, 10, 3),
)
LIT = ("012456", "25", "02346", "02356", "1235", "01356", "013456", "025", "0123456", "012356")

Images = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Pick = Callable[..., Numbers]  # (name, limit, *shape) -> whole numbers [n, *shape] in range(limit)


def made(draw: Callable[[Numbers, Pick], Images], count: int, seed: int, split: str) -> tuple[Images, Numbers]:
    """Return `count` images, drawn from their labels, and the labels int64, equally frequent but for a remainder."""
    labels = permutation(count, key64(seed, split, "labels")) % 10

    def chunk(first: int) -> Images:
        numbers = np.arange(first, min(first + CHUNK, count))

        def pick(what: str, limit: int, *shape: int) -> Numbers:
            values = int(np.prod(shape))
            counters = (numbers[:, None] * values + np.arange(values)).reshape(-1, *shape)
            return (uniform(key64(seed, split, what), counters) * limit).astype(np.int64)

        return draw(labels[numbers], pick)

    return np.concatenate([chunk(first) for first in range(0, count, CHUNK)]), labels


def waves(labels: Numbers, pick: Pick) -> Images:
    """Return images uint8 [n, 3, 32, 32]: coloured waves with random shifts, contrasts, brightness and noise."""
    row, column = np.mgrid[:32, :32]
    texture = np.array([np.rint(64 * np.cos(2 * np.pi / 32 * (x * column + y * row))) for x, y in TEXTURES], np.int64)
    y = (row + pick("down", 32)[:, None, None]) % 32
    x = (column + pick("across", 32)[:, None, None]) % 32
    wave = texture[(labels % len(TEXTURES))[:, None, None], y, x][:, None]
    colour = np.array(COLOURS)[labels // len(TEXTURES)][:, :, None, None]
    contrast = 2 + pick("contrast", 5)[:, None, None, None]
    bright = 96 + pick("bright", 65, 3, 1, 1)
    noise = pick("noise", 161, 3, 32, 32) - 80
    values: Numbers = np.clip(bright + colour * wave * contrast // 16 + noise, 0, 255)
    return values.astype(np.uint8)


def segments(labels: Numbers, pick: Pick) -> Images:
    """Return images uint8 [n, 28, 28]: seven-segment digits with random shifts, slants, ink and noise."""
    glyphs = np.zeros((10, 28, 28), np.int64)
    for digit, lit in enumerate(LIT):
        for x, y, width, height in (SEGMENTS[int(one)] for one in lit):
            glyphs[digit, y : y + height, x : x + width] = 1
    row, column = np.mgrid[:28, :28]
    lean = (row - 14) * (pick("lean", 5)[:, None, None] - 2) // 8
    y = (row + pick("down", 5)[:, None, None] - 2) % 28
    x = (column + lean + pick("across", 5)[:, None, None] - 2) % 28
    ink = 100 + pick("ink", 100)[:, None, None]
    noise = pick("noise", 201, 28, 28) - 100
    values: Numbers = np.clip(glyphs[labels[:, None, None], y, x] * ink + noise, 0, 255)
    return values.astype(np.uint8)


def write_cifar10(folder: Path, train: int, test: int, seed: int) -> str:
    """Write waves as CIFAR-10's files, up to five of them for training; return a description as text."""
    _new(folder, [*cifar10.TRAIN, cifar10.TEST])
    images, labels = made(waves, train, seed, "train")
    parts = np.array_split(np.arange(train), min(train, len(cifar10.TRAIN)))
    for name, part in zip(cifar10.TRAIN, parts, strict=False):
        cifar10.write(folder / name, images[part], labels[part])
    cifar10.write(folder / cifar10.TEST, *made(waves, test, seed, "test"))
    return "images of 3 x 32 x 32 in CIFAR-10's format"


def write_mnist(folder: Path, train: int, test: int, seed: int) -> str:
    """Write seven-segment digits as MNIST's files; return a description as text."""
    _new(folder, sum(mnist.FILES.values(), ()))
    mnist.write(folder, "train", *made(segments, train, seed, "train"))
    mnist.write(folder, "test", *made(segments, test, seed, "test"))
    return "images of 28 x 28 in MNIST's format"


def write_digits(folder: Path) -> tuple[int, int]:
    """Write scikit-learn's 1,797 digits, enlarged from 8 x 8 to 28 x 28, as MNIST's files; return the splits' sizes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("digits come with scikit-learn, which is not installed: pip install scikit-learn") from None
    _new(folder, sum(mnist.FILES.values(), ()))
    found = load_digits()
    grey = (found.images.astype(np.int64) * 255 + 8) // 16  # from 0..16
    images = np.pad(grey.astype(np.uint8).repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2)))
    train, test = np.split(permutation(len(images), key64(1, "digits")), [DIGITS_TRAIN])
    mnist.write(folder, "train", images[train], found.target[train])
    mnist.write(folder, "test", images[test], found.target[test])
    return len(train), len(test)


def main(argv: Sequence[str]) -> None:
    """Parse the command line and write the files."""
    parser = cli.parser("generate", "Write small files in the formats of CIFAR-10 and MNIST.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="cifar10|mnist|digits")
    for name, what in (
        ("cifar10", "coloured waves, as CIFAR-10's files"),
        ("mnist", "seven-segment digits, as MNIST's files"),
        ("digits", "scikit-learn's handwritten digits, as MNIST's files"),
    ):
        command = commands.add_parser(name, help=what, allow_abbrev=False)
        command.add_argument("folder", type=Path, metavar="DIR", help="folder of the files; created if missing")
        if name != "digits":
            command.add_argument("--train", type=int, default=2000, metavar="N", help="training images (default 2000)")
            command.add_argument("--test", type=int, default=500, metavar="N", help="test images (default 500)")
            command.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the images (default 1)")
        cli.add_debug(command)
    print(written(parser.parse_args(argv)))


def written(arguments: argparse.Namespace) -> str:
    """Write the files that parsed flags ask for; return a line that describes them."""
    folder = arguments.folder
    if arguments.command == "digits":
        train, test = write_digits(folder)
        what = "handwritten digits of 28 x 28 in MNIST's format"
    else:
        train, test = arguments.train, arguments.test
        for flag, count in (("--train", train), ("--test", test)):
            if count < 1:
                raise UserError(f"{flag} must be at least 1, not {count}")
        write = write_cifar10 if arguments.command == "cifar10" else write_mnist
        what = write(folder, train, test, arguments.seed)
    return f"{folder}: {train:,} training and {test:,} test {what}"


def _new(folder: Path, names: Iterable[str]) -> None:
    """Create the folder of new files; UserError if one of them exists."""
    for name in names:
        if (folder / name).exists():
            raise UserError(f"{folder / name}: the file exists; give another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    sys.exit(cli.run("generate", main))
