"""What a cluster's actors and deployments are called."""

from hashlib import sha256

from crossdraft.serving.cluster.installed import installed

NAMESPACE = "crossdraft"
DIRECTORY = "directory"
APPLICATION = "crossdraft"  # of Serve
INGRESS = "Ingress"
SHOWN = 12  # characters of a digest
# Of a front's process: which orchestrator gets an order is asked anew each time. What Serve remembers of one that has
# fallen silent is that it has nothing to do, so it would be chosen again and again until Ray knows that it is lost.
ASKING = {"env_vars": {"RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "0"}}


def slot_name(model: str, role: str, name: str, number: int) -> str:
    """The place of one replica: of a model's target or of its drafter with this name, or of a front (no model)."""
    return "/".join(one for one in (model, role, name, str(number)) if one)


def actor_name(slot: str, digest: str) -> str:
    """Of the actor that hosts a replica: another one as soon as what it hosts differs."""
    return f"{slot}@{digest}"


def slot_of(actor: str) -> str:
    """The place that an actor has by its name; empty if it has none."""
    return actor.rpartition("@")[0]


def orchestrator_name(model: str) -> str:
    """Of the deployment that makes a model's outputs: Serve takes letters, digits, - and _ only."""
    return "Orchestrator-" + "".join(one if one.isalnum() else f"_{ord(one):x}" for one in model)


def digest_of(*parts: object) -> str:
    """Tells values apart that are shown differently; all of them are shown in full (dataclasses, bytes)."""
    return sha256(repr(parts).encode()).hexdigest()[:SHOWN]


def version_of(*parts: object) -> str:
    """Of a process that is told these, as `digest_of`; with another crossdraft it is another process."""
    return digest_of(installed(), *parts)
