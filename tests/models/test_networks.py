"""Each model's network against its paper's equations, in float32 and under autocast, and its lookups."""

import shutil

import numpy as np
import pytest
import torch

from hostdev.core.errors import UserError
from hostdev.core.optimizers import FTRL, SGD, Adagrad, LazyAdam, RowWiseAdagrad
from hostdev.models import make, names
from hostdev.models.dcn import DCN
from hostdev.models.deepfm import DeepFM
from hostdev.models.dlrm import DLRM
from hostdev.models.mmoe import MMoE
from hostdev.models.shared_bottom import SharedBottom
from hostdev.models.wide_deep.network import WideDeep
from tests.models.reference import NETWORKS
from tests.models.samples import batch_of, schema_of

DIM, B = 6, 7
MADE = {
    "wide_deep": (WideDeep, {"layers": (8, 5)}),
    "deepfm": (DeepFM, {"layers": (8, 5)}),
    "dlrm": (DLRM, {"bottom": (9,), "top": (8, 5)}),
    "dcn": (DCN, {"layers": (8, 5)}),
    "dcn low rank": (DCN, {"layers": (8, 5), "rank": 4, "cross_layers": 2}),
    "dcn parallel": (DCN, {"layers": (8, 5), "rank": None, "structure": "parallel"}),
    "dcn without a network": (DCN, {"layers": ()}),
    "shared_bottom": (SharedBottom, {"bottom": (8, 5), "tower": (4,)}),
    "mmoe": (MMoE, {"experts": 3, "expert": (8, 5), "tower": (4,)}),
}
SCHEMAS = {"dense, ids, bag": (3, 4, 1), "no dense": (0, 3, 0), "bags only": (2, 0, 2), "one of each": (1, 1, 1)}
by_model = pytest.mark.parametrize("name", MADE)


def model_of(name, schema, seed=1, noise=0.3):
    """Return a small model with meaningful parameters: the initial ones, some of which are 0, plus noise."""
    make_it, options = MADE[name]
    model = make_it(schema, DIM, seed=seed, **options)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=noise)
    return model


def rows_of(model, schema, seed=0, dtype=torch.float32):
    """Return random rows for every feature, and the same by table as a list of columns [B, dim]."""
    torch.manual_seed(seed)
    fields = model.schema.ids
    rows, columns = {}, {key: [] for key in model.tables}
    for name, feature in model.features.items():
        found = []
        for key in [feature.tables] if feature.is_single else feature.tables:
            width = len(fields) + (len(schema.dense) if isinstance(model, WideDeep) else 0)
            shape = (B, model.tables[key].dim) if feature.pooling else (B, width, model.tables[key].dim)
            part = torch.randn(shape).to(torch.float32 if key == "wide" else dtype).requires_grad_()
            found.append(part)
            columns[key] += [part] if feature.pooling else list(part.unbind(1))
        rows[name] = found[0] if feature.is_single else tuple(found)
    return rows, list(columns.values())


def leaves(rows):
    return [part for found in rows.values() for part in (found if isinstance(found, tuple) else [found])]


def options_of(name):
    return {"structure": "parallel"} if "parallel" in name else {}


@pytest.mark.parametrize("columns", SCHEMAS)
@by_model
def test_the_network_is_the_papers(name, columns):
    schema = schema_of(*SCHEMAS[columns])
    model = model_of(name, schema)
    rows, by_table = rows_of(model, schema)
    dense = torch.rand(B, len(schema.dense))
    parameters = dict(model.named_parameters())
    inputs = [*parameters.values(), *leaves(rows)]
    found = model(dense, rows)
    expected = NETWORKS[name.split()[0]](parameters, dense, *by_table, **options_of(name))
    assert found.shape == (B,)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    weight = torch.randn(B)
    for gradient, twin in zip(
        torch.autograd.grad(found @ weight, inputs), torch.autograd.grad(expected @ weight, inputs), strict=True
    ):
        torch.testing.assert_close(gradient, twin, rtol=1e-4, atol=1e-4)
        assert gradient.abs().sum() > 0


@by_model
def test_bfloat16_with_a_last_layer_in_float32(name):
    schema = schema_of()
    model = model_of(name, schema)
    dense = torch.rand(B, len(schema.dense))
    exact = model(dense, rows_of(model, schema)[0]).detach()
    rows, _ = rows_of(model, schema, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(dense, rows)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found, exact, rtol=0.1, atol=0.1 * float(exact.abs().max()))
    assert not torch.equal(found, exact)
    found.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert all(part.grad.isfinite().all() and part.grad.dtype == part.dtype for part in leaves(rows))


@pytest.mark.slow  # the first compilation takes a minute and more
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is no g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch has deprecated
@pytest.mark.parametrize("name", [name for name in MADE if " " not in name])
def test_compiled(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.compiler.reset()
    schema = schema_of()
    model = model_of(name, schema)
    dense, rows = torch.rand(B, len(schema.dense)), rows_of(model, schema)[0]
    expected = model(dense, rows)
    grads = torch.autograd.grad(expected.sum(), leaves(rows))
    found = torch.compile(model, fullgraph=True)(dense, rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for grad, twin in zip(torch.autograd.grad(found.sum(), leaves(rows)), grads, strict=True):
        torch.testing.assert_close(grad, twin, rtol=1e-4, atol=1e-5)


@by_model
def test_deterministic_operations_alone(name):
    """The same bits twice, and no operation that torch refuses in deterministic mode."""
    schema = schema_of()
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            model = model_of(name, schema)
            rows, _ = rows_of(model, schema)
            logits = model(torch.ones(B, len(schema.dense)), rows)
            logits.sum().backward()
            results.append([logits, *(p.grad for p in model.parameters()), *(part.grad for part in leaves(rows))])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@by_model
def test_initial_values_are_functions_of_seed_and_name(name):
    make_it, options = MADE[name]
    first, again, other = (make_it(schema_of(), DIM, seed=seed, **options).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [key for key in first if first[key].any()]
    assert drawn
    assert not any(torch.equal(first[key], other[key]) for key in drawn)
    values = [float(first[key].flatten()[0]) for key in drawn]
    assert len(set(values)) == len(values)
    if name == "wide_deep":  # published digests depend on these names
        assert list(first) == ["bias", *(f"deep.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias"))]


def std(parameter):
    return float(parameter.detach().std())


def test_initial_scales():
    schema = schema_of(dense=13, ids=26)
    dlrm = DLRM(schema, 64, seed=1)
    assert std(dlrm.top[2].weight) == pytest.approx((2 / 2048) ** 0.5, rel=0.01)
    assert std(dlrm.top[2].bias) == pytest.approx((1 / 1024) ** 0.5, rel=0.1)
    dcn = DCN(schema, 64, seed=1)
    assert std(dcn.cross[0][0].weight) == pytest.approx((2 / (13 + 27 * 64)) ** 0.5, rel=0.01)
    assert not dcn.deep[0].bias.any()
    deepfm = DeepFM(schema, 64, seed=1)
    assert std(deepfm.dense_vectors) == pytest.approx(0.01, rel=0.1)
    assert not deepfm.dense_first_order.any()
    assert std(WideDeep(schema, 64, seed=1).deep[2].weight) == pytest.approx(0.01, rel=0.01)


def test_published_sizes():
    """Criteo's columns: 13 dense, 26 of ids."""
    schema = schema_of(dense=13, ids=26, bags=0)
    shapes = {
        name: [
            tuple(value.shape) for key, value in make(name, schema, dim, seed=0).named_parameters() if value.dim() == 2
        ]
        for name, dim in (("wide_deep", 80), ("deepfm", 10), ("dlrm", 128), ("dcn", 128))
    }
    assert shapes["wide_deep"] == [(1024, 39 * 80), (512, 1024), (256, 512), (128, 256), (1, 128)]
    assert shapes["deepfm"] == [(13, 10), (400, 39 * 10), (400, 400), (400, 400), (1, 400)]
    top = [(1024, 128 + 27 * 26 // 2), (1024, 1024), (512, 1024), (256, 512), (1, 256)]
    assert shapes["dlrm"] == [(512, 13), (256, 512), (128, 256), *top]
    n = 13 + 26 * 128
    assert shapes["dcn"] == [(512, n), (n, 512)] * 3 + [(1024, n), *top[1:]]
    made = {name: make(name, schema, 4, seed=0) for name in names()}
    assert {name: (model.default_dim, model.lr) for name, model in made.items()} == {
        "wide_deep": (80, 3.5e-4),
        "deepfm": (10, 1e-3),
        "dlrm": (128, 1e-3),
        "dcn": (128, 5e-4),
        "shared_bottom": (16, 1e-3),
        "mmoe": (16, 1e-3),
    }


def test_low_rank_only_where_it_is_smaller():
    schema = schema_of(dense=2, ids=3, bags=0)  # n = 2 + 3 * 6 = 20
    assert isinstance(DCN(schema, DIM, seed=0, rank=9).cross[0], torch.nn.Sequential)
    assert [tuple(DCN(schema, DIM, seed=0, rank=rank).cross[0].weight.shape) for rank in (10, 512, None)] == [
        (20, 20)
    ] * 3


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("name", names())
def test_what_a_batch_looks_up(name, dtype):
    schema = schema_of(dense=3, ids=4, bags=2)
    model = make(name, schema, DIM, seed=0)
    batch = batch_of(schema, 5, dtype=dtype)
    found = model.ids(batch)
    assert list(found) == list(model.features) == ["fields", "bag:b0", "bag:b1"]
    assert [feature.pooling for feature in model.features.values()] == [None, "mean", "mean"]
    for bag in ("b0", "b1"):
        assert found[f"bag:{bag}"].values is batch.bags[bag][0]
        assert found[f"bag:{bag}"].lengths is batch.bags[bag][1]
        assert found[f"bag:{bag}"].weights is None
    if name != "wide_deep":
        assert found["fields"] is batch.ids
        return
    fields = found["fields"]
    assert fields.values.dtype == dtype
    np.testing.assert_array_equal(fields.values, [[0, 1, 2, *row] for row in batch.ids])
    assert fields.weights.dtype == np.float32
    np.testing.assert_array_equal(fields.weights[:, :3], batch.dense)
    assert (fields.weights[:, 3:] == 1).all()


def test_tables_and_their_optimizers():
    schema = schema_of()
    tables = {name: make(name, schema, DIM, seed=0).tables for name in names()}
    assert all(spec.rows == schema.rows for specs in tables.values() for spec in specs.values())
    assert {
        name: {key: (spec.dim, spec.optimizer) for key, spec in specs.items()} for name, specs in tables.items()
    } == {
        "wide_deep": {"wide": (1, FTRL()), "deep": (DIM, LazyAdam())},
        "deepfm": {"first_order": (1, LazyAdam(lr=1e-3)), "vectors": (DIM, LazyAdam(lr=1e-3))},
        "dlrm": {"vectors": (DIM, RowWiseAdagrad(lr=1e-2))},
        "dcn": {"vectors": (DIM, Adagrad(lr=5e-3))},
        "shared_bottom": {"vectors": (DIM, LazyAdam(lr=1e-3))},
        "mmoe": {"vectors": (DIM, LazyAdam(lr=1e-3))},
    }
    given = SGD()
    for name in names():
        specs = make(name, schema, DIM, seed=0, optimizer=given).tables
        assert all(spec.optimizer is given for key, spec in specs.items() if key != "wide")


def test_dropout_is_off_unless_asked_for():
    schema = schema_of(bags=0)
    plain = DeepFM(schema, DIM, seed=1, layers=(50, 50))
    model = DeepFM(schema, DIM, seed=1, layers=(50, 50), dropout=0.5)
    assert not any(isinstance(part, torch.nn.Dropout) for part in plain.deep)
    assert sum(isinstance(part, torch.nn.Dropout) for part in model.deep) == 2
    rows, dense = rows_of(model, schema)[0], torch.rand(B, 3)
    torch.manual_seed(3)
    first, second = model(dense, rows), model(dense, rows)
    torch.manual_seed(3)
    assert torch.equal(first, model(dense, rows))  # draws depend on the generator's state alone
    assert not torch.equal(first, second)
    assert torch.equal(model.eval()(dense, rows), model(dense, rows))


def test_data_that_a_model_cannot_take():
    with pytest.raises(UserError, match="no column of ids"):
        DeepFM(schema_of(ids=0, bags=0), DIM, seed=0)
    with pytest.raises(UserError, match="DLRM needs pairs of vectors, but the data has one column of ids and no dense"):
        DLRM(schema_of(dense=0, ids=1, bags=0), DIM, seed=0)
    with pytest.raises(ValueError, match="DCN .*stacked, parallel, not 'both'"):
        DCN(schema_of(), DIM, seed=0, structure="both")
    with pytest.raises(ValueError, match="rank of cross layers must be at least 1, .* not 0"):
        DCN(schema_of(), DIM, seed=0, rank=0)
