"""`crossdraft replay`: verification once more, from a recording."""

import sys
from pathlib import Path

from crossdraft.cli.failures import CommandFailed
from crossdraft.cli.timeline import recording_of
from crossdraft.pipeline.recording import RecordingError
from crossdraft.pipeline.replay import replay as run

UNKNOWN = "Replies and their times are the recorded ones: whether they are what the models say is not checked."


def replay(file: Path) -> None:
    """Says whether the verdicts are the same.

    Raises:
        Misused: the recording cannot be read.
        CommandFailed: they are not, or it cannot be replayed.
    """
    recording = recording_of(file)
    try:
        replayed = run(recording)
    except RecordingError as error:
        raise CommandFailed(str(error)) from error
    if replayed.difference is not None:
        raise CommandFailed(f"{replayed.rounds} rounds have the same verdicts; {replayed.difference}")
    print(f"{replayed.rounds} rounds, {replayed.tokens} tokens: same verdicts")
    if recording.fault:
        print(f"The recording could not be read to its end: {recording.fault}.", file=sys.stderr)
    elif recording.finished is None:
        print("The recording ends before the session does.", file=sys.stderr)
    print(UNKNOWN, file=sys.stderr)
