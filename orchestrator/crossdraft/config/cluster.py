"""What only the file of a cluster has: of a model's services, its orchestrators, its fronts, and all of them."""

from dataclasses import dataclass

from crossdraft.config.fields import option
from crossdraft.config.service import ProcessOptions, Waits

MAX_COUNT = 1024
# Keys of older files, by where they stand, and what they are now; they are taken with a warning.
OLD = {
    "models.outputs": "max_outputs",
    "http.requests_per_minute": "rate",
    "http.max_request_mib": "max_body_mib",
    "http.max_requests_mib": "max_bodies_mib",
    "grpc.requests_per_minute": "rate",
    "grpc.max_request_mib": "max_message_mib",
    "grpc.certificate": "ssl_certfile",
    "grpc.key": "ssl_keyfile",
    "security.tls.certificate": "cert",
}
OLD |= {
    f"models.{role}.sessions.{old}": new
    for role in ("target", "drafters")
    for old, new in (("most", "max_sessions"), ("per_peer", "max_sessions_per_peer"), ("idle_seconds", "idle_seconds"))
}
LIFTED = ("models.target.sessions", "models.drafters.sessions")  # groups whose keys now stand beside them


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """How often a service runs."""

    replicas: int = option(1, "How many there are.", min=1, max=MAX_COUNT)
    port: int = option(0, "Of every replica, each on a node of its own then; 0: any free one.", min=0, max=65535)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Of a drafter."""

    trusted: bool = option(True, "false: only methods whose output no drafter can change.")


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Orchestrators by load, which Serve starts and ends."""

    min: int = option(1, "The least.", min=1, max=MAX_COUNT)
    max: int = option(1, "The most.", min=1, max=MAX_COUNT)
    outputs: int = option(16, "Outputs of one at once that are aimed at.", min=1)
    up_seconds: float = option(15.0, "Seconds of more outputs, until there are more orchestrators.", min=0)
    down_seconds: float = option(300.0, "Seconds of fewer outputs, until there are fewer orchestrators.", min=0)


@dataclass(frozen=True, kw_only=True)
class ResourceOptions:
    """Of one replica, in Ray's units."""

    cpus: float = option(1.0, "CPUs.", min=0)
    gpus: float = option(0.0, "GPUs.", min=0)


@dataclass(frozen=True, kw_only=True)
class FrontReplicas:
    """How often a front runs."""

    replicas: int | None = option(
        None, "How many there are; by default one on each node that has room for it.", min=1, max=MAX_COUNT
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(ProcessOptions, Waits):
    """What all processes of a cluster have."""

    metrics: bool = option(True, "Every process serves Prometheus on a port of its own; `crossdraft status` shows it.")
    metrics_port: int | None = option(
        None,
        "Of each node, where one process answers for all of the node; by default, or with 0, none does.",
        min=0,
        max=65535,
    )
