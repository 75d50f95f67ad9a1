"""Manifests and schemas: version 1 is read as before, and what is broken is refused."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from hostdev import UserError
from hostdev.data import manifest, schema
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.data.schema import Column, Schema, Space
from hostdev.data.shards import ShardReader
from hostdev.models.wide_deep.network import WideDeep
from tests.manifests import edit_manifest

# A data set of version 1, made by the code of that time from 60 look-alike rows, threshold 1, 20 rows in a shard.
VERSION_1 = Path(__file__).parent / "version1/vocabulary"
# SHA-256 of label, ids and weights of all training batches of 16 rows, epoch 2, as the reader of that time gave them.
DIGESTS = {
    None: "336bffa164880bbf2a3a84c43b3a596a50d7ad00710bcfc1bc23767c61712ec2",
    5: "98044e38212897fa25f8add96e01820de3a99c7e50305ccf45cc97480836381b",
}


@pytest.mark.parametrize("seed", [None, 5])
def test_version_1_gives_the_batches_that_it_gave(seed):
    digest = sha256()
    reader = ShardReader(VERSION_1, manifest.read(VERSION_1), "train")
    model = WideDeep(reader.schema, 1, seed=0, layers=())
    for batch in reader.batches(16, seed=seed, epoch=2):
        fields = model.ids(batch)["fields"]
        for array in (batch.label, fields.values, fields.weights):
            digest.update(np.ascontiguousarray(array).tobytes())
    assert digest.hexdigest() == DIGESTS[seed]


def test_version_1_has_criteos_columns(tmp_path):
    found = manifest.read(VERSION_1)
    made = build(Synthetic(60, 4), tmp_path / "data", Options(threshold=1, rows_per_shard=20))
    assert [shard.sha256 for shard in found.train] == [shard.sha256 for shard in made.train]
    assert found.vocabulary_sha256 == made.vocabulary_sha256
    assert found.schema.rows == made.schema.rows == found.vocabulary_size
    assert found.schema.dense == tuple(f"I{i}" for i in range(1, 14))
    assert found.schema.ids == tuple(f"C{i}" for i in range(1, 27))
    assert found.schema.bags == ()
    whole = [
        Space(f"C{i + 1}", 13 + i, 39, found.schema.rows - 39) for i in range(26)
    ]  # which is which it does not say
    assert list(found.schema.spaces) == whole
    assert replace(found.schema, spaces=made.schema.spaces) == made.schema
    np.testing.assert_array_equal(manifest.read_counts(VERSION_1, found), manifest.read_counts(tmp_path / "data", made))


def test_the_schema_of_criteo(own_data):
    found = manifest.read(own_data)
    assert json.loads((own_data / "manifest.json").read_text())["version"] == 2
    first = 39
    for i, space in enumerate(found.schema.spaces):
        assert space == Space(f"C{i + 1}", 13 + i, first, space.size)
        first += space.size
    assert first == found.schema.rows
    assert found.schema.columns == tuple(Column(f"C{i}", "id", f"C{i}") for i in range(1, 27))
    assert found.schema.first_value == 39
    batches = ShardReader(own_data, found, "train").batches(100)
    for ids in np.concatenate([batch.ids for batch in batches]):
        for value, space in zip(ids.tolist(), found.schema.spaces, strict=True):
            assert value == space.oov or space.first <= value < space.first + space.size


SCHEMA = Schema(
    "y",
    ("a", "b"),
    (Column("c", "id", "c"), Column("d", "bag", "c"), Column("e", "bag", "e")),
    (Space("c", 2, 4, 10), Space("e", 3, 14, 5)),
    19,
)


def test_a_schema_survives_json():
    assert SCHEMA.ids == ("c",)
    assert SCHEMA.bags == ("d", "e")
    assert SCHEMA.first_value == 4
    assert schema.from_json(json.loads(json.dumps(SCHEMA.as_json()))) == SCHEMA


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "a"}, "column 'a' .*twice"),
        ({"dense": ("a", "c")}, "column 'c' .*twice"),
        ({"spaces": (*SCHEMA.spaces, Space("c", 1, 2, 3))}, "space 'c' .*twice"),
        ({"spaces": SCHEMA.spaces[:1]}, "column 'e' .*space 'e'"),
        ({"columns": (Column("c", "list", "c"),)}, "column 'c' is of kind 'list', not one of id, bag"),
        ({"rows": 3}, "3 ids are too few: .* need 4"),
        ({"rows": 18}, "space 'e' has ids outside 0..17"),
        ({"spaces": (SCHEMA.spaces[0], Space("e", -1, 14, 5))}, "space 'e' has ids outside 0..18"),
        ({"spaces": (SCHEMA.spaces[0], Space("e", 3, 14, -5))}, "space 'e' has ids outside 0..18"),
    ],
)
def test_a_schema_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SCHEMA, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("rows"), "schema.rows is missing"),
        (lambda found: found.update(rows="19"), "schema.rows is"),
        (lambda found: found["spaces"][0].update(first=3.0), r"schema.spaces.0..first is 3.0"),
        (lambda found: found.update(label=None), "schema.label is null"),
        (lambda found: found["dense"].append(3), r"schema.dense.13. is 3"),
        (lambda found: found["columns"][0].update(kind="list"), "is of kind 'list'"),
        (lambda found: found["columns"][0].pop("kind"), "kind"),
        (lambda found: found.update(more=1), "more"),
    ],
)
def test_a_manifest_with_a_broken_schema(own_data, change, message):
    edit_manifest(own_data, lambda content: change(content["schema"]))
    with pytest.raises(UserError, match=f"manifest.json is broken .*{message}.*preprocess the data again"):
        manifest.read(own_data)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda found: found.update(vocabulary=5), "vocabulary"),
        (lambda found: found["statistics"].update(missing="none"), "missing"),
        (lambda found: found["statistics"].update(rejected="none"), "rejected"),
        (lambda found: found.update(statistics=[]), "statistics"),
        (lambda found: found["statistics"]["missing"]["test"].update(C1="none"), "missing.test.C1"),
    ],
)
def test_a_manifest_with_a_wrong_value(own_data, change, what):
    edit_manifest(own_data, change)
    with pytest.raises(UserError, match=rf"manifest.json is broken \(.*{what} is .*\); preprocess the data"):
        manifest.read(own_data)
