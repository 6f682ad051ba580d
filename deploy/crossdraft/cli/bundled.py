"""The pair that runs when no address is given."""

from dataclasses import dataclass

DEFAULT_DRAFTER = "drafter-b"


@dataclass(frozen=True)
class ModelNames:
    """A target and a drafter, as `--model` has them."""

    target: str = "bundled:target"
    drafter: str = f"bundled:{DEFAULT_DRAFTER}"
