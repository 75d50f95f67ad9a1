"""The tutorial on serving: its commands run as they are, up to a model that is updated while it answers."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.conftest import ROOT, environment
from tests.data import movies
from tests.distributed.processes import wait_until

PAGE = (ROOT / "docs/tutorials/served-model.md").read_text()
PATIENCE = 120


def commands():
    """Return the commands after a prompt, whole."""
    return [
        re.sub(r"\\\n\s+", "", found) for found in re.findall(r"^    \$ ((?:.*\\\n)*.*)$", PAGE, flags=re.MULTILINE)
    ]


def question():
    """Return the body that the page's curl sends."""
    return re.search(r"-d '(\{.*?\})'\n", PAGE, flags=re.DOTALL)[1].encode()


def test_from_a_file_to_a_model_that_is_updated(tmp_path):
    prepare, train, first, serve, more = commands()
    assert train.startswith("hostdev train --follow") and serve.startswith("hostdev serve") and "--follow" in serve
    env = environment(tmp_path)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    lines = movies.make(rows=6000).write_csv(tmp_path / "all.csv").read_text().splitlines(keepends=True)
    (tmp_path / "films.csv").write_text("".join(lines[:4001]))
    (tmp_path / "next.csv").write_text("".join([lines[0], *lines[4001:]]))
    (tmp_path / "arriving").mkdir()
    running = {}

    def run(command):
        subprocess.run(command, shell=True, cwd=tmp_path, env=env, check=True)

    def begin(name, command):
        with (tmp_path / name).open("w") as out:
            running[name] = subprocess.Popen(
                f"exec {command}", shell=True, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT
            )

    def ask(port):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/predict", question(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    try:
        run(prepare)
        begin("train.txt", train)
        run(first)
        # 4,000 rows are 8 steps.
        wait_until(lambda: any((tmp_path / "served/checkpoints").glob("step-*8")), PATIENCE)
        begin("serve.txt", f"{serve} --port 0")
        wait_until(lambda: "Ctrl-C ends it" in (tmp_path / "serve.txt").read_text(), PATIENCE)
        port = int(re.search(r"127\.0\.0\.1:(\d+)", (tmp_path / "serve.txt").read_text())[1])
        before = ask(port)
        assert before["step"] == 8
        run(more)
        wait_until(lambda: ask(port)["step"] == 12, PATIENCE)
        after = ask(port)
        assert before["model"] == after["model"] == "deepfm" and before["predictions"] != after["predictions"]
        for name, code in (("train.txt", 130), ("serve.txt", 130)):
            running[name].send_signal(signal.SIGINT)
            assert running[name].wait(PATIENCE) == code, (tmp_path / name).read_text()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    shown = (tmp_path / "train.txt").read_text()
    assert "2026-11-02.csv: AUC 0." in shown and "on 2,000 rows, before training on them" in shown
    assert "serving  version 12, written" in (tmp_path / "serve.txt").read_text()
