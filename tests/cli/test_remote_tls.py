"""Clients of `serve grpc` that see a certificate, and show none."""

from pathlib import Path

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
    with front("grpc", pair, "--server-cert", ours / "127.0.0.1.pem", "--server-key", ours / "127.0.0.1.key") as ready:
        ask = ("generate", "--server", ready["address"], "--json", *SHORT)
        trusted = cli(*ask, "--tls-ca", ours / "ca.pem")
        assert (trusted.code, trusted.err) == (0, "")
        assert len(trusted.records) == 13
        for options in ((), ("--tls-ca", folder / "theirs" / "ca.pem")):
            refused = cli(*ask, *options)
            assert (refused.code, refused.out) == (1, "")
            assert f"server at {ready['address']}" in refused.err


def test_options_that_do_not_go_together(cli: Cli, folder: Path) -> None:
    serve = ("serve", "grpc", "--target", "127.0.0.1:1", "--model", "toy")
    ours = folder / "ours"
    certificate, key = ours / "127.0.0.1.pem", ours / "127.0.0.1.key"
    other = folder / "theirs" / "127.0.0.1.key"
    for command, complaint in (
        ((*serve, "--server-cert", certificate), "--server-cert and --server-key are given together"),
        (
            (*serve, "--server-cert", certificate, "--server-key", other),
            "does not belong",
        ),
        ((*serve, "--server-cert", folder, "--server-key", key), "cannot be read"),
        (("generate", "--server", "127.0.0.1:1", "--tls-ca", key, *SHORT), "is no certificate in PEM"),
        (("generate", "--server", "127.0.0.1:1", "--tls-key", key, *SHORT), "a server wants no certificate"),
    ):
        ended = cli(*command)
        assert (ended.code, ended.out) == (2, "")
        assert complaint in ended.err
