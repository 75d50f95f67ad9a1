"""A check that a folder is a data set. This module imports little, so that a wrong path is reported at once."""

from pathlib import Path

from hostdev.core.addresses import address_of
from hostdev.core.errors import UserError
from hostdev.data.remote import FILE_NAME as FILE_NAME
from hostdev.data.remote import refresh


def require_input(folder: Path) -> None:
    """Raise UserError unless a folder of this machine has a manifest; leave one in a store to `require`."""
    if address_of(folder) is None:
        require(folder)


def require(folder: Path) -> None:
    """Raise UserError unless `folder` has a manifest. For one in a store, read the manifest and the vocabulary anew."""
    if (address := address_of(folder)) is not None:
        refresh(folder, address)
    if not (folder / FILE_NAME).is_file():
        raise UserError(
            f"{folder} is not a data set: it has no {FILE_NAME}; create a data set with python -m "
            "hostdev.data.preprocess"
        )
