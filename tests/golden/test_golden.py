"""Bytes on the wire, decisions of sessions and what users write are those of the committed files; `record.py` makes
these."""

import json
from pathlib import Path

import pytest

from crossdraft.trace.recording import FileRecorder
from crossdraft.trace.recording import read as read_recording
from crossdraft.trace.replay import Replayed, replay
from tests.golden import interface, sessions
from tests.golden.messages import VALUES
from tests.golden.record import CASES, MESSAGES, VERDICTS

BYTES = {name: bytes.fromhex(raw) for name, raw in json.loads(MESSAGES.read_text(encoding="utf-8")).items()}
TOLD = json.loads(VERDICTS.read_text(encoding="utf-8"))


def test_every_message_and_session_has_its_file() -> None:
    assert list(BYTES) == list(VALUES)
    assert list(TOLD) == list(CASES)


@pytest.mark.parametrize("name", VALUES)
def test_messages_have_the_same_bytes(name: str) -> None:
    codec, value = VALUES[name]
    assert codec.to_bytes(value).hex() == BYTES[name].hex()
    assert codec.to_bytes(codec.from_bytes(BYTES[name])).hex() == BYTES[name].hex()


@pytest.mark.parametrize("name", CASES)
def test_sessions_decide_the_same(name: str, tmp_path: Path) -> None:
    golden = sessions.read(name)
    recorder = FileRecorder(tmp_path / "record", golden.header)
    for place, ((_, event, commands), step) in enumerate(zip(golden.steps, sessions.decided(golden), strict=True)):
        assert list(map(sessions.packed_command, step.commands)) == commands, f"step {place}, after {event}"
        recorder.record(step)
    recorder.close()
    assert recorder.wait() == ""
    told = TOLD[name]
    assert {"rounds": told["rounds"], **sessions.verdicts(golden)} == told
    assert replay(read_recording(tmp_path / "record")) == Replayed(told["rounds"], len(told["ids"]), None)


def test_options_keys_and_fields_are_named_and_explained_the_same() -> None:
    for name, text in interface.written().items():
        assert text.splitlines() == (interface.FOLDER / name).read_text(encoding="utf-8").splitlines(), name
