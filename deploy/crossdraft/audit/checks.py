"""What an audit asks an endpoint, and what it makes of the answers."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from crossdraft.audit.endpoint import CannotBeAudited, Endpoint, Place, Reply
from crossdraft.audit.statistics import Draw, LawTest, Power, chi_square, holm, missing, power_of, temperature
from crossdraft.config.commands import AuditSizes

OK, FAULT, NOT_CHECKED = "ok", "FAULT", "not checked"
CONTEXTS = 4  # first tokens of each prompt, the most frequent ones, after which the second token is tested


@dataclass(frozen=True)
class AuditPlan(AuditSizes):
    """What is asked, all of it fixed before the first answer."""

    prompts: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises ValueError."""
        largest = max(self.greedy, self.sampled)
        if largest > len(self.prompts):
            raise ValueError(f"{largest} prompts are to be used and there are {len(self.prompts)}: give --prompts FILE")
        if not 0 < self.level < 1:
            raise ValueError(f"--level must be between 0 and 1, got {self.level}")
        if not self.greedy and not (self.sampled and self.samples):
            raise ValueError("nothing is checked: --greedy, and --sampled or --samples are 0")

    def requests(self, endpoint: Endpoint, reference: Endpoint | None) -> int:
        """How many will be sent to both together, without those that are sent again."""
        batches = -(-self.samples // endpoint.abilities.choices) if endpoint.abilities.top else 0
        return self.sampled * batches + self.greedy * (1 if reference is None else 2)


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
    gap: float  # nats by which the token is less probable
    at_least: bool  # that is all that can be told: the token is not listed
    text: str  # what came, and in place of what


@dataclass(frozen=True)
class Result:
    """All that an audit found."""

    checks: tuple[Check, ...]
    differences: tuple[Difference, ...]
    tests: tuple[LawTest, ...]
    adjusted: tuple[float, ...]  # p-value of each test, corrected for their number
    power: Power | None  # None: no distribution was tested

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.checks if check.verdict == FAULT)


async def audit(plan: AuditPlan, endpoint: Endpoint, reference: Endpoint | None) -> Result:
    """Runs all checks. Raises CannotBeAudited."""
    if reference is not None and not reference.abilities.top:
        raise CannotBeAudited(f"the reference {reference.url} reports no log-probabilities, which tell ties")
    if reference is None and not endpoint.abilities.top:
        raise CannotBeAudited(
            f"{endpoint.url} reports no log-probabilities (`logprobs`): start it with them, or compare greedy texts "
            "with those of a reference that does (--reference-url URL, or --model MODEL)"
        )
    checks, differences = await greedy(plan, endpoint, reference)
    draws, tests, notes = await laws(plan, endpoint)
    adjusted = holm([test.p for test in tests])
    for kind in dict.fromkeys(test.kind for test in tests):
        mine = [(p, test) for p, test in zip(adjusted, tests, strict=True) if test.kind == kind]
        p, worst = min(mine, key=lambda test: test[0])
        count = f"{len(mine)} test{'s' * (len(mine) > 1)}"
        finding = f"{count}, smallest corrected p {p:.2g}: {worst.finding}, {worst.where}"
        checks.append(Check(kind, FAULT if p < plan.level else OK, finding))
    checks += [Check("distributions", NOT_CHECKED, note) for note in notes]
    power = power_of(draws, len(tests), plan.level) if tests else None
    return Result(tuple(checks), tuple(differences), tuple(tests), tuple(adjusted), power)


async def greedy(
    plan: AuditPlan, endpoint: Endpoint, reference: Endpoint | None
) -> tuple[list[Check], list[Difference]]:
    """Whether greedy texts are the reference's, and whether each token is the most probable one."""
    prompts = plan.prompts[: plan.greedy]
    if not prompts:
        return [Check("greedy text", NOT_CHECKED, "--greedy 0")], []
    ours = await _outputs(endpoint, prompts, plan.greedy_tokens)
    theirs = ours if reference is None else await _outputs(reference, prompts, plan.greedy_tokens)
    pairs = list(zip(ours, theirs, strict=True))
    compare = {
        "greedy by its own log-probabilities": [_own_gap(*reply) for reply in enumerate(ours, 1)],
        "greedy text, against the reference": [compared(number, *pair) for number, pair in enumerate(pairs, 1)],
    }
    done = [bool(endpoint.abilities.top), reference is not None]
    checks, differences = [], []
    for (name, found), able in zip(compare.items(), done, strict=True):
        if able:
            differences += [difference for difference in found if difference is not None]
            checks.append(_judged(name, found, plan.tolerance))
    return checks + [_values(pairs, plan.tolerance)] * all(done), differences


async def _outputs(endpoint: Endpoint, prompts: Sequence[str], tokens: int) -> list[Reply]:
    return [reply for (reply,) in await asyncio.gather(*(endpoint.ask(prompt, tokens, 0.0) for prompt in prompts))]


def _own_gap(prompt: int, reply: Reply) -> Difference | None:
    """The token of a greedy text that is farthest below the most probable one; None if there is none below."""
    gaps = [place.top[0][1] - place.log_probability if place.top else 0.0 for place in reply.places]
    if max(gaps, default=0.0) <= 0:
        return None
    worst = int(np.argmax(gaps))
    place = reply.places[worst]
    return Difference(prompt, worst + 1, gaps[worst], False, f"{place.token!r} in place of {place.top[0][0]!r}")


def compared(prompt: int, ours: Reply, theirs: Reply) -> Difference | None:
    """Where a text leaves the reference's, by the log-probabilities of the reference; None if it does not.

    It goes on with the token that the endpoint names, or without that the most probable listed one that fits.
    """
    mine, told, before = ours.text.encode(), theirs.text.encode(), b""
    if mine == told:
        return None
    for number, place in enumerate(theirs.places):
        after = before + place.raw
        if told.startswith(before) and not mine.startswith(after):
            others = dict(listed for listed in place.top if listed[0] and listed[0] != place.token)
            rest, named = mine[len(before) :], b"".join(place.raw for place in ours.places[:number]) == before
            names = [place.token for place in ours.places[number : number + 1]] if named else []
            names = names or [name for name in others if rest.startswith(name.encode())]
            name = names[0] if names and names[0] in others else ""
            came = name or rest[:12].decode(errors="replace") or "the end of the text"
            # The end of a text may be a token whose name nobody says.
            value = others.get(name, place.top[-1][1] if ours.places or rest else place.log_probability)
            gap = place.log_probability - value
            return Difference(prompt, number + 1, gap, not name, f"{came!r} in place of {place.token!r}")
        before = after
    return Difference(prompt, len(theirs.places), 0.0, True, "the reference reports no token there")


def _judged(name: str, found: Sequence[Difference | None], tolerance: float) -> Check:
    """Args: found: of each text, None where it is as it should be."""
    some = [difference for difference in found if difference is not None]
    faults = sum(difference.gap > tolerance for difference in some)
    unknown = sum(difference.gap <= tolerance and difference.at_least for difference in some)
    ties = len(some) - faults - unknown
    counts = f"{len(found) - len(some)} equal, {ties} ties (gap up to {tolerance:g} nats), {faults} faults"
    counts += f", {unknown} that cannot be judged" * bool(unknown)
    return Check(name, FAULT if faults else NOT_CHECKED if unknown else OK, f"{len(found)} texts: {counts}")


def _values(pairs: Sequence[tuple[Reply, Reply]], tolerance: float) -> Check:
    """Log-probabilities of the tokens that both have after the same text."""
    name, gaps = "log-probabilities, against the reference", []
    for ours, theirs in pairs:
        for mine, other in zip(ours.places, theirs.places, strict=False):
            if mine.token != other.token:
                break
            if mine.top:  # llama.cpp reports no probability of a draft token that it accepted, and calls it 1
                gaps.append(abs(mine.log_probability - other.log_probability))
    if not gaps:
        return Check(name, NOT_CHECKED, "no greedy text begins with the same token")
    mean = fmean(gaps)
    finding = f"{len(gaps)} tokens: {mean:.2g} nats apart on average, {max(gaps):.2g} at most"
    return Check(name, FAULT if mean > tolerance else OK, finding)


async def laws(plan: AuditPlan, endpoint: Endpoint) -> tuple[list[Draw], list[LawTest], list[str]]:
    """Sampled tokens against the log-probabilities that came with them: draws, tests, and what could not be tested."""
    if not plan.sampled or not plan.samples:
        return [], [], ["--sampled or --samples is 0"]
    if not endpoint.abilities.top:
        return [], [], ["the endpoint reports no log-probabilities"]
    return tested([await _samples(plan, endpoint, prompt) for prompt in plan.prompts[: plan.sampled]])


async def _samples(plan: AuditPlan, endpoint: Endpoint, prompt: str) -> list[Reply]:
    size = endpoint.abilities.choices
    counts = [min(size, plan.samples - begin) for begin in range(0, plan.samples, size)]
    asked = (endpoint.ask(prompt, plan.tokens, 1.0, choices=count) for count in counts)
    return [reply for replies in await asyncio.gather(*asked) for reply in replies]


def tested(replies: Sequence[Sequence[Reply]]) -> tuple[list[Draw], list[LawTest], list[str]]:
    """The tests of each prompt's samples."""
    draws: list[Draw] = []
    tests: list[LawTest | None] = []
    notes = []
    for number, outputs in enumerate(replies, 1):
        depth = judged_depth(outputs)
        if depth < max(len(reply.places) for reply in outputs):
            notes.append(
                f"prompt {number}: of each sample only the first {depth} tokens are tested, as a later one, or the end "
                "of a text, came without log-probabilities"
            )
        contexts = _contexts(outputs, depth)
        draws += [draw for places in contexts.values() for draw in places]
        tests.append(chi_square("first token", f"prompt {number}", contexts[()]))
        frequent = sorted((path for path in contexts if len(path) == 1), key=lambda path: -len(contexts[path]))
        for path in frequent[:CONTEXTS]:
            tests.append(chi_square("second token", f"prompt {number} after {path[0]!r}", contexts[path]))
    if not draws:
        notes.append("every list of most probable tokens has two with the same name, or none")
    else:
        tests.append(temperature(draws))
    if draws and any(reply.end_unreported for outputs in replies for reply in outputs):
        notes.append("missing tokens: the token that ended a sample is not reported, and may be listed")
    elif draws:
        tests.append(missing(draws))
    return draws, [test for test in tests if test is not None], notes


def judged_depth(outputs: Sequence[Reply]) -> int:
    """How many first tokens of a prompt's samples are tested.

    Those before the first place at which any sample has no list: its text ends unreported, or a draft token was
    accepted (llama.cpp). To leave out draws because of what was drawn would make the others look too frequent.
    """
    depths = [len(reply.places) for reply in outputs if reply.end_unreported]
    depths += [number for reply in outputs for number, place in enumerate(reply.places) if not place.top]
    return min(depths, default=max(len(reply.places) for reply in outputs))


def _contexts(outputs: Iterable[Reply], depth: int) -> dict[tuple[str, ...], list[Draw]]:
    """The first draws by the tokens before them. Those are left out at which names of tokens are not told apart."""
    contexts: defaultdict[tuple[str, ...], list[Place]] = defaultdict(list)
    for reply in outputs:
        names = tuple(place.token for place in reply.places)
        for number, place in enumerate(reply.places[:depth]):
            contexts[names[:number]].append(place)
    told = {path: not any(place.ambiguous for place in places) for path, places in contexts.items()}
    return {(): []} | {path: [draw_of(place) for place in places] for path, places in contexts.items() if told[path]}


def draw_of(place: Place) -> Draw:
    """Args: place: with a list of tokens."""
    listed = np.exp([value for _, value in place.top])
    probabilities = np.append(listed, max(0.0, 1 - listed.sum()))
    cell = len(listed) if place.rank is None else place.rank
    return Draw(place.token, tuple(token for token, _ in place.top), probabilities / probabilities.sum(), cell)
