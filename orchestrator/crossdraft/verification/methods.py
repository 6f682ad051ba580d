"""The verification methods by name: what each requires of drafter and target, and what it guarantees."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from crossdraft.verification import alignment, coupling, matching, prefixes, rejection
from crossdraft.verification.walk import Ground, Walk


class Guess(Enum):
    """A guess at the tokens that the walk will emit; it makes one path of a pass's tree."""

    OWN = "own"  # the draft's own tokens, up to the first that is no target token
    CANONICAL = "canonical"  # the draft's text as the target's tokenizer writes it
    LONGEST = "longest"  # the draft's text cut greedily into longest target tokens


@dataclass(frozen=True)
class Method:
    """One verification method."""

    name: str
    walk: Callable[[Ground], Walk]
    source: str
    guesses: tuple[Guess, ...]  # paths of a pass, the likeliest first
    exact: bool = True  # the output has the target's distribution
    samples: bool = False  # the target replies with its own draws, not with rows
    keyed: bool = False  # the drafter draws with the target's noise
    same_vocabulary: bool = False  # refused if the vocabularies differ
    shared_only: bool = False  # the drafter draws tokens of T∩D only
    redistributed: bool = False  # the drafter draws target tokens through its affinity matrix
    drafter_rows: bool = True  # every draft token carries the row that it was drawn from
    scores: bool = False  # the drafter is asked for probabilities of strings
    whole_draft: bool = False  # the number of draft tokens is fixed before the first is revealed: lock-step only
    trusting: bool = True  # exact only if each draft token's row is the distribution that it was drawn from
    seedable: bool = False  # the output is a function of the seed, whatever the timing and the drafter


STANDARD = Method(
    "standard", rejection.walk, "Leviathan et al. 2023; Chen et al. 2023", (Guess.OWN,), same_vocabulary=True
)
TLI = Method("tli", rejection.walk, "arXiv 2502.05202, Algorithm 4", (Guess.OWN,), shared_only=True)
UNION = Method("union", rejection.walk, "arXiv 2502.05202, Algorithm 1", (Guess.OWN,))
RDK = Method(
    "rdk",
    rejection.walk,
    "Timor et al., Out-of-Vocabulary Sampling Boosts Speculative Decoding, Algorithm 1",
    (Guess.OWN,),
    shared_only=True,
    redistributed=True,
)
COUPLED = Method("coupled", coupling.walk, "rejection sampling on text", (Guess.CANONICAL, Guess.OWN))
COUPLED_SHARED = Method(
    "coupled-shared", coupling.walk, "the same over T∩D", (Guess.OWN, Guess.CANONICAL), shared_only=True
)
SLEM = Method(
    "slem",
    matching.walk,
    "arXiv 2502.05202, Algorithm 2",
    (Guess.CANONICAL, Guess.OWN),
    samples=True,
    drafter_rows=False,
    trusting=False,
    seedable=True,
)
SEEDED = Method(
    "seeded",
    matching.walk,
    "Algorithm 2 with common noise",
    (Guess.CANONICAL, Guess.OWN),
    samples=True,
    keyed=True,
    drafter_rows=False,
    trusting=False,
    seedable=True,
)
SLRS = Method(
    "slrs",
    prefixes.walk,
    "arXiv 2502.05202, Algorithm 3",
    (Guess.LONGEST,),
    scores=True,
    whole_draft=True,
)
TOKENTIMING = Method(
    "tokentiming",
    alignment.walk,
    "Xiao et al., TokenTiming, Algorithm 2",
    (Guess.CANONICAL,),
    exact=False,
    whole_draft=True,
)
METHODS = {
    method.name: method
    for method in (STANDARD, UNION, TLI, RDK, COUPLED, COUPLED_SHARED, SLEM, SEEDED, SLRS, TOKENTIMING)
}


def method_named(name: str) -> Method:
    """The method of this name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def default_method(temperature: float, seeded: bool, same_vocabulary: bool) -> Method:
    """`slem` at temperature 0, `seeded` with a seed, else the exact method that accepted most (BENCHMARKS.md)."""
    if temperature == 0:
        return SLEM
    if seeded:
        return SEEDED
    return STANDARD if same_vocabulary else COUPLED
