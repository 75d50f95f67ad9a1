"""The progress bar of a notebook; importing this module needs ipywidgets."""

from tqdm.notebook import tqdm

from hostdev.core.progress import BarFormat


class NotebookBar(BarFormat, tqdm):  # type: ignore[misc]
    """A bar in a notebook, with the texts of a terminal's."""
