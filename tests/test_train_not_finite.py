"""A training whose loss is not finite: the error names epoch and step, and what was done before is kept."""

import json
import re
import time

import numpy as np
import pyarrow as pa
import pytest

from hostdev.pipeline.scheduling import workers
from tests.test_shards import rewrite
from tests.test_train import error_of, small, trained  # noqa: F401  (a fixture)


@pytest.mark.parametrize("is_late", [False, True])
def test_it_names_the_step(device, trained, own_data, tmp_path, capsys, monkeypatch, is_late):  # noqa: F811
    if is_late:  # then the loss is read before the updater finds it, which raises once more at the end
        wait = workers.await_step
        monkeypatch.setattr(workers, "await_step", lambda *step: time.sleep(0.2) or wait(*step))

    def change(table):
        dense = np.array(table["dense"].to_pylist(), np.float32)
        dense[:] = np.inf
        return table.set_column(1, "dense", pa.FixedSizeListArray.from_arrays(pa.array(dense.ravel()), 13))

    rewrite(own_data, change)
    assert trained(*small(own_data, "--batch-size", 100, "--host-device-mix", device=device)) == 2
    step = re.search(r"epoch 1 step (\d+): the loss is not finite", error_of(capsys))[1]
    done = (tmp_path / "run" / "loss.log").read_text().splitlines() if (tmp_path / "run").exists() else []
    assert len(done) == int(step) - 1
    if done:
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["status"] == "failed"
        assert summary["steps"] == len(done)
