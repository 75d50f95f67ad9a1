"""Models by name, and checks of a model before data is read or memory is allocated."""

import inspect
import math
from typing import TYPE_CHECKING, Any

from hostdev.core import registry
from hostdev.core.errors import UserError
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.registry import load_class
from hostdev.data.schema import Schema
from hostdev.runtime.spec import Feature, TableSpec

if TYPE_CHECKING:  # torch takes seconds to import
    from hostdev.models.model import Model

KIND = "model"


def names() -> list[str]:
    """Return the names of the models that packages register."""
    return registry.names(KIND)


def find(name: "str | type[Any]") -> "type[Model]":
    """Return the model class for a registered name, for "package.module:Class", or for the class itself.

    The class must be an nn.Module with the constructor and methods of `Model`, but need not inherit from `Model`.

    Raises:
        UserError: There is no such class, or it lacks a method. Errors of the user's module are raised unchanged.
    """
    from torch import nn

    from hostdev.models.model import Model

    found: Any = name
    if isinstance(name, str):
        is_registered = name in names()
        found = registry.find(KIND, name) if is_registered else load_class(name, "model", name, names())
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UserError(f"model {name!r} must be a subclass of torch.nn.Module, not {found!r}")
    try:
        inspect.signature(found).bind(None, 1, seed=0, optimizer=None)
    except TypeError as error:
        raise UserError(
            f"model {name!r} cannot be created by {found.__name__}(schema, dim, *, seed, optimizer=None): {error}"
        ) from None
    for method, missing in (("ids", (None, Model.ids)), ("forward", (nn.Module.forward, Model.forward))):
        if getattr(found, method, None) in missing:
            raise UserError(f"model {name!r} has no method {method}; see hostdev.models.model.Model")
    return found  # type: ignore[return-value]  # has the interface of Model


def default_dim(name: "str | type[Any]") -> int:
    """Return a model's default number of embedding columns; raise UserError if the model has none."""
    dim = getattr(find(name), "default_dim", None)
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise UserError(f"model {name!r} has no default_dim; give the number of embedding columns with --emb-dim N")
    return dim


def make(
    name: "str | type[Any]",
    schema: Schema,
    dim: int,
    *,
    seed: int,
    optimizer: SparseOptimizer | None = None,
    **options: Any,
) -> "Model":
    """Return a model for data with this schema.

    Args:
        name: As in `find`.
        dim: Number of embedding columns.
        seed: Seed of all initial values.
        optimizer: The tables' optimizer, or None for the model's default.
        options: Further arguments of the model's constructor, such as layers.

    Raises:
        UserError: As in `find`, or the model's tables, features or lr are invalid.
    """
    model = find(name)(schema, dim, seed=seed, optimizer=optimizer, **options)
    for attribute, kind in (("tables", TableSpec), ("features", Feature)):
        found = getattr(model, attribute, None)
        if not (isinstance(found, dict) and found and all(isinstance(value, kind) for value in found.values())):
            raise UserError(
                f"model {name!r}: its attribute {attribute} must be a non-empty dict of {kind.__name__} "
                f"by name, not {found!r}"
            )
    for feature_name, feature in model.features.items():
        for table in [feature.tables] if feature.is_single else feature.tables:
            if table not in model.tables:
                raise UserError(
                    f"model {name!r}: feature {feature_name!r} uses table {table!r}, which is not one of "
                    f"the model's tables: {', '.join(model.tables)}"
                )
    lr = getattr(model, "lr", None)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not (math.isfinite(lr) and lr >= 0):
        raise UserError(
            f"model {name!r}: its attribute lr, the dense layers' learning rate, must be finite and at least 0, "
            f"not {lr!r}"
        )
    return model
