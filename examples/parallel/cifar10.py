"""CIFAR-10's binary files (https://www.cs.toronto.edu/~kriz/cifar.html): read, write and convert them to inputs.

A record has 3,073 bytes: the label, 0 to 9, then the red, green and blue values of 32 x 32 pixels, row by row.

Shapes: N images of a split, n images of a batch.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.errors import UserError
from hostdev.kernels.counter import key64, uniform

TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
INSIDE = "cifar-10-batches-bin"  # the folder in the published archive
SIDE, CLASSES = 32, 10
RECORD = 1 + 3 * SIDE * SIDE
PADDING = 4
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

Images = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


def read(folder: Path, split: Literal["train", "test"]) -> tuple[Images, Numbers]:
    """Return the images uint8 [N, 3, 32, 32] and labels int64 [N] of a split.

    Args:
        folder: Has the files, or a folder cifar-10-batches-bin with them. The last few of the five training files may
            be missing.
        split: "train" or "test".

    Raises:
        UserError: A file is missing, empty or truncated, or has an invalid label.
    """
    files = _files(folder, split)
    counts = [_records(file) for file in files]
    images = np.empty((sum(counts), 3, SIDE, SIDE), np.uint8)
    labels = np.empty(len(images), np.int64)
    first = 0
    for file, count in zip(files, counts, strict=True):
        records = np.fromfile(file, np.uint8).reshape(count, RECORD)
        wrong = np.flatnonzero(records[:, 0] >= CLASSES)
        if len(wrong):
            raise UserError(
                f"{file}: record {wrong[0] + 1} of {count} has the label {records[wrong[0], 0]}, not one of 0 to 9; "
                "is this CIFAR-10's binary version?"
            )
        labels[first : first + count] = records[:, 0]
        images[first : first + count] = records[:, 1:].reshape(count, 3, SIDE, SIDE)
        first += count
    return images, labels


def write(path: Path, images: Images, labels: Numbers) -> None:
    """Write one file of images uint8 [n, 3, 32, 32] and labels int64 [n], 0 to 9."""
    records = np.empty((len(images), RECORD), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = images.reshape(len(images), RECORD - 1)
    records.tofile(path)


def transform(images: Images, numbers: Numbers, *, seed: int, epoch: int, train: bool, size: int = SIDE) -> Tensor:
    """Return the network's input float32 [n, 3, size, size]: scaled to 0..1, then normalized by `MEAN` and `STD`.

    The result for an image depends only on the image, its number, the seed and the epoch, not on the batch.

    Args:
        images: uint8 [n, 3, 32, 32].
        numbers: int64 [n], the images' numbers in their split.
        seed: Seed of the random crops.
        epoch: The epoch; each has other crops.
        train: Crop 32 x 32 at random from the image with a border of 4 zeros, and mirror about half of the crops.
        size: The size to which the images are then enlarged bilinearly.
    """
    if train:
        images = _cut_out(images, *drawn(numbers, seed, epoch))
    values = torch.from_numpy(images.astype(np.float32))
    if size != SIDE:
        values = _rows(_rows(values.transpose(2, 3), size).transpose(2, 3), size)
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (MEAN, STD))
    return (values / 255 - mean) / std


def drawn(numbers: Numbers, seed: int, epoch: int) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
    """Return the first row and column of each crop, int64 [n] in 0..8, and which crops are mirrored, bool [n]."""
    places = 2 * PADDING + 1
    choice = (uniform(key64(seed, "cifar10", epoch), numbers) * (2 * places * places)).astype(np.int64)
    return choice // (2 * places), choice // 2 % places, choice % 2 == 1


def _cut_out(images: Images, top: Numbers, left: Numbers, mirrored: npt.NDArray[np.bool_]) -> Images:
    """Return crops [n, 3, 32, 32] of the padded images, each from its first row and column on."""
    around = (PADDING, PADDING)
    padded = np.pad(images, ((0, 0), (0, 0), around, around))
    ascending = np.arange(SIDE)
    rows = top[:, None] + ascending
    columns = left[:, None] + np.where(mirrored[:, None], ascending[::-1], ascending)
    sample, channel = np.arange(len(images))[:, None, None, None], np.arange(3)[:, None, None]
    cut: Images = padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
    return cut


def _rows(values: Tensor, size: int) -> Tensor:
    """Resize the height of [n, 3, height, width] to `size`, by linear interpolation between the centres of pixels.

    The bits of torch.nn.functional.interpolate would depend on the number of threads and on the batch size.
    """
    height = values.shape[2]
    place = ((torch.arange(size) + 0.5) * (height / size) - 0.5).clamp(min=0)
    low = place.long()
    high = (low + 1).clamp(max=height - 1)
    share = (place - low)[:, None]
    return values[:, :, low] * (1 - share) + values[:, :, high] * share


def _files(folder: Path, split: Literal["train", "test"]) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of {TRAIN[0]}, ... and {TEST}")
    if (folder / INSIDE).is_dir():
        folder = folder / INSIDE
    files = [folder / name for name in (TRAIN if split == "train" else (TEST,))]
    there = [file.is_file() for file in files]
    if not all(there[: max(1, sum(there))]):  # the last files may be missing, but none before them
        raise UserError(
            f"{files[there.index(False)]}: no such file; download CIFAR-10's binary files, or generate some"
        )
    return files[: sum(there)]


def _records(file: Path) -> int:
    """Return the number of a file's records."""
    size = file.stat().st_size
    if size == 0:
        raise UserError(f"{file}: the file is empty; download it again")
    if size % RECORD:
        raise UserError(f"{file} is truncated: {size:,} bytes are not a multiple of {RECORD:,}; download it again")
    return size // RECORD
