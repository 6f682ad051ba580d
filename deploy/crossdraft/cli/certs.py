"""`crossdraft certs`: a private CA in a folder, and certificates for the hosts of a cluster."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from crossdraft.console.running import CommandFailed, Misused
from crossdraft.rpc.authority import AuthorityError, Issued, Subject, Use, ends, issue, new_authority, subject_of

CA = "ca"
CA_DAYS = 3650
DAYS = 365


@dataclass(frozen=True)
class Asked:
    """What was typed."""

    folder: Path
    hosts: tuple[str, ...] = ()  # each one certificate: names and addresses of one host with commas between
    use: Use | None = None  # None: both, or what a renewed one had
    days: int = DAYS
    renew: bool = False


def certs(asked: Asked) -> None:
    """Makes what was asked for, and prints what belongs where.

    Raises:
        Misused: there is nothing to make, or a name, a number or a folder cannot be.
        CommandFailed: files are there already, are missing or cannot be written.
    """
    if asked.days < 1:
        raise Misused(f"--days must be at least 1, got {asked.days}")
    try:
        wanted = _to_renew(asked) if asked.renew else _to_make(asked)
        asked.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority, made = _authority(asked.folder)
        issued = {name: issue(authority, subject, asked.days) for name, subject in wanted.items()}
        if made:
            _write(asked.folder, CA, authority)
        for name, one in issued.items():
            _write(asked.folder, name, one)
    except AuthorityError as error:
        raise Misused(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"{error.filename or asked.folder}: {error.strerror}; name a folder of yours") from error
    print("\n".join(_said(asked.folder, wanted, asked.days, made)))


def _to_make(asked: Asked) -> dict[str, Subject]:
    if not asked.hosts:
        raise Misused("name the hosts: --host NAME_OR_ADDRESS, repeatable; several names of one host go with commas")
    wanted: dict[str, Subject] = {}
    for host in asked.hosts:
        subject = Subject(_separate(host), asked.use or Use.BOTH)
        name = file_name(subject.hosts[0])
        if name == CA or name in wanted:
            raise Misused(f"--host {host}: the name {name!r} is taken; begin with another name of the host")
        for path in _paths(asked.folder, name):
            if path.exists():
                raise CommandFailed(f"{path} is there already and is not overwritten: to make it anew, add --renew")
        wanted[name] = subject
    return wanted


def _to_renew(asked: Asked) -> dict[str, Subject]:
    """Those named, else all in the folder; further names and addresses are added to those that a certificate has."""
    given = {file_name(hosts[0]): hosts for hosts in map(_separate, asked.hosts)}
    names = given or sorted(path.stem for path in asked.folder.glob("*.pem") if path.stem != CA)
    if not names:
        raise CommandFailed(f"{asked.folder} has no certificates to renew: make some with --host, without --renew")
    wanted = {}
    for name in names:
        path, _ = _paths(asked.folder, name)
        if not path.exists():
            raise CommandFailed(f"there is no certificate {path} to renew: make it without --renew")
        try:
            before = subject_of(path.read_bytes())
        except AuthorityError as error:
            raise CommandFailed(f"{path}: {error}; it is not renewed") from error
        hosts = tuple(dict.fromkeys((*before.hosts, *given.get(name, ()))))
        wanted[name] = replace(before, hosts=hosts, use=asked.use or before.use)
    return wanted


def _authority(folder: Path) -> tuple[Issued, bool]:
    """The folder's CA, and whether it is new."""
    certificate, key = _paths(folder, CA)
    if not certificate.exists() and not key.exists():
        return new_authority(CA_DAYS), True
    for path in (certificate, key):
        if not path.exists():
            raise CommandFailed(f"{path} is missing beside the other half of the CA: copy it back, or use a new folder")
    return Issued(certificate.read_bytes(), key.read_bytes()), False


def _write(folder: Path, name: str, issued: Issued) -> None:
    """Each file at once in full; the key, which only its owner may read, first."""
    certificate, key = _paths(folder, name)
    for path, content, mode in ((key, issued.key, 0o600), (certificate, issued.certificate, 0o644)):
        new = path.with_name(path.name + ".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        new.replace(path)


def _said(folder: Path, wanted: dict[str, Subject], days: int, made: bool) -> list[str]:
    """What people should do now."""
    ca, ca_key = _paths(folder, CA)
    lines = [f"made a CA, valid until {ends(ca.read_bytes()):%Y-%m-%d}:"] if made else ["the CA that was there:"]
    lines += [
        f"  {ca}: copy it to every host; it is not secret",
        f"  {ca_key}: keep it here and give it to nobody; with it anyone can join the cluster",
        f"certificates for {days} days:",
    ]
    for name, subject in wanted.items():
        certificate, key = _paths(folder, name)
        lines.append(
            f"  {certificate}, {key}: copy them to {name} only ({', '.join(subject.hosts)}; {USES[subject.use]})"
        )
    example = next(iter(wanted))
    lines += [
        f"on {example}, add to {COMMANDS[wanted[example].use]}:",
        f"  --tls-ca ca.pem --tls-cert {example}.pem --tls-key {example}.key",
        "whoever runs takes renewed files when they are replaced; nothing need be started again",
    ]
    return lines


USES = {
    Use.SERVICE: "to serve",
    Use.ORCHESTRATOR: "to connect to services",
    Use.BOTH: "to serve and to connect",
}
COMMANDS = {
    Use.SERVICE: "`crossdraft serve target` or `serve drafter`",
    Use.ORCHESTRATOR: "`crossdraft generate`, `serve http` or `serve grpc`",
    Use.BOTH: "`crossdraft serve` and `crossdraft generate`",
}


def file_name(host: str) -> str:
    """What a host's files are called, without their ends."""
    return host.replace(":", "_")


def _separate(hosts: str) -> tuple[str, ...]:
    separate: Sequence[str] = [host.strip() for host in hosts.split(",")]
    if not all(separate):
        raise Misused(f"--host {hosts!r} has an empty name: leave out the comma that is too many")
    return tuple(dict.fromkeys(separate))


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}.key"
