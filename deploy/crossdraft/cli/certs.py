"""`crossdraft certs`: a private CA in a folder, and certificates for the hosts of a cluster."""

import os
from dataclasses import replace
from pathlib import Path

from crossdraft.cli.authority import AuthorityError, Issued, Purpose, Subject, ends, issue, new_authority, subject_of
from crossdraft.cli.running import CommandFailed, UsageError
from crossdraft.config.commands import CertsOptions

CA = "ca"
CA_DAYS = 3650  # how long a CA is valid


def certs(folder: Path, options: CertsOptions) -> None:
    """Makes the certificates, and prints which file belongs where.

    Raises:
        UsageError: there is nothing to make, or a name, a number or a file of the CA cannot be used.
        CommandFailed: files exist already, are missing or cannot be written.
    """
    try:
        wanted = _to_renew(folder, options) if options.renew else _to_make(folder, options)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority, made = _authority(folder)
        issued = {name: issue(authority, subject, options.days) for name, subject in wanted.items()}
        if made:
            _write(folder, CA, authority)
        for name, one in issued.items():
            _write(folder, name, one)
    except AuthorityError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise CommandFailed(
            f"{error.filename or folder}: {error.strerror}; name a folder that you may write to"
        ) from error
    print("\n".join(_instructions(folder, wanted, options.days, made)))


def _to_make(folder: Path, options: CertsOptions) -> dict[str, Subject]:
    if not options.host:
        raise UsageError(
            "name the hosts: --host NAME_OR_ADDRESS; repeat it for more hosts, commas separate names of one"
        )
    wanted: dict[str, Subject] = {}
    for host in options.host:
        subject = Subject(_separate(host), Purpose(options.use or "both"))
        name = file_name(subject.hosts[0])
        if name == CA or name in wanted:
            raise UsageError(f"--host {host}: the name {name!r} is taken; put another name of the host first")
        for path in _paths(folder, name):
            if path.exists():
                raise CommandFailed(f"{path} exists and is not overwritten: to replace it, add --renew")
        wanted[name] = subject
    return wanted


def _to_renew(folder: Path, options: CertsOptions) -> dict[str, Subject]:
    """The named hosts, else all in the folder; names and addresses that a certificate lacks are added to it."""
    given = {file_name(hosts[0]): hosts for hosts in map(_separate, options.host or ())}
    names = given or sorted(path.stem for path in folder.glob("*.pem") if path.stem != CA)
    if not names:
        raise CommandFailed(f"{folder} has no certificates to renew: make them with --host, without --renew")
    wanted = {}
    for name in names:
        path, _ = _paths(folder, name)
        if not path.exists():
            raise CommandFailed(f"there is no certificate {path} to renew: make it without --renew")
        try:
            before = subject_of(path.read_bytes())
        except AuthorityError as error:
            raise CommandFailed(f"{path}: {error}; it is not renewed") from error
        hosts = tuple(dict.fromkeys((*before.hosts, *given.get(name, ()))))
        wanted[name] = replace(before, hosts=hosts, purpose=Purpose(options.use or before.purpose))
    return wanted


def _authority(folder: Path) -> tuple[Issued, bool]:
    certificate, key = _paths(folder, CA)
    if not certificate.exists() and not key.exists():
        return new_authority(CA_DAYS), True
    for path in (certificate, key):
        if not path.exists():
            raise CommandFailed(
                f"{path} is missing, the other file of the CA exists: copy it back, or use a new folder"
            )
    return Issued(certificate.read_bytes(), key.read_bytes()), False


def _write(folder: Path, name: str, issued: Issued) -> None:
    """Writes the key, readable only by its owner, then the certificate; each file is replaced atomically."""
    certificate, key = _paths(folder, name)
    for path, content, mode in ((key, issued.key, 0o600), (certificate, issued.certificate, 0o644)):
        new = path.with_name(path.name + ".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        new.replace(path)


def _instructions(folder: Path, wanted: dict[str, Subject], days: int, made: bool) -> list[str]:
    ca, ca_key = _paths(folder, CA)
    lines = [f"made a CA, valid until {ends(ca.read_bytes()):%Y-%m-%d}:"] if made else ["the CA that exists:"]
    lines += [
        f"  {ca}: copy it to every host; it is not secret",
        f"  {ca_key}: keep it here and secret: whoever has it can join the cluster",
        f"certificates for {days} days:",
    ]
    for name, subject in wanted.items():
        certificate, key = _paths(folder, name)
        uses = f"{', '.join(subject.hosts)}; {USES[subject.purpose]}"
        lines.append(f"  {certificate}, {key}: copy them to {name} only ({uses})")
    example = next(iter(wanted))
    lines.append(f"on {example}, add: --tls-ca ca.pem --tls-cert {example}.pem --tls-key {example}.key")
    return [*lines, "running processes use renewed files as soon as these are replaced, without a restart"]


USES = {
    Purpose.SERVICE: "to serve",
    Purpose.ORCHESTRATOR: "to connect to services",
    Purpose.BOTH: "to serve and to connect",
}


def file_name(host: str) -> str:
    return host.replace(":", "_")


def _separate(hosts: str) -> tuple[str, ...]:
    separate = [host.strip() for host in hosts.split(",")]
    if not all(separate):
        raise UsageError(f"--host {hosts!r} has an empty name: remove the extra comma")
    return tuple(dict.fromkeys(separate))


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}.key"
