"""What people may see of an output while it grows."""

from crossdraft.pipeline.assignment import Assignment
from crossdraft.text.letters import NOTHING, Letters, to_bytes
from crossdraft.text.tokenization import LetterDecoder


class Shown:
    """The text that is final: whole characters, and none that a stop string may still begin with.

    It goes on after what an earlier session has shown of the same output.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._decoder = LetterDecoder()
        self._letters = NOTHING
        self._decoded = ""  # what is shown is this less what is held back
        self._length = 0  # characters shown
        self._held_back = max(map(len, assignment.stop), default=1) - 1  # characters
        self.add(assignment.pair.target.letters_of(assignment.committed))

    def add(self, letters: Letters, kept: int | None = None) -> str:
        """Text that is new.

        Args:
            letters: of the tokens after those before.
            kept: set with the last one: letters of the output that count.
        """
        self._letters = Letters(self._letters + letters)
        self._decoded += self._decoder.feed(letters)
        if kept is None:
            new = self._decoded[self._length : max(self._length, len(self._decoded) - self._held_back)]
        else:
            new = to_bytes(Letters(self._letters[:kept])).decode("utf-8", "replace")[self._length :]
        self._length += len(new)
        return new
