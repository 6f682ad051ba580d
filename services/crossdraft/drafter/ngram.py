"""A drafter without a model: it looks up how the text went on when its last letters were seen before, and copies that
(prompt look-up). Its tokens are bytes.

Its draft tokens are a function of the text alone, so each row is one-hot, and noise changes nothing.
"""

import asyncio
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from crossdraft.drafter.conversation import Conversation, DraftProgress, Reply, ReplyBuffer, Request, Send
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.rpc.handlers import DRAFTER, Replies
from crossdraft.rpc.server import Listening, Server
from crossdraft.text.letters import FIRST_CONTROL, NOTHING, Letters, Side
from crossdraft.text.vocabulary import Vocabulary, tokenizer_digest
from crossdraft.types.messages import Description, OpenDrafter, Score, Scored
from crossdraft.types.rows import DraftToken, Row

if TYPE_CHECKING:
    from crossdraft.engine.emulation import Pace  # at run time nothing here needs torch

UNLIMITED = 2**31 - 1  # bytes of context: nothing but memory limits it


@dataclass(frozen=True)
class MatchLengths:
    """How many letters must match. A token of usual vocabularies has about four.

    Raises:
        ValueError: a length is out of its range.
    """

    longest: int = 24  # letters; among longer matches the newest is taken
    shortest: int = 4  # letters

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"--min-ngram must be between 1 and --max-ngram, got {self.shortest} and {self.longest}")


def continuation(text: Letters, count: int, lengths: MatchLengths) -> Letters:
    """At most `count` letters that followed the longest match of the text's end, and the newest of several.

    A match that overlaps the text's end is copied again and again: what follows it is what is being copied. Control
    symbols do not match and are not copied.
    """
    start = _found(text, lengths)
    if start is None:
        return NOTHING
    followed = text[start : start + count]
    followed *= -(-count // len(followed))  # shorter than `count` only where the text ends: repeated
    return plain_beginning(Letters(followed[:count]))


def plain_beginning(letters: Letters) -> Letters:
    end = next((place for place, letter in enumerate(letters) if ord(letter) >= FIRST_CONTROL), len(letters))
    return Letters(letters[:end])


def _found(text: Letters, lengths: MatchLengths) -> int | None:
    """Where the letters after the match begin. If n letters match, so do fewer: the longest is found by bisection."""
    ending = Letters(text[-lengths.longest :][::-1])
    least, most = lengths.shortest, len(plain_beginning(ending))
    found = None
    while least <= most:
        # At first the fewest letters: where they do not match, nothing does.
        size = lengths.shortest if found is None else (least + most + 1) // 2
        place = text.rfind(text[-size:], 0, len(text) - 1)
        if place < 0 and found is None:
            return None
        if place < 0:
            most = size - 1
        else:
            found, least = place + size, size + 1
    return found


@dataclass(frozen=True)
class ServeNgram:
    """An n-gram drafter service: how it matches, and where it listens."""

    lengths: MatchLengths = field(default_factory=MatchLengths)
    listening: Listening = field(default_factory=Listening)
    pace: "Pace | None" = None  # emulated time of each draft, all of whose bytes are one step; None: no delay


class NgramSession:
    """One output that is guessed from its own text and its prompt's."""

    def __init__(self, options: ServeNgram, opening: OpenDrafter) -> None:
        self._options = options
        self._opening = opening
        self._text = opening.prompt
        self._origin = len(opening.prompt)  # letters
        self._allowed = None if opening.allowed is None else frozenset(opening.allowed.tolist())
        self._replies: ReplyBuffer

    def close(self) -> None:
        """It holds nothing but the text."""

    def begin(self, epoch: DraftProgress) -> None:
        request, written = epoch.request, len(self._text) - self._origin
        if request.offset > written:
            raise ProtocolBroken(f"cannot rewind to letter {request.offset}: the output has {written}")
        if request.adopt:
            raise ProtocolBroken(f"there is no branch {request.adopt}: a drafter that copies prepares none")
        self._text = Letters(self._text[: self._origin + request.offset] + request.letters)
        self._replies = ReplyBuffer(epoch)

    def draft(self, epoch: DraftProgress, send: Send) -> asyncio.Future[None]:
        """As in `conversation.Drafter`. Copying takes no time: all that is wanted is there at once."""
        return asyncio.ensure_future(self._draft(epoch, send))

    async def _draft(self, epoch: DraftProgress, send: Send) -> None:
        self._replies.resume()
        missing = epoch.count - self._replies.made
        if self._options.pace is not None:
            await asyncio.sleep(self._options.pace.seconds(missing))
        ids = [byte_ids()[letter] for letter in continuation(self._text, missing, self._options.lengths)]
        if self._allowed is not None:
            ids = list(takewhile(self._allowed.__contains__, ids))
        self._text = Letters(self._text + byte_vocabulary().letters_of(ids))
        for token in ids:
            self._replies.add(DraftToken(token, Row.certain(token) if self._opening.row_width else None))
        for reply in self._replies.due():
            send(reply)
        if len(ids) < missing:
            send(self._replies.last("no earlier text goes on from here that far"))

    async def score(self, epoch: DraftProgress, request: Score) -> Scored:
        """As in `conversation.Drafter`: what is copied is certain."""
        drafted = self._text[self._origin + epoch.start :][: request.tokens]
        certain = [float(drafted.startswith(string)) for string in request.strings]
        return Scored(request.epoch, np.array(certain, dtype=np.float64), 0.0)


@dataclass(frozen=True)
class NgramService:
    """Sessions that share nothing."""

    options: ServeNgram = field(default_factory=ServeNgram)

    @property
    def description(self) -> Description:
        """The bytes as a vocabulary."""
        tokenizer_json = byte_tokenizer()
        return Description(
            model="ngram",
            tokenizer_json=tokenizer_json,
            controls=(),
            stops=(),
            vocabulary_size=byte_vocabulary().size,
            context=UNLIMITED,
            fingerprint=tokenizer_digest(tokenizer_json),
            copies=True,
        )

    async def open(self, request: OpenDrafter, replies: Replies[Reply]) -> Conversation:
        """A new session; raises ProtocolBroken if it is to draw a target's tokens."""
        if request.redistribute:
            raise ProtocolBroken(
                "an n-gram drafter has no affinity matrix: serve a drafter with a model and a file of "
                "`crossdraft affinity`, or use another method"
            )
        return Conversation(NgramSession(self.options, request), replies)

    async def close(self) -> None:
        """Nothing runs."""


@cache
def byte_tokenizer() -> str:
    """The tokenizer.json whose tokens are the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: token for token, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


@cache
def byte_vocabulary() -> Vocabulary:
    return Vocabulary.build(byte_tokenizer(), 256, (), (), Side.DRAFTER)


@cache
def byte_ids() -> dict[str, int]:
    return {letter: token for token, letter in enumerate(byte_vocabulary().letters)}


def ngram_server(options: ServeNgram) -> Server[OpenDrafter, Request, Reply]:
    """The server, which does not listen yet. Must be called in a running event loop."""
    marks = {} if options.pace is None else {"paced": str(options.pace)}
    return Server(DRAFTER, NgramService(options), options.listening, marks)
