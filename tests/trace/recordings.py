"""Recordings of sessions over toys, without files and without waiting."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from crossdraft.session.assignment import Secrets
from crossdraft.session.events import Command, Event, Finished, IllegalEventError, Open, Ready, Replied, Send
from crossdraft.session.session import Session
from crossdraft.speculation.choice import Controller
from crossdraft.text.letters import Letters, Side
from crossdraft.trace.recording import FileRecorder, Header, Recording, Step
from crossdraft.trace.replay import assignment_of
from crossdraft.types.messages import Description, OpenDrafter, PassDone, Sample, SamplingOptions
from crossdraft.types.request import GenerationRequest, Grammar, Overlap
from crossdraft.types.rows import Row
from crossdraft.verification.chooser import RandomChooser
from tests.clock import Run, World, answers
from tests.tables import ToyDrafter, ToyTarget
from tests.text.kinds import kind
from tests.verification.toys import row_of

SECRETS = Secrets(noise=2**63 + 1, audit=2, chooser=2**127 + 3)
LIKELY = set("the ")


def described(name: str) -> Description:
    return kind(name).described(stops=(kind(name).id_of(kind(name).end),), context=512)


def header_of(method: str = "coupled", overlap: Overlap = Overlap.OFF, drafts: bool = True) -> Header:
    """What a recording of a small request begins with."""
    request = GenerationRequest(
        "The quick", method=method, num_speculative_tokens=3, max_tokens=12, overlap=overlap, ignore_eos=True,
        options=SamplingOptions(grammar=Grammar.regex("(?s:.*)")),
    )  # fmt: skip
    drafter = described("llama2") if drafts else None
    return Header("1.2.3", 1.75e9, request, described("gpt2"), drafter, SECRETS)


class Recorded:
    """A session that keeps its steps; each takes a millisecond."""

    def __init__(self, session: Session) -> None:
        self.steps: list[Step] = []
        self._session = session

    @property
    def counts(self) -> object:
        """As the session's own."""
        return self._session.counts

    def start(self, now: float) -> list[Command]:
        """As the session's own."""
        return self._kept(None, now, self._session.start(now))

    def handle(self, event: Event, now: float) -> list[Command]:
        """As the session's own."""
        return self._kept(event, now, self._session.handle(event, now))

    def _kept(self, event: Event | None, now: float, commands: list[Command]) -> list[Command]:
        made = self._session.take_choices()
        self.steps.append(Step(now, event, tuple(commands), 0.001, self._session.counts.row_misses, choices=made))
        return commands


def rounds_of(steps: list[Step]) -> Iterator[tuple[Step, ...]]:
    """Each ends with a pass's return."""
    kept: list[Step] = []
    for step in steps:
        kept.append(step)
        if isinstance(step.event, Replied) and isinstance(step.event.reply, PassDone):
            yield tuple(kept)
            kept = []
    if kept:
        yield tuple(kept)


def toy_recording(header: Header) -> Recording:
    """A session that the header describes, over toys that answer in order, 10 ms after they were asked."""
    session = Recorded(Session(assignment_of(header)))
    toys, now = services(header), 5.0
    waiting = deque(events_of(session.start(now), *toys))
    while waiting:
        now += 0.01
        event = waiting.popleft()
        try:
            commands = session.handle(event, now)
        except IllegalEventError:
            continue  # a toy has answered an epoch that is over
        if any(isinstance(command, Finished) for command in commands):
            break
        waiting.extend(events_of(commands, *toys))
    return Recording(header, tuple(rounds_of(session.steps)))


def babble(letters: Sequence[Letters], context: str) -> NDArray[np.float64]:
    """A distribution that depends on all before, and in which a few single letters are likely; shape
    (len(letters),).
    """
    rng = np.random.default_rng(crc32(context.encode()))
    said = np.array([float(text in LIKELY) for text in letters])
    weights = said * rng.random(len(letters)) + 1e-4 * np.array([float(bool(text)) for text in letters])
    return np.asarray(weights / weights.sum())


class Target(ToyTarget):
    """Babbles."""

    def distribution(self, path: tuple[int, ...]) -> NDArray[np.float64]:
        return babble(kind("gpt2").vocabulary(Side.TARGET).letters, f"target {path}")


class Drafter(ToyDrafter):
    """Likewise."""

    def distribution(self, text: Letters) -> Row:
        distribution = babble(self.letters, f"drafter {text}")
        if self.allowed is not None:
            return row_of(self.allowed, distribution[self.allowed])
        ids = np.flatnonzero(distribution)
        return Row(ids, distribution[ids])


def services(header: Header) -> tuple[Target, Drafter]:
    """Toys with the vocabularies of a header."""
    chooser = RandomChooser(np.random.default_rng(4))
    target = Target(header.target.vocabulary_size, 64, chooser)
    return target, Drafter(kind("llama2").vocabulary(Side.DRAFTER).letters, chooser)


def events_of(commands: list[Command], target: Target, drafter: Drafter) -> Iterator[Event]:
    """What comes of commands; a pass takes the model 4 ms, and its samples are drawn at once."""
    for command in commands:
        match command:
            case Open(lane, request):
                if isinstance(request, OpenDrafter):
                    drafter.allowed = request.allowed
                yield Ready(lane)
            case Send(lane, request):
                for reply in answers(request, target, drafter):
                    if isinstance(reply, PassDone):
                        nodes = (Sample(node.token, -1.0) if isinstance(node, Sample) else node for node in reply.nodes)
                        reply = replace(reply, nodes=tuple(nodes), seconds=0.004)
                    yield Replied(lane, reply)


def virtual_recording(world: World, controller: Controller) -> Recording:
    """A session on a virtual clock, from its first command to its last."""
    run = Run(world, controller)
    recorded = Recorded(run.session)
    run.session = recorded  # type: ignore[assignment]
    run.run()
    return Recording(header_of("standard"), tuple(rounds_of(recorded.steps)))


def save(recording: Recording, path: Path) -> Path:
    """Writes it as a session would."""
    recorder = FileRecorder(path, recording.header)
    for step in recording.steps:
        recorder.record(step)
    recorder.close()
    assert recorder.wait() == ""
    return path
