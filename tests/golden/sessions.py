"""Recorded sessions in what stays when code moves: messages as their bytes on the wire, the rest as plain values.

A file is msgpack, compressed by zlib: the request, the secrets in hexadecimal, and steps of [now, event, commands].
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from crossdraft.rpc.generation import Generate
from crossdraft.session import events
from crossdraft.session.assignment import Secrets
from crossdraft.session.models import Models
from crossdraft.session.resolution import resolve
from crossdraft.session.session import Session
from crossdraft.trace.timeline import Step
from crossdraft.types.messages import Advance, Description, Draft, Drafted, OpenDrafter, Score, Scored
from crossdraft.types.request import GenerationRequest
from tests.golden.messages import DESCRIPTION, FROM_DRAFTER, FROM_TARGET, TO_DRAFTER, TO_FRONT, TO_TARGET

FOLDER = Path(__file__).parent / "sessions"
TO_DRAFTERS = (OpenDrafter, Draft, Advance, Score)


@dataclass(frozen=True, eq=False)
class Header:
    """The inputs of a session, its events aside."""

    request: GenerationRequest
    target: Description
    drafter: Description
    secrets: Secrets


@dataclass(frozen=True)
class Golden:
    """A session as a file has it."""

    header: Header
    steps: tuple[tuple[float, events.Event | None, list[Any]], ...]  # seconds, what came in, packed commands


def write(header: Header, steps: Iterable[Step], name: str) -> None:
    """A session as files: itself, and what its services said of themselves, which others share."""
    secrets = header.secrets
    kept = {
        "request": TO_FRONT.to_bytes(Generate(header.request)),
        "secrets": [f"{one:x}" for one in (secrets.noise, secrets.audit, secrets.chooser)],
        "steps": [[step.now, packed_event(step.event), list(map(packed_command, step.commands))] for step in steps],
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.session").write_bytes(zlib.compress(msgpack.packb(kept), 9))
    for role, description in (("target", header.target), ("drafter", header.drafter)):
        (FOLDER / f"{role}.description").write_bytes(zlib.compress(DESCRIPTION.to_bytes(description), 9))


def read(name: str) -> Golden:
    """A session from its files."""
    kept = msgpack.unpackb(zlib.decompress((FOLDER / f"{name}.session").read_bytes()))
    target, drafter = (
        DESCRIPTION.from_bytes(zlib.decompress((FOLDER / f"{role}.description").read_bytes()))
        for role in ("target", "drafter")
    )
    request = TO_FRONT.from_bytes(kept["request"]).request
    secrets = Secrets(*(int(one, 16) for one in kept["secrets"]))
    steps = tuple((now, _event(packed), commands) for now, packed, commands in kept["steps"])
    return Golden(Header(request, target, drafter, secrets), steps)


def decided(golden: Golden) -> Iterator[list[events.Command]]:
    """What a new session decides that is given the same events at the same times."""
    given = golden.header
    session = Session(resolve(given.request, Models.of(given.target, given.drafter), given.secrets, target_seconds=30))
    for now, event, _ in golden.steps:
        try:
            yield session.start(now) if event is None else session.handle(event, now)
        except events.IllegalEventError:
            yield []


def packed_event(event: events.Event | None) -> list[Any] | None:
    """An event in plain values; raises ValueError for one that these sessions have not."""
    match event:
        case None:
            return None
        case events.Ready(lane):
            return ["ready", lane]
        case events.Replied(lane, reply):
            drafts = isinstance(reply, Drafted | Scored)
            return ["drafter" if drafts else "target", lane, (FROM_DRAFTER if drafts else FROM_TARGET).to_bytes(reply)]
        case events.Expired(timer, number):
            return ["expired", timer.name, number]
    raise ValueError(f"no golden session has a {type(event).__name__}")


def _event(packed: list[Any] | None) -> events.Event | None:
    match packed:
        case None:
            return None
        case "ready", lane:
            return events.Ready(lane)
        case "drafter" | "target" as role, lane, raw:
            return events.Replied(lane, (FROM_DRAFTER if role == "drafter" else FROM_TARGET).from_bytes(raw))
        case _, timer, number:
            return events.Expired(events.Timer[timer], number)
    raise ValueError(f"{packed} is no event")


def packed_command(command: events.Command) -> list[Any]:
    """A command in plain values."""
    match command:
        case events.Open(lane, request, after):
            return ["open", lane, _request(request), after]
        case events.Send(lane, request):
            return ["send", lane, _request(request)]
        case events.Close(lane, blame):
            return ["close", lane, blame]
        case events.SetTimer(timer, number, seconds):
            return ["timer", timer.name, number, seconds]
        case events.Emitted():
            return ["emitted", command.token, command.letters.encode(), command.kind.value, command.offset,
                    command.epoch, command.log_probability, command.kept]  # fmt: skip
        case events.Finished(reason, counts):
            return ["finished", reason.value, counts.tokens, counts.passes, counts.epochs, counts.draft_tokens]


def _request(request: Any) -> bytes:
    return (TO_DRAFTER if isinstance(request, TO_DRAFTERS) else TO_TARGET).to_bytes(request)


def verdicts(golden: Golden) -> dict[str, Any]:
    """What a person can read of a session: its output."""
    emitted = [one for _, _, commands in golden.steps for one in commands if one[0] == "emitted"]
    return {
        "ids": [one[1] for one in emitted],
        "kinds": [one[3] for one in emitted],
        "finished": [one for _, _, commands in golden.steps for one in commands if one[0] == "finished"],
    }
