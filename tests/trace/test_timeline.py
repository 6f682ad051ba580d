"""Spans are derived from events: what overlaps, what is idle, what was in vain."""

from itertools import pairwise

import pytest

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
from crossdraft.text.letters import Letters
from crossdraft.trace.recording import Recording, Step
from crossdraft.trace.timeline import MarkKind, ServiceRole, Task, Timeline, Track, Work, spans_of
from crossdraft.types.messages import Branch, Draft, Drafted, OpenDrafter, OpenTarget, Pass, PassDone, SamplingOptions
from crossdraft.types.rows import DraftToken
from crossdraft.types.statistics import Kind
from crossdraft.types.trees import TokenTree
from tests.clock import World
from tests.trace.recordings import header_of, virtual_recording

TARGET = Open(1, OpenTarget((0,), SamplingOptions(), None))
DRAFTER = Open(2, OpenDrafter(Letters(""), SamplingOptions(), None, 0))
OTHER = Open(3, TARGET.request)
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
    step(100.0, None, TARGET, DRAFTER),
    step(100.01, Ready(1)),
    step(100.02, Ready(2), draft(1)),
    step(100.10, drafted(1, 2, 0.04), sent(1), seconds=0.01),
    step(100.25, passed(1, 0.10), emitted(Kind.ACCEPTED), emitted(Kind.CORRECTED), draft(2)),
)


def works(found: Timeline, role: ServiceRole) -> list[Work]:
    return [work for work in found.works if work.track.role is role]


def test_times_are_those_since_the_beginning_and_wire_is_what_the_model_did_not_take() -> None:
    found = timeline(*ROUND)
    (work,) = works(found, ServiceRole.DRAFTER)
    assert (work.begin, work.end) == pytest.approx((0.04, 0.08))  # 80 ms less 40 ms, half each way
    (work,) = works(found, ServiceRole.TARGET)
    assert (work.begin, work.end) == pytest.approx((0.13, 0.23))  # sent at 110 ms: 140 ms less 100 ms
    assert (work.task, work.size, work.tokens, work.epoch) == (Task.PASS, 2, 2, 1)


def test_messages_meet_the_work_that_they_ask_for() -> None:
    found = timeline(*ROUND)
    ends = {(message.track.role, message.outward): message for message in found.messages if message.epoch == 1}
    for role in ServiceRole:
        work = works(found, role)[0]
        assert ends[role, True].end == pytest.approx(work.begin)
        assert ends[role, False].begin == pytest.approx(work.end)
    assert ends[ServiceRole.TARGET, True].begin == pytest.approx(0.11)


def test_epochs_follow_one_another() -> None:
    found = timeline(*ROUND, step(100.3, drafted(2, 2, 0.01)))
    assert [(era.epoch, era.begin, era.end) for era in found.epochs] == [
        (1, pytest.approx(0.02), pytest.approx(0.25)),
        (2, pytest.approx(0.25), pytest.approx(0.3)),
    ]


def test_refusals_hits_stalls_and_losses_are_marked() -> None:
    found = timeline(
        *ROUND[:4],
        step(100.25, passed(1, 0.10), emitted(Kind.CORRECTED), draft(2, adopt=4), SetTimer(Timer.STALL, 1, 0.05)),
        step(100.30, Expired(Timer.STALL, 1), sent(2)),
        step(100.35, Lost(1, OSError("it is gone")), OTHER),
        step(100.36, Ready(3), sent(1, lane=3)),
    )
    marks = {mark.what: mark for mark in found.marks}
    assert marks[MarkKind.REFUSED].at == pytest.approx(0.25)
    assert marks[MarkKind.HIT].text == "branch 4 was adopted"
    assert marks[MarkKind.STALLED].at == pytest.approx(0.30)
    assert "it is gone" in marks[MarkKind.LOST].text
    assert [(wait.begin, wait.end) for wait in found.waits] == [(pytest.approx(0.25), pytest.approx(0.30))]
    assert (found.figures.refused, found.figures.hits, found.figures.stalls) == (1, 1, 1)
    assert found.tracks == (
        Track(ServiceRole.DRAFTER),
        Track(ServiceRole.TARGET),
    )  # the lost one's successor takes its track


def test_targets_side_by_side_have_rows_of_their_own() -> None:
    found = timeline(
        step(0.0, None, TARGET, OTHER),
        step(0.1, Ready(1), sent(1)),
        step(0.1, Ready(3), sent(1, lane=3)),
        step(0.3, passed(1, 0.2), emitted(Kind.BONUS)),
        step(0.4, Replied(3, PassDone(1, (), 0.2)), emitted(Kind.BONUS)),
    )
    assert found.tracks == (Track(ServiceRole.TARGET), Track(ServiceRole.TARGET, 1))
    assert [work.track.place for work in found.works] == [0, 1]
    assert found.figures.idle_share == pytest.approx(1 - (0.2 + 0.3) / 0.6)
    assert found.figures.model_share == pytest.approx(0.4 / 0.6)


def test_a_pass_for_a_row_miss_is_told_apart() -> None:
    miss = step(100.25, passed(1, 0.1), emitted(Kind.ACCEPTED), sent(2), misses=1)
    found = timeline(*ROUND[:4], miss, step(100.4, passed(2, 0.1), emitted(Kind.ACCEPTED), sent(3), misses=1))
    assert [work.task for work in works(found, ServiceRole.TARGET)] == [Task.PASS, Task.MISS]
    assert found.figures.row_misses == 1


def test_what_a_drafter_says_of_an_epoch_that_is_over_is_late() -> None:
    found = timeline(*ROUND, step(100.26, drafted(1, 1, 0.02, first=2, branches=1)), step(100.4, drafted(2, 1, 0.02)))
    late = [work for work in works(found, ServiceRole.DRAFTER) if work.late]
    assert [(work.epoch, work.task, work.branches) for work in late] == [(1, Task.BRANCHES, 1)]


def test_replies_that_arrive_together_were_worked_for_one_after_another() -> None:
    found = timeline(*ROUND[:3], step(100.10, drafted(1, 1, 0.03)), step(100.10, drafted(1, 1, 0.02, first=1)))
    one, other = works(found, ServiceRole.DRAFTER)
    assert other.end - other.begin == pytest.approx(0.02)
    assert one.end <= other.begin + 1e-12


def test_events_wait_while_the_session_is_busy() -> None:
    found = timeline(step(0.0, None, TARGET, seconds=0.2), step(0.1, Ready(1), sent(1), seconds=0.1))
    assert [(one.begin, one.end) for one in found.handled] == [(0.0, 0.2), (0.2, pytest.approx(0.3))]
    assert found.passes == (pytest.approx(0.3),)


def test_an_empty_recording_has_an_empty_timeline() -> None:
    found = spans_of(Recording(header_of(), ()))
    assert (found.works, found.tracks, found.figures.tokens) == ((), (), 0)
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
    assert sum(work.tokens for work in found.works) == counts.tokens
    assert figures.model_share * figures.seconds == pytest.approx(counts.target_seconds, rel=0.02)


@pytest.mark.parametrize("controller", CHOICES)
def test_nobody_works_on_two_things_at_once(controller: Fixed) -> None:
    found = spans_of(virtual_recording(WORLD, controller))
    for track in found.tracks:
        mine = [work for work in found.works if work.track == track]
        assert all(work.begin <= work.end for work in mine)
        assert all(later.begin >= earlier.end - 1e-9 for earlier, later in pairwise(mine))
