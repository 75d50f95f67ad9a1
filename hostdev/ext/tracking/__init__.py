"""Reports of a training run while it trains: callbacks, TensorBoard, MLflow.

`__init__.pyi` lists the public names. A name is imported at its first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
