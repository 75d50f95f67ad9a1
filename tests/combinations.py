"""Combinations of parameters: all pairs of values for the quick rungs, the full product for the slow one."""

from itertools import combinations, product

import pytest


def choose_pairs(*values, cost=lambda *case: 1, quick=lambda *case: True):
    """Return combinations, one value of each list, such that each pair of two lists' values occurs in at least one.

    The choice is greedy and always the same: first the combination with the most new pairs for its cost.

    Args:
        values: The lists.
        cost: Takes a combination, and returns a number above 0.
        quick: Takes a combination, and returns whether it may be chosen. Pairs that only others have are left out.
    """
    places = list(combinations(range(len(values)), 2))
    cases = {at: tuple(each[k] for each, k in zip(values, at, strict=True)) for at in product(*map(_indices, values))}
    cases = {at: case for at, case in cases.items() if quick(*case)}
    pairs = {at: {(a, b, at[a], at[b]) for a, b in places} for at in cases}
    costs = {at: cost(*case) for at, case in cases.items()}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(pairs, key=lambda at: len(pairs[at] & missing) / costs[at]))
        missing -= pairs[chosen[-1]]
    return [cases[at] for at in sorted(chosen)]


def pairs_first(names, *values, cost=lambda *case: 1, quick=lambda *case: True, ids=None):
    """Return a `parametrize` of the full product; beyond `choose_pairs`, its combinations are marked slow.

    Args:
        names: The names of the parameters, as for `pytest.mark.parametrize`; or a list, in which an entry with several
            names, such as "depth, cache", is one parameter: its values are tuples.
        values, cost, quick: As for `choose_pairs`.
        ids: As for `pytest.mark.parametrize`: makes a value's part of the test's name.
    """
    names = names.split(", ") if isinstance(names, str) else names
    chosen = choose_pairs(
        *map(_indices, values), cost=lambda *at: cost(*_at(values, at)), quick=lambda *at: quick(*_at(values, at))
    )
    cases = []
    for at in product(*map(_indices, values)):
        case = zip(names, _at(values, at), strict=True)
        flat = [each for name, value in case for each in (value if ", " in name else [value])]
        cases.append(pytest.param(*flat, marks=() if at in chosen else pytest.mark.slow))
    return pytest.mark.parametrize(", ".join(names), cases, ids=ids)


def _indices(values):
    return range(len(values))


def _at(values, at):
    return tuple(each[k] for each, k in zip(values, at, strict=True))


# Quick tests take the dtype of ids whose kernels `compile_kernels` compiles for all optimizers and formats.
of_any_ids = pytest.mark.parametrize("id_dtype", ["int32", pytest.param("int64", marks=pytest.mark.slow)])
