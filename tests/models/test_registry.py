"""Models by name: lookup, and one clear line for anything missing."""

import subprocess
import sys

import pytest

from hostdev.core.errors import UserError
from hostdev.core.optimizers import SGD
from hostdev.models import default_dim, find, make, names
from tests.conftest import environment
from tests.models.samples import batch_of, schema_of

MINE = '''
import torch
from torch import nn
from hostdev.core.optimizers import SGD
from hostdev.runtime.spec import Feature, TableSpec


class Mine(nn.Module):
    lr = 1e-2

    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.tables = {"t": TableSpec(schema.rows, dim, optimizer or SGD())}
        self.features = {"ids": Feature("t")}

    def ids(self, batch):
        return {"ids": batch.ids}

    def forward(self, dense, rows):
        return rows["ids"].sum((1, 2)) + self.bias


class WithDim(Mine):
    default_dim = 7


class NoIds(nn.Module):
    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__()

    def forward(self, dense, rows):
        return dense


class NoForward(Mine):
    forward = nn.Module.forward


class NoSeed(Mine):
    def __init__(self, schema, dim):
        super().__init__(schema, dim, seed=0)


class NoTables(Mine):
    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__(schema, dim, seed=seed)
        del self.tables


class NoFeature(Mine):
    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__(schema, dim, seed=seed)
        self.features = {}


class WrongTable(Mine):
    def __init__(self, schema, dim, *, seed, optimizer=None):
        super().__init__(schema, dim, seed=seed)
        self.features = {"ids": Feature(("t", "u"))}


class NoRate(Mine):
    lr = "fast"


def function():
    """Not a class."""
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Create a folder on the path with a package of models; its modules are unloaded afterwards."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("")
    (tmp_path / "shop" / "models.py").write_text(MINE)
    (tmp_path / "shop" / "missing.py").write_text("import a_library_that_is_not_there\n")
    (tmp_path / "shop" / "broken.py").write_text("from shop.models import Nothing\n")
    (tmp_path / "shop" / "empty.py").write_text("x = 1\n")
    (tmp_path / "shop" / "failing.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "shop"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", names())
def test_the_models_of_here(name):
    schema = schema_of()
    model = make(name, schema, 4, seed=1, optimizer=SGD())
    assert type(model) is find(name) is find(f"{type(model).__module__}:{type(model).__name__}")
    assert list(model.ids(batch_of(schema, 3))) == list(model.features)


def test_columns_where_the_user_does_not_say(mine):
    wanted = {"wide_deep": 80, "deepfm": 10, "dlrm": 128, "dcn": 128, "shared_bottom": 16, "mmoe": 16}
    assert {name: default_dim(name) for name in names()} == wanted
    assert default_dim("shop.models:WithDim") == 7
    with pytest.raises(UserError, match="model 'shop.models:Mine' has no default_dim; .*--emb-dim N"):
        default_dim("shop.models:Mine")


def test_options_of_a_models_constructor():
    assert make("deepfm", schema_of(), 4, seed=1, layers=(7,)).deep[0].out_features == 7


def test_the_names():
    assert names() == ["dcn", "deepfm", "dlrm", "mmoe", "shared_bottom", "wide_deep"]


def test_a_model_of_ones_own(mine):
    model = make("shop.models:Mine", schema_of(), 4, seed=1)
    assert type(model).__name__ == "Mine"
    assert model.tables["t"].optimizer == SGD()
    given = SGD(lr=0.5)
    assert make("shop.models:Mine", schema_of(), 4, seed=1, optimizer=given).tables["t"].optimizer is given


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "deepfmm",
            "there is no model 'deepfmm'; choose one of dcn, deepfm, dlrm, mmoe, shared_bottom, wide_deep, or",
        ),
        ("", "there is no model ''; choose one of"),
        ("shop.models", "there is no model 'shop.models'"),
        ("shop.models:", "there is no model 'shop.models:'"),
        (":Mine", "there is no model ':Mine'"),
        (".models:Mine", "there is no model '.models:Mine'"),
        (
            "shopp.models:Mine",
            "model 'shopp.models:Mine': there is no module 'shopp'; modules must be in the current folder",
        ),
        ("shop.model:Mine", "model 'shop.model:Mine': there is no module 'shop.model'"),
        ("shop/models.py:Mine", "there is no module 'shop/models'"),
        ("shop.missing:Mine", "module 'shop.missing' needs 'a_library_that_is_not_there', which is not installed"),
        (
            "shop.broken:Mine",
            "module 'shop.broken' cannot be imported: cannot import name 'Nothing' from 'shop.models'",
        ),
        (
            "shop.models:Mime",
            "module 'shop.models' has no 'Mime'; its classes are Mine, WithDim, NoIds, NoForward, NoSeed",
        ),
        ("shop.empty:Mine", "module 'shop.empty' has no 'Mine', and it defines no class"),
        ("shop.models:function", "model 'shop.models:function' must be a subclass of torch.nn.Module, not <function"),
        ("builtins:dict", "model 'builtins:dict' must be a subclass of torch.nn.Module, not <class 'dict'>"),
        (
            "torch.nn:Linear",
            r"cannot be created by Linear\(schema, dim, \*, seed, optimizer=None\): got an unexpected keyword",
        ),
        (
            "shop.models:NoSeed",
            r"cannot be created by NoSeed\(schema, dim, \*, seed, optimizer=None\): got an unexpected",
        ),
        ("shop.models:NoIds", "model 'shop.models:NoIds' has no method ids; see hostdev.models.model.Model"),
        ("shop.models:NoForward", "model 'shop.models:NoForward' has no method forward"),
        ("hostdev.models.model:Model", "cannot be created by Model|has no method ids"),
    ],
)
def test_what_is_not_found(mine, name, message):
    with pytest.raises(UserError, match=message):
        find(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoTables", "its attribute tables must be a .*dict of TableSpec by name, not None"),
        ("NoFeature", "its attribute features must be a .*dict of Feature by name, not {}"),
        ("WrongTable", "feature 'ids' uses table 'u', which is not one of .*tables: t"),
        ("NoRate", "its attribute lr, the dense layers' learning rate, must be finite and at least 0, not 'fast'"),
    ],
)
def test_what_a_model_says_of_itself(mine, name, message):
    with pytest.raises(UserError, match=f"model 'shop.models:{name}': {message}"):
        make(f"shop.models:{name}", schema_of(), 4, seed=0)


def test_an_error_of_ones_own_module_comes_as_it_is(mine):
    with pytest.raises(ZeroDivisionError):
        find("shop.failing:Mine")


def test_names_without_torch(tmp_path):
    """The list of names, for a command's help, does not import torch."""
    code = "import sys; sys.modules['torch'] = None\nfrom hostdev.models import names; print(*names())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == names()
