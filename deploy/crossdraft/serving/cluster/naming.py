"""What a cluster's actors and deployments are called."""

NAMESPACE = "crossdraft"
DIRECTORY = "directory"
APPLICATION = "crossdraft"  # of Serve
INGRESS = "Ingress"


def service_name(model: str, drafter: str, number: int) -> str:
    """Of the actor that hosts one replica of a target (`drafter` empty) or of a drafter."""
    role = f"drafter/{drafter}" if drafter else "target"
    return f"{model}/{role}/{number}"


def orchestrator_name(model: str) -> str:
    """Of the deployment that makes a model's outputs: Serve takes letters, digits, - and _ only."""
    return "Orchestrator-" + "".join(one if one.isalnum() else f"_{ord(one):x}" for one in model)
