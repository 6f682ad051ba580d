"""A session's output: committed tokens, when it ends, and the text that can be shown while it grows."""

from dataclasses import dataclass

from crossdraft.session.assignment import Assignment
from crossdraft.session.events import Reason
from crossdraft.text.letters import Letters, to_bytes
from crossdraft.text.tokenization import LetterDecoder

PROMPT_END = 16  # tokens; a character has at most four bytes, and control symbols may stand beside them


@dataclass(frozen=True)
class Ending:
    """The token just committed is the last one."""

    reason: Reason
    kept: int  # letters of the output that count: a stop string does not


class Output:
    """The committed tokens, those that were committed before the session began included."""

    def __init__(self, assignment: Assignment) -> None:
        self._given = assignment
        self.ids = list(assignment.request.committed[:-1])  # target ids
        self.text = assignment.pair.target.letters_of(self.ids)
        self._most = min(assignment.request.max_tokens, self.room + len(self.ids))  # tokens
        # Set if it had ended before this session began.
        self.ended = self.commit(assignment.request.committed[-1]) if assignment.request.committed else None

    @property
    def room(self) -> int:
        """Tokens that the target's context still holds."""
        return self._given.context - len(self._given.open_target.prompt) - len(self.ids)

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return self._most - len(self.ids)

    def commit(self, token: int) -> Ending | None:
        """Append a target token; the Ending if the output ends with it."""
        given, before = self._given, len(self.text)
        self.text = Letters(self.text + given.pair.target.letters[token])
        self.ids.append(token)
        kept = None
        if given.stop and len(self.ids) > given.open_target.options.min_tokens:
            kept = _cut_by_stop(given, self.text, before)
        if kept is None and token in given.ends:
            kept = len(self.text) if given.request.include_stop_str_in_output else before
        if kept is not None:
            return Ending(Reason.STOP, kept)
        return Ending(Reason.LENGTH, len(self.text)) if len(self.ids) >= self._most else None


def _cut_by_stop(given: Assignment, text: Letters, size: int) -> int | None:
    """Where the text is cut by the first stop string that ends after `size` letters; None if there is none."""
    places = ((text.find(stop, max(0, size - len(stop) + 1)), len(stop)) for stop in given.stop)
    found = min(((place, length) for place, length in places if place >= 0), default=None)
    return None if found is None else found[0] + found[1] * given.request.include_stop_str_in_output


def fault_of_committed(given: Assignment) -> str:
    """Why an output cannot go on after the tokens committed before; empty if it can, or has just ended with them."""
    ids, vocabulary = given.request.committed, given.pair.target
    if len(ids) > given.request.max_tokens:
        return f"committed has {len(ids)} tokens, and max_tokens, which counts them, is {given.request.max_tokens}"
    size = len(given.open_target.prompt) + len(ids)
    if size > given.context:
        return f"prompt and committed have {size} tokens, and the target's context holds {given.context}"
    before = ids[:-1]
    text = vocabulary.letters_of(before)
    least = len(vocabulary.letters_of(before[: given.open_target.options.min_tokens]))  # where stop strings may end
    found = _cut_by_stop(given, text, least) is not None
    if found or not given.ends.isdisjoint(before):
        what = "a stop string" if found else "a stop symbol"
        return f"committed goes on after {what}, where the output had ended: leave out what follows"
    return ""


class ShownText:
    """The text that is final: whole characters, and none that may belong to a stop string.

    It continues what an earlier session has shown of the same output. A character within which the prompt ends belongs
    to it, so that the prompt's whole characters and this text are the text of all.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._decoder = LetterDecoder()
        self._decoder.feed(assignment.pair.target.letters_of(assignment.open_target.prompt[-PROMPT_END:]))
        self._letters = [self._decoder.held]
        self._begun = len(self._decoder.held)
        self._held = ""  # decoded, and not shown
        self._length = 0  # characters shown
        longest = 1 if assignment.request.include_stop_str_in_output else max(map(len, assignment.stop), default=1)
        self._held_back = longest - 1  # characters
        self.add(assignment.pair.target.letters_of(assignment.request.committed))

    def add(self, letters: Letters, kept: int | None = None) -> str:
        """The newly final text.

        `letters`: of the tokens after those before. `kept`: set with the last one: letters of the output that count.
        """
        self._letters.append(letters)
        text, back = self._held + self._decoder.feed(letters), self._held_back
        if kept is None:
            new, self._held = (text[:-back], text[-back:]) if back else (text, "")
        else:
            whole = Letters("".join(self._letters)[: self._begun + kept])
            new = to_bytes(whole).decode("utf-8", "replace")[self._length :]
        self._length += len(new)
        return new
