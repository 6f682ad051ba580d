"""What an audit asks an endpoint, and what it makes of the answers."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from crossdraft.audit.endpoint import CannotBeAudited, Endpoint, Place, Reply
from crossdraft.audit.statistics import (
    Draw,
    LawTest,
    Power,
    chi_square,
    holm,
    information,
    missing,
    power_of,
    temperature,
)

OK, FAULT, NOT_CHECKED = "ok", "FAULT", "not checked"
CONTEXTS = 4  # first tokens of each prompt, the most frequent ones, after which the second token is tested


@dataclass(frozen=True)
class AuditPlan:
    """What is asked, all of it fixed before the first answer."""

    prompts: tuple[str, ...]
    greedy: int  # prompts whose greedy texts are examined
    greedy_tokens: int  # of each of them, at most
    sampled: int  # prompts whose distributions are tested
    samples: int  # of each of them
    tokens: int  # of each sample, at most
    temperature: float
    tolerance: float  # nats between log-probabilities that count as equal
    level: float  # probability of a false alarm in all tests of distributions together

    def __post_init__(self) -> None:
        """Raises ValueError."""
        largest = max(self.greedy, self.sampled)
        if largest > len(self.prompts):
            raise ValueError(f"{largest} prompts are to be used and there are {len(self.prompts)}: give --prompts FILE")
        if not self.temperature > 0 or not 0 < self.level < 1 or not self.tolerance >= 0:
            raise ValueError("--temperature must be above 0, --level between 0 and 1, and --tolerance at least 0")
        if not self.greedy and not (self.sampled and self.samples):
            raise ValueError("nothing is checked: --greedy, and --sampled or --samples are 0")

    def requests(self, endpoint: Endpoint, reference: Endpoint | None) -> int:
        """How many will be sent to both together, without those that are sent again."""
        batches = -(-self.samples // endpoint.abilities.choices)
        laws = self.sampled * (batches + 2 * (self.temperature != 1)) if endpoint.abilities.top else 0
        return laws + self.greedy * (1 if reference is None else 2)


@dataclass(frozen=True)
class Check:
    """One thing that was looked into."""

    name: str
    verdict: str  # OK, FAULT or NOT_CHECKED
    finding: str


@dataclass(frozen=True)
class Difference:
    """Where a greedy text leaves the reference's, or its own most probable tokens."""

    prompt: int  # from 1
    token: int  # from 1
    gap: float | None  # nats by which the token is less probable; None: that cannot be told
    at_least: bool  # the token is not listed: the gap is larger still
    text: str  # what came, and in place of what


@dataclass(frozen=True)
class Result:
    """All that an audit found."""

    checks: tuple[Check, ...]
    differences: tuple[Difference, ...]
    tests: tuple[LawTest, ...]
    adjusted: tuple[float, ...]  # p-value of each test, corrected for their number
    power: Power | None  # None: no distribution was tested
    information: float  # of all samples, nats²

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.checks if check.verdict == FAULT)


async def audit(plan: AuditPlan, endpoint: Endpoint, reference: Endpoint | None) -> Result:
    """Runs all checks. Raises CannotBeAudited."""
    if reference is not None and not reference.abilities.top:
        raise CannotBeAudited(
            f"the reference {reference.url} reports no log-probabilities, which tell ties from faults"
        )
    if reference is None and not endpoint.abilities.top:
        raise CannotBeAudited(
            f"{endpoint.url} reports no log-probabilities (`logprobs`): start it with them, or compare greedy texts "
            "with those of a reference that does (--reference-url URL, or --model MODEL)"
        )
    checks, differences = await greedy(plan, endpoint, reference)
    draws, tests, notes = await laws(plan, endpoint)
    adjusted = tuple(holm([test.p for test in tests]))
    for kind in dict.fromkeys(test.kind for test in tests):
        mine = [(p, test) for p, test in zip(adjusted, tests, strict=True) if test.kind == kind]
        p, worst = min(mine, key=lambda one: one[0])
        finding = (
            f"{len(mine)} test{'s' * (len(mine) > 1)}, smallest corrected p {p:.2g}: {worst.finding}, {worst.where}"
        )
        checks.append(Check(kind, FAULT if p < plan.level else OK, finding))
    checks += [Check("distributions", NOT_CHECKED, note) for note in notes]
    power = power_of(draws, tests, plan.level) if tests else None
    return Result(tuple(checks), tuple(differences), tuple(tests), adjusted, power, information(draws))


# Greedy texts.


async def greedy(
    plan: AuditPlan, endpoint: Endpoint, reference: Endpoint | None
) -> tuple[list[Check], list[Difference]]:
    """Whether greedy texts are the reference's, and whether each token is the most probable one."""
    prompts = plan.prompts[: plan.greedy]
    if not prompts:
        return [Check("greedy text", NOT_CHECKED, "--greedy 0")], []
    ours = await _outputs(endpoint, prompts, plan.greedy_tokens)
    checks, differences = [], []
    if endpoint.abilities.top:
        found = [gap for gap in map(_own_gap, range(1, len(ours) + 1), ours) if gap is not None]
        checks.append(_judged("greedy by its own log-probabilities", len(ours), found, plan.tolerance))
        differences += found
    if reference is not None:
        theirs = await _outputs(reference, prompts, plan.greedy_tokens)
        pairs = list(zip(ours, theirs, strict=True))
        found = [compared(number, *pair) for number, pair in enumerate(pairs, 1) if pair[0].text != pair[1].text]
        checks.append(_judged("greedy text, against the reference", len(ours), found, plan.tolerance))
        differences += found
        if endpoint.abilities.top:
            checks.append(_values(pairs, plan.tolerance))
    return checks, differences


async def _outputs(endpoint: Endpoint, prompts: Sequence[str], tokens: int) -> list[Reply]:
    return [reply for (reply,) in await asyncio.gather(*(endpoint.ask(one, tokens, 0.0) for one in prompts))]


def _own_gap(prompt: int, reply: Reply) -> Difference | None:
    """The token of a greedy text that is farthest below the most probable one; None if there is none below."""
    gaps = [place.top[0][1] - place.log_probability if place.top else 0.0 for place in reply.places]
    worst = max(range(len(gaps)), key=gaps.__getitem__, default=None)
    if worst is None or gaps[worst] <= 0:
        return None
    place = reply.places[worst]
    return Difference(prompt, worst + 1, gaps[worst], False, f"{place.token!r} in place of {place.top[0][0]!r}")


def compared(prompt: int, ours: Reply, theirs: Reply) -> Difference:
    """Where a text leaves the reference's, by the log-probabilities of the reference. The texts differ."""
    mine, told, before = ours.text.encode(), theirs.text.encode(), b""
    common = next((place for place, (one, other) in enumerate(zip(mine, told, strict=False)) if one != other), None)
    common = min(len(mine), len(told)) if common is None else common
    for number, place in enumerate(theirs.places, 1):
        if len(before + place.raw) > common and told.startswith(before):
            same = b"".join(one.raw for one in ours.places[: number - 1]) == before
            name = _name_in(place, mine[len(before) :], ours.places[number - 1 : number] if same else ())
            came = name or mine[len(before) :][:12].decode(errors="replace") or "the end of the text"
            value = dict(place.top).get(name, place.top[-1][1])
            # The end of a text may be a token whose name nobody says.
            known = bool(name or ours.places or len(mine) > len(before))
            gap = place.log_probability - value if known else None
            return Difference(prompt, number, gap, known and not name, f"{came!r} in place of {place.token!r}")
        before += place.raw
    return Difference(prompt, len(theirs.places), None, False, "the reference reports no token there")


def _name_in(place: Place, continuation: bytes, own: Sequence[Place]) -> str:
    """The listed token with which a text goes on: by the name that the endpoint gives it, or without one the most
    probable one with which it may; empty if it is not listed."""
    others = [name for name, _ in place.top if name and name != place.token]
    if own:
        return own[0].token if own[0].token in others else ""
    return next((name for name in others if continuation.startswith(name.encode())), "")


def _judged(name: str, texts: int, found: Sequence[Difference], tolerance: float) -> Check:
    near = [one for one in found if one.gap is not None and one.gap <= tolerance]
    ties = [one for one in near if not one.at_least]
    unknown = len(near) - len(ties) + sum(one.gap is None for one in found)
    faults = len(found) - len(ties) - unknown
    counts = f"{texts - len(found)} equal, {len(ties)} ties (gap up to {tolerance:g} nats), {faults} faults"
    counts += f", {unknown} that cannot be judged" * bool(unknown)
    return Check(name, FAULT if faults else NOT_CHECKED if unknown else OK, f"{texts} texts: {counts}")


def _values(pairs: Sequence[tuple[Reply, Reply]], tolerance: float) -> Check:
    """Log-probabilities of the tokens that both have after the same text."""
    name, gaps = "log-probabilities, against the reference", []
    for ours, theirs in pairs:
        for mine, other in zip(ours.places, theirs.places, strict=False):
            if mine.token != other.token:
                break
            if not mine.top:  # llama.cpp reports no probability of a draft token that it accepted, and calls it 1
                continue
            gaps.append(abs(mine.log_probability - other.log_probability))
    if not gaps:
        return Check(name, NOT_CHECKED, "no greedy text begins with the same token")
    mean = fmean(gaps)
    finding = f"{len(gaps)} tokens: {mean:.2g} nats apart on average, {max(gaps):.2g} at most"
    return Check(name, FAULT if mean > tolerance else OK, finding)


# Distributions.


async def laws(plan: AuditPlan, endpoint: Endpoint) -> tuple[list[Draw], list[LawTest], list[str]]:
    """Sampled tokens against the log-probabilities that came with them: draws, tests, and what could not be tested."""
    if not plan.sampled or not plan.samples:
        return [], [], ["--sampled or --samples is 0"]
    if not endpoint.abilities.top:
        return [], [], ["the endpoint reports no log-probabilities"]
    prompts = plan.prompts[: plan.sampled]
    power = 1.0 if plan.temperature == 1 else await _power(plan, endpoint)
    replies = [await _samples(plan, endpoint, prompt) for prompt in prompts]
    return tested(replies, power)


async def _samples(plan: AuditPlan, endpoint: Endpoint, prompt: str) -> list[Reply]:
    size = endpoint.abilities.choices
    counts = [min(size, plan.samples - begin) for begin in range(0, plan.samples, size)]
    asked = (endpoint.ask(prompt, plan.tokens, plan.temperature, choices=count) for count in counts)
    return [reply for replies in await asyncio.gather(*asked) for reply in replies]


async def _power(plan: AuditPlan, endpoint: Endpoint) -> float:
    """What reported probabilities are raised to, to be those at the plan's temperature: 1, or its inverse where the
    endpoint reports them at temperature 1, as vLLM does. Raises CannotBeAudited if neither is so."""

    async def top(prompt: str, temperature: float) -> dict[str, float]:
        (reply,) = await endpoint.ask(prompt, 1, temperature)
        return dict(reply.places[0].top) if reply.places else {}

    errors: dict[float, list[float]] = {1.0: [], 1 / plan.temperature: []}
    for prompt in plan.prompts[: plan.sampled]:
        plain, warm = await top(prompt, 1.0), await top(prompt, plan.temperature)
        common = [token for token in plain if token in warm]
        before, after = np.array([(plain[one], warm[one]) for one in common]).reshape(-1, 2).T
        for power, found in errors.items():  # a power of 1 is needed where what is reported is warm already
            wanted = before / plan.temperature if power == 1 else before
            found += list(np.abs((after - wanted) - np.mean(after - wanted)))
    means = {power: fmean(found) if found else np.inf for power, found in errors.items()}
    best = min(means, key=lambda one: means[one])
    if means[best] > plan.tolerance:
        raise CannotBeAudited(
            f"{endpoint.url} reports log-probabilities at temperature {plan.temperature:g} that are neither those at "
            "temperature 1 nor those divided by the temperature: audit it at --temperature 1"
        )
    return best


def tested(replies: Sequence[Sequence[Reply]], power: float) -> tuple[list[Draw], list[LawTest], list[str]]:
    """The tests of each prompt's samples. `power`: what reported probabilities are raised to."""
    draws: list[Draw] = []
    tests: list[LawTest | None] = []
    notes = []
    for number, outputs in enumerate(replies, 1):
        depth = judged_depth(outputs)
        if depth < max((len(reply.places) for reply in outputs), default=0):
            notes.append(
                f"prompt {number}: of each sample only the first {depth} tokens are tested, as a later one, or the end "
                "of a text, came without log-probabilities"
            )
        contexts = _contexts(outputs, depth)
        draws += [draw for places in contexts.values() for draw in _drawn(places, power)]
        tests.append(chi_square("first token", f"prompt {number}", _drawn(contexts[()], power)))
        frequent = sorted((path for path in contexts if len(path) == 1), key=lambda path: -len(contexts[path]))
        for path in frequent[:CONTEXTS]:
            where = f"prompt {number} after {path[0]!r}"
            tests.append(chi_square("second token", where, _drawn(contexts[path], power)))
    if not draws:
        notes.append("every list of most probable tokens has two with the same name, or none")
    elif any(reply.end_unreported for outputs in replies for reply in outputs):
        tests.append(temperature(draws))
        notes.append("missing tokens: the token that ended a sample is not reported, and may be listed")
    else:
        tests += [temperature(draws), missing(draws)]
    return draws, [test for test in tests if test is not None], notes


def judged_depth(outputs: Sequence[Reply]) -> int:
    """How many first tokens of a prompt's samples are tested.

    A draw must not be left out because of what was drawn: an end of the text that the endpoint does not report, or an
    accepted draft token without a list (llama.cpp), would make the others look too frequent. So the tokens are tested
    before the first place at which that happened to any sample.
    """
    depths = [len(reply.places) for reply in outputs if reply.end_unreported]
    depths += [number for reply in outputs for number, place in enumerate(reply.places) if not place.top]
    return min(depths, default=max((len(reply.places) for reply in outputs), default=0))


def _contexts(outputs: Iterable[Reply], depth: int) -> dict[tuple[str, ...], list[Place]]:
    """The first places by the tokens before them. Those are left out at which names of tokens are not told apart."""
    contexts: dict[tuple[str, ...], list[Place]] = defaultdict(list)
    for reply in outputs:
        names = tuple(place.token for place in reply.places)
        for number, place in enumerate(reply.places[:depth]):
            contexts[names[:number]].append(place)
    for places in contexts.values():
        if any(place.ambiguous for place in places):
            places.clear()
    return contexts


def _drawn(places: Iterable[Place], power: float) -> list[Draw]:
    return [draw for draw in (draw_of(place, power) for place in places) if draw is not None]


def draw_of(place: Place, power: float) -> Draw | None:
    """None if nothing is listed; with a power other than 1 also if the token is not: the sum over all other tokens of
    their powers is unknown, so that only the distribution among the listed ones is tested, which is exact."""
    values = power * np.array([value for _, value in place.top])
    if not len(values) or (power != 1 and place.rank is None):
        return None
    listed = np.exp(values) if power == 1 else np.exp(values - values.max())
    probabilities = np.append(listed, max(0.0, 1 - listed.sum()) if power == 1 else 0.0)
    cell = len(values) if place.rank is None else place.rank
    return Draw(place.token, tuple(token for token, _ in place.top), probabilities / probabilities.sum(), cell)
