"""What a loop of one's own does beside backward and step: scaling, clipping, freezing, accumulating, losing passes."""

import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import hostdev
from hostdev import EmbeddingCache, HostEmbedding, HostTable, UserError
from hostdev.device.staging import Staging
from hostdev.runtime import host_embedding as module_file
from tests.device.test_staging import Streams
from tests.test_host_embedding import batches, contents, loop, pass_both, plain_tables, same, table_of, two_tables

OPTIMIZERS = [hostdev.LazyAdam(), hostdev.FTRL(), hostdev.SGD(), hostdev.Adagrad(), hostdev.RowWiseAdagrad()]
by_name = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
cached_or_not = pytest.mark.parametrize("cached", [False, True])


def module_of(cached, optimizer=None):
    table = table_of(optimizer)
    return HostEmbedding(EmbeddingCache(table, "40%") if cached else table)


def write_back(module):
    if module._cache is not None:
        module._cache.write_back()
    return contents(module.table)


def scaled_loop(module, given, scaler, update_first=False, loss_of=lambda rows, dense: (rows * dense).square().sum()):
    dense = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([dense], 0.0)
    for ids in given:
        optimizer.zero_grad()
        scaler.scale(loss_of(module(ids), dense)).backward()
        scaler.step(optimizer)
        if update_first:
            scaler.update()
        module.step(scaler)
        if not update_first:
            scaler.update()


@cached_or_not
@by_name
def test_a_scaler_changes_no_bit(optimizer, cached):
    """Powers of two are exact, so scaling and unscaling leave the gradients as they are."""
    plain = table_of(optimizer)
    loop(HostEmbedding(plain), batches(8))
    for update_first in (False, True):
        module = module_of(cached, optimizer)
        scaled_loop(module, batches(8), GradScaler("cpu", 2.0**16, growth_interval=2), update_first)
        assert write_back(module) == contents(plain), update_first


@cached_or_not
def test_a_scaler_that_is_left_out(cached):
    module, scaler = module_of(cached), GradScaler("cpu")
    before = contents(module.table)
    scaler.scale(module(batches(1)[0]).sum()).backward()
    with pytest.raises(ValueError, match=r"table 't': a GradScaler has scaled a loss .*; call step\(scaler\)"):
        module.step()
    assert write_back(module) == before
    if not cached:
        module.step(scaler)
        assert module.table.step == 1
    module = module_of(cached)
    module(batches(1)[0]).sum().backward()
    with pytest.raises(ValueError, match="this GradScaler has scaled no loss since the forward pass"):
        module.step(scaler)
    scaler.scale(torch.ones(1))  # of another model
    module.step(GradScaler("cpu", enabled=False))
    module(batches(1)[0]).sum().backward()
    module.step()
    assert module.table.step == 2


def test_a_scale_that_changes_between_passes():
    module, scaler = module_of(False), GradScaler("cpu", 4.0)
    for scale in (None, 2.0):
        if scale is not None:
            scaler.update(scale)
        scaler.scale(module(batches(1)[0]).sum()).backward()
    with pytest.raises(ValueError, match="the scale has changed between the passes"):
        module.step(scaler)


@cached_or_not
def test_a_step_that_overflows_is_skipped_and_the_scale_lowered(cached):
    module, plain = module_of(cached), table_of()
    scaler, given = GradScaler("cpu", 2.0**127), batches(8)
    scaled_loop(module, given[:1], scaler, loss_of=lambda rows, dense: (rows * 1024).sum() + dense)
    assert module.table.step == 0  # the rows' gradients alone are infinite
    assert scaler.get_scale() == 2.0**126
    scaler.update(4.0)
    scaled_loop(module, given[1:], scaler)
    loop(HostEmbedding(plain), given[1:])
    assert write_back(module) == contents(plain)


def test_one_table_of_a_cache_overflows():
    given = batches(8)
    tables, cache, modules = two_tables("30%", window=2)
    plain = plain_tables([])
    scaler = GradScaler("cpu", 4.0)
    for number, ids in enumerate(cache.ahead(given, ids=lambda ids: ids)):
        loss = sum(module(ids).square().sum() for module in modules)
        scaler.scale(loss).backward()
        if number in (2, 5):
            modules[0].rows()[0].grad[0, 0] = float("inf")
        for module in modules:
            module.step(scaler)
    loop(HostEmbedding(plain[0]), [ids for number, ids in enumerate(given) if number not in (2, 5)])
    loop(HostEmbedding(plain[1]), given)
    assert same(tables, plain)


@cached_or_not
def test_clipping_over_the_whole_model(cached):
    """As torch does with the rows as a parameter of its own."""
    module, ids = module_of(cached, hostdev.SGD(lr=0.5)), batches(1)[0]
    weights = nn.Parameter(torch.from_numpy(module.table.weights.copy()))
    dense = [nn.Parameter(torch.full((3,), 2.0)) for _ in range(2)]
    norms = []
    for number, (look, rows) in enumerate([
        (module, module.rows), (lambda ids: nn.functional.embedding(ids, weights), lambda: [weights])
    ]):  # fmt: skip
        (look(ids).exp().sum() * dense[number].sum()).backward()
        norms.append(float(nn.utils.clip_grad_norm_([dense[number], *rows()], 1.0)))
    module.step()
    write_back(module)
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 10
    torch.testing.assert_close(torch.from_numpy(module.table.weights.copy()), weights.detach() - 0.5 * weights.grad)
    assert module.rows() == []


def test_clipping_of_scaled_gradients():
    module, scaler = module_of(False, hostdev.SGD(lr=1.0)), GradScaler("cpu", 1024.0)
    before = module.table.weights.copy()
    scaler.scale(module(torch.tensor([3])).sum()).backward()
    module.unscale_(scaler)
    assert nn.utils.clip_grad_norm_(module.rows(), 1.0) == pytest.approx(5**0.5)
    with pytest.raises(ValueError, match=r"unscale_\(\) has been called since"):
        module.unscale_(scaler)
    with pytest.raises(ValueError, match=r"call step\(\) after unscale_\(\)"):
        module(torch.tensor([3]))
    with pytest.raises(ValueError, match=r"call step\(scaler\)"):
        module.step()
    module.step(scaler)
    np.testing.assert_allclose(before[3] - module.table.weights[3], 5**-0.5, rtol=1e-5)


@pytest.mark.parametrize("parent", [False, True])
@cached_or_not
def test_a_frozen_module_only_looks(cached, parent):
    module = module_of(cached)
    loop(module, batches(3))
    before = write_back(module)
    model = nn.Sequential(module, nn.Linear(5, 1))
    (model if parent else module).requires_grad_(False)
    assert not module(batches(1)[0]).requires_grad
    module.step()
    assert write_back(module) == before
    model.requires_grad_(True)
    loop(module, batches(1))
    assert module.table.step == 4


def test_a_frozen_table_of_a_shared_cache():
    tables, cache, modules = two_tables("30%", window=2)
    before = contents(tables[0])
    modules[0].requires_grad_(False)
    given = cache.ahead(batches(4), ids=lambda ids: ids)
    ids = next(given)
    modules[0](ids)
    with pytest.raises(
        ValueError, match="table 'b' is to be trained, and table 'a', which shares its cache, is frozen"
    ):
        modules[1](ids)
    modules[1].requires_grad_(False)
    for ids in given:  # all frozen: nobody steps
        for module in modules:
            module(ids)
            module.step()
    assert contents(tables[0]) == before


def test_the_modules_one_parameter():
    module = HostEmbedding(table_of())
    model = nn.Sequential(module, nn.Linear(5, 1))
    old = nn.Sequential(nn.Identity(), nn.Linear(5, 1)).state_dict()
    assert list(model.state_dict()) == list(old)
    model.load_state_dict(old, strict=True)
    with pytest.raises(RuntimeError, match="Unexpected"):
        model.load_state_dict({**old, "0.rows": torch.ones(1)})
    assert [name for name, _ in module.named_parameters()] == ["trainable"]
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for ids in batches(2):
        model(ids).sum().backward()
        optimizer.step()
        module.step()
    assert module.trainable.grad is None
    assert module.trainable not in optimizer.state
    model.double().to("cpu")
    assert module(batches(1)[0]).dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@cached_or_not
@by_name
def test_gradients_that_are_not_finite_change_nothing(optimizer, cached, value):
    module, given = module_of(cached, optimizer), batches(6)
    loop(module, given[:3])
    before = write_back(module)
    (module(given[3]).square().sum() * value).backward()
    with pytest.raises(UserError, match="table 't': the gradients are not finite; no row was updated"):
        module.step()
    assert write_back(module) == before
    loop(module, given[4:])
    plain = table_of(optimizer)
    loop(HostEmbedding(plain), given[:3] + given[4:])
    assert write_back(module) == contents(plain)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("ahead", [False, True])
def test_no_table_of_a_cache_steps_where_one_is_not_finite(ahead, wrong):
    given = batches(8)
    tables, cache, modules = two_tables("30%", window=2)
    for number, ids in enumerate(cache.ahead(given, ids=lambda ids: ids) if ahead else given):
        pass_both(modules, ids)
        if number == 4:
            modules[wrong].rows()[0].grad[1] = float("nan")
            with pytest.raises(UserError, match=f"table '{'ab'[wrong]}': the gradients are not finite"):
                modules[0].step()
            continue
        for module in modules:
            module.step()
    cache.write_back()
    assert same(tables, plain_tables(given[:4] + given[5:]))


def test_gradients_whose_sum_overflows_are_finite():
    module = module_of(False, hostdev.SGD(lr=1e-38))
    module(torch.arange(4)).sum().backward()
    module.rows()[0].grad[:] = 3e38
    module.step()
    assert module.table.step == 1


def test_gradients_add_up_without_a_cache():
    one, two = module_of(False), module_of(False)
    ids = batches(3)
    for part in ids:
        one(part).square().sum().backward()
    one.step()
    sum(two(part).square().sum() for part in ids).backward()
    two.step()
    assert contents(one.table) == contents(two.table)


@pytest.mark.parametrize("ahead", [False, True])
def test_gradients_do_not_add_up_with_a_cache(ahead):
    cache = EmbeddingCache(table_of(), "40%", window=2)
    module, given = HostEmbedding(cache), batches(4)
    source = cache.ahead(given, ids=lambda ids: ids) if ahead else iter(given)
    module(next(source)).sum().backward()
    with pytest.raises(ValueError, match=r"call step\(\) before the next forward pass in training, or discard\(\)"):
        module(given[1])
    if ahead:
        with pytest.raises(ValueError, match=r"the gradients of the tables \['t'\] were not stepped"):
            next(source)
    else:
        module.discard()
    loop(module, cache.ahead(given, ids=lambda ids: ids))
    plain = table_of()
    loop(HostEmbedding(plain), given)
    assert contents(module.table) == contents(plain)


def test_a_batch_may_be_skipped_outside_of_ahead():
    module, given = module_of(True), batches(4)
    loop(module, given[:1])
    module(given[1])
    module.discard()
    module(given[2]).sum().backward()
    module.discard()
    loop(module, given[3:])
    plain = table_of()
    loop(HostEmbedding(plain), [given[0], given[3]])
    assert write_back(module) == contents(plain)


def test_passes_that_are_thrown_away_are_forgotten():
    module = module_of(False)
    for ids in batches(200):
        module(ids)  # for a metric, say
    gc.collect()
    assert len(module.rows()) <= 1
    loop(module, batches(1))
    plain = table_of()
    loop(HostEmbedding(plain), batches(1))
    assert contents(module.table) == contents(plain)


def test_gradients_that_nobody_steps(monkeypatch):
    monkeypatch.setattr(module_file, "MOST_PASSES", 3)
    module, ids = module_of(False), batches(1)[0]
    for _ in range(3):
        module(ids).sum().backward()
    with pytest.raises(ValueError, match=r"the gradients of 3 passes wait for a step; call step\(\), or discard\(\)"):
        module(ids)
    module.discard()
    module(ids).sum().backward()
    module.step()
    assert module.table.step == 1


def test_positions_go_to_the_device_without_a_stop(monkeypatch):
    """Through pinned memory on a copy stream, for which the stream of the forward pass waits."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    module = HostEmbedding(HostTable(60, 5, hostdev.SGD(), name="t"))
    module._staging = Staging(torch.device("cpu"), streams=(streams := Streams()))
    sent = []
    send = module._staging.send
    monkeypatch.setattr(module._staging, "send", lambda tensors, memory: sent.extend(tensors) or send(tensors, memory))
    for training in (True, False):
        module.train(training)
        module(torch.tensor([4, 9, 4]))
        assert any(tensor.dtype == torch.int32 and tensor.tolist() == [0, 1, 0] for tensor in sent), training
        assert streams.waits[-1] == ("compute", "down")
        sent.clear()
