"""Spans are derived from events while a session runs: what overlaps, what is idle, what was in vain."""

import asyncio
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from crossdraft.client.api import Generation
from crossdraft.session import events
from crossdraft.speculation.choice import Choice, Fixed, lock_step
from crossdraft.text.letters import Letters, to_bytes
from crossdraft.trace import timeline
from crossdraft.trace.timeline import DRAFTER, OUTPUT, TARGET, Judged, Span, Step, Watch, What, trace_events, watched
from crossdraft.types.messages import Branch, Draft, Drafted, OpenDrafter, OpenTarget, Pass, PassDone, SamplingOptions
from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.statistics import Kind
from crossdraft.types.trees import TokenTree
from crossdraft.verification.methods import COUPLED, SEEDED, SLRS, UNION, Method
from crossdraft.verification.walk import Emit, Ground, NeedDraftToken, NeedRow, Refused
from tests.clock import World
from tests.ports import MemoryDrafter, MemoryTarget, assignment, services_of, toys
from tests.tables import pair_of
from tests.trace.recordings import virtual_steps
from tests.verification.enumerating import EnumeratingChooser

FIRST = events.Open(1, OpenTarget((0,), SamplingOptions(), None))
DRAFTING = events.Open(2, OpenDrafter(Letters(""), SamplingOptions(), None, 0))
OTHER = events.Open(3, FIRST.request)
TREE = TokenTree((5, 6), (-1, 0))
PASSES = (What.PASS, What.MISS)
WORKS = (What.DRAFT, What.BRANCHES, What.SCORES, What.LATE, *PASSES)


def step(now: float, event: events.Event | None, *commands: events.Command, seconds=0.0, misses=0) -> Step:
    return Step(now, event, commands, seconds, misses)


def spans_of(*steps: Step, every: int = 10**6) -> list[Span]:
    """What is taken after each `every` steps, and at the end, by its beginning."""
    watch, spans = Watch(), list[Span]()
    for count, step in enumerate(steps, 1):
        watch.record(step)
        if count % every == 0:
            spans += watch.take()
    return sorted((*spans, *watch.take()), key=lambda span: span.begin)


def drafted(epoch: int, count: int, seconds: float, first: int = 0, branches: int = 0) -> events.Replied:
    made = tuple(Branch(number, 0, Letters("x"), (1,)) for number in range(branches))
    return events.Replied(2, Drafted(epoch, (DraftToken(1),) * count, seconds, first=first, branches=made))


def passed(number: int, seconds: float) -> events.Replied:
    return events.Replied(1, PassDone(number, (), seconds))


def emitted(kind: Kind, epoch: int = 1) -> events.Emitted:
    return events.Emitted(7, Letters("ab"), kind, 0, epoch, None, None)


def draft(epoch: int, adopt: int = 0) -> events.Send:
    return events.Send(2, Draft(epoch, 0, Letters(""), 2, adopt=adopt))


def sent(number: int, lane: int = 1) -> events.Send:
    return events.Send(lane, Pass(number, (), TREE))


ROUND = (
    step(100.0, None, FIRST, DRAFTING),
    step(100.01, events.Ready(1)),
    step(100.02, events.Ready(2), draft(1)),
    step(100.10, drafted(1, 2, 0.04), sent(1), seconds=0.01),
    step(100.25, passed(1, 0.10), emitted(Kind.ACCEPTED), emitted(Kind.CORRECTED), draft(2)),
)


def works(found: list[Span], lane: str) -> list[Span]:
    return [span for span in found if span.lane == lane and span.what in WORKS]


def of_kind(found: list[Span], *kinds: What) -> list[Span]:
    return [span for span in found if span.what in kinds]


def test_times_are_those_since_the_beginning_and_wire_is_what_the_model_did_not_take() -> None:
    found = spans_of(*ROUND)
    (work,) = works(found, DRAFTER)
    assert (work.begin, work.end) == pytest.approx((0.04, 0.08))  # 80 ms less 40 ms, half each way
    (work,) = works(found, TARGET)
    assert (work.begin, work.end) == pytest.approx((0.13, 0.23))  # sent at 110 ms: 140 ms less 100 ms
    assert (work.what, work.label, work.count, work.epoch) == (What.PASS, "pass, 2 nodes", 2, 1)


def test_messages_meet_the_work_that_they_ask_for() -> None:
    found = spans_of(*ROUND)
    messages = {(one.lane, one.what): one for one in of_kind(found, What.SENT, What.RECEIVED) if one.epoch == 1}
    for lane in (DRAFTER, TARGET):
        work = works(found, lane)[0]
        assert messages[lane, What.SENT].end == pytest.approx(work.begin)
        assert messages[lane, What.RECEIVED].begin == pytest.approx(work.end)
    assert messages[TARGET, What.SENT].begin == pytest.approx(0.11)


def test_epochs_follow_one_another() -> None:
    found = spans_of(*ROUND, step(100.3, drafted(2, 2, 0.01)))
    epochs = [(one.epoch, one.begin) for one in of_kind(found, What.EPOCH)]
    assert epochs == [(1, pytest.approx(0.02)), (2, pytest.approx(0.25))]


def test_refusals_hits_stalls_and_losses_are_marked() -> None:
    stall = events.SetTimer(events.Timer.STALL, 1, 0.05)
    found = spans_of(
        *ROUND[:4],
        step(100.25, passed(1, 0.10), emitted(Kind.CORRECTED), draft(2, adopt=4), stall),
        step(100.30, events.Expired(events.Timer.STALL, 1), sent(2)),
        step(100.35, events.Lost(1, OSError("it is gone")), OTHER),
        step(100.36, events.Ready(3), sent(1, lane=3)),
    )
    marks = {one.what: one for one in found}
    assert marks[What.REFUSED].begin == pytest.approx(0.25)
    assert marks[What.HIT].label == "branch 4 was adopted"
    assert marks[What.STALLED].begin == pytest.approx(0.30)
    assert "it is gone" in marks[What.LOST].label
    assert (marks[What.WAIT].begin, marks[What.WAIT].end) == (pytest.approx(0.25), pytest.approx(0.30))
    opened = [one.lane for one in of_kind(found, What.OPENED)]
    assert opened == [TARGET, DRAFTER, TARGET]  # the lost one's successor takes its lane


def test_targets_side_by_side_have_rows_of_their_own() -> None:
    found = spans_of(
        step(0.0, None, FIRST, OTHER),
        step(0.1, events.Ready(1), sent(1)),
        step(0.1, events.Ready(3), sent(1, lane=3)),
        step(0.3, passed(1, 0.2), emitted(Kind.BONUS)),
        step(0.4, events.Replied(3, PassDone(1, (), 0.2)), emitted(Kind.BONUS)),
    )
    assert [one.lane for one in of_kind(found, *PASSES)] == [TARGET, "target 2"]


def test_a_pass_for_a_row_miss_is_told_apart() -> None:
    miss = step(100.25, passed(1, 0.1), emitted(Kind.ACCEPTED), sent(2), misses=1)
    found = spans_of(*ROUND[:4], miss, step(100.4, passed(2, 0.1), emitted(Kind.ACCEPTED), sent(3), misses=1))
    assert [work.what for work in works(found, TARGET)] == [What.PASS, What.MISS]


def test_what_a_drafter_says_of_an_epoch_that_is_over_is_late() -> None:
    found = spans_of(*ROUND, step(100.26, drafted(1, 1, 0.02, first=2, branches=1)), step(100.4, drafted(2, 1, 0.02)))
    (late,) = of_kind(found, What.LATE)
    assert (late.epoch, late.label) == (1, "draft with branches, 1 draft tokens, 1 prepared continuations")


def test_replies_that_arrive_together_were_worked_for_one_after_another() -> None:
    found = spans_of(*ROUND[:3], step(100.10, drafted(1, 1, 0.03)), step(100.10, drafted(1, 1, 0.02, first=1)))
    one, other = works(found, DRAFTER)
    assert other.end - other.begin == pytest.approx(0.02)
    assert one.end <= other.begin + 1e-12


def test_events_wait_while_the_session_is_busy() -> None:
    found = spans_of(step(0.0, None, FIRST, seconds=0.2), step(0.1, events.Ready(1), sent(1), seconds=0.1))
    assert [(one.begin, one.end) for one in of_kind(found, What.SESSION)] == [(0.0, 0.2), (0.2, pytest.approx(0.3))]


WORLD = World(0.8, token=0.05, round_trip=0.4, tokens=60)
CHOICES = (lock_step(4), Fixed(Choice(12, min_draft_tokens=1, patience=0.3, branch_depth=2)), Fixed(Choice(0)))


@pytest.fixture(scope="module", params=range(len(CHOICES)))
def steps(request: pytest.FixtureRequest) -> list[Step]:
    return virtual_steps(WORLD, CHOICES[request.param])


@pytest.mark.parametrize("every", [3, 1000])
def test_nobody_works_on_two_things_at_once(steps: list[Step], every: int) -> None:
    found = spans_of(*steps, every=every)
    for lane in (DRAFTER, TARGET):
        mine = works(found, lane)
        assert all(work.begin <= work.end for work in mine)
        assert all(later.begin >= earlier.end - 1e-9 for earlier, later in pairwise(mine))


@pytest.mark.parametrize("every", [1, 7])
def test_what_is_taken_piece_by_piece_is_what_is_taken_at_the_end(steps: list[Step], every: int) -> None:
    whole, taken = spans_of(*steps), spans_of(*steps, every=every)

    def placed(spans: list[Span]) -> Counter[tuple[str, float, float, What, int]]:
        # Messages of drafters and their works may be placed a little differently.
        return Counter((one.lane, one.begin, one.end, one.what, one.epoch) for one in spans if one.lane != DRAFTER)

    assert placed(whole) == placed(taken)
    assert sum(one.count for one in works(taken, DRAFTER)) == sum(one.count for one in works(whole, DRAFTER))


def test_tokens_passes_and_marks_are_those_of_the_session(steps: list[Step]) -> None:
    spans = spans_of(*steps, every=2)
    (counts,) = [one.counts for step in steps for one in step.commands if isinstance(one, events.Finished)]
    emitted = [one for step in steps for one in step.commands if isinstance(one, events.Emitted)]
    assert [(one.what.value, one.label) for one in spans if one.lane == OUTPUT] == [
        (one.kind.value, to_bytes(one.letters).decode()) for one in emitted
    ]
    assert sum(one.count for one in spans if one.what is What.SESSION) == len(emitted)
    seen = Counter(one.what for one in spans)
    assert (seen[What.PASS] + seen[What.MISS], seen[What.MISS]) == (counts.passes, counts.row_misses)
    assert (seen[What.HIT], seen[What.STALLED]) == (counts.branches_hit, counts.stalls)
    assert seen[What.REFUSED] == counts.corrected
    refused = [one for one in spans if one.what is What.REFUSED]
    assert all(one.lane == timeline.VERIFICATION and one.begin == one.end for one in refused)


def test_trace_events_have_a_row_for_each_lane_and_messages_may_overlap() -> None:
    spans = spans_of(*ROUND)
    drawn = trace_events(spans)["traceEvents"]
    rows = {one["args"]["name"]: one["tid"] for one in drawn if one["ph"] == "M"}
    assert set(rows) == {one.lane for one in spans}
    (work,) = [one for one in drawn if one["ph"] == "X" and one["cat"] == What.PASS]
    assert (work["tid"], work["ts"], work["dur"]) == (rows[TARGET], pytest.approx(0.13e6), pytest.approx(0.1e6))
    begun, over = ({one["id"] for one in drawn if one["ph"] == ph} for ph in "be")
    assert begun == over
    assert len(begun) == len(of_kind(spans, What.SENT, What.RECEIVED))


async def test_a_generation_tells_its_watch_before_the_tokens_that_came_of_it() -> None:
    target, drafter = toys()
    watch = Watch()
    services = services_of(MemoryTarget(toy=target), MemoryDrafter(toy=drafter))
    running = Generation(assignment(controller=lock_step(3)), services, watch=watch)
    seen: list[Span] = []
    tokens = 0
    async with asyncio.timeout(300), running:
        async for token in running:
            seen += watch.take()
            tokens += 1
            made = [one for one in seen if one.lane == OUTPUT]
            assert len(made) >= tokens
            assert made[tokens - 1].what.value == token.kind.value
    seen += watch.take()
    assert sum(one.what in (What.PASS, What.MISS) for one in seen) == running.statistics.passes


@pytest.mark.parametrize("method", [UNION, COUPLED], ids=lambda one: one.name)
def test_of_a_draft_token_p_q_chance_and_verdict_are_told(method: Method) -> None:
    """The guide's example: accepted with min(1, p/q)."""
    judged: list[Judged] = []
    pair = pair_of(("a", "b"), ("a", "b"))
    walk = watched(method, judged).walk(Ground(pair, EnumeratingChooser([])))
    p, q = Row(np.array([0, 1]), np.array([0.2, 0.8])), Row(np.array([0, 1]), np.array([0.5, 0.5]))
    answer, drafted = None, [DraftToken(1, q), DraftToken(0, q)]
    for token, verdict in ((1, "accepted"), (0, "refused: 'b' takes its place")):
        while not (judged and judged[-1].verdict == verdict):
            match walk.send(answer):
                case NeedDraftToken(path):
                    answer = None if path else drafted.pop(0)
                case NeedRow(known=known):
                    answer = None if known else p
                case Emit() | Refused():
                    answer = None
        ratio = f", chance {min(1, p.probability(token) / 0.5):.3f}"
        chance = ratio if method is UNION else ""  # the other judges texts
        assert f"q 0.500, p {p.probability(token):.3f}{chance}, " in str(judged[-1])
    assert [one.letters for one in judged] == ["b", "a"]


def test_a_token_that_a_longer_one_replaces_is_refused_though_the_text_agrees() -> None:
    judged: list[Judged] = []
    walk = watched(UNION, judged).walk(Ground(pair_of(("a", "aa"), ("a",)), EnumeratingChooser([])))
    p, answers = Row(np.array([0, 1]), np.array([0.2, 0.8])), [DraftToken(0, Row(np.array([0]), np.ones(1)))]
    step = next(walk)
    while not judged:
        asked = isinstance(step, NeedRow) and not step.known
        step = walk.send(answers.pop() if step == NeedDraftToken() else p if asked else None)
    assert str(judged[0]) == "'a': q 1.000, p 0.200, chance 0.200, refused: 'aa' takes its place"


@pytest.mark.parametrize("method", [UNION, SEEDED, SLRS], ids=lambda one: one.name)
async def test_each_draft_token_that_was_asked_for_is_told(method: Method) -> None:
    target, drafter = toys()
    watch = Watch()
    services = services_of(MemoryTarget(toy=target), MemoryDrafter(toy=drafter))
    given = assignment(method=method, controller=lock_step(3))
    running = Generation(given, services, watch=watch)
    async with asyncio.timeout(300), running:
        kinds = Counter([token.kind async for token in running])
    told = [one.label for one in watch.take() if one.what is What.JUDGED]
    assert told
    assert sum("takes its place" in one for one in told) <= kinds[Kind.CORRECTED]
    assert all(one.endswith(("accepted", "takes its place")) for one in told)
    assert all(("chance" in one) == (method is UNION) for one in told)
