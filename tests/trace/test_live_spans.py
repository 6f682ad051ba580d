"""Spans taken while a session runs are those of its timeline afterwards."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from crossdraft.client.api import Generation
from crossdraft.session.events import Emitted
from crossdraft.speculation.choice import Choice, Fixed, lock_step
from crossdraft.text.letters import to_bytes
from crossdraft.trace.live_spans import OUTPUT, VERIFICATION, Span, Watch, What
from crossdraft.trace.recording import Recording
from crossdraft.trace.timeline import ServiceRole, Timeline, named, spans_of
from tests.clock import World
from tests.ports import MemoryDrafter, MemoryTarget, assignment, services_of, toys
from tests.trace.recordings import virtual_recording

WORLD = World(0.8, token=0.05, round_trip=0.4, tokens=60)
CONTROLLERS = (lock_step(4), Fixed(Choice(12, min_draft_tokens=1, patience=0.3, branch_depth=2)), Fixed(Choice(0)))
DRAFTED = (What.DRAFT, What.BRANCHES, What.LATE)
WAYS = (What.SENT, What.RECEIVED)


def watched(recording: Recording, every: int) -> Iterator[tuple[Span, ...]]:
    """What is taken after each `every` steps, and at the end."""
    watch = Watch()
    for count, step in enumerate(recording.steps, 1):
        watch.record(step)
        if count % every == 0:
            yield watch.take()
    yield watch.take()


def all_of(recording: Recording, every: int) -> list[Span]:
    return [span for taken in watched(recording, every) for span in taken]


@pytest.fixture(scope="module", params=range(len(CONTROLLERS)))
def recording(request: pytest.FixtureRequest) -> Recording:
    return virtual_recording(WORLD, CONTROLLERS[request.param])


@pytest.fixture(scope="module")
def timeline(recording: Recording) -> Timeline:
    return spans_of(recording)


@pytest.mark.parametrize("every", [1, 7])
def test_passes_and_their_messages_are_those_of_the_timeline(
    recording: Recording, timeline: Timeline, every: int
) -> None:
    spans = all_of(recording, every)
    passes = [span for span in spans if span.what in (What.PASS, What.MISS)]
    expected = [work for work in timeline.works if work.track.role is ServiceRole.TARGET]
    assert [(one.begin, one.end, one.count, one.epoch) for one in passes] == [
        (work.begin, work.end, work.size, work.epoch) for work in expected
    ]
    ways = Counter((one.label, one.begin, one.end) for one in spans if one.lane == "target" and one.what in WAYS)
    # A pass that was under way at the end has no way yet.
    theirs = Counter(
        (one.name, one.begin, one.end) for one in timeline.messages if one.track.role is ServiceRole.TARGET
    )
    assert not ways - theirs
    assert sum((theirs - ways).values()) <= 1


def test_all_that_was_drafted_is_seen_once_and_nobody_works_on_two_things_at_once(
    recording: Recording, timeline: Timeline
) -> None:
    drafted = sorted((one for one in all_of(recording, 3) if one.what in DRAFTED), key=lambda one: one.begin)
    expected = [work for work in timeline.works if work.track.role is ServiceRole.DRAFTER]
    assert sum(one.count for one in drafted) == sum(work.size for work in expected)
    assert {one.lane for one in drafted} <= {named(track) for track in timeline.tracks}
    assert all(one.begin <= one.end for one in drafted)
    assert all(later.begin >= earlier.end - 1e-9 for earlier, later in pairwise(drafted))


def test_tokens_epochs_and_marks_are_those_of_the_session(recording: Recording, timeline: Timeline) -> None:
    spans = all_of(recording, 2)
    emitted = [one for step in recording.steps for one in step.commands if isinstance(one, Emitted)]
    tokens = [one for one in spans if one.lane == OUTPUT]
    assert [(one.what.value, one.label) for one in tokens] == [
        (one.kind.value, to_bytes(one.letters).decode()) for one in emitted
    ]
    assert sum(one.count for one in spans if one.what is What.SESSION) == len(emitted)
    assert [(one.epoch, one.begin) for one in spans if one.what is What.EPOCH] == [
        (era.epoch, era.begin) for era in timeline.epochs
    ]
    refused = [one for one in spans if one.what is What.REFUSED]
    assert len(refused) == timeline.figures.refused
    assert all(one.lane == VERIFICATION and one.begin == one.end for one in refused)
    waits = [(one.begin, one.end) for one in spans if one.what is What.WAIT]
    assert waits == [(wait.begin, wait.end) for wait in timeline.waits]


async def test_a_generation_tells_its_watch_before_the_tokens_that_came_of_it() -> None:
    target, drafter = toys()
    watch = Watch()
    services = services_of(MemoryTarget(toy=target), MemoryDrafter(toy=drafter))
    running = Generation(assignment(controller=lock_step(3)), services, num_speculative_tokens=3, watch=watch)
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
