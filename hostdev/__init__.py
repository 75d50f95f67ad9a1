"""Train recommender models whose embedding tables do not fit on the accelerator.

`__init__.pyi` lists the public names, each with its module. A name is imported at its first use, so that every command
starts quickly. Other names are not public and may change.
"""

import lazy_loader

__version__ = "0.3.0.dev0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
