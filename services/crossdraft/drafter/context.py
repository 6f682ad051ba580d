"""A drafter's text as ids that fit its model: rewound, re-tokenized where it must be, cut where it is too long."""

from bisect import bisect_right
from itertools import accumulate, islice

from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.letters import Letters, to_bytes
from crossdraft.text.tokenization import Tokenization, last_word_boundary

# A text that is too long is cut to this share of the room: a cut changes every position, so that all kept tokens are
# fed again, and must be rare.
KEPT_NUMERATOR, KEPT_DENOMINATOR = 3, 4
CONTINUATION_BYTES = range(0x80, 0xC0)  # bytes of UTF-8 within a character
MOST_AGAIN = 32  # letters of a word that are tokenized again with what follows them; some texts have no word boundaries


class NoRoomError(Exception):
    """The model's context holds no text that one could draft from."""


class Context:
    """The prompt, then the output. Positions count letters of both; offsets count those of the output.

    The ids are a head, which covers the text up to `_base` (the prompt, or after a cut the newest text then), and
    tokens after it, each with the position where it ends.
    """

    def __init__(self, tokenization: Tokenization, prompt: Letters, capacity: int, templated: bool = False) -> None:
        """`capacity`: tokens that the model can be fed; `templated`: the prompt names special tokens."""
        self.capacity = capacity
        self._tokenization = tokenization
        if templated:
            text = to_bytes(prompt).decode("utf-8", "replace")
            self._prompt_ids = tokenization.encode_prompt(text, special=False, leave_out=True)
            prompt = tokenization.letters_of(self._prompt_ids)
        else:
            # What cannot fit need not be tokenized to be cut away.
            self._prompt_ids = tokenization.encode_prompt_letters(Letters(prompt[-capacity * tokenization.longest :]))
        self._text = prompt
        self._origin = len(prompt)  # position of offset 0
        self._head, self._base = self._prompt_ids, self._origin
        self._tokens: list[int] = []
        self._ends: list[int] = []

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self._head, *self._tokens)

    @property
    def offset(self) -> int:
        return len(self._text) - self._origin

    def tokens_before(self, offset: int) -> int:
        """How many ids end exactly where so many letters of output do; 0: none does."""
        position = self._origin + offset
        whole = bisect_right(self._ends, position)
        return len(self._head) + whole if self._end_of(whole) == position else 0

    def letters(self, first: int, end: int) -> Letters:
        """The output's letters between two offsets, as far as there are any."""
        return Letters(self._text[self._origin + first : self._origin + end])

    def append(self, *tokens: int) -> None:
        written = [self._tokenization.vocabulary.letters[token] for token in tokens]
        ends = accumulate(map(len, written), initial=len(self._text))
        self._ends += islice(ends, 1, None)
        self._tokens += tokens
        self._text = Letters("".join((self._text, *written)))  # once for all: the text may be long

    def rewind(self, offset: int, letters: Letters) -> None:
        """The output becomes what it was up to `offset`, then `letters`.

        Its own tokens are kept up to there; letters are tokenized together with the word that they may go on with.
        Raises ProtocolBroken: there are fewer than `offset` letters.
        """
        if offset > self.offset:
            raise ProtocolBroken(f"cannot rewind to letter {offset}: the output has {self.offset}")
        position = self._origin + offset
        self._text = Letters(self._text[:position] + letters)
        if position < self._base:  # what was cut away is needed again
            self._head, self._base = self._prompt_ids, self._origin
            self._keep(0)
        whole = bisect_right(self._ends, position)
        if letters or self._end_of(whole) < position:
            boundary = last_word_boundary(self._text, position, position - MOST_AGAIN)
            whole = min(whole, bisect_right(self._ends, boundary))
        self._keep(whole)
        self._go_on(self._end_of(whole))

    def fit(self, count: int) -> bool:
        """Makes room for `count` more tokens, by forgetting the oldest text if need be; whether it did. Raises
        NoRoomError: nothing would be left."""
        room = self.capacity + 1 - count  # the last one drawn is not fed
        full = len(self._head) + len(self._tokens) > room
        if full:
            self._cut(max(room, 0) * KEPT_NUMERATOR // KEPT_DENOMINATOR)
        if not self._head and not self._tokens:
            raise NoRoomError("there is no text that this drafter could go on with")
        return full

    def _end_of(self, whole: int) -> int:
        """Position where the first `whole` tokens end."""
        return self._ends[whole - 1] if whole else self._base

    def _keep(self, whole: int) -> None:
        del self._tokens[whole:]
        del self._ends[whole:]

    def _go_on(self, start: int) -> None:
        """Tokenizes the text from a position on, and leaves out what has no token here."""
        text, end = self._text, start
        ids = self._tokenization.encode_continuation(Letters(text[start:]), leave_out=True)
        written = list(map(self._tokenization.vocabulary.letters.__getitem__, ids))
        if "".join(written) == text[start:]:  # the usual case
            self._tokens += ids
            self._ends += islice(accumulate(map(len, written), initial=start), 1, None)
            return
        for token, letters in zip(ids, written, strict=True):
            if not (self._tokenization.lossy or text.startswith(letters, end)):
                end = text.index(letters, end)  # what is before it was left out
            # A tokenizer that changes text may make more or fewer letters of it.
            end = min(end + len(letters), len(text))
            self._tokens.append(token)
            self._ends.append(end)
        if end > start:  # the last token ends the text anyway
            self._ends[-1] = len(text)

    def _cut(self, goal: int) -> None:
        """Keeps the newest text that makes at most `goal` ids; raises NoRoomError if there is none."""
        held = len(self._head) + len(self._tokens)
        size = min(len(self._text), len(self._text) * goal // held) if held else 0
        while size > 0:
            start = self._beginning(len(self._text) - size, size)
            ids = self._tokenization.encode_prompt_letters(Letters(self._text[start:]))
            if len(ids) <= goal:
                self._head, self._base = ids, len(self._text)
                self._keep(0)
                return
            size = size * KEPT_NUMERATOR // KEPT_DENOMINATOR
        raise NoRoomError(
            f"a context of {self.capacity} tokens has no room for text and the draft tokens that are wanted"
        )

    def _beginning(self, start: int, size: int) -> int:
        """The word boundary before a position, if it is near enough, or else the next whole character."""
        boundary = last_word_boundary(self._text, start)
        if boundary and boundary >= start - size // KEPT_DENOMINATOR:
            return boundary
        while ord(self._text[start : start + 1] or "\0") in CONTINUATION_BYTES:
            start += 1
        return start
