"""The methods by name: what each asks of drafter and target, and what it promises."""

from collections.abc import Callable
from dataclasses import dataclass

from crossdraft.verification import matching, rejection
from crossdraft.verification.walk import Ground, Walk


@dataclass(frozen=True)
class Method:
    """One verification method."""

    name: str
    walk: Callable[[Ground], Walk]
    samples: bool  # the target answers with draws of its own, not with rows
    keyed: bool  # the drafter draws with the target's noise
    shared_only: bool  # the drafter may draw tokens of T∩D only
    same_vocabulary: bool  # refused when the vocabularies differ
    seedable: bool  # the output is a function of the seed: neither timing nor drafter change it
    source: str


STANDARD = Method(
    "standard", rejection.walk, False, False, False, True, False, "Leviathan et al. 2023; Chen et al. 2023"
)
TLI = Method("tli", rejection.walk, False, False, True, False, False, "arXiv 2502.05202, Algorithm 4")
SLEM = Method("slem", matching.walk, True, False, False, False, True, "arXiv 2502.05202, Algorithm 2")
SEEDED = Method("seeded", matching.walk, True, True, False, False, True, "Algorithm 2 with common noise")

METHODS = {method.name: method for method in (STANDARD, TLI, SLEM, SEEDED)}


def method_named(name: str) -> Method:
    """The method of this name.

    Raises:
        ValueError: there is none; the text lists the names.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def default_method(temperature: float, seeded: bool, same_vocabulary: bool) -> Method:
    """Temperature 0: `slem`; a seed: `seeded`; else the method that accepted most (BENCHMARKS.md)."""
    if temperature == 0:
        return SLEM
    if seeded:
        return SEEDED
    return STANDARD if same_vocabulary else SEEDED
