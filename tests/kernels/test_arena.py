"""Memory for blocks of growing size."""

import threading

import numpy as np
import psutil
import pytest

from hostdev.kernels.key_directory import Arena


@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_zero_and_do_not_overlap(seed):
    rng = np.random.default_rng(seed)
    arena, held = Arena(), []
    for step in range(600):
        if held and rng.random() < 0.45:
            block, value = held.pop(int(rng.integers(len(held))))
            assert (block.values == value).all()
            arena.give_back(block)
        else:
            block = arena.take(int(rng.integers(1, 3_000_000 if rng.random() < 0.1 else 5_000)))
            assert block.values.ctypes.data % 64 == 0 and not block.values.any()
            block.values[:] = value = step % 255 + 1
            held.append((block, value))
        assert sum(len(block.values) for block, _ in held) <= arena.nbytes
    for block, value in held:
        assert (block.values == value).all()
        arena.give_back(block)
    assert arena.nbytes == 0


def test_memory_goes_back_to_the_system():
    """Blocks grow in turns, as the parts of a directory do: what is in use stays near their sizes."""
    arena, process = Arena(), psutil.Process()
    before = process.memory_info().rss
    blocks = [arena.take(200_000) for _ in range(64)]
    for turn in range(20 * 64):
        place = turn % 64
        new = arena.take(min(2_000_000, int(1.2 * len(blocks[place].values))))
        new.values.fill(1)
        arena.give_back(blocks[place])
        blocks[place] = new
    live = sum(len(block.values) for block in blocks)
    assert live == 64 * 2_000_000 and live <= arena.nbytes < 1.1 * live
    assert process.memory_info().rss - before < 1.3 * live
    for block in blocks:
        arena.give_back(block)
    assert process.memory_info().rss - before < 0.2 * live


def test_a_block_may_be_larger_than_a_range():
    arena = Arena()
    blocks = [arena.take(size) for size in (1 << 20, 1 << 29, 1 << 20)]
    assert [len(block.values) for block in blocks] == [1 << 20, 1 << 29, 1 << 20]
    for block in blocks[:2]:
        block.values[-1] = 1
        arena.give_back(block)
    assert arena.nbytes <= 1 << 21


def test_several_threads():
    arena, wrong = Arena(), []

    def work(number):
        for turn in range(200):
            block = arena.take(1_000 * (1 + (turn + number) % 300))
            if block.values.any():
                wrong.append(turn)
            block.values[:] = number
            if (block.values != number).any():
                wrong.append(turn)
            arena.give_back(block)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and arena.nbytes == 0
