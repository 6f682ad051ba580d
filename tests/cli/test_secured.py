"""Services and `generate` as processes with mutual TLS: the same text as without, and nobody else is let in."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Cli, serving

GREEDY = ["once upon", "--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--json"]


@pytest.fixture
def tls(cli: Cli, tmp_path: Path) -> tuple[str, ...]:
    """The options of a side whose certificate is for this machine."""
    folder = tmp_path / "certs"
    assert cli("certs", folder, "--host", "local,127.0.0.1").code == 0
    names = {"--tls-ca": "ca.pem", "--tls-cert": "local.pem", "--tls-key": "local.key"}
    return tuple(text for option, name in names.items() for text in (option, str(folder / name)))


def test_a_generation_over_tls_is_the_same_and_others_are_refused(
    cli: Cli, tls: tuple[str, ...], target: str, target_folder: Path, drafter_folder: Path
) -> None:
    plain = cli("generate", *GREEDY, "--target", target)
    with (
        serving("target", target_folder, *tls) as (_, safe),
        serving("drafter", drafter_folder, *tls) as (_, helping),
    ):
        where = ["--target", safe["address"], "--drafter", helping["address"], "--untrusted-drafter"]
        secured = cli("generate", *GREEDY, *where, *tls)
        assert secured.err == ""
        assert secured.records[-1]["text"] == plain.records[-1]["text"] != ""
        assert secured.records[-1]["statistics"]["method"] == "slem"
        refused = cli("generate", *GREEDY, *where, *tls, "--method", "coupled")
        assert refused.code == 2
        assert "this drafter is not trusted; use 'slem' or 'seeded'" in refused.err
        outside = cli("generate", *GREEDY, "--target", safe["address"])
        assert (outside.code, outside.out) == (1, "")
        assert "if it speaks TLS, it takes only clients with a valid certificate of its CA" in outside.err
    mistaken = cli("generate", *GREEDY, "--target", target, *tls)
    assert mistaken.code == 1
    assert f"target at {target}: it does not speak TLS" in mistaken.err


def test_an_open_port_is_warned_of_once_beside_the_ready_line() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*COMMAND, "serve", "ngram", "--host", "0.0.0.0"], stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"crossdraft: {address} is open to whoever can reach it, unencrypted")
