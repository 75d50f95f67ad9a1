"""The counts of the source: none is above its bound in tests/house.json."""

from tests import house


def test_no_count_is_above_its_bound():
    assert not house.exceed(house.count())


def test_a_count_above_its_bound_is_told():
    counts = house.count()
    bound = house.json.loads(house.BOUNDS.read_text())["circles"]
    assert f"circles: 1000, above its bound {bound}" in house.exceed(counts | {"circles": 1_000})
