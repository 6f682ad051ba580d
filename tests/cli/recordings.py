"""Files for the commands that read recordings."""

from pathlib import Path

from crossdraft.pipeline.recorder import FileRecorder
from crossdraft.pipeline.recording import Recording


def save(recording: Recording, path: Path) -> Path:
    """Writes it as a session would."""
    recorder = FileRecorder(path, recording.header)
    for step in recording.steps:
        recorder.record(step)
    recorder.close()
    assert recorder.wait() == ""
    return path
