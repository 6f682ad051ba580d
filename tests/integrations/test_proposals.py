"""Drafts for requests of an engine that calls as vLLM does: from a real service, as streams, and told apart by ids."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.config.engine import NgramOptions
from crossdraft.drafter.ngram import ngram_server
from crossdraft.engine.names import BUNDLED
from crossdraft.integrations.vllm import services
from crossdraft.integrations.vllm.proposals import HEAD, TAIL, Prefixes, Proposals
from crossdraft.integrations.vllm.services import DrafterSession, RequestState, TokenIds
from crossdraft.integrations.vllm.streams import MAX_BEHIND, DrafterFaultError, DraftStream, Guess, Outcome, Pull
from crossdraft.rpc.errors import Full, Unreachable
from crossdraft.rpc.server import Listening, Server
from crossdraft.speculation.choice import DraftSeen
from crossdraft.text.letters import Letters, Side, from_bytes
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.tokenizer_file import load_tokenizer_json
from crossdraft.types.messages import Advance, Branch, Draft, Drafted
from crossdraft.types.rows import DraftToken, Whose
from tests.started import in_a_thread
from tests.tables import greedy_tokens, pair_of

MOST = 4
STEP = 0.05  # seconds of the clock
SECONDS = 60.0  # that anything may take here; nothing is judged by it
TEXT = "def first(value):\n    return value\n\n\n" * 40
PROMPT = 60  # tokens


class Service(ExitStack):
    """An n-gram drafter in a thread of its own, which can be stopped."""

    stop = ExitStack.close

    def __init__(self, port: int = 0) -> None:
        super().__init__()

        async def server() -> Server:
            return ngram_server(NgramOptions(), Listening(port=port, grace_seconds=0))

        (self.address,) = self.enter_context(in_a_thread(server))


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def target() -> Tokenization:
    return load_tokenizer_json(str(BUNDLED / "target")).tokenization(Side.TARGET)


@contextmanager
def proposals(target: Tokenization, *addresses: str) -> Iterator[Proposals]:
    made = Proposals(addresses, target, MOST, 0.005, clock=Clock())
    made.start(SECONDS)
    try:
        yield made
    finally:
        made.stop()


class Clock:
    """A step takes as long with drafts as without, so that drafting pays whatever this machine is doing."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Requests whose outputs are known, in the steps in which vLLM would make them."""

    def __init__(self, made: Proposals, texts: Sequence[Sequence[int]]) -> None:
        self._made = made
        self._texts = texts
        self._done = [PROMPT] * len(texts)
        self._drafts: list[list[int]] = [[] for _ in texts]
        self.accepted = [0] * len(texts)

    def step(self, rows: Sequence[int]) -> None:
        """One forward for these requests, in this order."""
        clock = self._made.clock
        clock.now += STEP
        sampled = []
        for row in rows:
            text, done, draft = self._texts[row], self._done[row], self._drafts[row]
            matched = next((n for n, one in enumerate(draft) if text[done + n] != one), len(draft))
            sampled.append(list(text[done : done + matched + 1]))
            self._done[row] += matched + 1
            self.accepted[row] += matched
        ids = [np.array(self._texts[row][: self._done[row]], dtype=np.int32) for row in rows]
        found = self._made.step(ids, sampled, alone=True)
        assert all(len(draft) <= MOST for draft in found)
        for row, draft in zip(rows, found, strict=True):
            self._drafts[row] = draft

    @property
    def finished(self) -> bool:
        return any(len(text) - done < MOST + 2 for text, done in zip(self._texts, self._done, strict=True))


def complete(stream: DraftStream) -> bool:
    return stream._epoch is None or not stream._drafts.ledger.drafting


def settled(made: Proposals) -> bool:
    """Waits until every request has its session, and all of its draft that was asked for."""
    shared = made._services
    states = [one for waiting in made._prefixes._known.values() for one, _ in waiting]
    with shared.lock:
        return shared.news.wait_for(
            lambda: all(one.session is None or (one.session.ready and complete(one.session.stream)) for one in states),
            SECONDS,
        )


def test_drafts_of_a_service_are_accepted_whatever_the_rows(target: Tokenization, service: Service) -> None:
    """Rows move, and one request is out of the batch for some steps, as if it was preempted."""
    texts = [target.encode_continuation(from_bytes((start + TEXT).encode())) for start in ("", "# a\n", "# b\n")]
    with proposals(target, service.address) as made:
        engine, orders = Engine(made, texts), ([0, 1, 2], [2, 0, 1], [1, 0], [0, 1], [2, 1, 0])
        count = 0
        while not engine.finished:
            engine.step(orders[count % len(orders)])
            assert settled(made)
            count += 1
        assert len(made._prefixes) == len(texts)
        # The text repeats itself: an n-gram drafter knows nearly all of it.
        assert min(engine.accepted) > count / 2


def test_without_any_service_there_are_no_drafts(target: Tokenization) -> None:
    text = target.encode_continuation(from_bytes(TEXT.encode()))
    with proposals(target, "127.0.0.1:1") as made:
        engine = Engine(made, [text])
        for _ in range(20):
            engine.step([0])
        assert engine.accepted == [0]


def test_a_text_that_has_no_letters_is_left_alone_and_no_drafter_is_blamed(target: Tokenization, service: Service):
    """A prompt may have ids that no text has, such as those of images."""
    text = target.encode_continuation(from_bytes(TEXT.encode()))
    with proposals(target, service.address) as made:
        engine = Engine(made, [[1_000_000, *text], text])
        while not engine.finished:
            engine.step([0, 1])
            assert settled(made)
        assert engine.accepted[0] == 0
        assert engine.accepted[1] > 0
        shared = made._services
        with shared.lock:
            (place,) = shared.roster._places.values()
            assert (place.failed_at, place.sessions) == (None, 1)


def test_a_service_may_go_in_mid_stream(target: Tokenization, service: Service) -> None:
    text = target.encode_continuation(from_bytes(TEXT.encode()))
    with proposals(target, service.address) as made:
        engine = Engine(made, [text])
        while not engine.accepted[0]:
            engine.step([0])
            assert settled(made)
        service.stop()
        shared = made._services
        (state,) = (one for waiting in made._prefixes._known.values() for one, _ in waiting)
        with shared.lock:
            assert shared.news.wait_for(lambda: state.session is None, SECONDS)
        engine.step([0])  # what it had proposed before is still verified
        before = engine.accepted[0]
        for _ in range(5):
            engine.step([0])
        assert engine.accepted[0] == before
        assert state.failures >= 1  # more, if the machine is so slow that it has tried again


def logged(caplog: pytest.LogCaptureFixture, text: str) -> int:
    """How many lines have this text, after one of them has come, or time is over."""
    over = time.monotonic() + SECONDS
    while not any(text in line for line in list(caplog.messages)) and time.monotonic() < over:
        time.sleep(0.05)
    return sum(text in line for line in caplog.messages)


def test_the_log_says_who_drafts_and_when_a_drafter_goes_and_comes(target, caplog):
    service = Service()
    address = service.address
    try:
        with proposals(target, address) as made:
            assert logged(caplog, f"drafts come from 'ngram' at {address}") == 1
            service.stop()
            assert logged(caplog, f"drafter at {address} cannot be reached any more; it is tried again") == 1
            service = Service(int(address.rpartition(":")[2]))
            assert logged(caplog, f"drafter at {address} is there now") == 1
            engine = Engine(made, [target.encode_continuation(from_bytes(TEXT.encode()))])
            while not engine.accepted[0]:
                engine.step([0])
                assert settled(made)
            assert logged(caplog, "any more") == logged(caplog, "there now") == logged(caplog, "drafts come from") == 1
    finally:
        service.stop()


def test_why_requests_have_no_session_is_logged_once_and_not_where_the_service_is_gone(target, service, caplog):
    with proposals(target, service.address) as made:
        shared = made._services
        for error in (Unreachable("gone"), Full("no room"), Full("no room")):
            with shared.lock:
                address = shared.roster.take((), set(), 0.0)
                session = DrafterSession(shared, RequestState(), address, shared.roster[address])
            session.lost(error)
        assert caplog.text.count("a request goes on without drafts for a while: no room") == 1
        assert "gone" not in caplog.text


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds threads to cores")
def test_the_thread_of_drafters_is_not_bound_to_the_engines_core(target: Tokenization) -> None:
    """vLLM's CPU build binds the thread that makes the proposer to one core, and a new thread inherits that."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with proposals(target, "127.0.0.1:1") as made:
            number = made._services._thread.native_id
            free = set(range(os.cpu_count() or 1)) - {min(allowed)}
            assert os.sched_getaffinity(number) == (free or allowed)
            assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_thread_that_cannot_begin_keeps_no_engine_waiting(target: Tokenization, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object, **__: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(services, "DrafterClient", refused)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    made = Proposals(["127.0.0.1:1"], target, MOST, 0.0)
    with pytest.raises(OSError, match="no room"):
        made.start(SECONDS)
    made.stop()


# ids:    0    1    2     3     4
TARGET = ["a", "b", "ab", "bb", "c"]
DRAFTER = ["a", "b", "c", "ba"]
PULL = Pull(window=6, first=2, chunk=2)


@pytest.fixture
def stream() -> DraftStream:
    pair = pair_of(TARGET, DRAFTER)
    return DraftStream(pair, greedy_tokens(pair.target))


def drafted(epoch: int, *tokens: int, first: int = 0, reason: str = "") -> Drafted:
    return Drafted(epoch, tuple(map(DraftToken, tokens)), 0.5, reason, first)


def test_a_draft_is_at_hand_as_target_tokens(stream: DraftStream) -> None:
    stream.emitted([2])  # ab
    assert stream.follow(PULL, 1.0) == [Draft(1, 0, Letters("ab"), 6, 2, first=2)]
    assert stream.asked == 1.0
    assert stream.guess(4) == Guess()
    assert stream.take(drafted(1, 0, 1, 2), 3.0) == DraftSeen(3, 2.0, 0.5)  # abc
    assert stream.asked is None
    assert stream.guess(4) == Guess((2, 4), sure=1)  # more text could make another token of the last one only
    assert stream.guess(1) == Guess((2,), sure=1)


def test_a_guess_has_no_more_tokens_than_may_be_proposed(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    stream.take(drafted(1, 2, 2, 2, 2), 1.0)
    assert stream.guess(2) == Guess((4, 4), sure=2)


def test_a_draft_goes_on_while_the_target_agrees(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    stream.take(drafted(1, 0, 1, 2, 1), 1.0)  # abcb
    stream.guess(2)
    assert stream.emitted([2, 4]) == Outcome(2, False)
    assert stream.follow(PULL, 2.0) == [Advance(1, 9)]  # three of its tokens are passed
    assert stream.guess(4) == Guess((1,), sure=0)
    stream.take(drafted(1, 1, first=4), 3.0)
    assert stream.guess(4) == Guess((3,), sure=0)


def test_a_refusal_rewinds_the_drafter_to_what_agreed(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    stream.take(drafted(1, 0, 3), 1.0)  # aba
    stream.guess(4)  # ab, a
    assert stream.emitted([2, 4]) == Outcome(1, False, edge=False)
    assert stream.guess(4) == Guess()
    assert stream.follow(PULL, 2.0) == [Draft(2, 2, Letters("c"), 6, 2, first=2)]
    assert stream.take(drafted(1, 0, first=2), 3.0) is None  # late: of the draft before
    assert stream.guess(4) == Guess()


def test_what_was_not_proposed_is_judged_all_the_same(stream: DraftStream) -> None:
    """The target's own next token is compared with the guess, however much of it was proposed."""
    stream.follow(PULL, 0.0)
    stream.take(drafted(1, 2, 2, 2), 1.0)
    stream.guess(3)
    assert stream.emitted([4]) == Outcome(1, False)
    stream.guess(3)
    assert stream.emitted([0]) == Outcome(0, True)
    assert stream.emitted([0]) == Outcome(0, False)  # there was no guess


def test_a_draft_that_the_target_overtook_goes_on_when_it_was_right(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    stream.emitted([2, 4])  # abc, before anything came
    assert stream.follow(PULL, 1.0) == []
    stream.take(drafted(1, 0, 1), 2.0)
    assert stream.guess(4) == Guess()
    stream.take(drafted(1, 2, 0, 0, first=2), 3.0)
    assert stream.guess(4) == Guess((0, 0), sure=1)


def test_a_drafter_that_is_too_slow_begins_anew(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    for _ in range(2 * MAX_BEHIND):  # its first reply is under way: nothing is asked twice
        stream.emitted([4])
        assert stream.follow(PULL, 1.0) == []
    stream.take(drafted(1, 2, 2), 2.0)
    told = []
    for _ in range(MAX_BEHIND + 1):
        stream.emitted([4])
        told = stream.follow(PULL, 3.0)
    assert told == [Draft(2, 2, Letters("c" * (3 * MAX_BEHIND - 1)), 6, 2, first=2)]


def test_a_draft_that_has_ended_is_not_asked_for_more(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    stream.take(drafted(1, 0, 1, reason="the context is full"), 1.0)
    assert stream.guess(4) == Guess((2,), sure=1)  # no more text comes behind it
    stream.emitted([2])
    assert stream.follow(PULL, 2.0) == []
    assert stream.stop(2.0) == []


def test_a_draft_that_is_not_wanted_is_stopped(stream: DraftStream) -> None:
    stream.follow(PULL, 0.0)
    assert stream.stop(2.0) == [Advance(1, 0)]
    assert stream.take(drafted(1, 0), 1.0) is None
    stream.emitted([4])
    assert stream.follow(PULL, 2.0) == [Draft(2, 0, Letters("c"), 6, 2, first=2)]


def test_a_prepared_continuation_that_agrees_is_at_hand_at_once(stream: DraftStream) -> None:
    """The drafter said ab, and that it would say bb after a b in place of its a."""
    prepared = replace(PULL, branch=2)
    stream.follow(prepared, 0.0)
    branch = Branch(1, 0, Letters("b"), (1, 0))
    stream.take(replace(drafted(1, 0, 1), branches=(branch,)), 1.0)
    assert stream.guess(4) == Guess((2,), sure=0)
    assert stream.emitted([1]) == Outcome(0, False, edge=False)
    assert stream.follow(prepared, 2.0) == [Draft(2, 0, Letters("b"), 8, 2, 2, adopt=1, first=4)]
    assert stream.guess(4) == Guess((1, 0), sure=1)  # its tokens, without waiting
    stream.take(drafted(2, 2, 2, first=2), 3.0)
    assert stream.emitted([1]) == Outcome(1, False)
    assert stream.guess(4) == Guess((0, 4, 4), sure=2)


def test_a_prepared_continuation_that_does_not_agree_is_forgotten(stream: DraftStream) -> None:
    prepared = replace(PULL, branch=2)
    stream.follow(prepared, 0.0)
    stream.take(replace(drafted(1, 0, 1), branches=(Branch(1, 0, Letters("b"), (1, 0)),)), 1.0)
    stream.emitted([4])
    assert stream.follow(prepared, 2.0) == [Draft(2, 0, Letters("c"), 6, 2, 2, first=2)]
    stream.take(drafted(2, 1), 3.0)
    stream.emitted([0])
    assert stream.follow(PULL, 4.0) == [Draft(3, 1, Letters("a"), 6, 2, first=2)]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (drafted(1, 4), "proposed id 4, and its ids are 0 to 3"),
        (drafted(1, -1), "proposed id -1"),
        (Drafted(1, (DraftToken(0, None, Whose.TARGET),), 0.5), "proposed id 0"),
        (drafted(1, *[0] * 7), "draft tokens 0 to 7, asked for 0 to 6"),
        (replace(drafted(1, 0), branches=(Branch(1, 0, Letters("b"), (1,)),)), "branch 1 is not one of at most 0 ids"),
        (drafted(1, 0, first=1), "draft tokens 1 to 2, asked for 0 to 6"),
    ],
)
def test_what_was_not_asked_for_is_a_fault(stream: DraftStream, reply: Drafted, text: str) -> None:
    stream.follow(PULL, 0.0)
    with pytest.raises(DrafterFaultError, match=text):
        stream.take(reply, 1.0)


def ids_of(ids: Sequence[int]) -> TokenIds:
    return np.array(ids, dtype=np.int32)


@pytest.fixture
def prefixes() -> Prefixes:
    return Prefixes(10.0)


def test_a_request_is_found_again_when_rows_move(prefixes: Prefixes) -> None:
    one, other = prefixes.step([ids_of([1, 2, 3]), ids_of([4, 5, 6])], [1, 1], 0.0)
    again = prefixes.step([ids_of([4, 5, 6, 7, 8]), ids_of([9]), ids_of([1, 2, 3, 3])], [2, 1, 1], 1.0)
    assert again[0] is other
    assert again[2] is one
    assert again[1] not in (one, other)


def test_a_preempted_request_is_found_again_when_it_comes_back(prefixes: Prefixes) -> None:
    one, other = prefixes.step([ids_of([1, 2, 3]), ids_of([4, 5, 6])], [1, 1], 0.0)
    assert prefixes.step([ids_of([4, 5, 6, 7])], [1], 1.0) == [other]
    assert prefixes.forget(9.0) == []
    # Its prompt and output were read again, and one more token was sampled.
    assert prefixes.step([ids_of([4, 5, 6, 7, 8]), ids_of([1, 2, 3, 4])], [1, 1], 9.5) == [other, one]


def test_what_is_not_seen_for_long_is_forgotten(prefixes: Prefixes) -> None:
    (one,) = prefixes.step([ids_of([1, 2])], [1], 0.0)
    (other,) = prefixes.step([ids_of([3, 4])], [1], 5.0)
    assert prefixes.forget(11.0) == [one]
    assert len(prefixes) == 1
    assert prefixes.step([ids_of([1, 2, 3]), ids_of([3, 4, 5])], [1, 1], 12.0)[1] is other
    assert len(prefixes) == 2


def test_one_request_may_have_now_what_another_had_before(prefixes: Prefixes) -> None:
    short, long = prefixes.step([ids_of([1, 1]), ids_of([1, 1, 1])], [1, 1], 0.0)
    assert prefixes.step([ids_of([1, 1, 1]), ids_of([1, 1, 1, 1])], [1, 1], 1.0) == [short, long]


def test_equal_texts_stay_as_many_requests(prefixes: Prefixes) -> None:
    first = prefixes.step([ids_of([5, 6])] * 3, [1] * 3, 0.0)
    second = prefixes.step([ids_of([5, 6, 7]), ids_of([5, 6, 8]), ids_of([5, 6, 7])], [1] * 3, 1.0)
    assert len(set(map(id, first))) == 3
    assert set(map(id, second)) == set(map(id, first))


def test_long_texts_that_begin_or_end_differently_are_different(prefixes: Prefixes) -> None:
    middle = [7] * (HEAD + TAIL)
    found = prefixes.step([ids_of([1, *middle]), ids_of([2, *middle]), ids_of([*middle, 3])], [1] * 3, 0.0)
    again = prefixes.step([ids_of([*middle, 3, 9]), ids_of([2, *middle, 9]), ids_of([1, *middle, 9])], [1] * 3, 1.0)
    assert again == [found[2], found[1], found[0]]


@given(st.data())
def test_texts_are_followed_in_any_order_with_any_pauses(data: st.DataObject) -> None:
    """Each request that is given back had exactly the ids that the row had before."""
    prefixes = Prefixes(100.0)
    texts = [data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)) for _ in range(4)]
    had: dict[int, list[int]] = {}  # by the identity of a request
    kept: list[RequestState] = []
    for step in range(6):
        batch = data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]
        new = [data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)) for _ in batch]
        rows = [texts[one] + more for one, more in zip(batch, new, strict=True)]
        found = prefixes.step([ids_of(row) for row in rows], [len(more) for more in new], float(step))
        assert len(set(map(id, found))) == len(found)
        for one, row, request in zip(batch, rows, found, strict=True):
            assert had.get(id(request), texts[one]) == texts[one]
            texts[one] = row
            had[id(request)] = row
        kept += found  # so that no identity is used twice
