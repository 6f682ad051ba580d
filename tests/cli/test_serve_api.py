"""`crossdraft serve http` and `serve grpc` as processes, `crossdraft generate --server`, and what they refuse."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from transformers import AutoTokenizer

from crossdraft.cli import serve
from crossdraft.config.engine import OwnModels
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.serving.backend import LocalModel, LocalOptions
from tests.cli.conftest import COMMAND, Cli

KEY = "alice-0123456789abcdef"
PROMPT = "The quick brown"
SHORT = ("--max-tokens", "12", "--ignore-eos", "--temperature", "0", "--overlap", "off", PROMPT)
BODY = {"model": "toy", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
Pair = tuple[str, ...]


@contextmanager
def api(kind: str, pair: Pair, *options: object) -> Iterator[dict[str, Any]]:
    """The ready line of a server that uses the pair; it is ended with the block, and must end well and quietly."""
    _, target, _, drafter = pair
    where = ("--target", target, "--drafter", f"small={drafter}", "--model", "toy")
    with process(kind, *where, "--grace-seconds", "0", *options) as (_, ready):
        yield ready


@contextmanager
def process(kind: str, *options: object) -> "Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]":
    """A server and its ready line."""
    command = [*COMMAND, "serve", kind, "--port", "0", *map(str, options)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process, json.loads(process.stdout.readline() or json.dumps({"error": process.communicate()[1]}))
        finally:
            process.send_signal(signal.SIGTERM)
            out, log = process.communicate()  # a pipe that is closed before would be an error of its own
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in log


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"alice {KEY}\n")
    return path


@pytest.fixture(scope="module")
def ready(pair: Pair, keys: Path) -> Iterator[dict[str, Any]]:
    """Of a gRPC server with a key and metrics."""
    with api("grpc", pair, "--api-keys", keys, "--metrics-port", 0) as ready:
        assert (ready["role"], ready["models"]) == ("generation", ["toy"])
        yield ready


@pytest.fixture
def server(ready: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """Its address, for those who have the key."""
    monkeypatch.setenv("CROSSDRAFT_API_KEY", KEY)
    return str(ready["address"])


@pytest.mark.parametrize("options", [("--drafter", "small", "--model", "toy"), ("--seed", "3")])
def test_the_same_as_without_a_server(cli: Cli, pair: Pair, server: str, options: tuple[str, ...]) -> None:
    local = cli("generate", *pair, "--json", *(options if "--seed" in options else ()), *SHORT)
    remote = cli("generate", "--server", server, "--json", *options, *SHORT)
    assert (remote.code, remote.err) == (0, "")
    assert remote.records[:-1] == local.records[:-1]
    ours, theirs = remote.records[-1], local.records[-1]
    assert all(ours[name] == theirs[name] for name in ("text", "ids", "reason"))
    ours, theirs = ours["statistics"], theirs["statistics"]
    assert set(ours) == set(theirs)
    assert all(ours[name] == theirs[name] for name in ("method", "num_speculative_tokens", "accepted", "passes"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--model", "other"), "there is no model 'other'; there is toy"),
        (("--drafter", "other"), "'toy' has no drafter 'other'; there is small"),
        (("--method", "standard"), "method 'standard' needs a drafter with the target's vocabulary"),
        (("--record", "file"), "record is not for a server: leave it out (--record)"),
        (("--target", "127.0.0.1:1"), "a server has its own targets"),
    ],
)
def test_what_cannot_be_asked_for(cli: Cli, server: str, options: tuple[str, ...], complaint: str) -> None:
    ended = cli("generate", "--server", server, *options, *SHORT)
    ended.failed(complaint)
    assert ended.err.count("\n") == 1


def test_where_there_is_no_server(cli: Cli, target: str) -> None:
    nobody = cli("generate", "--server", "127.0.0.1:1", *SHORT)
    assert nobody.code == 1
    assert "server at 127.0.0.1:1" in nobody.err
    assert "check that the service runs there" in nobody.err
    other = cli("generate", "--server", target, *SHORT)
    assert other.code == 1
    assert f"what listens at {target} does not serve crossdraft.v1.Generation; check the address" in other.err
    assert cli("generate", "--server", "nowhere", *SHORT).code == 2
    assert cli("generate", "--model", "toy", *SHORT).code == 2


def test_keys_and_metrics_over_grpc(cli: Cli, ready: dict[str, Any]) -> None:
    def tokens() -> float:
        with urllib.request.urlopen(f"http://{ready['metrics']}/metrics", timeout=60) as answer:
            lines = answer.read().decode().replace("'", '"').splitlines()
        name = 'crossdraft_generation_tokens_total{drafter="small",model_name="toy"} '
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    ask, before = ("generate", "--server", ready["address"], "--json", *SHORT), tokens()
    cli(*ask).failed("an API key is needed", 1)
    assert cli(*ask, "--api-key", KEY).code == 0
    assert tokens() == before + 12


@pytest.fixture
def folder(cli: Cli, tmp_path: Path) -> Path:
    """Certificates of 127.0.0.1, and another CA."""
    for name in ("ours", "theirs"):
        assert cli("certs", tmp_path / name, "--host", "127.0.0.1").code == 0
    return tmp_path


def test_http_and_grpc_beside_it_with_keys_metrics_and_a_certificate(cli: Cli, pair: Pair, keys: Path, folder: Path):
    ours, other_ca = folder / "ours", folder / "theirs" / "ca.pem"
    shown = ("--ssl-certfile", ours / "127.0.0.1.pem", "--ssl-keyfile", ours / "127.0.0.1.key", "--api-keys", keys)
    with api("http", pair, "--grpc-port", 0, *shown) as ready:
        assert (ready["ready"], ready["role"], ready["model"]) == (True, "http", "toy")
        url = f"https://{ready['address']}"
        trusting = ssl.create_default_context(cafile=ours / "ca.pem")
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, verify=trusting, headers=headers, timeout=60) as client:
            assert client.get("/ready").json() == {"status": "ready", "models": ["toy"]}
            assert client.get("/v1/models", headers={"Authorization": ""}).status_code == 401
            done = client.post("/v1/completions", json=BODY).json()
            assert done["usage"]["completion_tokens"] == 12
            tokens = 'crossdraft_generation_tokens_total{drafter="small",model_name="toy"} 12.0'
            assert tokens in client.get("/metrics").text
            assert "<html" in client.get("/").text
        for verify in (True, ssl.create_default_context(cafile=other_ca)):
            with (
                httpx.Client(base_url=url, verify=verify, timeout=60) as other,
                pytest.raises(httpx.ConnectError, match="verify"),
            ):
                other.get("/health")
        with httpx.Client(timeout=60) as plain, pytest.raises(httpx.TransportError):
            plain.get(f"http://{ready['address']}/health")
        ask = ("generate", "--server", ready["grpc"], "--api-key", KEY, "--json", *SHORT)
        assert cli(*ask, "--tls-ca", ours / "ca.pem").records[-1]["text"] == done["choices"][0]["text"]
        for options in ((), ("--tls-ca", other_ca)):
            cli(*ask, *options).failed(f"server at {ready['grpc']}", 1)


@pytest.fixture(scope="module")
def one(target_folder: Path, drafter_folder: Path) -> "Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]":
    """One command for a pair; others reach its services, too. The first of them that ends it ends it for all."""
    own = ("--target-model", target_folder, "--drafter-model", drafter_folder, "--cache-mib", 64, "--threads", 1)
    ports = ("--grpc-port", 0, "--target-port", 0, "--drafter-port", 0)
    with process("http", *own, *ports, "--grace-seconds", 300, "--log-level", "warning") as started:
        yield started


@pytest.fixture
def asked(one: "tuple[subprocess.Popen[str], dict[str, Any]]") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{one[1]['address']}/v1", api_key="none", timeout=300, max_retries=0) as client:
        yield client


def metric(ready: dict[str, Any], name: str, role: str) -> float:
    lines = httpx.get(f"http://{ready['address']}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and f'role="{role}"' in line)


def test_a_pair_by_one_command(cli, one, asked, target_folder):
    ready, name = one[1], str(target_folder)
    assert (ready["role"], ready["model"]) == ("http", name)
    assert httpx.get(f"http://{ready['address']}/ready").json() == {"status": "ready", "models": [name]}
    body = {"ignore_eos": True, "speculative": {"overlap": "off", "k": 3}}
    done = asked.completions.create(model=name, prompt=PROMPT, max_tokens=12, temperature=0, extra_body=body)
    loaded = load_model(LoadOptions(name))
    ids = loaded.model.generate(
        AutoTokenizer.from_pretrained(name)(PROMPT, return_tensors="pt").input_ids,
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
    )
    assert done.choices[0].text == AutoTokenizer.from_pretrained(name).decode(ids[0, -12:])
    assert metric(ready, "crossdraft_service_passes_total", "target") > 0
    assert metric(ready, "crossdraft_service_draft_tokens_total", "drafter") > 0
    assert metric(ready, "crossdraft_service_bytes_total", "target") == 0
    others = ("generate", "--target", ready["target"], "--drafter", ready["drafter"], "--json", *SHORT)
    assert cli(*others).records[-1]["text"] == done.choices[0].text
    assert cli("generate", "--server", ready["grpc"], "--json", *SHORT).records[-1]["text"] == done.choices[0].text
    assert metric(ready, "crossdraft_service_bytes_total", "target") > 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_signal_ends_what_the_first_one_lets_go_on(target_folder: Path, workers: int) -> None:
    own = ("--target-model", target_folder, "--cache-mib", 64, "--threads", 1, "--workers", workers)
    with process("http", *own, "--grace-seconds", 3000, "--log-level", "error") as (server, ready):
        url = f"http://{ready['address']}/v1"
        with openai.OpenAI(base_url=url, api_key="none", timeout=300, max_retries=0) as client:
            settings: Any = {"model": str(target_folder), "prompt": PROMPT, "max_tokens": 4000}
            stream = client.completions.create(**settings, extra_body={"ignore_eos": True}, stream=True)
            next(stream)
            for number in (signal.SIGINT, signal.SIGTERM):  # the second one comes where the test ends the server
                server.send_signal(number)
                with suppress(OSError):
                    while number == signal.SIGINT:  # until nobody listens: the signal has been taken
                        socket.create_connection(ready["address"].split(":")).close()
            with pytest.raises(openai.APIError, match="the server ends"):
                list(stream)


def test_the_models_are_beside_several_workers(one, asked, target_folder, drafter_folder):
    """One that is killed takes no model with it."""
    settings = {"model": str(target_folder), "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    body = {"ignore_eos": True, "speculative": {"overlap": "off", "k": 3}}
    expected = asked.completions.create(**settings, extra_body=body).choices[0].text
    own = ("--target-model", target_folder, "--drafter-model", drafter_folder, "--cache-mib", 64, "--threads", 1)
    with process("http", *own, "--grpc-port", 0, "--workers", 2, "--log-level", "error") as (_, ready):
        for pid in ready["workers"]:
            for _ in range(4):
                with openai.OpenAI(base_url=f"http://{ready['address']}/v1", api_key="none", timeout=300) as client:
                    done = client.completions.create(**settings, extra_body=body)
                assert done.choices[0].text == expected
            if pid == ready["workers"][0]:
                os.kill(pid, signal.SIGKILL)
        assert "crossdraft_service_draft_tokens_total" in httpx.get(f"http://{ready['drafter_metrics']}/metrics").text


def test_one_process_that_is_told_to_end_lets_its_outputs_end(one, asked):
    process, ready = one
    settings = {"model": ready["model"], "prompt": PROMPT, "max_tokens": 100, "seed": 3}
    whole = asked.completions.create(**settings, extra_body={"ignore_eos": True}).choices[0].text
    stream = asked.completions.create(**settings, stream=True, extra_body={"ignore_eos": True})
    pieces = [next(stream).choices[0].text]
    process.send_signal(signal.SIGTERM)
    assert "".join(pieces + [chunk.choices[0].text for chunk in stream]) == whole
    assert process.wait(300) == 0


def test_a_pair_that_cannot_be_served(cli: Cli, target_folder: Path, target: str) -> None:
    own = ("--target-model", target_folder)
    for options, complaint, code in (
        ((), "give --target-model, a model to run here, or --target, where one runs", 2),
        (("--target", target), "give --model, the name of the model in the API", 2),
        (("--target", target, "--model", "toy", "--dtype", "float32"), "--dtype is for --target-model and", 2),
        (("--target-model", "no-model", "--target-port", target.rpartition(":")[2]), f"cannot listen on {target}", 1),
        (("--target-model", "bundled:nothing"), "there is no bundled model 'bundled:nothing'", 1),
        ((*own, "--max-model-len", "100000"), "--max-model-len", 2),
    ):
        for front in ("http", "grpc"):
            cli("serve", front, "--port", "0", *options).failed(complaint, code)


def test_the_length_of_a_session_is_the_targets() -> None:
    """A drafter with a shorter context keeps the newest text."""
    engine = OwnModels(drafter_device="cuda:1", dtype="float32", max_model_len=1000).of_drafter
    assert (engine.device, engine.dtype, engine.max_model_len) == ("cuda:1", "float32", None)


def test_certificates_that_cannot_be_used(cli: Cli, folder: Path) -> None:
    serve = ("serve", "http", "--target", "127.0.0.1:1", "--model", "toy")
    ours = folder / "ours"
    certificate, key = ours / "127.0.0.1.pem", ours / "127.0.0.1.key"
    other = folder / "theirs" / "127.0.0.1.key"
    own = ("--target-model", "bundled:target", "--tls-ca", ours / "ca.pem", "--tls-cert", certificate, "--tls-key", key)
    for command, complaint in (
        ((*serve, "--ssl-certfile", certificate), "--ssl-certfile and --ssl-keyfile go together"),
        ((*serve, "--ssl-certfile", certificate, "--ssl-keyfile", other), "does not belong"),
        ((*serve, "--ssl-certfile", folder, "--ssl-keyfile", key), "cannot be read"),
        (("generate", "--server", "127.0.0.1:1", "--tls-ca", key, *SHORT), "is no certificate in PEM"),
        ((*serve[:2], "--workers", 2, *own), "--workers reach own models at 127.0.0.1"),
        (("generate", "--server", "127.0.0.1:1", "--tls-key", key, *SHORT), "a server takes no client certificates"),
    ):
        cli(*command).failed(complaint)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--target", "nowhere"], "--target must be HOST:PORT"),
        (["--drafter", "127.0.0.1:9"], "--drafter must be NAME=HOST:PORT"),
        (["--drafter", "a=127.0.0.1"], "--drafter must be HOST:PORT"),
        (["--drafter", "a=127.0.0.1:9", "--drafter", "a=127.0.0.1:8"], "have the same name"),
        (["--drafter", "none", "--drafter", "a=127.0.0.1:8"], "--drafter none is no drafter: leave out the others, or"),
        (["--model", "large"], "--model was given 2 times (tiny, large), and a server has one model"),
        (["--untrusted-drafter", "b"], "--untrusted-drafter names 'b', but no --drafter has that name"),
        (["--api-keys", "/nowhere/keys"], "cannot read the API keys"),
    ],
)
def test_options_out_of_range(cli: Cli, options: list[str], complaint: str) -> None:
    done = cli("serve", "http", "--target", "127.0.0.1:9", "--model", "tiny", *options)
    done.failed(complaint)
    assert done.err.count("\n") == 1


def test_none_is_no_drafter(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[LocalModel] = []
    monkeypatch.setattr(serve, "_serve_api", lambda api, *_: found.append(serve._local_model(api, {})))
    assert cli("serve", "http", "--target", "127.0.0.1:9", "--model", "tiny", "--drafter", "none").code == 0
    assert [model.drafters for model in found] == [()]
    here = ("--model", "tiny", "--target", "127.0.0.1:9", "--drafter-model", "bundled:drafter-b")
    assert "leave it out" in cli("serve", "http", *here, "--drafter", "none").err


@pytest.mark.parametrize("front", ["http", "grpc"])
def test_how_long_outputs_wait_for_a_target(cli: Cli, monkeypatch: pytest.MonkeyPatch, front: str) -> None:
    found: list[LocalOptions] = []
    monkeypatch.setattr(serve, "_serve_api", lambda _, local, *__: found.append(local))
    waits = ("--target-wait-seconds", "0.5", "--reply-wait-seconds", "90")
    assert cli("serve", front, "--target", "127.0.0.1:9", "--model", "tiny", *waits).code == 0
    assert [(local.patience.target_seconds, local.patience.reply_seconds) for local in found] == [(0.5, 90)]


def test_without_the_extra_only_http_cannot_be_served() -> None:
    script = """
import sys
sys.modules.update(fastapi=None, uvicorn=None, starlette=None)
from crossdraft.cli.app import main
for front in ("http", "grpc"):
    try:
        main(["serve", front, "--target", "nowhere", "--model", "tiny"])
    except SystemExit as ended:
        assert ended.code in (1, 2)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=300)
    http, grpc = done.stderr.splitlines()
    assert "HTTP needs the extra `http`: in the checkout, run pip install -c constraints.txt -e '.[http]'" in http
    assert "--target must be HOST:PORT" in grpc
