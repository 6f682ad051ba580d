"""Mutual TLS: files that are checked, who is spoken to, and certificates renewed while serving."""

import asyncio
import gc
import logging
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, KeySerializationEncryption
from prometheus_client import CollectorRegistry

from crossdraft.rpc.errors import NotAllowed, ServiceError, Unreachable
from crossdraft.rpc.frames import TARGET
from crossdraft.rpc.metrics import Exporter
from crossdraft.rpc.security import RenewedCredentials, TlsError, TlsFiles
from crossdraft.rpc.server import Listening, Server
from tests.rpc.certificates import FUTURE, PAST, Cluster
from tests.rpc.linked import OPEN, PuppetService, one_pass
from tests.rpc.sessions import TargetClient


def serving(tls: TlsFiles | None) -> Server:
    return Server(TARGET, PuppetService(), Listening(grace_seconds=0, tls=tls))


async def describe(address: str, tls: TlsFiles | None) -> str:
    """The fingerprint of what is served there."""
    async with TargetClient(address, tls=None if tls is None else RenewedCredentials(tls)) as client:
        return (await client.describe()).fingerprint


async def refused(address: str, credentials: Any, error: type[ServiceError], complaint: str) -> None:
    with pytest.raises(error) as raised:
        async with TargetClient(address, tls=credentials) as client:
            await client.describe()
    assert [text for text in (address, complaint) if text not in str(raised.value)] == []


def showing(credentials: grpc.ChannelCredentials) -> Any:
    """Always these."""
    return SimpleNamespace(now=lambda: credentials)


def unchecked(files: TlsFiles) -> Any:
    """Of a client that does not look at its own files."""
    raw = (path.read_bytes() for path in (files.ca, files.key, files.certificate))
    return showing(grpc.ssl_channel_credentials(*raw))


async def test_clients_without_a_valid_certificate_of_the_ca_are_closed_on_and_told_what_it_may_be(cluster, tmp_path):
    own, other = cluster.files("orchestrator"), Cluster(tmp_path / "theirs").files("orchestrator")
    clients = {
        "none": showing(grpc.ssl_channel_credentials(own.ca.read_bytes())),
        "of another CA": unchecked(replace(other, ca=own.ca)),
        "expired": unchecked(cluster.files("old", begins=PAST)),
        "not one of a client": RenewedCredentials(cluster.files("service", use="service")),
        "no TLS": None,
    }
    async with serving(cluster.files("target")) as server:
        complaint = "takes only clients with a valid certificate of its CA; check --tls-ca"
        for credentials in clients.values():
            await refused(server.address, credentials, Unreachable, complaint)
        assert await describe(server.address, own) == "f1"


async def test_servers_that_cannot_be_trusted_are_not_and_it_is_said_why(cluster, tmp_path, monkeypatch):
    files, client = cluster.files("target"), RenewedCredentials(cluster.files("orchestrator"))
    other = RenewedCredentials(Cluster(tmp_path / "theirs").files("orchestrator"))
    monkeypatch.setattr("crossdraft.rpc.security._check_dates", lambda *_: None)  # it ran when it expired
    servers = (
        (cluster.files("elsewhere", hosts=("10.1.2.3", "node3")), client, "its certificate is not for this address"),
        (cluster.files("client", use="orchestrator"), client, "its certificate is not that of a service"),
        (cluster.files("old", begins=PAST), client, "has expired: renew it there (crossdraft certs DIR --renew)"),
        (cluster.files("again"), other, "give both sides certificates of one CA"),
    )
    async with serving(files) as server:
        for shown, credentials, complaint in servers:
            shutil.copy(shown.key, files.key)
            shutil.copy(shown.certificate, files.certificate)
            await refused(server.address, credentials, NotAllowed, complaint)
        for host in ("127.0.0.1", "localhost"):
            address = f"{host}:{server.address.rpartition(':')[2]}"
            assert await describe(address, cluster.files("orchestrator")) == "f1"
    async with serving(None) as server:
        await refused(server.address, client, NotAllowed, "it does not speak TLS: start it with --tls-ca")


async def test_a_renewed_certificate_is_served_to_new_connections_without_a_restart(cluster, caplog):
    files, client = cluster.files("target", days=1), cluster.files("orchestrator")
    async with serving(files) as server:
        credentials = RenewedCredentials(client)
        async with TargetClient(server.address, tls=credentials) as early, early.session(OPEN) as session:
            cluster.files("target", hosts=("10.1.2.3",))
            await refused(server.address, credentials, NotAllowed, "not for this address")
            assert (await session.run(one_pass(1))).number == 1  # what is open goes on
        files.key.write_text("half written")
        await refused(server.address, credentials, NotAllowed, "not for this address")
        cluster.files("target")
        assert await describe(server.address, client) == "f1"
    assert "the certificate was not renewed, the one before is used on: " in caplog.text


async def test_a_clients_renewed_certificate_is_shown_to_new_sessions_without_a_restart(cluster, caplog):
    files = cluster.files("orchestrator", days=1)
    renewed = RenewedCredentials(files)
    async with serving(cluster.files("target")) as server, TargetClient(server.address, tls=renewed) as client:
        before = client.channel
        async with client.session(OPEN) as session:
            assert client.channel is before
            cluster.files("orchestrator", use="service")  # one that cannot connect
            with pytest.raises(Unreachable):
                await client.describe()
            assert client.channel is not before
            assert (await session.run(one_pass(1))).number == 1  # what is open goes on
            files.key.write_text("half written")
            with pytest.raises(Unreachable):
                await client.describe()
            assert "the certificate was not renewed, the one before is used on: " in caplog.text
            cluster.files("orchestrator")
            assert (await client.describe()).fingerprint == "f1"
            assert (await session.run(one_pass(2))).number == 2


async def test_a_connection_that_is_not_used_any_more_ends(cluster):
    files = cluster.files("orchestrator")
    renewed = RenewedCredentials(files)
    async with serving(cluster.files("target")) as server, TargetClient(server.address, tls=renewed) as client:
        async with client.session(OPEN) as session:
            before, link = ref(client.channel), client._link
            cluster.files("orchestrator")
            await client.describe()
            assert (await session.run(one_pass(1))).number == 1
        await asyncio.wait([link._task])
        del session, link
        gc.collect()
        assert before() is None


@pytest.mark.parametrize(
    ("host", "secured", "said"), [("127.0.0.1", False, False), ("0.0.0.0", False, True), ("0.0.0.0", True, False)]
)
async def test_a_port_that_is_open_to_others_in_plaintext_is_said(cluster, caplog, host, secured, said):
    tls = cluster.files("target") if secured else None
    with caplog.at_level(logging.WARNING):
        async with Server(TARGET, PuppetService(), Listening(host, grace_seconds=0, tls=tls)):
            pass
    ours = [record.message for record in caplog.records if record.name.startswith("crossdraft.")]  # asyncio's come late
    assert ["is open to whoever can reach it" in line for line in ours] == [True] * said


def test_which_hosts_are_of_this_machine_only():
    assert all(Listening(host).local for host in ("127.0.0.1", "127.9.9.9", "localhost", "[::1]"))
    assert not any(Listening(host).local for host in ("10.0.0.1", "node1"))


async def test_an_ipv6_host_is_with_brackets_in_addresses_and_without_where_it_is_bound():
    assert [Listening(host).host for host in ("::1", "[::1]", "node1")] == ["[::1]", "[::1]", "node1"]
    exporter = Exporter(CollectorRegistry())
    assert exporter.start("[127.0.0.1]", 0).startswith("[127.0.0.1]:")
    await exporter.stop()


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_each_file_must_be_there_and_be_what_it_is_for(cluster, name):
    files = cluster.files("target")
    path = getattr(files, name)
    path.write_text("nothing")
    with pytest.raises(TlsError, match=f"{path} is no .* in PEM: make one with `crossdraft certs"):
        files.load()
    path.unlink()
    with pytest.raises(TlsError, match=f"there is no file {path}: make it with `crossdraft certs"):
        files.load()
    path.mkdir()
    with pytest.raises(TlsError, match=f"{path} cannot be read: Is a directory"):
        files.load()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_key_of_another_user(cluster):
    files = cluster.files("target")
    files.key.chmod(0)
    with pytest.raises(TlsError, match="cannot be read: Permission denied; let the user"):
        files.load()


def with_key(files: TlsFiles, encryption: KeySerializationEncryption, key: PrivateKeyTypes | None = None) -> TlsFiles:
    key = key or serialization.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return files


FOREIGN = Ed25519PrivateKey.generate()  # of a kind that gRPC could not use
ENCRYPTED = BestAvailableEncryption(b"x")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda ca: replace(ca.files("target"), key=ca.files("drafter").key),
            r"the key .*drafter.key does not belong to the certificate .*target.pem",
        ),
        (lambda ca: ca.files("own", begins=PAST), r"own.pem has expired on .* UTC: renew it with `crossdraft certs"),
        (lambda ca: ca.files("own", begins=FUTURE), r"own.pem is not valid before .* UTC: check this machine's clock"),
        (lambda ca: Cluster(ca.folder / "ended", PAST, 15).files("target", begins=PAST), "ca.pem has expired"),
        (lambda ca: replace(ca.files("a"), ca=ca.files("b").certificate), "is not the certificate of a CA"),
        (lambda ca: with_key(ca.files("a"), ENCRYPTED), "is encrypted: write it without a passphrase"),
        (lambda ca: with_key(ca.files("a"), serialization.NoEncryption(), FOREIGN), "use one of P-256 or RSA"),
    ],
    ids=["another key", "expired", "not yet valid", "of an expired CA", "of no CA", "encrypted", "not for gRPC"],
)
def test_files_that_cannot_be_used_are_refused_before_they_are(cluster, make, complaint):
    with pytest.raises(TlsError, match=complaint):
        make(cluster).load()
