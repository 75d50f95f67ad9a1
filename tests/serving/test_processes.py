"""The command: its lines, exit codes and signals, and several worker processes behind one port."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import hostdev
from hostdev.checkpoint import folder
from hostdev.ext.checkpoints.deliver import deliver
from hostdev.ext.serving import cli as serve
from tests import forks
from tests.conftest import environment
from tests.distributed.processes import wait_until
from tests.serving.helpers import FILMS, bits


@contextmanager
def started(checkpoint, folder, *options):
    """Start the command; yield the process and the address in its line. It must be ended in the block."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "hostdev.serving", "--checkpoint", checkpoint, "--port", 0, *options]
    with (folder / "err.txt").open("wb") as err:
        process = forks.Popen(
            list(map(str, command)), cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=err, text=True
        )
    try:
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert lines[1], (folder / "err.txt").read_text()
        yield process, lines[1].split(" at ")[1].split(";")[0].split(",")[0]
        assert process.wait(60) is not None
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
        process.wait()
        process.stdout.close()


def ask(address, path, content=None, headers=()):
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(address + path, body, {"Content-Type": "application/json", **dict(headers)})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read()) if path != "/metrics" else answer.read().decode()


def errors(folder):
    return (folder / "err.txt").read_text()


def test_ctrl_c(film_run, tmp_path):
    with started(film_run, tmp_path / "work") as (process, address):
        found = ask(address, "/v1/predict", {"columns": FILMS})["predictions"]
        assert bits(found) == bits(hostdev.Predictor(film_run)(FILMS))
        with pytest.raises(urllib.error.HTTPError) as refused:  # by a name that a web page points to this machine
            ask(address, "/v2", headers={"Host": "evil.example"})
        assert refused.value.code == 403
        refused.value.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert errors(tmp_path / "work") == "hostdev.serving: interrupted\n"


def test_workers(film_run, tmp_path):
    """One is killed and replaced; all take a newer checkpoint; metrics cover all; the end leaves nothing behind."""
    work, place = tmp_path / "work", tmp_path / "served"
    first, second, *_ = folder.names_in(film_run)
    deliver(folder.read_chain(film_run / first), place, 2)
    with started(place, work, "--workers", 2, "--follow") as (process, address):
        children = {child.pid for child in psutil.Process(process.pid).children()}
        assert len(children) == 2
        for _ in range(6):
            assert ask(address, "/v2/health/live") == {"live": True}
        counted = 'hostdev_requests_total{end="live",status="200"} 6.0'
        wait_until(lambda: counted in ask(address, "/metrics"), 60)  # an answer is counted after it was sent
        os.kill(min(children), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert ask(address, "/v1/predict", {"columns": FILMS})["model"] == "deepfm"
            now = {child.pid for child in psutil.Process(process.pid).children()}
            if len(now) == 2 and now != children:
                break
            time.sleep(0.2)
        else:
            pytest.fail("it is not replaced")
        text = ask(address, "/metrics")
        assert counted in text
        assert "hostdev_model_age_seconds" in text and "hostdev_queue_rows 0.0" in text
        deliver(folder.read_chain(film_run / second), place, 2)
        newer = hostdev.Predictor(film_run / second)
        assert process.stdout.readline().startswith(f"serving  version {newer.step}, written ")
        for _ in range(6):
            assert ask(address, "/v1/predict", {"columns": FILMS})["step"] == newer.step
        assert f"hostdev_model_step {newer.step:.1f}\n" in ask(address, "/metrics")
        [metrics] = {
            variable.partition("=")[2]
            for pid in now
            for variable in (f"{k}={v}" for k, v in psutil.Process(pid).environ().items())
            if variable.startswith("PROMETHEUS_MULTIPROC_DIR")
        }
        for _ in range(6):
            ask(address, "/v2/health/ready")
        counted = 'hostdev_requests_total{end="ready",status="200"} 6.0'
        wait_until(lambda: counted in ask(address, "/metrics"), 60)
        shutil.rmtree(metrics)  # as a cleaner of temporary files does
        assert "hostdev_queue_rows" in ask(address, "/metrics")
        wait_until(lambda: counted in ask(address, "/metrics"), 60)  # what both processes have counted is there again
        wait_until(lambda: len(list(Path(metrics).glob("counter_*.db"))) == 2, 60)
        assert f"hostdev_model_step {newer.step:.1f}\n" in ask(address, "/metrics")
        process.terminate()
        assert process.wait(90) == 0
    assert not any(map(psutil.pid_exists, now)) and not os.path.exists(metrics)  # noqa: PTH110
    [line] = errors(work).splitlines()
    assert line == f"hostdev.serving: warning: worker {min(children)} ended (signal SIGKILL); another one starts"


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(film_run, tmp_path):
    with started(film_run, tmp_path / "work", "--workers", 2) as (process, _):
        children = psutil.Process(process.pid).children()
        process.kill()
        _, left = psutil.wait_procs(children, timeout=60)
        assert not left


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_is_cut(film_run, tmp_path, workers):
    """The process that looks at it ends by SIGBUS, as no program can go on; a line says why."""
    shutil.copytree(film_run, tmp_path / "run")
    with started(tmp_path / "run", tmp_path / "work", "--workers", workers) as (process, address):
        ask(address, "/v1/predict", {"columns": FILMS})
        contents = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*") if path.suffix != ".json"}
        for path in contents:
            os.truncate(path, 0)
        with pytest.raises(OSError):
            ask(address, "/v1/predict", {"columns": FILMS})
        for path, content in contents.items():
            path.write_bytes(content)
        wait_until(lambda: "SIGBUS" in errors(tmp_path / "work"), 60)
        [line] = errors(tmp_path / "work").splitlines()
        assert "a file that" in line and "was cut" in line
        process.terminate()
        assert process.wait(60) in (0, -signal.SIGBUS)


def test_a_wrong_command(film_run, tmp_path, in_process):
    def line(*options, checkpoint=film_run):
        code, out, error = in_process(serve, "--checkpoint", checkpoint, *options)
        assert (code, out, error.count("\n")) == (2, "", 1), (out, error)
        return error

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port} of 127.0.0.1 cannot be used: Address already in use" in line("--port", port)
    assert "there is no such checkpoint" in line(checkpoint="nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty" in line("--port", 0, checkpoint="empty")
    shutil.copytree(film_run, tmp_path / "damaged")
    for file in (tmp_path / "damaged").rglob("dense*"):
        file.write_bytes(b"x")
    assert "damaged" in line("--port", 0, checkpoint="damaged")
    hostdev.Runtime({"x": hostdev.HostTable(9, 2, hostdev.SGD(lr=1), name="x")}).save(tmp_path / "own")
    assert "was written by Runtime.save" in line("--port", 0, checkpoint="own")
    assert "--host nowhere.invalid" in line("--host", "nowhere.invalid")
    for option, value, message in (
        ("--port", 70_000, "must be in 0..65535"),
        ("--max-batch", 0, "must be in 1.."),
        ("--max-wait-ms", "nan", "must be in 0..10000"),
        ("--max-queue", 0, "must be in"),
        ("--max-request-bytes", "10", "must be in 1024.."),
        ("--workers", 0, "must be in 1..256"),
        ("--model-name", "a/b", "use letters, digits"),
        ("--token-file", "nowhere", "there is no such file"),
        ("--tls-cert", "nowhere", "belong together"),
        ("--which", "last", "invalid choice"),
        ("--device", "nothing", "nothing"),
    ):
        assert message in line("--port", 0, option, value) if option != "--port" else message in line(option, value)
    (tmp_path / "x.pem").write_text("nothing")
    assert "not a certificate" in line("--port", 0, "--tls-cert", "x.pem", "--tls-key", "x.pem")


def test_a_missing_package(film_run, in_process, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [name for name in sys.modules if name.startswith("hostdev.ext.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    code, _, error = in_process(serve, "--checkpoint", film_run, "--port", 0)
    assert (code, error) == (
        2,
        "hostdev.serving: error: serving needs uvicorn, which is not installed; pip install 'hostdev[serve]'\n",
    )


def test_tls_and_a_token_on_another_address(film_run, tmp_path):
    """The token is in no output; without encryption or a token there is a warning."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make_certificate(key, cert)
    (tmp_path / "token").write_text("s3cret")
    options = ["--host", "0.0.0.0", "--token-file", tmp_path / "token"]
    with started(film_run, tmp_path / "a", *options, "--tls-cert", cert, "--tls-key", key) as (process, address):
        assert address.startswith("https://0.0.0.0:")
        context = ssl.create_default_context(cafile=str(cert))
        request = urllib.request.Request(address.replace("0.0.0.0", "localhost") + "/v2")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, context=context, timeout=60)
        assert refused.value.code == 401
        refused.value.close()
        request.add_header("Authorization", "Bearer s3cret")
        request.add_header("Host", "a.name.of.a.proxy")  # with a token, any name is accepted
        with urllib.request.urlopen(request, context=context, timeout=60) as answer:
            assert json.loads(answer.read())["name"] == "hostdev"
        process.terminate()
        assert process.wait(60) == 0
    assert errors(tmp_path / "a") == ""


def make_certificate(key, cert):
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(secret, hashes.SHA256())
    )
    forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key.write_bytes(secret.private_bytes(*forms))
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
