"""Drafts from a real service: an n-gram drafter over gRPC, and an engine that calls as vLLM does."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from crossdraft.drafter.ngram import ServeNgram, ngram_server
from crossdraft.engine.names import BUNDLED
from crossdraft.integrations.vllm import services
from crossdraft.integrations.vllm.proposals import Proposals
from crossdraft.integrations.vllm.services import DrafterSession, RequestState
from crossdraft.integrations.vllm.streams import DraftStream
from crossdraft.rpc.errors import Full, Unreachable
from crossdraft.rpc.server import Listening, Server
from crossdraft.text.letters import Side, from_bytes
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.tokenizer_file import load_tokenizer_json
from tests.started import in_a_thread

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
            return ngram_server(ServeNgram(listening=Listening(port=port, grace_seconds=0)))

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
                assert address is not None
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
            assert number is not None
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
