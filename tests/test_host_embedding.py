"""A user's own model and loop over host tables: torch's own gradients, a cache that changes no bit, clear errors."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import hostdev
from hostdev import EmbeddingCache, HostEmbedding, HostTable, UserError

ROWS, DIM = 60, 5


def example(name):
    path = Path(__file__).resolve().parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_of(optimizer=None, name="t"):
    return HostTable(ROWS, DIM, optimizer or hostdev.LazyAdam(lr=1e-2), name=name)


def batches(count, seed=0):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.zipf(1.3, (4, 6)) % ROWS) for _ in range(count)]


def loop(module, given, step=True):
    for ids in given:
        rows = module(ids)
        assert rows.device.type == module.device.type
        rows.square().sum().backward()
        module.step()


def contents(table):
    return [table.weights.tobytes(), *(values.tobytes() for values in table.slots.values()), table.step]


def test_rows_and_slots_lie_on_the_device(device):
    cache = EmbeddingCache(table_of(), "50%", device=device)
    assert {values.device.type for values in (cache.slots[0].block, cache.slots[0].row_slots)} == {device.type}
    for module in (HostEmbedding(cache), HostEmbedding(table_of(), device=device)):
        assert module(batches(1)[0]).device.type == device.type
        assert module.eval()(batches(1)[0]).device.type == device.type


def test_the_gradient_is_torchs(device):
    table = HostTable(ROWS, DIM, hostdev.SGD(lr=0.5), name="t")
    weights = torch.from_numpy(table.weights.copy()).requires_grad_()
    module = HostEmbedding(table, device=device)
    ids = torch.tensor([[3, 3, 7], [7, 3, 0]])
    factors = torch.arange(1.0, 7.0).view(2, 3, 1)
    for rows, by in ((module(ids), factors.to(device)), (torch.nn.functional.embedding(ids, weights), factors)):
        (rows * by).square().sum().backward()
    assert module(ids).shape == (2, 3, DIM)
    module.eval()
    module = HostEmbedding(table, device=device)
    (module(ids) * factors.to(device)).square().sum().backward()
    module.step()
    torch.testing.assert_close(torch.from_numpy(table.weights.copy()), weights.detach() - 0.5 * weights.grad)


def test_several_passes_are_one_step(device):
    one, two = table_of(), table_of()
    ids = batches(2)
    modules = [HostEmbedding(one, device=device), HostEmbedding(two, device=device)]
    sum(modules[0](part).square().sum() for part in ids).backward()
    modules[1](torch.cat(ids)).square().sum().backward()
    for module in modules:
        module.step()
    np.testing.assert_allclose(one.weights, two.weights, rtol=1e-6)
    assert one.step == two.step == 1


@pytest.mark.parametrize(
    "optimizer",
    [hostdev.LazyAdam(), hostdev.FTRL(), hostdev.SGD(), hostdev.Adagrad(), hostdev.RowWiseAdagrad()],
    ids=lambda optimizer: type(optimizer).__name__,
)
@pytest.mark.parametrize("policy", ["lookahead", "lru", "lfu", "static"])
def test_a_cache_changes_no_bit(device, optimizer, policy):
    plain = table_of(optimizer)
    loop(HostEmbedding(plain, device=device), batches(20))
    for size in (0, 1, "20%", "100%"):
        table = table_of(optimizer)
        cache = EmbeddingCache(table, size, policy, window=3, counts=np.arange(ROWS)[::-1], device=device)
        module = HostEmbedding(cache)
        loop(module, cache.ahead(batches(20)[:12], ids=lambda ids: ids))
        loop(module, batches(20)[12:])  # nothing ahead
        cache.write_back()
        assert contents(table) == contents(plain), size


def test_evaluation_sees_cached_rows_and_changes_nothing(device):
    table = table_of()
    cache = EmbeddingCache(table, "50%", window=2, device=device)
    module = HostEmbedding(cache)
    plain = HostEmbedding(table_of(), device=device)
    for number, ids in enumerate(cache.ahead(batches(8), ids=lambda ids: ids)):
        loop(module, [ids])
        loop(plain, [ids])
        with torch.no_grad():
            assert torch.equal(module(batches(1, 9)[0]), plain(batches(1, 9)[0])), number
    assert contents(table) == contents(plain.table)


def test_breaking_off_writes_back_and_goes_on(device):
    table, plain = table_of(), table_of()
    cache = EmbeddingCache(table, "20%", window=3, device=device)
    module = HostEmbedding(cache)
    given = batches(14)
    for number, ids in enumerate(cache.ahead(given[:10], ids=lambda ids: ids)):
        loop(module, [ids])
        if number == 5:
            break
    loop(HostEmbedding(plain, device=device), given[:6])
    assert contents(table) == contents(plain)
    loop(module, cache.ahead(given[6:], ids=lambda ids: ids))
    plain_module = HostEmbedding(plain, device=device)
    loop(plain_module, given[6:])
    assert contents(table) == contents(plain)


def test_errors_say_what_to_do(device):
    cache = EmbeddingCache(table_of(), 5, device=device)
    module = HostEmbedding(cache)
    ids = batches(3)
    with pytest.raises(ValueError, match=r"step\(\) needs a forward pass"):
        module.step()
    with pytest.raises(UserError, match=f"id {ROWS} at position 1 is outside"):
        module(torch.tensor([0, ROWS]))
    given = cache.ahead(ids, ids=lambda ids: ids)
    next(given)
    with pytest.raises(ValueError, match="not the ids of the batch being stepped"):
        module(ids[1])
    module(ids[0])
    with pytest.raises(ValueError, match=r"call step\(\) before the next forward"):
        module(ids[0])
    with pytest.raises(ValueError, match=r"the cache has the tables \['t'\]"):
        HostEmbedding(cache, "u")
    with pytest.raises(ValueError, match="share their ids"):
        EmbeddingCache([table_of(), HostTable(3, 1, hostdev.SGD(), name="x")], 1, device=device)
    for size in ("-1", "101%", "many", "nan%"):
        with pytest.raises(UserError, match="a cache's size is"):
            EmbeddingCache(table_of(), size, device=device)
    with pytest.raises(ValueError, match="policy must be one of"):
        EmbeddingCache(table_of(), 1, "random", device=device)
    with pytest.raises(ValueError, match="static needs counts"):
        EmbeddingCache(table_of(), 1, "static", device=device)
    cache = EmbeddingCache(table_of(), 5, device=device)
    loop(module := HostEmbedding(cache), cache.ahead(ids, ids=lambda ids: ids))
    for batch in cache.ahead(ids, ids=lambda ids: ids):
        loop(module, [batch])
        with pytest.raises(ValueError, match="has stepped this batch"):
            module(batch)


def two_tables(size, **options):
    tables = [table_of(name="a"), HostTable(ROWS, 1, hostdev.FTRL(), name="b")]
    cache = EmbeddingCache(tables, size, **options)
    return tables, cache, [HostEmbedding(cache, table.name) for table in tables]


def pass_both(modules, ids):
    sum(module(ids).square().sum() for module in modules).backward()


def plain_tables(given):
    tables = [table_of(name="a"), HostTable(ROWS, 1, hostdev.FTRL(), name="b")]
    for table in tables:
        loop(HostEmbedding(table), given)
    return tables


def same(tables, others):
    return [contents(table) for table in tables] == [contents(table) for table in others]


def test_a_batch_may_be_skipped(device):
    given = batches(12)
    tables, cache, modules = two_tables("30%", window=3, device=device)
    for number, ids in enumerate(cache.ahead(given, ids=lambda ids: ids)):
        if number == 3:
            continue  # not even looked at
        pass_both(modules, ids)
        if number in (5, 11):
            for module in modules:
                module.discard()  # the loss was not finite, say
            continue
        for module in modules:
            module.step()
    assert same(tables, plain_tables([ids for number, ids in enumerate(given) if number not in (3, 5, 11)]))


def test_tables_may_step_one_after_the_other_outside_of_ahead(device):
    tables, cache, modules = two_tables("30%", device=device)
    for ids in batches(10):
        for module in modules:
            loop(module, [ids])
    cache.write_back()
    assert same(tables, plain_tables(batches(10)))


def test_an_error_between_two_tables_steps_loses_nothing(device):
    given = batches(10)
    tables, cache, modules = two_tables("30%", window=2, device=device)
    with pytest.raises(ValueError, match=r"the tables \['b'\] have not taken the step"):
        for number, ids in enumerate(cache.ahead(given, ids=lambda ids: ids)):
            pass_both(modules, ids)
            modules[0].step()
            if number != 4:
                modules[1].step()
    plain = [plain_tables(given[:5])[0], plain_tables(given[:4])[1]]
    assert same(tables, plain)
    for ids in cache.ahead(given[5:], ids=lambda ids: ids):
        pass_both(modules, ids)
        for module in modules:
            module.step()
    for table in plain:
        loop(HostEmbedding(table, device=device), given[5:])
    assert same(tables, plain)


def test_writing_back_and_looking_between_steps(device):
    given = batches(10)
    tables, cache, modules = two_tables("30%", window=3, device=device)
    for number, ids in enumerate(cache.ahead(given, ids=lambda ids: ids), 1):
        pass_both(modules, ids)
        cache.write_back()
        for module in modules:
            module.step()
        cache.write_back()
        assert same(tables, plain_tables(given[:number]))


def test_a_table_may_be_changed_after_clear(device):
    given = batches(8)
    table, other = table_of(), table_of()
    cache = EmbeddingCache(table, "50%", window=2, device=device)
    loop(HostEmbedding(cache), cache.ahead(given[:5], ids=lambda ids: ids))
    loop(HostEmbedding(other, device=device), given[:5])
    cache.clear()
    for each in (table, other):
        each.weights[:] *= 0.5
    loop(HostEmbedding(cache), cache.ahead(given[5:], ids=lambda ids: ids))
    loop(HostEmbedding(other, device=device), given[5:])
    assert contents(table) == contents(other)


def test_what_would_go_wrong_is_refused(device):
    given = batches(6)
    cache = EmbeddingCache(table_of(), "50%", window=2, device=device)
    module, twin = HostEmbedding(cache), HostEmbedding(cache)
    batch = next(first := cache.ahead(given, ids=lambda ids: ids))
    with pytest.raises(ValueError, match="from another `ahead`"):
        next(cache.ahead(given, ids=lambda ids: ids))
    for each in (module, twin):
        each(batch).sum().backward()
    module.step()
    with pytest.raises(ValueError, match="the batch of this pass is over"):
        twin.step()
    batch = next(first)
    module(batch).sum().backward()
    first.close()
    with pytest.raises(ValueError, match="the batch of this pass is over"):
        module.step()
    ids = given[0].clone()

    def reused():
        for part in given:
            ids.copy_(part)
            yield ids

    with pytest.raises(ValueError, match="not the ids of the batch being stepped"):
        loop(module, cache.ahead(reused(), ids=lambda ids: ids))


def test_the_deepfm_example(device, capsys):
    deepfm = example("deepfm")
    losses, tables = deepfm.train(2000, "10%", 30, device=str(device))
    plain_losses, plain_tables = deepfm.train(2000, "0", 30, device=str(device))
    assert losses == plain_losses
    assert [contents(table) for table in tables] == [contents(table) for table in plain_tables]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert "the cache of 200 rows had" in capsys.readouterr().out


def test_a_clip_by_norm_gives_the_same_bits_with_a_cache(device):
    """The norm is a sum over rows: they lie in the order of the ids, with a cache, too."""
    results = []
    for cached in (False, True):
        table = table_of()
        source = EmbeddingCache(table, "20%", device=device, window=3) if cached else table
        module = HostEmbedding(source) if cached else HostEmbedding(table, device=device)
        norms = []
        for ids in source.ahead(batches(14), ids=lambda ids: ids) if cached else batches(14):
            (module(ids) * 3).square().sum().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(module.rows(), 0.3)))
            module.step()
        if cached:
            source.write_back()
        results.append((norms, contents(table)))
    assert results[0] == results[1]
