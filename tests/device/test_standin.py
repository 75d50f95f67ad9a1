"""The simulated accelerator: it gives the CPU's results in every schedule, and detects every kind of missing wait."""

import gc
import sys
import threading
import time

import numpy as np
import pytest
import torch

if "tests.standin.plugin" not in sys.modules:
    pytest.skip("registers a device for the whole process; see `make test-device`", allow_module_level=True)

from tests import standin

if standin.unavailable is not None:
    pytest.skip(standin.unavailable, allow_module_level=True)

pytestmark = pytest.mark.device
ON = torch.device("standin", 0)


@pytest.fixture(autouse=True)
def _lazy():
    standin.configure(schedule="lazy")


@pytest.fixture(params=standin.SCHEDULES)
def schedule(request, _lazy):
    standin.configure(schedule=request.param)
    return request.param


def streams(count):
    return [standin.Stream(ON) for _ in range(count)]


def on(stream):
    return torch.get_device_module(ON).stream(stream)


def sent(tensor):
    return tensor.pin_memory().to(ON, non_blocking=True)


# -- registration ----------------------------------------------------------------------------------------------------
def test_this_torch_can_register_a_device_from_python():
    """If this fails after an update of torch, the interface in tests/standin/device.py has changed."""
    assert standin.unavailable is None
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "standin"
    tensor = torch.arange(5.0).to("standin")
    assert (tensor.device, tensor.cpu().tolist()) == (ON, [0, 1, 2, 3, 4])


def test_the_cpu_cannot_read_its_memory():
    tensor = torch.ones(3, device=ON)
    with pytest.raises(TypeError, match="can't convert standin:0 device type tensor to numpy"):
        tensor.numpy()
    with pytest.raises(RuntimeError, match="xpected all tensors"):
        tensor + torch.ones(3)


def test_two_devices():
    one = torch.arange(4.0).to("standin:1")
    assert one.device.index == 1
    assert (one * 2).sum().item() == 12
    with pytest.raises(RuntimeError, match="on the same device, but"):
        one + torch.ones(4, device=ON)
    assert torch.equal(one.to("standin:0").cpu(), one.cpu())
    network = torch.nn.Linear(4, 1).to("standin:1")
    network(one).sum().backward()
    assert network.weight.grad.device == one.device
    with torch.accelerator.device_index(1):
        assert torch.zeros(1, device="standin").device.index == 1
        assert torch.zeros(1).to("standin").device.index == 1
        assert torch.accelerator.current_stream().device_index == 1
    assert torch.accelerator.current_stream().device_index == 0
    with pytest.raises(RuntimeError, match="there is no device 2"):
        torch.accelerator.set_device_index(2)


# -- the CPU's results -----------------------------------------------------------------------------------------------
def work(device):
    """A chain over three streams, or sequentially on the CPU; forward, backward and an optimizer."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    ways, out = streams(2) if device.type == "standin" else [], []
    for number in range(5):
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
        if ways:
            with on(ways[0]):
                batch = sent(batch)
            torch.accelerator.current_stream().wait_stream(ways[0])
            batch.record_stream(torch.accelerator.current_stream())
        loss = network(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values = torch.cat([parameter.detach().view(-1) for parameter in network.parameters()])
        if ways:
            ways[1].wait_stream(torch.accelerator.current_stream())
            with on(ways[1]):
                host = torch.empty(values.shape, pin_memory=True)
                host.copy_(values, non_blocking=True)
                values.record_stream(ways[1])
                event = ways[1].record_event()
            event.synchronize()
            values = host
        out.append(values.clone())
    return out


def test_every_schedule_gives_the_cpus_bits(schedule):
    expected = work(torch.device("cpu"))
    for seed in range(3):
        standin.configure(seed=seed)
        assert all(torch.equal(*pair) for pair in zip(work(ON), expected, strict=True))


def test_operations_of_every_kind():
    torch.manual_seed(0)
    a, b = torch.randn(6, 4), torch.randn(4, 6)
    ids = torch.tensor([3, 1, 3])
    operations = [
        lambda a, b, ids: a @ b,
        lambda a, b, ids: a.unbind(1)[2] * 2 + a[:, 0],
        lambda a, b, ids: a.index_select(0, ids).index_copy_(0, torch.zeros_like(ids[:1]), b[:1, :4]),
        lambda a, b, ids: torch.zeros_like(a).index_put_((ids,), b.T[:3], accumulate=True),
        lambda a, b, ids: torch.cat([a, b.T]).sort(0).values,
        lambda a, b, ids: a[a > 0],  # whose shape depends on values
        lambda a, b, ids: torch.unique(ids),
        lambda a, b, ids: torch.where(a > 0, a, 0.0).max(1).indices,
        lambda a, b, ids: torch.stack(list(torch.std_mean(a, 1))),
        lambda a, b, ids: torch.add(a, 1, out=torch.empty(0, device=a.device)),
        lambda a, b, ids: a.to(torch.bfloat16).float().view(torch.int32),
        lambda a, b, ids: (a.double() ** 2).sum(),
        lambda a, b, ids: torch.nn.functional.pad(a, (0, 3)),
    ]
    for number, operation in enumerate(operations):
        assert torch.equal(operation(a.to(ON), b.to(ON), ids.to(ON)).cpu(), operation(a, b, ids)), number


def test_square_roots_are_correctly_rounded():
    values = torch.rand(10_000)
    np.testing.assert_array_equal(values.to(ON).sqrt().cpu(), np.sqrt(values.numpy()))


def test_autocast():
    a = torch.randn(5, 5, device="cpu").to(ON)
    with torch.autocast("standin", torch.bfloat16):
        assert torch.mm(a, a).dtype == torch.bfloat16
    assert torch.mm(a, a).dtype == torch.float32


def test_custom_operations(schedule):
    """Ops with a CPU kernel only: mutation without a result, lists and optional tensors, results without a shape."""
    with torch.library._scoped_library("standintest", "FRAGMENT") as library:
        library.define("add_rows(Tensor(a!) rows, Tensor ids, Tensor? values, float scale) -> ()")
        library.define("scale_all(Tensor(a!)[] tensors, Tensor by) -> ()")
        library.define("positive(Tensor values) -> Tensor")
        library.define("two(Tensor values, Tensor? other=None) -> (Tensor, Tensor)")

        def add_rows(rows, ids, values, scale):
            rows.numpy()[ids.numpy()] += scale * (1 if values is None else values.numpy())

        def scale_all(tensors, by):
            for tensor in tensors:
                tensor.mul_(by)

        library.impl("add_rows", add_rows, "CPU")
        library.impl("scale_all", scale_all, "CPU")
        library.impl("positive", lambda values: values[values > 0], "CPU")
        library.impl("two", lambda values, other=None: (values + 1, values * 2), "CPU")
        operations = torch.ops.standintest
        rows, ids = torch.zeros(4, 2, device=ON), torch.tensor([1, 3]).to(ON)
        assert operations.add_rows(rows, ids, None, 0.5) is None
        operations.add_rows(rows, ids, torch.ones(2, 2).to(ON), 2.0)
        operations.scale_all([rows[1], rows[3]], torch.tensor(2.0).to(ON))
        assert rows.cpu().tolist() == [[0, 0], [5, 5], [0, 0], [5, 5]]
        assert operations.positive(rows).shape == (4,)
        assert [part.sum().item() for part in operations.two(rows)] == [28, 40]
        assert standin.counters.launches["standintest.add_rows.default"] == 2


def test_an_error_on_the_device_is_raised_at_the_next_wait():
    bad = torch.ones(3).to(ON).index_select(0, torch.tensor([7]).to(ON))
    with pytest.raises(RuntimeError, match="index_select.*index out of range"):
        bad.cpu()
    assert torch.ones(1, device=ON).item() == 1


# -- what is missing is found ----------------------------------------------------------------------------------------
def test_new_memory_is_not_a_number(schedule):
    assert torch.empty(4, device=ON).isnan().all().item()
    assert torch.empty(4, pin_memory=True).isnan().all()


def test_a_missing_wait_for_an_event(schedule):
    [stream] = streams(1)
    with on(stream):
        rows = sent(torch.ones(4))
    with pytest.raises(standin.RaceError, match=r"on stream 0 reads .* host to device on stream \d+ uses, and nothing"):
        rows + 1
    torch.accelerator.current_stream().wait_event(stream.record_event())
    rows.record_stream(torch.accelerator.current_stream())
    assert (rows + 1).sum().item() == 8


def test_a_missing_wait_for_a_stream(schedule):
    [stream] = streams(1)
    rows = torch.ones(4, device=ON) * 2
    host = torch.empty(4, pin_memory=True)
    with on(stream):
        with pytest.raises(standin.RaceError, match=r"device to host on stream \d+ reads"):
            host.copy_(rows, non_blocking=True)
        stream.wait_stream(torch.get_device_module(ON).default_stream(ON))
    rows.add_(1)  # the other stream has not been given its read
    with on(stream):
        stream.wait_stream(torch.get_device_module(ON).default_stream(ON))
        host.copy_(rows, non_blocking=True)
        rows.record_stream(stream)
    with pytest.raises(standin.RaceError, match="writes memory"):
        rows.add_(1)  # while the copy may still read it
    stream.synchronize()
    assert host.tolist() == [3, 3, 3, 3]
    rows.add_(1)


def test_a_wait_reaches_through_other_streams(schedule):
    one, two, three = streams(3)
    with on(one):
        rows = sent(torch.ones(2))
    two.wait_stream(one)
    three.wait_stream(two)
    with on(three):
        assert (rows + 1).cpu().tolist() == [2, 2]
        rows.record_stream(three)


def test_a_missing_record_stream(schedule):
    [stream] = streams(1)
    rows = torch.ones(4, device=ON)
    stream.wait_stream(torch.accelerator.current_stream())
    with on(stream):
        out = rows * 2
    del rows
    torch.empty(1, device=ON)  # as an allocator, which may give the memory to this one
    with pytest.raises(
        standin.RaceError, match=r"is given up while aten.mul.* may still use it, without record_stream"
    ):
        torch.get_device_module(ON).default_stream(ON).synchronize()
    if schedule == "lazy":  # what the operation has read is what the next owner wrote
        stream.synchronize()
        assert out.cpu().isnan().all()


def test_record_stream_keeps_memory(schedule):
    [stream] = streams(1)
    rows = torch.ones(4, device=ON)
    stream.wait_stream(torch.accelerator.current_stream())
    with on(stream):
        out = rows * 2
        rows.record_stream(stream)
        del rows
        assert out.cpu().tolist() == [2, 2, 2, 2]
        out.record_stream(stream)


def test_recorded_memory_is_not_free_until_it_is_not_used():
    [stream] = streams(1)
    rows = torch.ones(1000, device=ON)
    stream.wait_stream(torch.accelerator.current_stream())
    with on(stream):
        total = rows.sum()
    rows.record_stream(stream)
    standin.collect()
    before = standin.counters.device_bytes
    del rows
    standin.collect()
    assert standin.counters.device_bytes == before
    stream.synchronize()
    standin.collect()
    assert standin.counters.device_bytes == before - 4000
    total.record_stream(stream)


def test_the_host_reads_before_it_has_waited():
    host = torch.zeros(4, pin_memory=True)
    host.copy_(torch.ones(4, device=ON), non_blocking=True)
    assert host.isnan().all()
    torch.accelerator.synchronize()
    assert host.tolist() == [1, 1, 1, 1]


def test_the_host_changes_what_a_copy_reads(schedule):
    host = torch.ones(4, pin_memory=True)
    array = host.numpy()
    sent_from = torch.from_numpy(array)
    assert sent_from.is_pinned()  # as a driver sees it, by its address
    rows = sent_from.to(ON, non_blocking=True)
    array[2] = 5
    with pytest.raises(standin.RaceError, match="the host has changed pinned memory that host to device"):
        rows.sum().item()
    rows = host.to(ON, non_blocking=True)
    torch.accelerator.synchronize()
    array[2] = 6  # after the wait it may
    assert rows.cpu().tolist() == [1, 1, 5, 1]


def test_pinned_memory_between_streams(schedule):
    down, up = streams(2)
    host, other = torch.empty(4, pin_memory=True), torch.ones(4, device=ON)
    up.wait_stream(torch.accelerator.current_stream())
    with on(up):
        host.copy_(other, non_blocking=True)
        other.record_stream(up)
    with on(down), pytest.raises(standin.RaceError, match="reads 16 bytes of pinned memory of 16"):
        host.to(ON, non_blocking=True)
    down.wait_stream(up)
    with on(down):
        assert host.to(ON, non_blocking=True).cpu().tolist() == [1, 1, 1, 1]


def test_a_wait_of_the_host_orders_all_that_follows(schedule):
    [stream] = streams(1)
    with on(stream):
        rows = sent(torch.ones(4))
    stream.synchronize()
    assert (rows + 1).sum().item() == 8


def test_without_the_checker_the_bits_are_wrong():
    standin.configure(check=False)
    [stream] = streams(1)
    with on(stream):
        rows = sent(torch.ones(4))
    assert (rows + 1).isnan().all().item()


# -- what is counted -------------------------------------------------------------------------------------------------
def test_counters():
    standin.settle()
    gc.collect()
    standin.settle()
    standin.counters.reset()
    before = standin.counters.device_bytes
    host = torch.empty(1000, pin_memory=True)
    host[:] = 1
    rows = host.to(ON, non_blocking=True)
    assert standin.counters.waits == {}
    view = rows.view(10, 100)[2:]
    assert standin.counters.launches == {"host to device": 1}
    total = (view + 1).sum()
    thread = threading.Thread(target=total.item, name="reader")
    thread.start()
    thread.join()
    torch.ones(3).to(ON)
    torch.accelerator.current_stream().synchronize()
    assert standin.counters.waits_of("reader") == {"item": 1}
    assert standin.counters.waits_of("MainThread") == {"copy to device": 1, "stream.synchronize": 1}
    assert (standin.counters.pinned_allocations, standin.counters.pinned_bytes) == (1, 4000)
    standin.collect()
    assert standin.counters.device_bytes == before + 4004
    assert standin.counters.device_peak_bytes >= before + 4000 + 3200
    assert torch.get_device_module(ON).mem_get_info(ON)[0] <= standin.config.total_bytes - 4004


def test_memory_has_an_end():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 34, dtype=torch.uint8, device=ON)


def test_events_tell_time(schedule):
    begin, end = (torch.Event(ON, enable_timing=True) for _ in range(2))
    begin.record()
    torch.ones(100, 100, device=ON).sum()
    end.record()
    end.synchronize()
    assert begin.query()
    assert begin.elapsed_time(end) > 0


def test_lazy_work_waits_for_a_wait():
    event = torch.Event(ON)
    torch.ones(3, device=ON)
    event.record()
    time.sleep(0.01)
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_who_asks_often_is_told(schedule):
    """A loop over `query` ends, and the work that it saw is ordered before later work."""
    [stream] = streams(1)
    host = torch.ones(3, pin_memory=True)
    with on(stream):
        rows = host.to(ON, non_blocking=True)
    event = stream.record_event()
    while not event.query():
        time.sleep(0.0005)
    host.zero_()
    assert (rows + 1).sum().item() == 6
