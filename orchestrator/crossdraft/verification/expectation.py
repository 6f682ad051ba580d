"""Expected acceptance of the first target token, from whole rows: Table 2 of arXiv 2502.05202, with what it lacks.

What is computed is the probability that the first token of an epoch, both sides at a token start, is of kind
ACCEPTED under this project's walks. `slem` therefore differs from the paper's Σ p(t)ψ(t): a walk that compares
letters also accepts a token that the draft's text merely begins with, so it is Σ p(t)G(t), never less. `tokentiming`
is left out: its alignment depends on the tokens that follow, not on rows alone.

Of the paper's inequalities, `tli` ≥ `union` holds for all laws (Theorem 4.1), and so does `coupled` ≥ `tli` where both
draw from T∩D, because the coupling accepts shared strings with min(p, q) before anything else. `coupled` ≥ `slem` and
`slrs` ≥ `slem` do not hold for all laws: accepting `a` as `a` leaves (a, c) of the draft to the target's `ab`, and the
longest token hides its prefixes. tests/verification/test_expectation.py has the counterexamples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from crossdraft.text.letters import Letters
from crossdraft.text.pairing import Pair
from crossdraft.verification.agreement import Agreement, Drafting, Expected, Weights, independent, maximal, weights_of
from crossdraft.verification.races import Race
from crossdraft.verification.rows import Ids, Probabilities, Row, Whose

__all__ = ["EXPECTATIONS", "Drafting", "Expected"]


def overlap(target: Row, drafting: Drafting) -> Expected:
    """Σ min(p, q) over target ids: `standard`, `union` (all of D drafted), `tli` (T∩D only), `rdk` (target ids).

    One proposal is all that it needs. Drafter ids with the same letters are one target id, as in the walk.
    """
    proposed = drafting.row_after(())
    drafted = in_target_ids(drafting.pair, proposed, drafting.whose)
    return Expected(float(np.minimum(in_target_ids(drafting.pair, target, Whose.TARGET), drafted).sum()))


def matching(target: Row, drafting: Drafting) -> Expected:
    """Σ p(t) G(t) with G(t) = P(the draft's text starts with t): `slem`."""
    return Agreement(drafting, independent).starting(weights_of(target))


def common_noise(target: Row, drafting: Drafting) -> Expected:
    """The same where the first tokens of both are drawn with common noise: `seeded`.

    Two Gumbel races over the same clocks, keyed by letters and rank, meet with a probability in closed form; noise at
    later offsets is independent of the first token's.
    """
    race = Race(drafting.pair, target, drafting.row_after(()))
    going_on = Agreement(drafting, independent)
    found = Expected(race.reached)
    for drafted, wanted in race.beyond.items():
        found += going_on.after_proposal(sum(wanted.values()), wanted, (drafted,))
    return found


def string_rejection(target: Row, drafting: Drafting) -> Expected:
    """Σ min(p(t), ψ(t)) with ψ(t) = P(t is the longest target token that the draft's text starts with): `slrs`."""
    weights, psi = weights_of(target), dict[Letters, float]()
    probabilities = _by_letters(drafting.pair.target.letters, weights)
    pruned = _longest_tokens(drafting, weights, psi)
    return Expected(sum(min(probabilities.get(letters, 0.0), mass) for letters, mass in psi.items()), pruned)


def coupled(target: Row, drafting: Drafting) -> Expected:
    """The coupling of both laws on text: shared strings first, then letter by letter on the residuals (`coupled`).

    With q the law of the draft's own tokens, or of those in T∩D.
    """
    pair, proposed = drafting.pair, drafting.row_after(())
    ours, theirs = pair.names(target.ids), pair.to_target_ids(proposed.ids)
    p = in_target_ids(pair, Row(ours, target.probabilities), Whose.TARGET)
    q = in_target_ids(pair, proposed)
    both = np.minimum(p, q)
    accepted = float(both.sum())
    surplus = Agreement(drafting, maximal).at_start(
        max(0.0, 1.0 - accepted), _surplus(target, ours, p - both, p), _surplus(proposed, theirs, q - both, q)
    )
    return Expected(accepted) + surplus


# By the names of `verification.methods`; whether proposals come from T∩D or are target tokens is the drafter's law.
EXPECTATIONS: dict[str, Callable[[Row, Drafting], Expected]] = {
    "standard": overlap,
    "union": overlap,
    "tli": overlap,
    "rdk": overlap,
    "slem": matching,
    "seeded": common_noise,
    "slrs": string_rejection,
    "coupled": coupled,
    "coupled-shared": coupled,
}


def in_target_ids(pair: Pair, row: Row, whose: Whose = Whose.DRAFTER) -> Probabilities:
    """A proposal's law over target ids, float64 (|T|,); what lies outside T is missing, so its sum may be below 1."""
    law = np.zeros(pair.target.size)
    ids = row.ids if whose is Whose.TARGET else pair.to_target_ids(row.ids)
    np.add.at(law, ids[ids >= 0], row.probabilities[ids >= 0])
    return law


def _by_letters(letters: tuple[Letters, ...], weights: Weights) -> dict[Letters, float]:
    """Weights of strings: ids with the same letters are added up."""
    found: dict[Letters, float] = {}
    for token, weight in weights.items():
        found[letters[token]] = found.get(letters[token], 0.0) + weight
    return found


def _surplus(row: Row, names: Ids, left: Probabilities, whole: Probabilities) -> Weights:
    """What is left of a row when the common mass of each token is taken away; -1 names what is not shared."""
    share = np.divide(left, whole, out=np.ones_like(whole), where=whole > 0)
    weights = row.probabilities * np.where(names < 0, 1.0, share[names])
    return {token: weight for token, weight in zip(row.ids.tolist(), weights.tolist(), strict=True) if weight > 0}


@dataclass(frozen=True)
class _Text:
    """The beginning of a draft."""

    tokens: tuple[int, ...]  # of the drafter
    letters: Letters
    mass: float  # its probability


def _longest_tokens(drafting: Drafting, target: Weights, psi: dict[Letters, float]) -> float:
    """Fills ψ by going through the drafts of at most n tokens; returns what pruned drafts could add to Σ min(p, ψ).

    A draft is followed while a longer target token could begin with all of its text (the paper's stopping rule).
    """
    trie, letters = drafting.pair.target_trie, drafting.pair.drafter.letters
    mass = np.array([target.get(token, 0.0) for token in trie.order.tolist()])
    before = np.concatenate([[0.0], np.cumsum(mass)])  # of the tokens at the first places of the trie
    pruned = 0.0
    texts = [_Text((), Letters(""), 1.0)]
    while texts:
        text = texts.pop()
        longest = trie.longest(text.letters)
        if text.tokens and (len(text.tokens) == drafting.proposals or not trie.extends(text.letters)):
            if longest is not None:
                psi[longest] = psi.get(longest, 0.0) + text.mass
            continue
        first, end = trie.span(text.letters if longest is None else longest)
        most = min(text.mass, float(before[end] - before[first]))
        if text.tokens and most < drafting.least:
            pruned += most
            continue
        for token, weight in weights_of(drafting.row_after(text.tokens)).items():
            texts.append(_Text((*text.tokens, token), Letters(text.letters + letters[token]), text.mass * weight))
    return pruned
