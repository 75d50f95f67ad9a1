"""Public signatures have types: where one has Any, a comment in the source gives the reason."""

import ast
import inspect
import textwrap

import hostdev
from hostdev import distributed, errors, ops
from hostdev.ext import parallel

REASON, FOR_CLASS = "# Any", "# Any, below: "  # the latter for all methods of a class


def public_functions():
    """Yield the functions and methods of the public surface by name, each with its class, if it has one."""
    for module in (hostdev, ops, errors, distributed, parallel):
        for name in dir(module):
            thing = getattr(module, name)
            if name.startswith("_") or inspect.ismodule(thing):
                continue
            if inspect.isfunction(thing):
                yield name, thing, None
            elif inspect.isclass(thing):
                for base in thing.__mro__:
                    yield from ((f"{name}.{key}", found, base) for key, found in public_methods(base))


def public_methods(base):
    """Yield a class's own public methods and properties, as functions."""
    for key, found in vars(base).items():
        if not key.startswith("_") or key in ("__init__", "__call__", "__getitem__"):
            found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if inspect.isfunction(found) and found.__module__.startswith("hostdev."):
                yield key, found


def has_any(function):
    """Return whether an annotation has Any; False for functions that a dataclass or NamedTuple makes."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError):
        return False
    if not isinstance(node, ast.FunctionDef):
        return False
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    found = [each.annotation for each in every if each is not None] + [node.returns]
    return any(
        isinstance(each, ast.Name) and each.id == "Any" for one in found if one is not None for each in ast.walk(one)
    )


def has_reason(function, owner):
    bases = () if owner is None else [base for base in owner.__mro__ if base.__module__.startswith("hostdev.")]
    return REASON in inspect.getsource(function) or any(FOR_CLASS in inspect.getsource(base) for base in bases)


def test_an_any_in_a_public_signature_has_a_reason():
    functions = list(public_functions())
    assert len(functions) > 150
    bare = {
        f"{name} in {function.__module__}"
        for name, function, owner in functions
        if has_any(function) and not has_reason(function, owner)
    }
    assert not bare, sorted(bare)
