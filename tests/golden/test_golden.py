"""Bytes on the wire, decisions of sessions and what users write are those of the committed files; `record.py` makes
these."""

import json

import pytest

from tests.golden import interface, sessions
from tests.golden.messages import VALUES
from tests.golden.record import CASES, MESSAGES, VERDICTS

BYTES = {name: bytes.fromhex(raw) for name, raw in json.loads(MESSAGES.read_text(encoding="utf-8")).items()}
TOLD = json.loads(VERDICTS.read_text(encoding="utf-8"))


def test_every_message_and_session_has_its_file() -> None:
    assert (list(BYTES), list(TOLD)) == (list(VALUES), list(CASES))


@pytest.mark.parametrize("name", VALUES)
def test_messages_have_the_same_bytes(name: str) -> None:
    codec, value = VALUES[name]
    assert codec.to_bytes(value).hex() == BYTES[name].hex()
    assert codec.to_bytes(codec.from_bytes(BYTES[name])).hex() == BYTES[name].hex()


@pytest.mark.parametrize("name", CASES)
def test_sessions_decide_the_same(name: str) -> None:
    golden = sessions.read(name)
    for place, ((_, event, commands), decided) in enumerate(zip(golden.steps, sessions.decided(golden), strict=True)):
        assert list(map(sessions.packed_command, decided)) == commands, f"step {place}, after {event}"
    assert sessions.verdicts(golden) == TOLD[name]


def test_options_keys_and_fields_are_named_and_explained_the_same() -> None:
    for name, text in interface.written().items():
        assert text.splitlines() == (interface.FOLDER / name).read_text(encoding="utf-8").splitlines(), name
