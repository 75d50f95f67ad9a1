"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled to PTX as they are launched.

The compiler needs no GPU, only a driver that names one. What must not be in the PTX: an FMA, an approximation, a flush
of denormals to zero.
"""

import re
import subprocess
import sys
from collections import Counter

import pytest
import torch

from hostdev import FTRL, SGD, Adagrad, LazyAdam, Momentum, RowWiseAdagrad, RowWiseAdam
from hostdev.device.triton import available, ops
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.skipif(not available(), reason="Triton is not installed")

OPTIMIZERS = [
    LazyAdam(),
    LazyAdam(nesterov=True),
    FTRL(),
    SGD(),
    Adagrad(),
    RowWiseAdagrad(),
    RowWiseAdam(),
    Momentum(),
    Momentum(nesterov=True),
]
DIMS = [3, 80, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (1, 128))]
FLOAT_OPERATION = re.compile(r"\b((?:add|sub|mul|div|sqrt|fma|mad|rcp|rsqrt|ex2|lg2)\.[\w.]*f(?:32|64))\b")


class Driver:
    """A GPU with a compute capability, as the compiler queries it."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0


@pytest.fixture(params=[80, 90], ids=lambda capability: f"sm_{capability}")
def compiled(request, monkeypatch, tmp_path_factory):
    """A list to which every launch appends (kernel's name, compiled kernel) instead of running it."""
    import triton
    from triton.runtime.driver import driver

    folder = tmp_path_factory.getbasetemp() / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(driver, "_active", Driver(request.param))
    found = []

    def launcher(kernel, grid):
        def compile_only(*arguments, **options):
            found.append((kernel.fn.__name__, kernel.run(*arguments, grid=grid, warmup=True, **options)))

        return compile_only

    monkeypatch.setattr(triton.runtime.JITFunction, "__getitem__", launcher)
    return found


def operations(kernel):
    """Count the PTX's float operations; reject those that round differently, or more than once."""
    found = Counter(FLOAT_OPERATION.findall(kernel.asm["ptx"]))
    inexact = [name for name in found if not re.fullmatch(r"(add|sub|mul|div|sqrt)\.rn\.f32", name)]
    assert not inexact, inexact
    for word in (".approx", ".ftz", "fma.", "div.full"):
        assert word not in kernel.asm["ptx"]
    return {name.split(".")[0] for name in found}


def update(optimizer, dim, H=5, A=2, scalars=None, ids=torch.int32):
    """Launch a step on dummy tensors."""
    rows = ops.launching("update")
    slots, per_row = 1 + len(optimizer.slots), len(optimizer.row_slots)
    numbers = [float(x) for x in optimizer.scalars(1, dim)] if scalars is None else scalars
    table = torch.empty(9, slots, dim), torch.empty(9, per_row)
    admitted = torch.empty(A, slots, dim), torch.empty(A, per_row)
    grads = torch.empty(H + A, dim)
    rows(optimizer.primitive, *table, torch.empty(H, dtype=ids), grads, numbers, torch.empty(()), *admitted)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_an_update_rounds_every_operation_once(compiled, optimizer, dim):
    update(optimizer, dim)
    [(_, kernel)] = compiled
    roots = set() if isinstance(optimizer, SGD | Momentum) else {"sqrt", "div"}
    assert operations(kernel) == {"mul", "sub"} | roots | (set() if isinstance(optimizer, SGD) else {"add"})
    ptx = kernel.asm["ptx"]
    assert ptx.index("st.global") > ptx.index("bar.sync")  # the loads of all warps lie before the stores


@pytest.mark.parametrize("dim", DIMS)
def test_the_other_kernels_round_every_operation_once(compiled, dim):
    def int32(n):
        return torch.empty(n, dtype=torch.int32)

    block, row_slots, rows = torch.empty(9, 3, dim), torch.empty(9, 1), torch.empty(9, dim)
    ops.launching("assemble")(block, int32(5), torch.empty(2, 3, dim), rows)
    ops.launching("lookup")(block, int32(5).long())
    ops.launching("exchange")(block, row_slots, int32(5), 3, torch.empty(5, 3, dim), torch.empty(5, 1))
    for _, kernel in compiled:
        assert operations(kernel) == set()
    assert "bar.sync" in compiled[-1][1].asm["ptx"]
    for dtype, weights in (
        (torch.float32, None),
        (torch.float32, torch.empty(500)),
        (torch.bfloat16, torch.empty(500)),
    ):
        compiled.clear()
        ops.launching("gather_scaled")(rows, int32(500), weights, dtype)
        grads = torch.empty(500, dim, dtype=dtype)
        for source in (None, int32(500)):
            ops.launching("sum_uses")(grads, int32(500), int32(500), int32(10), source, weights)
        for mean in (False, True):
            ops.launching("pool")(rows, int32(500), int32(33), weights, mean, dtype)
        assert "80000000" in compiled[1][1].asm["ptx"]  # -0, for rows without uses
        scaling = {"mul"} if weights is not None else set()
        assert [(name, operations(kernel)) for name, kernel in compiled] == [
            ("_gather", scaling),
            *[("_sum_segments", {"add"} | scaling), ("_add_segments", {"add"})] * 2,
            ("_pool", {"add"} | scaling),
            ("_pool", {"add", "div"} | scaling),
        ]


def test_with_fusion_the_check_fails(compiled, monkeypatch):
    """The option is necessary, and the check detects what it forbids."""
    from hostdev.device.triton import rows

    monkeypatch.setitem(rows.OPTIONS, "enable_fp_fusion", True)
    update(LazyAdam(), 80)
    [(_, kernel)] = compiled
    assert "fma.rn.f32" in kernel.asm["ptx"]
    with pytest.raises(AssertionError, match="fma"):
        operations(kernel)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_neither_scalars_nor_counts_compile_anew(compiled, optimizer):
    """1.0, 0.0, 1 and multiples of 16 are what Triton would specialise on."""
    numbers = [float(x) for x in optimizer.scalars(1, 48)]
    update(optimizer, 48)
    for value, H, A in ((1.0, 16, 32), (0.0, 1, 1), (2.0, 5, 0), (1e-42, 0, 7)):
        scalars = [value] * len(numbers)
        scalars[-1] = numbers[-1]  # LazyAdam's nesterov and FTRL's exponent choose the kernel
        update(optimizer, 48, H, A, scalars)
    assert len({id(kernel) for _, kernel in compiled}) == 1


def test_scalars_are_float32_in_the_kernel(compiled):
    update(SGD(lr=1.0), 80)
    [(_, kernel)] = compiled
    assert ".f64" not in kernel.asm["ptx"]
    assert [kind for name, kind in kernel.src.signature.items() if re.fullmatch(r"s\d", name)] == ["fp32"] * 6


def test_what_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match=r"shape \(4, 3\) and strides \(1, 4\) is not contiguous"):
        ops.launching("gather_scaled")(torch.empty(3, 4).T, torch.empty(2, dtype=torch.int32), None, torch.float32)


@pytest.mark.parametrize(("which", "least"), [("not slow", 100), pytest.param("slow", 40, marks=pytest.mark.slow)])
def test_the_contract_holds_in_the_interpreter(tmp_path, which, least):
    """Runs in another process, as kernels are decorated for either the interpreter or the compiler."""
    options = ["-q", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/device/test_triton_ops.py"],
        cwd=ROOT,
        env={**environment(tmp_path), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= least


def test_the_interpreters_arithmetic_is_float32_and_rounded(tmp_path):
    """The interpreter uses NumPy: float32 stays float32, and its root and quotient are exact."""
    code = """
import numpy as np, torch, triton, triton.language as tl
@triton.jit
def kernel(x, y, roots, quotients, sums, s, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(roots + at, tl.sqrt_rn(a)); tl.store(quotients + at, tl.div_rn(a, b)); tl.store(sums + at, s * a + b)
rng = np.random.default_rng(0)
x, y = (np.exp2(rng.uniform(-126, 100, 1 << 16)).astype(np.float32) for _ in range(2))
out = [torch.empty(1 << 16) for _ in range(3)]
with np.errstate(all="ignore"):
    kernel[(1,)](torch.from_numpy(x), torch.from_numpy(y), *out, float(np.float32(0.1)), 1 << 16)
    wide = np.sqrt(x.astype(np.float64)), x.astype(np.float64) / y  # twice the digits: one rounding more is harmless
    wide += ((np.float64(np.float32(0.1)) * x).astype(np.float32).astype(np.float64) + y,)
    for got, expected in zip(out, wide):
        np.testing.assert_array_equal(got.numpy(), expected.astype(np.float32))
"""
    (tmp_path / "check.py").write_text(code)  # the interpreter reads the kernel's source
    environ = {**environment(tmp_path), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, tmp_path / "check.py"], check=True, env=environ, timeout=120)


def test_nothing_imports_triton_until_a_kernel_is_launched(tmp_path):
    code = (
        "import sys, torch, hostdev, hostdev.cache.cache, hostdev.device.table\n"
        "from hostdev.device.triton import available, ops\n"
        "assert available()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'triton']\n"
        "try:\n    ops.lookup(torch.zeros(3, 1, 2), torch.zeros(1, dtype=torch.int32))\n"
        "except NotImplementedError as error:\n    assert 'CPU' in str(error)\n"
        "else:\n    raise AssertionError('nothing is registered for the CPU')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment(tmp_path))


@pytest.mark.parametrize("fusion", [False, True])
def test_the_machine_code_has_no_fma_either(compiled, monkeypatch, fusion):
    """`ptxas` fuses too. Asked of a kernel without division and root: their machine code has FMAs inside."""
    from hostdev.device.triton import rows

    monkeypatch.setitem(rows.OPTIONS, "enable_fp_fusion", fusion)
    update(SGD(), 80)
    [(_, kernel)] = compiled
    assert ("FFMA" in kernel.asm["sass"]) == fusion
    assert ("FMUL" in kernel.asm["sass"]) != fusion
