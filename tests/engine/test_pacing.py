"""Steps that take their time, by a clock that only their sleeping moves."""

import pytest

from crossdraft.engine.emulation import Clock, Pace, Paced
from crossdraft.engine.engine import Engine
from crossdraft.engine.model_thread import ModelThread
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.requests import ScheduledRequest as Scheduled
from crossdraft.types.trees import ROOT, TokenTree
from tests.engine.tiny import tiny_llama

MODEL = tiny_llama()
PROMPT = (5, 17, 3, 88)
TREE = TokenTree((1, 2, 3), (ROOT, 0, ROOT))


class Slept:
    """A clock; a forward takes what the test says."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.times: list[float] = []
        self.clock = Clock(lambda: self.seconds, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.times.append(round(seconds, 9))
        self.seconds += seconds


def whole(*works: Request) -> list[Scheduled]:
    return [Scheduled(work, 100) for work in works]


def test_what_a_step_feeds_counts_and_a_text_that_is_new_does_not() -> None:
    slept, engine = Slept(), Engine(MODEL)
    paced = Paced(Pace(20, 0.5), engine, engine.step, slept.clock)
    paced(whole(Request("a", PROMPT, TREE)))
    paced(whole(Request("a", (*PROMPT, 1, 9), TREE)))  # 1 is in the cache
    paced(whole(Request("a", (*PROMPT, 1, 9, 9), TREE), Request("b", PROMPT * 3, TREE)))  # together
    paced(whole(Request("b", PROMPT * 3)))
    assert slept.times == [0.0215, 0.022, 0.0235, 0.0205]


def test_a_prompt_in_several_steps_costs_what_it_costs_in_one() -> None:
    slept, engine = Slept(), Engine(MODEL)
    paced = Paced(Pace(20, 0.5), engine, engine.step, slept.clock)
    prompt = Request("a", PROMPT * 3, TREE)
    for tokens in (5, 5, 10):
        (logits,) = paced([Scheduled(prompt, tokens)])
    assert logits is not None
    assert slept.times == [0.0215]
    paced(
        [Scheduled(Request("b", PROMPT[1:] * 9), 3), *whole(Request("a", (*PROMPT * 3, 8)))]
    )  # beside one that is answered
    assert slept.times[1:] == [0.0205]


def test_a_text_that_was_lost_does_not_count_again() -> None:
    slept, engine = Slept(), Engine(MODEL)
    paced = Paced(Pace(20, 0.5), engine, engine.step, slept.clock)
    paced(whole(Request("a", PROMPT * 3)))
    engine.close("a")
    paced(whole(Request("b", PROMPT[::-1] * 20)))
    paced(whole(Request("a", (*PROMPT * 3, 7, 8, 9))))
    assert slept.times == [0.02, 0.02, 0.0215]


def test_what_the_model_took_itself_is_not_slept_again() -> None:
    slept, engine = Slept(), Engine(MODEL)

    def slow(shares):
        slept.seconds += 0.015 if len(shares) == 1 else 0.03
        return engine.step(shares)

    paced = Paced(Pace(20, 0), engine, slow, slept.clock)
    paced(whole(Request("a", PROMPT)))
    paced(whole(Request("a", PROMPT), Request("b", PROMPT)))
    assert slept.times == [0.005]


async def test_the_model_thread_steps_at_the_pace() -> None:
    slept, engine = Slept(), Engine(MODEL)
    thread = ModelThread(engine, Paced(Pace(1, 2), engine, engine.step, slept.clock))
    try:

        def job():
            answer = yield Request("a", PROMPT, TREE)
            assert len(answer.logits) == 4
            answer = yield Request("a", (*PROMPT, 1, 7))
            return len(answer.logits)

        assert await thread.run(job()) == 1
    finally:
        thread.close()
    assert slept.times == [0.007, 0.003]


@pytest.mark.parametrize("text", ["", "20", "20,x", "1,2,3", "-1,0", "0,-0.1", "inf,0", "0,nan"])
def test_a_pace_is_two_numbers_of_milliseconds(text: str) -> None:
    with pytest.raises(ValueError, match="two numbers of milliseconds"):
        Pace.parsed(text)
    assert str(Pace.parsed("20, 0.5")) == "20,0.5"
