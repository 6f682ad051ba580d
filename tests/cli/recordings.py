"""Files for the commands that read recordings."""

from pathlib import Path

from crossdraft.trace.codec import Recording
from crossdraft.trace.recorder import FileRecorder


def save(recording: Recording, path: Path) -> Path:
    """Writes it as a session would."""
    recorder = FileRecorder(path, recording.header)
    for step in recording.steps:
        recorder.record(step)
    recorder.close()
    assert recorder.wait() == ""
    return path
