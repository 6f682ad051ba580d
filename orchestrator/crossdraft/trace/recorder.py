"""The flight recorder: what went into a session and what came out, in a file that only grows.

One record a round: up to and including the return of the next pass, of a run its last answer, or the loss of a service.
Recording costs the event loop an append; a thread packs and writes.
"""

from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO, Protocol

from crossdraft.session.events import Lost, Replied
from crossdraft.trace.codec import Header, PackingError, Step, Writer
from crossdraft.types.messages import PassDone


class Recorder(Protocol):
    """Takes down a session, step by step."""

    def record(self, step: Step) -> None:
        """One call of the session, which has just returned; never blocks and never fails."""
        ...

    def close(self) -> None:
        """Nothing more will come; does not wait for the rest to be written."""
        ...


class Together:
    """Several recorders of one session."""

    def __init__(self, *recorders: Recorder | None) -> None:
        self._recorders = [one for one in recorders if one is not None]

    def record(self, step: Step) -> None:
        """As Recorder says."""
        for recorder in self._recorders:
            recorder.record(step)

    def close(self) -> None:
        """As Recorder says."""
        for recorder in self._recorders:
            recorder.close()


class FileRecorder:
    """Writes to a file; `wait` says whether all of it could be written.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._round: list[Step] = []
        self._queue: SimpleQueue[tuple[Step, ...] | None] = SimpleQueue()
        self._fault = ""
        self._closed = False
        self._thread = Thread(target=self._write, args=(path.open("wb"), header), name="recorder")
        self._thread.start()

    def record(self, step: Step) -> None:
        """As Recorder says."""
        self._round.append(step)
        event = step.event
        match event:
            case Lost() | Replied(reply=PassDone(more=False)):
                self._end_round()

    def close(self) -> None:
        """As Recorder says; a second time it does nothing."""
        if not self._closed:
            self._closed = True
            self._end_round()
            self._queue.put(None)

    def wait(self) -> str:
        """Blocks until all is written, after `close`; returns why some is not, or an empty text."""
        self._thread.join()
        return self._fault

    def _end_round(self) -> None:
        if self._round:
            self._queue.put(tuple(self._round))
            self._round.clear()

    def _write(self, file: BinaryIO, header: Header) -> None:
        """In a thread of its own. What cannot be written ends the recording, never the session."""
        try:
            with file:
                writer = Writer(file, header)
                while (steps := self._queue.get()) is not None:
                    writer.write(steps)
        except (OSError, PackingError) as error:
            self._fault = str(error)
