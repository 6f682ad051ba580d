"""A drafter without a model: it looks up how the text went on when its last letters were seen before, and copies that
(prompt look-up; with earlier outputs as in SuffixDecoding). Its tokens are bytes.

What followed the longest match most often is copied, as far as it is likely to hold: after a long match further.

Its draft tokens are a function of texts alone, so each row is one-hot, and noise changes nothing.
"""

import asyncio
import re
import time
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice, takewhile
from operator import attrgetter, itemgetter
from threading import BoundedSemaphore

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from crossdraft.config.engine import NgramOptions
from crossdraft.drafter.conversation import Conversation, DraftProgress, Reply, Request, Send, matcher_of
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.rpc.frames import DRAFTER
from crossdraft.rpc.handlers import Replies
from crossdraft.rpc.server import Listening, Server
from crossdraft.text.grammar import GrammarError, GrammarMatcher, of_letters
from crossdraft.text.letters import NOTHING, Letters, Side, common_length, from_bytes
from crossdraft.text.vocabulary import Vocabulary, tokenizer_digest
from crossdraft.types.messages import Description, OpenDrafter, Score, Scored
from crossdraft.types.rows import DraftToken, Row

UNLIMITED = 2**31 - 1  # bytes of context: nothing but memory limits it
BOUNDARY = b"\xff"  # in place of a control symbol, and between texts: it never occurs in UTF-8, and does not match
OCCURRENCES = 32  # of a match that are compared
LEAST_LIKELY = 0.15  # a draft ends where it holds with a smaller probability, as estimated
WORD = 8  # letters that are sorted as one number
LETTER_BYTES = 5  # of memory for each letter remembered: itself, and its place in the order
MAX_IN_BLOCK = 2**20  # letters that are sorted together
OF_BLOCK = 256  # letters that a block takes room for besides its own
MAX_WAITING = 64  # texts that wait to be sorted; further ones are forgotten


def to_text(letters: Letters) -> bytes:
    return re.sub("[^\\x00-\\xfe]", "\xff", letters).encode("latin-1")


@dataclass(frozen=True)
class OwnText:
    """The text that is to go on, searched as it is."""

    text: bytes

    def longest(self, ending: bytes, shortest: int) -> int:
        """Letters of the longest match of the text's end before it; 0 if it is too short."""
        end, size = len(self.text) - 1, shortest
        while size <= len(ending) and (place := self.text.rfind(ending[-size:], 0, end)) >= 0:
            end, size = place + size, size + 1  # no match of more letters ends later
        return size - 1 if size > shortest else 0

    def followed(self, ending: bytes, wanted: int) -> Iterator[bytes]:
        """What followed each occurrence, the newest first; up to the text's end, as if it were repeated from there."""
        place = len(self.text) - len(ending)
        while (place := self.text.rfind(ending, 0, place + len(ending) - 1)) >= 0:
            begin = place + len(ending)
            copied = self.text[begin : begin + wanted]
            yield (copied * -(-wanted // len(copied)))[:wanted]


class Block:
    """Texts, and the places after their letters in an order in which the longest matches are neighbours: by the letters
    before each place, the nearest first."""

    def __init__(self, text: bytes, depth: int) -> None:
        self.text, self.used, self._depth = text, time.monotonic(), depth  # depth: letters that count for the order
        size, words = len(text), -(-depth // WORD)
        letters = np.zeros(size + (words + 1) * WORD, dtype=np.uint64)
        letters[:size] = np.frombuffer(text, dtype=np.uint8)[::-1]
        numbers = np.zeros(size + words * WORD, dtype=np.uint64)
        for place in range(WORD):
            numbers = (numbers << np.uint64(8)) | letters[place : place + len(numbers)]
        order = np.lexsort([numbers[WORD * word :][:size] for word in reversed(range(words))])
        self._order = (size - order).astype(np.int32).data

    def longest(self, ending: bytes, shortest: int) -> int:
        """As `OwnText.longest`."""
        place = bisect_left(self._order, ending[::-1], key=self._before)
        wanted, nearest = from_bytes(ending[::-1]), map(self._before, self._order[max(0, place - 1) : place + 1])
        size = max(common_length(wanted, from_bytes(before)) for before in nearest)
        return size if size >= shortest else 0

    def followed(self, ending: bytes, wanted: int) -> Iterator[bytes]:
        """What followed each occurrence, or some of them if there are many."""
        self.used = time.monotonic()
        first = bisect_left(self._order, ending[::-1], key=self._before)
        last = bisect_right(self._order, ending[::-1], first, key=lambda place: self._before(place)[: len(ending)])
        return (self.text[at : at + wanted] for at in self._order[first : last : 1 + (last - first) // OCCURRENCES])

    def _before(self, place: int) -> bytes:
        return self.text[max(0, place - self._depth) : place][::-1]


def likeliest(followed: Sequence[bytes], wanted: int, matched: int) -> bytes:
    """Letters to copy: each time the most frequent of what followed. That n of them hold after m that matched is taken
    to have the probability m / (m + n), times the share of occurrences that went on so."""
    drafted, alive = bytearray(), followed
    for place in range(wanted):
        letters = Counter(text[place : place + 1] for text in alive)
        del letters[b""]  # a text ends there
        letter, agreeing = max(letters.items(), key=itemgetter(1), default=(BOUNDARY, 0))
        if letter == BOUNDARY or agreeing * matched < LEAST_LIKELY * len(followed) * (matched + place + 1):
            break
        drafted += letter
        if agreeing < len(alive):
            alive = [text for text in alive if text[place : place + 1] == letter]
    return bytes(drafted)


class TextMemory:
    """Earlier outputs by scope: what one scope has brought is never looked up for another.

    Blocks of similar sizes are merged, so that few are searched. Above the limit of bytes the least recently used scope
    loses its least recently used block. One thread adds while another looks up.
    """

    def __init__(self, limit: int, depth: int) -> None:
        self._limit, self._depth = limit // LETTER_BYTES, depth  # letters
        self._most = min(MAX_IN_BLOCK, self._limit // 4)  # letters of a block
        self._held = 0  # letters, with what each block takes besides
        self._blocks: OrderedDict[str, tuple[Block, ...]] = OrderedDict()  # the scope used last is the last

    def of(self, scope: str) -> tuple[Block, ...]:
        """The blocks of a scope, which is used now."""
        with suppress(KeyError):
            self._blocks.move_to_end(scope)
        return self._blocks.get(scope, ())

    def add(self, scope: str, text: bytes) -> None:
        text, blocks = (BOUNDARY + text)[-self._most :], list(self.of(scope))
        while blocks and len(blocks[-1].text) < 2 * len(text) and len(blocks[-1].text) + len(text) <= self._most:
            self._held -= len(blocks[-1].text) + OF_BLOCK
            text = blocks.pop().text + text
        self._blocks[scope] = (*blocks, Block(text, self._depth))
        self._held += len(text) + OF_BLOCK
        while self._held > self._limit and self._blocks:
            self._forget(next(iter(self._blocks)))

    def _forget(self, scope: str) -> None:
        oldest = min(self._blocks[scope], key=attrgetter("used"))
        self._held -= len(oldest.text) + OF_BLOCK
        kept = tuple(block for block in self._blocks[scope] if block is not oldest)
        if kept:
            self._blocks[scope] = kept
        else:
            del self._blocks[scope]


class NgramSession:
    """One output that is guessed from its own text, its prompt's, and what its scope remembers."""

    def __init__(self, service: "NgramService", opening: OpenDrafter) -> None:
        self._service = service
        self._opening = opening
        self._text = to_text(opening.prompt)
        self._origin = len(self._text)  # letters
        self._allowed = None if opening.allowed is None else frozenset(opening.allowed.tolist())
        grammar = opening.options.grammar
        self._matcher = None if grammar is None else matcher_of(of_letters(), grammar)
        self._epoch: DraftProgress | None = None

    def close(self) -> None:
        """What is verified of the output is remembered, with the prompt's end: more is asked for as it is accepted."""
        epoch, service = self._epoch, self._service
        written = 0 if epoch is None else epoch.start + min(epoch.sent, epoch.count - epoch.request.count)
        if written and self._opening.scope and service.options.memory_mib:
            text = self._text[max(0, self._origin - service.options.max_ngram) : self._origin + written]
            service.remember(self._opening.scope, text)

    def begin(self, epoch: DraftProgress) -> None:
        request, written = epoch.request, len(self._text) - self._origin
        if request.offset > written:
            raise ProtocolBroken(f"cannot rewind to letter {request.offset}: the output has {written}")
        if request.adopt:
            raise ProtocolBroken(f"there is no branch {request.adopt}: a drafter that copies prepares none")
        self._text = self._text[: self._origin + request.offset] + to_text(request.letters)
        self._epoch = epoch

    def draft(self, epoch: DraftProgress, send: Send) -> asyncio.Future[None]:
        """As in `conversation.Drafter`. Copying takes no time: all that is wanted is there at once."""
        return asyncio.ensure_future(self._draft(epoch, send))

    async def _draft(self, epoch: DraftProgress, send: Send) -> None:
        epoch.resume()
        missing = epoch.count - epoch.made
        copied = from_bytes(self._copied(missing))
        if self._matcher is not None:
            copied = self._fitting(self._matcher, copied)
        ids = [byte_vocabulary().ids_of(Letters(letter))[0] for letter in copied[:missing]]
        if self._allowed is not None:
            ids = list(takewhile(self._allowed.__contains__, ids))
        self._text += to_text(byte_vocabulary().letters_of(ids))
        for token in ids:
            epoch.add(DraftToken(token, Row.certain(token) if self._opening.row_width else None))
        for reply in epoch.due():
            send(reply)
        if len(ids) < missing:
            send(epoch.last("no earlier text goes on from here that far"))

    def _fitting(self, matcher: GrammarMatcher, copied: Letters) -> Letters:
        """What of it fits the grammar, then what that leaves no choice about; nothing once that has taken long."""
        try:
            return NOTHING if matcher.slow else matcher.fitting(from_bytes(self._text[self._origin :]), copied)
        except GrammarError:
            return NOTHING

    def _copied(self, missing: int) -> bytes:
        """What is drafted next."""
        copying, remembered = self._service.options, self._service.memory.of(self._opening.scope)
        ending = self._text[-copying.max_ngram :].rpartition(BOUNDARY)[2]
        places: tuple[OwnText | Block, ...] = OwnText(self._text), *reversed(remembered)
        size, best = max(((place.longest(ending, copying.min_ngram), place) for place in places), key=itemgetter(0))
        followed = list(islice(best.followed(ending[-size:], missing), OCCURRENCES)) if size else []
        return likeliest(followed, missing, size)

    async def score(self, epoch: DraftProgress, request: Score) -> Scored:
        """As in `conversation.Drafter`: what is copied is certain."""
        drafted = from_bytes(self._text[self._origin + epoch.start :][: request.tokens])
        certain = [float(drafted.startswith(string)) for string in request.strings]
        return Scored(request.epoch, np.array(certain, dtype=np.float64), 0.0)


class NgramService:
    """Sessions that share what their scopes remember."""

    def __init__(self, options: NgramOptions) -> None:
        self.options = options
        self.memory = TextMemory(options.memory_mib * 2**20, options.max_ngram)
        self._sorting = ThreadPoolExecutor(1, thread_name_prefix="memory")  # of what is remembered: that takes a while
        self._waiting = BoundedSemaphore(MAX_WAITING)

    @property
    def description(self) -> Description:
        """The bytes as a vocabulary."""
        tokenizer_json, size = byte_tokenizer(), byte_vocabulary().size
        named = tokenizer_digest(tokenizer_json)
        return Description("ngram", tokenizer_json, (), (), size, UNLIMITED, fingerprint=named, copies=True)

    async def open(self, request: OpenDrafter, replies: Replies[Reply]) -> Conversation:
        """A new session.

        Raises ProtocolBroken: it is to draw a target's tokens; BadRequest: its grammar cannot be compiled.
        """
        if request.redistribute:
            what = "serve a drafter with a model and a file of `crossdraft affinity`, or use another method"
            raise ProtocolBroken(f"an n-gram drafter has no affinity matrix: {what}")
        if request.options.grammar is None:
            return Conversation(NgramSession(self, request), replies)
        return Conversation(await asyncio.to_thread(NgramSession, self, request), replies)

    async def close(self) -> None:
        """What is to be remembered has been."""
        await asyncio.to_thread(self._sorting.shutdown)

    def remember(self, scope: str, text: bytes) -> None:
        """Add a text soon; unless too many wait for that, then it is forgotten."""
        if self._waiting.acquire(blocking=False):
            adding = self._sorting.submit(self.memory.add, scope, text)
            adding.add_done_callback(lambda _: self._waiting.release())


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


def ngram_server(options: NgramOptions, where: Listening) -> Server[OpenDrafter, Request, Reply]:
    """The server, which does not listen yet. Must be called in a running event loop."""
    return Server(DRAFTER, NgramService(options), where)
