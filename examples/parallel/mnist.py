"""MNIST's idx files (LeCun, Cortes & Burges): read, write and convert them to a network's input.

A file is a magic number, the sizes of its dimensions (each 4 bytes, the highest first), then a byte for each value.

Shapes: N images of a split, n images of a batch.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.errors import UserError

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
IMAGES, LABELS = 0x803, 0x801  # magic numbers: 08 is unsigned bytes, the last byte is the number of dimensions
CLASSES = 10
MEAN, STD = 0.1307, 0.3081

Images = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Split = Literal["train", "test"]


def read(folder: Path, split: Split) -> tuple[Images, Numbers]:
    """Return the images uint8 [N, rows, columns] and labels int64 [N] of a split, from plain or .gz files.

    Raises:
        UserError: A file is missing or damaged, or has an invalid label; or the numbers of images and labels differ.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of {FILES['train'][0]} and the others")
    images_file, labels_file = (_find(folder / name) for name in FILES[split])
    images, labels = _array(images_file, IMAGES), _array(labels_file, LABELS)
    if len(images) != len(labels):
        raise UserError(
            f"{labels_file}: {len(labels):,} labels, but {len(images):,} images in {images_file.name}; "
            "download both from one source"
        )
    wrong = np.flatnonzero(labels >= CLASSES)
    if len(wrong):
        raise UserError(
            f"{labels_file}: label {wrong[0] + 1} of {len(labels)} is {labels[wrong[0]]}, not one of 0 to 9; "
            "download the file again"
        )
    return images, labels.astype(np.int64)


def write(folder: Path, split: Split, images: Images, labels: Numbers) -> None:
    """Write a split's two files: images uint8 [N, rows, columns], labels int64 [N], 0 to 9."""
    for name, magic, values in zip(FILES[split], (IMAGES, LABELS), (images, labels.astype(np.uint8)), strict=True):
        header = struct.pack(f">{1 + values.ndim}I", magic, *values.shape)
        (folder / name).write_bytes(header + values.tobytes())


def transform(images: Images) -> Tensor:
    """Return the network's input float32 [n, 1, rows, columns]: images uint8 scaled to 0..1, then normalized."""
    return (torch.from_numpy(images.astype(np.float32)).unsqueeze(1) / 255 - MEAN) / STD


def _find(file: Path) -> Path:
    for one in (file, file.with_name(file.name + ".gz")):
        if one.is_file():
            return one
    raise UserError(f"{file}: no such file, with or without .gz; download MNIST's four files, or generate some")


def _array(file: Path, magic: int) -> Images:
    """Return the array in an idx file with this magic number."""
    raw = _content(file)
    header = 4 * (1 + magic % 256)
    if len(raw) < header:
        raise UserError(f"{file} is truncated: {len(raw)} bytes, but the header has {header}; download it again")
    found, *shape = struct.unpack(f">{header // 4}I", raw[:header])
    if found != magic:
        kind = "images" if magic == IMAGES else "labels"
        raise UserError(f"{file} is not an idx file of {kind}: it begins with {found}, not {magic}; download it again")
    if not all(shape):
        raise UserError(f"{file} has no values: its sizes are {_product(shape)}; download it again")
    expected = header + math.prod(shape)
    if len(raw) != expected:
        what = "is truncated" if len(raw) < expected else "is too long"
        raise UserError(
            f"{file} {what}: {len(raw):,} bytes instead of {expected:,} for the header's {_product(shape)} values; "
            "download it again"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy()  # writable


def _product(shape: list[int]) -> str:
    return " x ".join(map(str, shape))


def _content(file: Path) -> bytes:
    raw = file.read_bytes()
    if file.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{file} is damaged or not a gzip file ({error}); download it again") from None
