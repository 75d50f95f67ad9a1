"""Iterators are read ahead of a loop; one that is left early leaves nothing behind that the next does not get."""

import threading

import numpy as np
import pytest

from hostdev.pipeline.scheduling import overlapped as overlapped_module
from tests.runtime.cases import BodyError, Case, batches_of, differing, ids, overlapped, wanted_of


@pytest.mark.slow_on_standin
@overlapped
def test_an_iterator_is_gone_on_with(device, depth, cache):
    """What was read of it and not given out comes first in the next loop; in an evaluation as well."""
    batches = batches_of(14)
    case = Case(device, options={"depth": depth, "cache": cache})
    stream = iter(batches[:12])
    for label, rows in case.loop(stream):
        case.step(label, rows)
        if rows.step == 4:
            break
    with pytest.raises(BodyError):
        for label, rows in case.loop(stream):
            case.step(label, rows)
            if rows.step == 2:
                raise BodyError
    for _ in case.runtime.predict(batches[12:], ids=ids):
        pass
    for number, (label, rows) in enumerate(case.loop(stream, accumulate=1)):
        case.step(label, rows)
        if number == 1:
            break
    del label, rows
    case.train(stream)
    assert next(stream, None) is None
    assert differing(case.state(), wanted_of(device, batches[:12])) == []
    seen, stream = [], iter(batches)
    for _ in range(2):
        for batch, _ in case.runtime.predict(stream, ids=ids):
            seen.append(batch["label"])
            if len(seen) == 3:
                break
    np.testing.assert_array_equal(seen, [batch["label"] for batch in batches])


def test_a_slow_iterator_is_gone_on_with(device, monkeypatch):
    """The reader of before is still in it when the next loop begins."""
    monkeypatch.setattr(overlapped_module, "LONGEST_JOIN", 0.01)
    batches, slow = batches_of(8), threading.Event()

    def stream():
        for number, batch in enumerate(batches):
            if number == 4:
                slow.wait(5)
            yield batch

    case, source = Case(device, options={"depth": 2}), stream()
    for label, rows in case.loop(source):
        case.step(label, rows)
        if rows.step == 2:
            break
    threading.Timer(0.2, slow.set).start()
    case.train(source)
    assert differing(case.state(), wanted_of(device, batches)) == []
