"""Options of TLS, and `crossdraft certs` with its own."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossdraft.console.running import Misused
from crossdraft.serving.logs import LogFormat, LogLevel

if TYPE_CHECKING:
    from crossdraft.rpc.security import FrontFiles, TlsFiles

TlsCa = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Certificate of the CA that the other side's must be of.")
]
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="This side's certificate; see `crossdraft certs`.")]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")]
# Named as vLLM's and uvicorn's.
FrontCertificate = Annotated[
    Path | None,
    typer.Option(
        "--ssl-certfile", metavar="FILE", help="Certificate that clients see; without it nothing is encrypted."
    ),
]
FrontKey = Annotated[Path | None, typer.Option("--ssl-keyfile", metavar="FILE", help="Its key.")]


class Uses(StrEnum):
    """What certificates are good for."""

    SERVICE = "service"
    ORCHESTRATOR = "orchestrator"
    BOTH = "both"


def tls_of(ca: Path | None, certificate: Path | None, key: Path | None) -> "TlsFiles | None":
    """What --tls-ca, --tls-cert and --tls-key say together; raises Misused if one is missing or cannot be used."""
    if ca is None and certificate is None and key is None:
        return None
    if ca is None or certificate is None or key is None:
        raise Misused("--tls-ca, --tls-cert and --tls-key are given together, or none of them is")
    from crossdraft.console.running import checked_options
    from crossdraft.rpc.security import TlsFiles

    files = TlsFiles(ca, certificate, key)
    with checked_options():
        files.load()
    return files


def front_of(certificate: Path | None, key: Path | None) -> "FrontFiles | None":
    """What --ssl-certfile and --ssl-keyfile say together; raises Misused if one is missing or cannot be used."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise Misused("--ssl-certfile and --ssl-keyfile are given together, or neither is")
    from crossdraft.console.running import checked_options
    from crossdraft.rpc.security import FrontFiles

    files = FrontFiles(certificate, key)
    with checked_options():
        files.load()
    return files


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Keep it private: it has the CA's key.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...", help="A host by its name or address, or several of one with commas; repeatable."
        ),
    ] = None,
    use: Annotated[
        Uses | None,
        typer.Option(help="Whether it serves, connects to services, or both; an untrusted drafter only serves."),
    ] = None,
    days: Annotated[int, typer.Option(help="That they are valid.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Make those that are there anew, with new keys: all, or those of --host.")
    ] = False,
) -> None:
    """Make certificates for mutual TLS between the machines of a cluster: a private CA once, then one for each host."""
    from crossdraft.cli import certs as command
    from crossdraft.rpc.authority import Use

    command.certs(command.Asked(folder, tuple(host or ()), None if use is None else Use(use.value), days, renew))


# Options of all that serves: how its log looks, and where its metrics are read.

LogLines = Annotated[
    LogFormat, typer.Option("--log-format", help="Of the lines on standard error; json is one object a line.")
]
LogLevelOption = Annotated[LogLevel, typer.Option("--log-level", help="The least that is written.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", help="Answer Prometheus on this port of --host, over plain HTTP; 0 is any free one."),
]
