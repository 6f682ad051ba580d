"""A replay gives the same verdicts, and says precisely where it does not."""

from dataclasses import replace
from pathlib import Path

import pytest

from crossdraft.session.events import Emitted, Replied, Send
from crossdraft.trace.recording import Header, Recording, RecordingError, Step, read
from crossdraft.trace.replay import Difference, Replayed, replay
from crossdraft.types.messages import Pass, PassDone
from crossdraft.types.request import Overlap
from tests.trace.recordings import SECRETS, header_of, save, toy_recording


@pytest.mark.parametrize(
    ("method", "overlap"),
    [
        ("coupled", Overlap.ON),
        ("tli", Overlap.OFF),
        ("slem", Overlap.AUTO),
        ("seeded", Overlap.ON),
        ("union", Overlap.AUTO),
        ("slrs", Overlap.OFF),
    ],
)
def test_what_was_recorded_is_decided_again(method: str, overlap: Overlap, tmp_path: Path) -> None:
    recording = read(save(toy_recording(header_of(method, overlap)), tmp_path / "record"))
    assert recording.finished is not None
    assert recording.finished.counts.tokens == 12
    assert replay(recording) == Replayed(len(recording.rounds), 12, None)
    begun = replace(recording, rounds=recording.rounds[:3])
    assert replay(begun).difference is None


def test_plain_decoding_too() -> None:
    assert replay(toy_recording(header_of("coupled", drafts=False))).difference is None


def changed(recording: Recording, place: int, change: Step) -> Recording:
    """The recording with another step in place of a round's last one."""
    rounds = [list(steps) for steps in recording.rounds]
    rounds[place][-1] = change
    return replace(recording, rounds=tuple(map(tuple, rounds)))


def difference(recording: Recording) -> Difference:
    found = replay(recording).difference
    assert found is not None
    return found


def test_another_token_is_named_with_its_round() -> None:
    recording = toy_recording(header_of())
    place, step = next(
        (place, steps[-1])
        for place, steps in enumerate(recording.rounds)
        if place > 1 and any(isinstance(command, Emitted) for command in steps[-1].commands)
    )
    at = next(at for at, command in enumerate(step.commands) if isinstance(command, Emitted))
    first = step.commands[at]
    assert isinstance(first, Emitted)
    commands = (*step.commands[:at], replace(first, token=first.token + 1), *step.commands[at + 1 :])
    found = difference(changed(recording, place, replace(step, commands=commands)))
    assert found.round == place + 1
    assert found.place == f"command {at + 1}, Emitted.token"
    assert (found.recorded, found.replayed) == (str(first.token + 1), str(first.token))
    assert "round" in str(found)
    assert "rows of pass" in str(found)


def test_other_chance_is_another_session() -> None:
    recording = toy_recording(header_of("coupled"))
    other = replace(recording, header=replace(recording.header, secrets=replace(SECRETS, chooser=1)))
    assert replay(other).difference is not None


def test_a_command_that_is_missing_or_new_is_said() -> None:
    recording = toy_recording(header_of())
    step = recording.rounds[0][0]
    fewer = changed_first(recording, replace(step, commands=step.commands[:-1]))
    more = changed_first(recording, replace(step, commands=(*step.commands, step.commands[0])))
    assert difference(fewer).recorded == "missing"
    assert difference(more).replayed == "missing"


def changed_first(recording: Recording, step: Step) -> Recording:
    return replace(recording, rounds=((step, *recording.rounds[0][1:]), *recording.rounds[1:]))


def test_an_event_that_the_session_refuses_is_a_difference_unless_it_did_so_then() -> None:
    recording = toy_recording(header_of())
    step = recording.rounds[0][-1]
    assert isinstance(step.event, Replied)
    assert isinstance(step.event.reply, PassDone)
    wrong = replace(step, event=replace(step.event, reply=replace(step.event.reply, number=77)))
    assert "refused" in difference(changed(recording, 0, wrong)).replayed
    first = (*recording.rounds[0][:-1], replace(wrong, commands=(), choices=()), step)
    assert replay(replace(recording, rounds=(first, *recording.rounds[1:]))).difference is None


def test_a_choice_too_many_or_too_few_is_a_difference() -> None:
    recording = toy_recording(header_of())
    place, at, step = next(
        (place, at, step) for place, one in enumerate(recording.rounds) for at, step in enumerate(one) if step.choices
    )
    for choices, recorded in ((), "missing"), (step.choices * 2, "Choice("):
        steps = list(recording.rounds[place])
        steps[at] = replace(step, choices=choices)
        rounds = (*recording.rounds[:place], tuple(steps), *recording.rounds[place + 1 :])
        found = replay(replace(recording, rounds=rounds)).difference
        assert found is not None
        assert found.round == place + 1
        assert found.recorded.startswith(recorded) or not choices


def test_a_header_that_cannot_be_resolved_is_refused() -> None:
    header: Header = header_of("standard")  # needs one vocabulary, and there are two
    with pytest.raises(RecordingError, match="vocabulary"):
        replay(Recording(header, ()))


def test_passes_differ_by_what_is_in_their_arrays() -> None:
    recording = toy_recording(header_of("coupled", Overlap.OFF))
    for place, steps in enumerate(recording.rounds):
        for at, step in enumerate(steps):
            for number, command in enumerate(step.commands):
                if isinstance(command, Send) and isinstance(command.request, Pass) and command.request.listed:
                    listed = tuple(ids + 1 for ids in command.request.listed)
                    sent = replace(command, request=replace(command.request, listed=listed))
                    commands = (*step.commands[:number], sent, *step.commands[number + 1 :])
                    rounds = list(recording.rounds)
                    rounds[place] = (*steps[:at], replace(step, commands=commands), *steps[at + 1 :])
                    found = difference(replace(recording, rounds=tuple(rounds)))
                    assert found.place.startswith(f"command {number + 1}, Send.request.listed")
                    return
    raise AssertionError("no pass listed ids")
