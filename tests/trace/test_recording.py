"""A recording is a file that grows by whole rounds, and is readable to wherever it ends."""

import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from crossdraft.session.events import Cancelled, Lost, Ready
from crossdraft.trace.recording import (
    CODEC,
    FORMAT,
    FRAME,
    MAGIC,
    QUICK,
    VERSION,
    FileRecorder,
    Recording,
    RecordingError,
    Step,
    read,
)
from tests.trace.recordings import header_of, toy_recording


@pytest.fixture(scope="module")
def recording() -> Recording:
    return toy_recording(header_of())


def written(recording: Recording, path: Path) -> FileRecorder:
    recorder = FileRecorder(path, recording.header)
    for step in recording.steps:
        recorder.record(replace(step, sent=7, received=9))
    recorder.close()
    return recorder


def packed(steps: tuple[Step, ...]) -> bytes:
    return CODEC.pack(steps)


def test_what_is_read_is_what_was_recorded(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "record"
    assert written(recording, path).wait() == ""
    found = read(path)
    assert found.fault == ""
    assert CODEC.pack(found.header) == CODEC.pack(recording.header)
    expected = tuple(tuple(replace(step, sent=7, received=9) for step in steps) for steps in recording.rounds)
    assert [packed(steps) for steps in found.rounds] == [packed(steps) for steps in expected]
    assert found.finished is not None


def test_wherever_a_file_ends_its_whole_rounds_are_read(recording: Recording, tmp_path: Path) -> None:
    written(recording, tmp_path / "record").wait()
    data = (tmp_path / "record").read_bytes()
    whole = read(tmp_path / "record")
    sizes = [FRAME.size + len(zlib.compress(packed(steps), QUICK)) for steps in whole.rounds]
    end = len(data) - sum(sizes)
    cut = tmp_path / "cut"
    for count, size in enumerate(sizes):
        for more in (0, 1, FRAME.size, size - 1):
            cut.write_bytes(data[: end + more])
            found = read(cut)
            assert (len(found.rounds), bool(found.fault)) == (count, more > 0)
        end += size


def test_damage_ends_what_is_read(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "record"
    written(recording, path).wait()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = read(path)
    assert len(found.rounds) == len(recording.rounds) - 1
    assert found.fault.endswith("a record is damaged")  # whether or not its bytes still mean something


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "no recording"),
        (b"PK\x03\x04 something else altogether", "no recording"),
        (MAGIC, "no recording"),
        (MAGIC + VERSION.pack(99), "format 99"),
        (MAGIC + VERSION.pack(FORMAT), "cannot be read"),
        (MAGIC + VERSION.pack(FORMAT) + FRAME.pack(50, 0) + b"short", "middle of a record"),
    ],
)
def test_other_files_are_refused(data: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(RecordingError, match=complaint):
        read(tmp_path / "file")


def test_a_file_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        FileRecorder(tmp_path / "nowhere" / "record", header_of())


def test_what_cannot_be_written_is_said_and_disturbs_nobody(tmp_path: Path) -> None:
    recorder = FileRecorder(tmp_path / "record", header_of())
    recorder.record(Step(1.0, Ready(1), ()))
    recorder.record(Step(2.0, Ready({1}), ()))  # type: ignore[arg-type]
    recorder.close()
    recorder.record(Step(3.0, Cancelled(), ()))
    recorder.close()
    assert "set" in recorder.wait()
    assert read(tmp_path / "record").rounds == ()


def test_what_has_no_pass_yet_is_written_at_the_end(tmp_path: Path) -> None:
    recorder = FileRecorder(tmp_path / "record", header_of())
    recorder.record(Step(1.0, None, ()))
    recorder.record(Step(2.0, Lost(1, OSError("gone")), ()))
    recorder.close()
    assert recorder.wait() == ""
    (steps,) = read(tmp_path / "record").rounds
    assert [step.now for step in steps] == [1.0, 2.0]
    assert read(tmp_path / "record").finished is None
