"""Clients of the fronts that see a certificate, and show none."""

import ssl
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.cli.conftest import Cli
from tests.cli.test_remote import SHORT, Pair, front


@pytest.fixture
def folder(cli: Cli, tmp_path: Path) -> Path:
    """Certificates of 127.0.0.1, and another CA."""
    for name in ("ours", "theirs"):
        assert cli("certs", tmp_path / name, "--host", "127.0.0.1").code == 0
    return tmp_path


def test_a_server_with_a_certificate(cli: Cli, pair: Pair, folder: Path) -> None:
    ours = folder / "ours"
    with front(
        "grpc", pair, "--ssl-certfile", ours / "127.0.0.1.pem", "--ssl-keyfile", ours / "127.0.0.1.key"
    ) as ready:
        ask = ("generate", "--server", ready["address"], "--json", *SHORT)
        trusted = cli(*ask, "--tls-ca", ours / "ca.pem")
        assert (trusted.code, trusted.err) == (0, "")
        assert len(trusted.records) == 13
        for options in ((), ("--tls-ca", folder / "theirs" / "ca.pem")):
            refused = cli(*ask, *options)
            assert (refused.code, refused.out) == (1, "")
            assert f"server at {ready['address']}" in refused.err


def test_http_and_grpc_beside_it_with_a_certificate(cli: Cli, pair: Pair, folder: Path) -> None:
    ours = folder / "ours"
    shown = ("--ssl-certfile", ours / "127.0.0.1.pem", "--ssl-keyfile", ours / "127.0.0.1.key")
    with front("http", pair, "--grpc-port", 0, *shown) as ready:
        url = f"https://{ready['address']}"
        trusting = ssl.create_default_context(cafile=ours / "ca.pem")
        with httpx.Client(base_url=url, verify=trusting, timeout=60) as client:
            asked = {"prompt": "The quick brown", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            text = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            assert "<html" in client.get("/").text
        for verify in (True, ssl.create_default_context(cafile=folder / "theirs" / "ca.pem")):
            with (
                httpx.Client(base_url=url, verify=verify, timeout=60) as other,
                pytest.raises(httpx.ConnectError, match="verify"),
            ):
                other.get("/health")
        with httpx.Client(timeout=60) as plain, pytest.raises(httpx.TransportError):
            plain.get(f"http://{ready['address']}/health")
        remote = cli("generate", "--server", ready["grpc"], "--json", *SHORT, "--tls-ca", ours / "ca.pem")
        assert remote.records[-1]["text"] == text
        assert cli("generate", "--server", ready["grpc"], *SHORT).code == 1


@pytest.mark.parametrize("front", ["http", "grpc"])
def test_options_that_do_not_go_together(cli: Cli, folder: Path, front: str) -> None:
    serve = ("serve", front, "--target", "127.0.0.1:1", "--model", "toy")
    ours = folder / "ours"
    certificate, key = ours / "127.0.0.1.pem", ours / "127.0.0.1.key"
    other = folder / "theirs" / "127.0.0.1.key"
    for command, complaint in (
        ((*serve, "--ssl-certfile", certificate), "--ssl-certfile and --ssl-keyfile are given together"),
        (
            (*serve, "--ssl-certfile", certificate, "--ssl-keyfile", other),
            "does not belong",
        ),
        ((*serve, "--ssl-certfile", folder, "--ssl-keyfile", key), "cannot be read"),
        (("generate", "--server", "127.0.0.1:1", "--tls-ca", key, *SHORT), "is no certificate in PEM"),
        (("generate", "--server", "127.0.0.1:1", "--tls-key", key, *SHORT), "a server wants no certificate"),
    ):
        ended = cli(*command)
        assert (ended.code, ended.out) == (2, "")
        assert complaint in ended.err
