"""The verification methods by name: what each requires of drafter and target, and what it guarantees."""

from dataclasses import replace

from crossdraft.verification import alignment, coupling, matching, prefixes, rejection
from crossdraft.verification.walk import Guess as Guess
from crossdraft.verification.walk import Method as Method

STANDARD = Method("standard", rejection.walk, (Guess.OWN,), same_vocabulary=True)
TLI = Method("tli", rejection.walk, (Guess.OWN,), shared_only=True)
UNION = Method("union", rejection.walk, (Guess.OWN,))
RDK = Method("rdk", rejection.walk, (Guess.OWN,), shared_only=True, redistributed=True)
COUPLED = Method("coupled", coupling.walk, (Guess.CANONICAL, Guess.OWN))
COUPLED_SHARED = Method("coupled-shared", coupling.walk, (Guess.OWN, Guess.CANONICAL), shared_only=True)
SLEM = Method("slem", matching.walk, (Guess.CANONICAL, Guess.OWN), samples=True)
SEEDED = replace(SLEM, name="seeded", keyed=True)
SLRS = Method("slrs", prefixes.walk, (Guess.LONGEST,), whole_draft=True)
TOKENTIMING = Method("tokentiming", alignment.walk, (Guess.CANONICAL,), exact=False, whole_draft=True)
METHODS = {
    method.name: method
    for method in (STANDARD, UNION, TLI, RDK, COUPLED, COUPLED_SHARED, SLEM, SEEDED, SLRS, TOKENTIMING)
}


def method_named(name: str) -> Method:
    """The method of this name. Raises ValueError: there is none; the message lists the names."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def default_method(temperature: float, seeded: bool, same_vocabulary: bool) -> Method:
    """`slem` at temperature 0; else `seeded`, which drafts trees, or with one vocabulary and no seed `standard`.

    In chains `coupled` makes more tokens a pass, but draft trees, which only methods have whose output does not depend
    on what is drafted, make more than either. `slem` sends least.
    """
    if temperature == 0:
        return SLEM
    return STANDARD if same_vocabulary and not seeded else SEEDED
