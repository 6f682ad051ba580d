"""What the servers of targets and drafters have, and all servers: sessions, TLS, the log."""

from dataclasses import MISSING, dataclass
from enum import StrEnum
from pathlib import Path

from crossdraft.config.engine import DrafterOptions, ModelSettings, NgramOptions, TargetOptions
from crossdraft.config.fields import Checked, option

PORT = "Port to listen on; 0 picks a free one: the JSON line printed at start has it."
MAX_MIB = 1024  # of a message or a request
METRICS_PORT = "Serve Prometheus metrics over plain HTTP on this port; 0 picks a free one."


LogFormat = StrEnum("LogFormat", {"PLAIN": "plain", "JSON": "json"})
LogLevel = StrEnum("LogLevel", {"DEBUG": "debug", "INFO": "info", "WARNING": "warning", "ERROR": "error"})


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """What all processes that serve have, those of a cluster, too."""

    log_format: LogFormat = option(LogFormat.PLAIN, "Format of the log on standard error; json is one object a line.")
    grace_seconds: float = option(30.0, "Seconds for what is open to end after SIGTERM.", min=0, max=3600)


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Where a server listens."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 listens on all interfaces.")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ProcessOptions, HostOptions):
    """What all servers have."""

    log_level: LogLevel = option(LogLevel.INFO, "Lowest level that is logged.")
    until_stdin_ends: bool = option(False, None, hidden=True)


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Mutual TLS with services."""

    tls_ca: Path | None = option(None, "CA certificate that verifies the other side.", metavar="FILE")
    tls_cert: Path | None = option(None, "This side's certificate; see `crossdraft certs`.", metavar="FILE")
    tls_key: Path | None = option(None, "The key of --tls-cert.", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class ServerCertificate:
    """TLS with clients; the options are named as vLLM's and uvicorn's."""

    ssl_certfile: Path | None = option(None, "Certificate for clients; none: unencrypted.", metavar="FILE")
    ssl_keyfile: Path | None = option(None, "The key of --ssl-certfile.", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class SessionOptions(Checked):
    """Limits of the sessions of a service."""

    max_sessions: int = option(256, "Max open sessions; further sessions are refused.", min=1)
    max_sessions_per_peer: int | None = option(
        None, "Max open sessions per client certificate, or per address without TLS; by default --max-sessions.", min=1
    )
    idle_seconds: float = option(600.0, "End a session after this many seconds without a message.", above=0, max=86_400)

    def _fault(self) -> str:
        """Whether those of one peer are more than all."""
        if (self.max_sessions_per_peer or 0) <= self.max_sessions:
            return ""
        most, got = self.max_sessions, self.max_sessions_per_peer
        return f"max_sessions_per_peer must be between 1 and max_sessions ({most}), got {got}"


@dataclass(frozen=True, kw_only=True)
class Waits:
    """How long outputs wait for services."""

    target_wait_seconds: float = option(30.0, "Seconds without any target that fail an output.", above=0, max=3600)
    reply_wait_seconds: float = option(
        30.0, "Seconds without a step or another sign of life until a service is taken for lost.", above=0, max=3600
    )


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(ServerOptions, TlsOptions, SessionOptions):
    """What all gRPC services of a target or drafter have."""

    port: int = option(0, PORT, min=0, max=65535)
    max_message_mib: int = option(
        32, "Max size of a message, in MiB; those of sessions a quarter of it, at least 8 MiB.", min=1, max=MAX_MIB
    )
    metrics_port: int | None = option(None, METRICS_PORT, metavar="PORT", min=0, max=65535)


@dataclass(frozen=True, kw_only=True)
class ModelChoice(ServiceOptions, ModelSettings):
    """A service with a model."""

    model: list[str] = option(MISSING, "A folder, a hub id, or bundled:NAME.", metavar="MODEL")
    pace: str | None = option(None, "For benchmarks: a step of n tokens takes at least A + B n ms.", metavar="A,B")


@dataclass(frozen=True, kw_only=True)
class ServedTarget(TargetOptions, ModelChoice):
    """A target."""


@dataclass(frozen=True, kw_only=True)
class ServedDrafter(DrafterOptions, ModelChoice):
    """A drafter."""

    logit_noise: float = option(0.0, "For benchmarks: deviation of noise on logits.", metavar="SIGMA", min=0)


@dataclass(frozen=True, kw_only=True)
class ServedNgram(NgramOptions, ServiceOptions):
    """A drafter without a model."""
