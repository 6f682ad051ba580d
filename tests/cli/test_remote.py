"""`crossdraft serve grpc` and `crossdraft generate --server`, with services that run."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import COMMAND, Cli

KEY = "alice-0123456789abcdef"
PROMPT = "The quick brown"
SHORT = ("--max-tokens", "12", "--ignore-eos", "--temperature", "0", "--overlap", "off", PROMPT)
Pair = tuple[str, ...]


@contextmanager
def front(kind: str, pair: Pair, *options: object) -> Iterator[dict[str, Any]]:
    """The ready line of a server before the pair; it is ended with the block, and must end well."""
    _, target, _, drafter = pair
    where = ("--target", target, "--drafter", f"small={drafter}", "--model", "toy", "--port", "0")
    command = [*COMMAND, "serve", kind, *where, "--grace-seconds", "0", *map(str, options)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline() or json.dumps({"error": process.communicate()[1]}))
        finally:
            process.terminate()
            process.communicate()  # its last words are read: a pipe that is closed before would be an error of its own
    assert process.returncode == 0


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[str]:
    with front("grpc", pair) as ready:
        assert ready["role"] == "generation"
        assert ready["models"] == ["toy"]
        yield ready["address"]


@pytest.mark.parametrize("options", [(), ("--drafter", "small", "--model", "toy"), ("--seed", "3")])
def test_the_same_as_without_a_server(cli: Cli, pair: Pair, server: str, options: tuple[str, ...]) -> None:
    local = cli("generate", *pair, "--json", *(options if "--seed" in options else ()), *SHORT)
    remote = cli("generate", "--server", server, "--json", *options, *SHORT)
    assert (remote.code, remote.err) == (0, "")
    assert remote.records[:-1] == local.records[:-1]
    ours, theirs = remote.records[-1], local.records[-1]
    assert {name: ours[name] for name in ("text", "ids", "reason")} == {
        name: theirs[name] for name in ("text", "ids", "reason")
    }
    assert set(ours["statistics"]) == set(theirs["statistics"])
    for figure in ("method", "k", "tokens", "accepted", "passes", "draft_tokens", "acceptance", "tokens_per_pass"):
        assert ours["statistics"][figure] == theirs["statistics"][figure]


def test_text_and_figures(cli: Cli, server: str) -> None:
    shown = cli("generate", "--server", server, *SHORT)
    assert shown.out == cli("generate", "--server", server, "--json", *SHORT).records[-1]["text"] + "\n"
    assert shown.err.startswith("slem, k = 5")
    alone = cli("generate", "--server", server, "--drafter", "none", "--json", *SHORT).records[-1]
    assert alone["statistics"]["draft_tokens"] == 0


@pytest.mark.parametrize(
    ("options", "complaint", "code"),
    [
        (("--model", "other"), "there is no model 'other'; there is toy", 2),
        (("--drafter", "other"), "'toy' has no drafter 'other'; there is small", 2),
        (("--method", "standard"), "method 'standard' needs a drafter with the target's vocabulary", 2),
        (("--logit-bias", "9999:1"), "logit_bias names id 9999", 2),
        (("--explain",), "explain is not for a server: leave it out (--explain)", 2),
        (("--record", "file"), "record is not for a server: leave it out (--record)", 2),
        (("--target", "127.0.0.1:1"), "--target and --untrusted-drafter are the server's own", 2),
    ],
)
def test_what_cannot_be_asked_for(cli: Cli, server: str, options: tuple[str, ...], complaint: str, code: int) -> None:
    ended = cli("generate", "--server", server, *options, *SHORT)
    assert (ended.code, ended.out) == (code, "")
    assert complaint in ended.err
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


def test_keys_and_metrics(cli: Cli, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY}\n")
    with front("grpc", pair, "--api-keys", keys, "--metrics-port", 0) as ready:
        ask = ("generate", "--server", ready["address"], "--json", *SHORT)
        refused = cli(*ask)
        assert (refused.code, refused.out) == (1, "")
        assert "an API key is needed" in refused.err
        assert cli(*ask, "--api-key", KEY).code == 0
        monkeypatch.setenv("CROSSDRAFT_API_KEY", KEY)
        assert cli(*ask).code == 0
        with urllib.request.urlopen(f"http://{ready['metrics']}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        assert 'crossdraft_generation_tokens_total{drafter="small",model_name="toy"} 24.0' in text.replace("'", '"')


def test_keys_that_cannot_be_used(cli: Cli, tmp_path: Path) -> None:
    options = ("--target", "127.0.0.1:1", "--model", "toy", "--api-keys", tmp_path / "nowhere")
    ended = cli("serve", "grpc", *options)
    assert ended.code == 2
    assert "cannot read the API keys" in ended.err


def test_beside_http(cli: Cli, pair: Pair) -> None:
    with front("http", pair, "--grpc-port", 0) as ready:
        assert ready["role"] == "http"
        asked = cli("generate", "--server", ready["grpc"], "--json", *SHORT).records[-1]
        body = json.dumps({"model": "toy", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True})
        headers = {"Content-Type": "application/json"}
        post = urllib.request.Request(f"http://{ready['address']}/v1/completions", body.encode(), headers)
        with urllib.request.urlopen(post, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"] == asked["text"]
