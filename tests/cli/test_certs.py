"""`crossdraft certs`: files that TLS can use, and what is refused."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from crossdraft.rpc.security import TlsFiles
from tests.cli.conftest import Cli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "certs"


def files(folder: Path, name: str) -> TlsFiles:
    return TlsFiles(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def made_for(folder: Path, name: str) -> tuple[list[str], int, timedelta]:
    """The names in a certificate that can be loaded, for how many uses, and for how long it is valid."""
    certificate = x509.load_pem_x509_certificate(files(folder, name).load()[2])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    left = certificate.not_valid_after_utc - datetime.now(UTC) + timedelta(minutes=5)
    return [str(one.value) for one in names], len([*uses]), left


def test_a_ca_and_certificates_that_can_be_loaded(cli: Cli, folder: Path) -> None:
    made = cli("certs", folder, "--host", "node1,10.0.0.1", "--host", "10.0.0.2", "--host", "::1", "--days", "30")
    assert (made.code, made.err) == (0, "")
    names = {"node1": ["node1", "10.0.0.1"], "10.0.0.2": ["10.0.0.2"], "__1": ["::1"]}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}  # only the owner reads them
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert set(contents(folder)) == {f"{name}{end}" for name in ("ca", *names) for end in (".pem", ".key")}
    for name, hosts in names.items():
        found, uses, left = made_for(folder, name)
        assert (found, uses, left.days) == (hosts, 2, 30)
        assert f"copy them to {name} only ({', '.join(hosts)}; to serve and to connect)" in made.out
    assert f"{folder}/ca.pem: copy it to every host" in made.out
    assert f"{folder}/ca.key: keep it here and secret" in made.out
    assert "--tls-ca ca.pem --tls-cert node1.pem --tls-key node1.key" in made.out


def test_hosts_are_added_to_the_same_ca_and_nothing_is_overwritten(cli: Cli, folder: Path) -> None:
    cli("certs", folder, "--host", "node1")
    before = contents(folder)
    added = cli("certs", folder, "--host", "drafter7", "--use", "service")
    added.says("the CA that exists", "drafter7; to serve)")
    assert made_for(folder, "drafter7")[1] == 1
    refused = cli("certs", folder, "--host", "node2", "--host", "node1")
    refused.failed(f"{folder}/node1.pem exists and is not overwritten: to replace it, add --renew", 1)
    assert before.items() <= contents(folder).items()
    assert not (folder / "node2.pem").exists()


def test_renewing_makes_new_keys_for_the_same_hosts(cli: Cli, folder: Path) -> None:
    cli("certs", folder, "--host", "node1,10.0.0.1", "--days", "2")
    cli("certs", folder, "--host", "front", "--use", "orchestrator", "--days", "2")
    before = contents(folder)
    assert cli("certs", folder, "--renew", "--host", "node1,10.0.0.9").code == 0
    one = contents(folder)
    assert {name for name in one if one[name] != before[name]} == {"node1.pem", "node1.key"}
    renewed = cli("certs", folder, "--renew")
    assert "front only (front; to connect to services)" in renewed.out
    every = contents(folder)
    assert {name for name in every if every[name] == one[name]} == {"ca.pem", "ca.key"}
    for name, hosts, uses in (("node1", ["node1", "10.0.0.1", "10.0.0.9"], 2), ("front", ["front"], 1)):
        found, used, left = made_for(folder, name)
        assert (found, used, left.days) == (hosts, uses, 365)


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        ([], 2, "name the hosts: --host NAME_OR_ADDRESS"),
        (["--host", "node1:7001"], 2, "'node1:7001' is neither a host's name nor an address: give it without port"),
        (["--host", "../node1"], 2, "'../node1' is neither"),
        (["--host", "node1,"], 2, "has an empty name"),
        (["--host", "node1", "--host", "node1,10.0.0.1"], 2, "the name 'node1' is taken"),
        (["--host", "ca"], 2, "the name 'ca' is taken"),
        (["--host", "node1", "--days", "4000000"], 2, "--days must be between 1 and 36500, got 4000000"),
        (["--host", "node1", "--days", "4000"], 2, "a certificate cannot last 4000 days: ask for fewer"),
        (["--renew"], 1, "has no certificates to renew"),
        (["--renew", "--host", "node1"], 1, "node1.pem to renew: make it without --renew"),
    ],
)
def test_what_cannot_be_made(cli: Cli, folder: Path, options: list[str], code: int, complaint: str) -> None:
    cli("certs", folder, *options).failed(complaint, code)
    assert not folder.exists() or contents(folder) == {}


@pytest.mark.parametrize(
    ("damage", "code", "complaint"),
    [
        (None, 1, "ca.key is missing, the other file of the CA exists"),
        ("ca.pem", 2, "the files of the CA are damaged"),
        ("node1.key", 2, "the CA's key does not belong to its certificate"),
    ],
)
def test_a_damaged_ca(cli: Cli, folder: Path, damage: str | None, code: int, complaint: str) -> None:
    cli("certs", folder, "--host", "node1")
    content = None if damage is None else (folder / damage).read_bytes()
    (folder / "ca.key").unlink()
    if content is not None:
        (folder / "ca.key").write_bytes(content)
    cli("certs", folder, "--host", "node2").failed(complaint, code)


def test_files_that_are_of_somebody_else(cli: Cli, folder: Path) -> None:
    cli("certs", folder, "--host", "node1")
    (folder / "node1.pem").write_text("something")
    other = cli("certs", folder, "--renew")
    other.failed("no certificate that `crossdraft certs` made; it is not renewed", 1)
    cli("certs", folder / "ca.pem", "--host", "node1").failed("name a folder that you may write to", 1)


def test_tls_options_go_together_and_are_checked_before_anything_runs(cli: Cli, folder: Path) -> None:
    cli("certs", folder, "--host", "127.0.0.1")
    given = dict(zip(("--tls-ca", "--tls-cert", "--tls-key"), vars(files(folder, "127.0.0.1")).values(), strict=True))
    for command, kept in ((["serve", "ngram"], "--tls-ca"), (["generate", "--target", "127.0.0.1:1"], "--tls-key")):
        cli(*command, kept, given[kept]).failed("--tls-ca, --tls-cert and --tls-key go together")
        options = [text for name, path in given.items() for text in (name, folder / "no" if name == kept else path)]
        cli(*command, *options).failed(f"there is no file {folder}/no: make it with `crossdraft certs")
    ended = cli("generate", *[text for name, path in given.items() for text in (name, path)])
    ended.failed("--tls-ca is for services that run already: give --target")
