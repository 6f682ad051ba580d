"""Spans are derived from events: what overlaps, what is idle, what was in vain; while a session runs and afterwards."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from crossdraft.client.api import Generation
from crossdraft.session.events import (
    Command,
    Emitted,
    Event,
    Expired,
    Lost,
    Open,
    Ready,
    Replied,
    Send,
    SetTimer,
    Timer,
)
from crossdraft.speculation.choice import Choice, Fixed, lock_step
from crossdraft.text.letters import Letters, to_bytes
from crossdraft.trace.recording import Recording, Step
from crossdraft.trace.timeline import (
    DRAFTER,
    OUTPUT,
    PASSES,
    TARGET,
    VERIFICATION,
    WORKS,
    Span,
    Timeline,
    Watch,
    What,
    spans_of,
)
from crossdraft.types.messages import Branch, Draft, Drafted, OpenDrafter, OpenTarget, Pass, PassDone, SamplingOptions
from crossdraft.types.rows import DraftToken
from crossdraft.types.statistics import Kind
from crossdraft.types.trees import TokenTree
from tests.clock import World
from tests.ports import MemoryDrafter, MemoryTarget, assignment, services_of, toys
from tests.trace.recordings import header_of, virtual_recording

FIRST = Open(1, OpenTarget((0,), SamplingOptions(), None))
DRAFTING = Open(2, OpenDrafter(Letters(""), SamplingOptions(), None, 0))
OTHER = Open(3, FIRST.request)
TREE = TokenTree((5, 6), (-1, 0))


def step(now: float, event: Event | None, *commands: Command, seconds: float = 0.0, misses: int = 0) -> Step:
    return Step(now, event, commands, seconds, misses)


def timeline(*steps: Step) -> Timeline:
    return spans_of(Recording(header_of(), (steps,)))


def drafted(epoch: int, count: int, seconds: float, first: int = 0, branches: int = 0) -> Replied:
    made = tuple(Branch(number, 0, Letters("x"), (1,)) for number in range(branches))
    return Replied(2, Drafted(epoch, (DraftToken(1),) * count, seconds, first=first, branches=made))


def passed(number: int, seconds: float) -> Replied:
    return Replied(1, PassDone(number, (), seconds))


def emitted(kind: Kind, epoch: int = 1) -> Emitted:
    return Emitted(7, Letters("ab"), kind, 0, epoch, None, None)


def draft(epoch: int, adopt: int = 0) -> Send:
    return Send(2, Draft(epoch, 0, Letters(""), 2, adopt=adopt))


def sent(number: int, lane: int = 1) -> Send:
    return Send(lane, Pass(number, (), TREE))


ROUND = (
    step(100.0, None, FIRST, DRAFTING),
    step(100.01, Ready(1)),
    step(100.02, Ready(2), draft(1)),
    step(100.10, drafted(1, 2, 0.04), sent(1), seconds=0.01),
    step(100.25, passed(1, 0.10), emitted(Kind.ACCEPTED), emitted(Kind.CORRECTED), draft(2)),
)


def works(found: Timeline, lane: str) -> list[Span]:
    return [span for span in found.spans if span.lane == lane and span.what in WORKS]


def of_kind(found: Timeline, *kinds: What) -> list[Span]:
    return [span for span in found.spans if span.what in kinds]


def test_times_are_those_since_the_beginning_and_wire_is_what_the_model_did_not_take() -> None:
    found = timeline(*ROUND)
    (work,) = works(found, DRAFTER)
    assert (work.begin, work.end) == pytest.approx((0.04, 0.08))  # 80 ms less 40 ms, half each way
    (work,) = works(found, TARGET)
    assert (work.begin, work.end) == pytest.approx((0.13, 0.23))  # sent at 110 ms: 140 ms less 100 ms
    assert (work.what, work.label, work.count, work.epoch) == (What.PASS, "pass, 2 nodes, 2 tokens came of it", 2, 1)


def test_messages_meet_the_work_that_they_ask_for() -> None:
    found = timeline(*ROUND)
    messages = {(one.lane, one.what): one for one in of_kind(found, What.SENT, What.RECEIVED) if one.epoch == 1}
    for lane in (DRAFTER, TARGET):
        work = works(found, lane)[0]
        assert messages[lane, What.SENT].end == pytest.approx(work.begin)
        assert messages[lane, What.RECEIVED].begin == pytest.approx(work.end)
    assert messages[TARGET, What.SENT].begin == pytest.approx(0.11)


def test_epochs_follow_one_another() -> None:
    found = timeline(*ROUND, step(100.3, drafted(2, 2, 0.01)))
    epochs = [(one.epoch, one.begin) for one in of_kind(found, What.EPOCH)]
    assert epochs == [(1, pytest.approx(0.02)), (2, pytest.approx(0.25))]


def test_refusals_hits_stalls_and_losses_are_marked() -> None:
    found = timeline(
        *ROUND[:4],
        step(100.25, passed(1, 0.10), emitted(Kind.CORRECTED), draft(2, adopt=4), SetTimer(Timer.STALL, 1, 0.05)),
        step(100.30, Expired(Timer.STALL, 1), sent(2)),
        step(100.35, Lost(1, OSError("it is gone")), OTHER),
        step(100.36, Ready(3), sent(1, lane=3)),
    )
    marks = {one.what: one for one in found.spans}
    assert marks[What.REFUSED].begin == pytest.approx(0.25)
    assert marks[What.HIT].label == "branch 4 was adopted"
    assert marks[What.STALLED].begin == pytest.approx(0.30)
    assert "it is gone" in marks[What.LOST].label
    assert (marks[What.WAIT].begin, marks[What.WAIT].end) == (pytest.approx(0.25), pytest.approx(0.30))
    assert (found.figures.refused, found.figures.hits, found.figures.stalls) == (1, 1, 1)
    opened = [one.lane for one in of_kind(found, What.OPENED)]
    assert opened == [TARGET, DRAFTER, TARGET]  # the lost one's successor takes its lane


def test_targets_side_by_side_have_rows_of_their_own() -> None:
    found = timeline(
        step(0.0, None, FIRST, OTHER),
        step(0.1, Ready(1), sent(1)),
        step(0.1, Ready(3), sent(1, lane=3)),
        step(0.3, passed(1, 0.2), emitted(Kind.BONUS)),
        step(0.4, Replied(3, PassDone(1, (), 0.2)), emitted(Kind.BONUS)),
    )
    assert [one.lane for one in of_kind(found, *PASSES)] == [TARGET, "target 2"]
    assert found.figures.idle_share == pytest.approx(1 - (0.2 + 0.3) / 0.6)
    assert found.figures.model_share == pytest.approx(0.4 / 0.6)


def test_a_pass_for_a_row_miss_is_told_apart() -> None:
    miss = step(100.25, passed(1, 0.1), emitted(Kind.ACCEPTED), sent(2), misses=1)
    found = timeline(*ROUND[:4], miss, step(100.4, passed(2, 0.1), emitted(Kind.ACCEPTED), sent(3), misses=1))
    assert [work.what for work in works(found, TARGET)] == [What.PASS, What.MISS]
    assert found.figures.row_misses == 1


def test_what_a_drafter_says_of_an_epoch_that_is_over_is_late() -> None:
    found = timeline(*ROUND, step(100.26, drafted(1, 1, 0.02, first=2, branches=1)), step(100.4, drafted(2, 1, 0.02)))
    (late,) = of_kind(found, What.LATE)
    assert (late.epoch, late.label) == (1, "draft with branches, 1 draft tokens, 1 prepared continuations")


def test_replies_that_arrive_together_were_worked_for_one_after_another() -> None:
    found = timeline(*ROUND[:3], step(100.10, drafted(1, 1, 0.03)), step(100.10, drafted(1, 1, 0.02, first=1)))
    one, other = works(found, DRAFTER)
    assert other.end - other.begin == pytest.approx(0.02)
    assert one.end <= other.begin + 1e-12


def test_events_wait_while_the_session_is_busy() -> None:
    found = timeline(step(0.0, None, FIRST, seconds=0.2), step(0.1, Ready(1), sent(1), seconds=0.1))
    assert [(one.begin, one.end) for one in of_kind(found, What.SESSION)] == [(0.0, 0.2), (0.2, pytest.approx(0.3))]
    assert found.passes == (pytest.approx(0.3),)


def test_an_empty_recording_has_an_empty_timeline() -> None:
    found = spans_of(Recording(header_of(), ()))
    assert (found.spans, found.figures.tokens) == ((), 0)
    assert (found.figures.tokens_per_second, found.figures.tokens_per_pass) == (0.0, 0.0)


WORLD = World(0.8, token=0.05, round_trip=0.4, tokens=60)
CHOICES = (lock_step(4), Fixed(Choice(12, min_draft_tokens=1, patience=0.3, branch_depth=2)), Fixed(Choice(0)))


@pytest.mark.parametrize("controller", CHOICES)
def test_the_figures_are_those_of_the_session(controller: Fixed) -> None:
    recording = virtual_recording(WORLD, controller)
    found, end = spans_of(recording), recording.finished
    assert end is not None
    figures, counts = found.figures, end.counts
    assert (figures.tokens, figures.passes, figures.row_misses) == (counts.tokens, counts.passes, counts.row_misses)
    assert (figures.hits, figures.stalls) == (counts.branches_hit, counts.stalls)
    assert figures.refused == counts.kinds[Kind.CORRECTED]
    assert sum(one.count for one in of_kind(found, *PASSES)) == counts.tokens
    assert figures.model_share * figures.seconds == pytest.approx(counts.target_seconds, rel=0.02)


@pytest.fixture(scope="module", params=range(len(CHOICES)))
def recording(request: pytest.FixtureRequest) -> Recording:
    return virtual_recording(WORLD, CHOICES[request.param])


def watched(recording: Recording, every: int) -> Iterator[Span]:
    """What is taken after each `every` steps, and at the end."""
    watch = Watch()
    for count, step in enumerate(recording.steps, 1):
        watch.record(step)
        if count % every == 0:
            yield from watch.take()
    yield from watch.take()


def test_nobody_works_on_two_things_at_once(recording: Recording) -> None:
    found = spans_of(recording)
    for lane in (DRAFTER, TARGET):
        for spans in (found.spans, list(watched(recording, 3))):
            mine = sorted((one for one in spans if one.lane == lane and one.what in WORKS), key=lambda one: one.begin)
            assert all(work.begin <= work.end for work in mine)
            assert all(later.begin >= earlier.end - 1e-9 for earlier, later in pairwise(mine))


@pytest.mark.parametrize("every", [1, 7])
def test_what_is_taken_while_a_session_runs_is_its_timeline(recording: Recording, every: int) -> None:
    whole, taken = spans_of(recording), list(watched(recording, every))

    def placed(spans: Iterator[Span]) -> Counter[tuple[str, float, float, What, int]]:
        return Counter((one.lane, one.begin, one.end, one.what, one.epoch) for one in spans)

    # Messages of drafters and their works may be placed a little differently.
    theirs = placed(one for one in whole.spans if one.lane != DRAFTER)
    ours = placed(one for one in taken if one.lane != DRAFTER)
    assert not ours - theirs
    assert sum((theirs - ours).values()) <= 1  # a pass that was under way at the end has no way yet
    drafted = [one.count for one in taken if one.lane == DRAFTER and one.what in WORKS]
    assert sum(drafted) == sum(one.count for one in works(whole, DRAFTER))


def test_tokens_and_marks_are_those_of_the_session(recording: Recording) -> None:
    spans = list(watched(recording, 2))
    emitted = [one for step in recording.steps for one in step.commands if isinstance(one, Emitted)]
    assert [(one.what.value, one.label) for one in spans if one.lane == OUTPUT] == [
        (one.kind.value, to_bytes(one.letters).decode()) for one in emitted
    ]
    assert sum(one.count for one in spans if one.what is What.SESSION) == len(emitted)
    refused = [one for one in spans if one.what is What.REFUSED]
    assert len(refused) == sum(one.kind is Kind.CORRECTED for one in emitted)
    assert all(one.lane == VERIFICATION and one.begin == one.end for one in refused)


async def test_a_generation_tells_its_watch_before_the_tokens_that_came_of_it() -> None:
    target, drafter = toys()
    watch = Watch()
    services = services_of(MemoryTarget(toy=target), MemoryDrafter(toy=drafter))
    running = Generation(assignment(controller=lock_step(3)), services, watch=watch)
    seen: list[Span] = []
    tokens = 0
    async with asyncio.timeout(30), running:
        async for token in running:
            seen += watch.take()
            tokens += 1
            made = [one for one in seen if one.lane == OUTPUT]
            assert len(made) >= tokens
            assert made[tokens - 1].what.value == token.kind.value
    seen += watch.take()
    assert running.statistics is not None
    assert sum(one.what in (What.PASS, What.MISS) for one in seen) == running.statistics.passes
