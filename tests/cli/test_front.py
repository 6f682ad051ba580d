"""`crossdraft serve http` as a process, and what it refuses."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.cli.conftest import COMMAND, Cli

KEY = "a-key-that-nobody-guesses"


@contextmanager
def ended(process: "subprocess.Popen[str]") -> Iterator[None]:
    """The process is ended with the block, also if an assertion fails in it: else the test would wait for ever."""
    try:
        yield
    finally:
        process.kill()


def test_it_serves_and_ends_quietly_on_sigterm(pair: tuple[str, ...], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"me {KEY}\n")
    (_, target, _, drafter) = pair
    command = [*COMMAND, "serve", "http", "--target", target, "--drafter", f"small={drafter}", "--model", "tiny"]
    command += ["--port", "0", "--api-keys", str(keys)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process, ended(process):
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert (ready["ready"], ready["role"], ready["model"]) == (True, "http", "tiny")
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=f"http://{ready['address']}", headers=headers, timeout=60) as client:
            assert client.get("/ready").json() == {"status": "ready", "models": ["tiny"]}
            assert client.get("/v1/models", headers={"Authorization": ""}).status_code == 401
            done = client.post("/v1/completions", json={"prompt": "Say", "max_tokens": 3, "ignore_eos": True})
            assert done.json()["usage"]["completion_tokens"] == 3
            assert 'crossdraft_generation_tokens_total{drafter="small",model_name="tiny"} 3.0' in (
                client.get("/metrics").text
            )
            assert "<html" in client.get("/").text
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "")
        assert "output ended (length)" in log
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--target", "nowhere"], "--target must be HOST:PORT"),
        (["--drafter", "127.0.0.1:9"], "--drafter must be NAME=HOST:PORT"),
        (["--drafter", "a=127.0.0.1"], "--drafter must be HOST:PORT"),
        (["--drafter", "a=127.0.0.1:9", "--drafter", "a=127.0.0.1:8"], "have the same name"),
        (["--untrusted-drafter", "b"], "--untrusted-drafter names 'b', which no --drafter has"),
        (["--api-keys", "/nowhere/keys"], "cannot read the API keys"),
        (["--max-outputs", "0"], "most_outputs must be at least 1"),
        (["--max-body-mib", "0"], "most_bytes must be above 0"),
        (["--rate", "0"], "requests a minute above 0"),
        (["--port", "70000"], "port must be between 0"),
        (["--grace-seconds", "-1"], "grace_seconds must be 0 or more"),
    ],
)
def test_wrong_options(cli: Cli, options: list[str], complaint: str) -> None:
    done = cli("serve", "http", "--target", "127.0.0.1:9", "--model", "tiny", *options)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err
    assert done.err.count("\n") == 1


def test_help_needs_no_server() -> None:
    script = (
        "import sys; from crossdraft.cli import app; sys.exit(bool({'fastapi', 'grpc', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=300).returncode == 0


@pytest.mark.parametrize(
    ("front", "complaint"),
    [("http", "HTTP needs the extra `serve`: install crossdraft with it"), ("grpc", "--target must be HOST:PORT")],
)
def test_without_the_extra_only_http_cannot_be_served(front: str, complaint: str) -> None:
    words = ["crossdraft", "serve", front, "--target", "nowhere", "--model", "tiny"]
    script = (
        f"import runpy, sys; sys.modules.update(fastapi=None, uvicorn=None, starlette=None); sys.argv = {words}\n"
        "runpy.run_module('crossdraft.cli', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode in (1, 2)
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
