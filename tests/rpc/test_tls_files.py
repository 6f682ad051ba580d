"""The files of TLS: what they must be, and what is said where they are not."""

import os
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from crossdraft.rpc.security import TlsError, TlsFiles
from tests.rpc.certificates import FUTURE, PAST, Cluster


def changed(files: TlsFiles, **contents: bytes) -> TlsFiles:
    for name, content in contents.items():
        getattr(files, name).write_bytes(content)
    return files


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


def test_a_key_of_another_certificate(cluster):
    files, other = cluster.files("target"), cluster.files("drafter")
    with pytest.raises(TlsError, match=r"the key .*drafter.key does not belong to the certificate .*target.pem"):
        replace(files, key=other.key).load()


def test_dates_are_checked(cluster, tmp_path):
    with pytest.raises(TlsError, match=r"target.pem has expired on .* UTC: renew it with `crossdraft certs"):
        cluster.files("target", begins=PAST).load()
    with pytest.raises(TlsError, match=r"target.pem is not valid before .* UTC: check this machine's clock"):
        cluster.files("target", begins=FUTURE).load()
    ended = Cluster(tmp_path / "ended", begins=PAST, days=15)
    with pytest.raises(TlsError, match=r"ca.pem has expired"):
        ended.files("target", begins=PAST).load()


def test_a_hosts_certificate_is_no_ca(cluster):
    files = cluster.files("target")
    with pytest.raises(TlsError, match="is not the certificate of a CA"):
        replace(files, ca=files.certificate).load()


def test_keys_that_grpc_could_not_use(cluster):
    files = cluster.files("target")
    key = load_pem_private_key(files.key.read_bytes(), None)
    form = PrivateFormat.PKCS8
    with pytest.raises(TlsError, match="is encrypted: write it without a passphrase"):
        changed(files, key=key.private_bytes(Encoding.PEM, form, BestAvailableEncryption(b"secret"))).load()
    foreign = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, form, NoEncryption())
    with pytest.raises(TlsError, match="use one of P-256 or RSA"):
        changed(files, key=foreign).load()
