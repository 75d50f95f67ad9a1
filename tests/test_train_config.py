"""`hostdev train --config FILE`: a TOML file, and the config.json of a run."""

import json

import pytest

from hostdev.ext.training.config import CommandConfig
from tests.test_train import error_of, small, trained  # noqa: F401  (a fixture)


def result_of(run):
    return (run / "loss.log").read_bytes(), json.loads((run / "summary.json").read_text())["state_sha256"]


def test_a_file_is_what_flags_are(trained, small_data, tmp_path):  # noqa: F811
    flags = ["--host-device-mix", "--max-steps", 3, "--cache-rows", 7, "--table-dtype", "bfloat16"]
    assert trained(*small(small_data, *flags)) == 0
    (tmp_path / "run.toml").write_text(
        f'data = "{small_data}"\nhost_device_mix = true\ndevice = "cpu"\nemb_dim = 4\nseed = 1\n'
        "[length]\nbatch_size = 500\nmax_steps = 3\n"
        '[pipeline_and_cache]\ncache_rows = 7\n[tables_and_optimizer]\ntable_dtype = "bfloat16"\n'
    )
    assert trained("--config", "run.toml", "--seed", 2020, "--run-dir", "toml") == 0  # the flag takes precedence
    assert trained("--config", "run/config.json", "--run-dir", "json") == 0
    options = [json.loads((tmp_path / run / "config.json").read_text()) for run in ("run", "toml", "json")]
    assert set(options[0]) == {*CommandConfig.options(), "versions", "preprocess", "data_set"}
    for other, name in zip(options[1:], ("toml", "json"), strict=True):
        assert other == options[0] | {"run_dir": name}
        assert result_of(tmp_path / name) == result_of(tmp_path / "run")
    older = {name: value for name, value in options[0].items() if name not in ("follow", "evict_unused", "report")}
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert trained("--config", "older.json", "--run-dir", "older") == 0
    assert result_of(tmp_path / "older") == result_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batchsize = 3", "batchsize; did you mean batch_size?"),
        ("[length]\nepoch = 3", "epoch in length; did you mean epochs?"),
        ("epochs = 'x'", "epochs must be an integer"),
        ("epochs = 0", "run.toml: epochs must be at least 1"),
        ("[pipeline_and_cache]\ncache_rows = 5", "run.toml: pipeline_and_cache.cache_rows 5 has no effect without"),
        ("data = 's3://a:b@c/d'", "run.toml: data: "),
        ("l2 = 'all'", "run.toml: l2 must be none or batch or table"),
    ],
)
def test_a_wrong_file_gets_one_line(trained, tmp_path, capsys, text, words):  # noqa: F811
    (tmp_path / "run.toml").write_text(text)
    assert trained("--config", "run.toml") == 2
    error = error_of(capsys)
    assert "run.toml: " in error and words in error


def test_flags_repair_a_file(trained, tmp_path, capsys):  # noqa: F811
    (tmp_path / "run.toml").write_text("epochs = 0\nlr = -1")
    assert trained("--config", "run.toml", "--epochs", 1, "--lr", -2) == 2
    assert "error: --lr must be" in error_of(capsys)
