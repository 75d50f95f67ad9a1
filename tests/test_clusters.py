"""The guide to clusters: its manifests fit Kubernetes' schemas, and its commands work on two hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.conftest import ROOT, digest_of, environment
from tests.distributed.hosts import Hosts

GUIDES = ROOT / "docs/guides"
MANIFESTS = sorted((GUIDES / "cluster").glob("*.yaml"))
SCRIPTS = sorted((GUIDES / "cluster").glob("*.sbatch"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests(path):
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    wrong = {**documents[-1], "spec": {**documents[-1]["spec"], "replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def flags_of(text):
    """Return the flags of hostdev's commands in a text."""
    return set(
        re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(re.findall(r"hostdev (?:train|preprocess)[^&]*", text)))
    )


@pytest.mark.parametrize("path", [*MANIFESTS, *SCRIPTS], ids=lambda path: path.name)
def test_their_flags_are_hostdevs(path):
    text = path.read_text().replace("\\\n", " ")
    if path.suffix == ".yaml":
        text = " ".join(
            " ".join(container["command"])
            for document in yaml.safe_load_all(path.read_text())
            if document["kind"] == "Job"
            for container in document["spec"]["template"]["spec"]["containers"]
        ).replace("\\\n", " ")
    else:
        subprocess.run(["bash", "-n", path], check=True)
    found = flags_of(text)
    assert found
    command = "train" if "hostdev train" in text else "preprocess criteo"
    known = subprocess.run(
        [sys.executable, "-m", "hostdev", *command.split(), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert found <= set(re.findall(r"--[a-z][a-z-]+", known))


@pytest.mark.slow
def test_two_hosts(tmp_path):
    text = (GUIDES / "beyond.md").read_text()
    commands = re.findall(r"^host([01])\$ (.+)$", text, re.M)
    assert len(commands) == 6
    env = environment(tmp_path)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.environ['PATH'])}"
    make = [sys.executable, "-m", "hostdev", "preprocess", "synthetic", "--rows", "20000", "--tsv", "train.txt"]
    subprocess.run(make, cwd=tmp_path, env=env, check=True)
    begun = []
    with Hosts(tmp_path) as hosts:
        try:
            for host, command in commands:
                call = [*hosts.on(int(host)), "bash", "-c", command.removesuffix("&").strip()]
                process = subprocess.Popen(call, cwd=tmp_path, env=env)
                begun.append(process)
                if not command.endswith("&"):
                    assert process.wait(280) == 0, command
            assert begun[4].wait(60) == 0
        finally:
            for process in begun:
                process.kill()
                process.wait()
    alone = [sys.executable, "-m", "hostdev"]
    subprocess.run([*alone, "preprocess", "criteo", "train.txt", "--out", "one"], cwd=tmp_path, env=env, check=True)
    for path in (tmp_path / "one").rglob("*.arrow"):
        assert path.read_bytes() == (tmp_path / "criteo" / path.relative_to(tmp_path / "one")).read_bytes()
    how = ["--host-device-mix", "--data", "one", "--micro-batches", "2", "--epochs", "1", "--run-dir", "alone"]
    subprocess.run([*alone, "train", *how], cwd=tmp_path, env=env, check=True)
    assert digest_of(tmp_path / "run") == digest_of(tmp_path / "alone")
