"""Files for the commands that read recordings."""

from pathlib import Path

from crossdraft.pipeline.recorder import FileRecorder
from crossdraft.pipeline.recording import Recording


def save(recording: Recording, path: Path) -> Path:
    """Writes it as a session would."""
    recorder = FileRecorder(path, recording.header)
    for step in recording.steps:
        recorder.record(step.now, step.event, step.commands, seconds=step.seconds, row_misses=step.row_misses)
    recorder.close()
    assert recorder.wait() == ""
    return path
