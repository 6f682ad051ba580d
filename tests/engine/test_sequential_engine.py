"""The engine that runs each session by the model's own cache, against plain forwards; recurrent models and others."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from crossdraft.engine.compatibility import UnsupportedModelError
from crossdraft.engine.engine import Engine
from crossdraft.engine.model_thread import ModelThread
from crossdraft.engine.names import NumberOutOfRangeError
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.sequential_engine import LAG, MARGIN, STATES, Ids, SequentialEngine, engine_of
from crossdraft.lab.models import random_model
from crossdraft.types.trees import TokenTree, tree_of
from tests.engine import test_engine
from tests.engine.gathering import gathered
from tests.engine.test_engine import BRANCHES, plain
from tests.engine.test_model_thread import greedy
from tests.engine.tiny import VOCABULARY, tiny_llama

ARCHITECTURES = ("mamba", "olmo_hybrid", "gptj")  # a state, a hybrid, keys and values with an attention of its own
PROMPT = (5, 17, 3, 88, 41, 2)
LONG = PROMPT * 8
CHAIN = tree_of([(1, 2, 3, 4)], 9)


def serve(engine: Engine, *requests: Request) -> int:
    """As there; a recurrence in steps is rounded in another way than one in parallel."""
    return test_engine.serve(engine, *requests, apart=1e-4)


def made(name: str = "mamba", budget: int = 64, **settings: Any) -> Engine:
    return engine_of(random_model(name, VOCABULARY), None, budget, **settings)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chains_trees_and_several_sessions(name: str) -> None:
    engine = made(name)
    assert isinstance(engine, SequentialEngine)
    assert serve(engine, Request("a", PROMPT, CHAIN)) == len(PROMPT) + 4
    serve(engine, Request("a", (*PROMPT, 9), BRANCHES), Request("b", PROMPT[:1], CHAIN), Request("c", LONG, BRANCHES))
    assert serve(engine, Request("c", (*LONG, 1, 2, 9), BRANCHES, wanted=(1, 4))) <= 4 + len(BRANCHES)
    assert serve(engine, Request("a", LONG[1:41])) == 40  # another text
    serve(engine, Request("a", LONG[:21], wanted=(0,)), Request("c", LONG))  # rolled back
    engine.close("a")
    assert serve(engine, Request("a", LONG, wanted=())) == len(LONG)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_refused_draft_leaves_no_trace_and_costs_little(name: str) -> None:
    engine = made(name)
    context = LONG
    serve(engine, Request("a", context))
    for token in range(30, 40):
        assert serve(engine, Request("a", context, CHAIN)) <= LAG + 2 * len(CHAIN)
        context = (*context, *CHAIN.tokens[: token % 4], token)  # some of it is accepted
    assert serve(engine, Request("a", (*context[:-3], 7, 7))) <= MARGIN + 2  # the last tokens were others


def test_a_draft_that_is_accepted_is_not_computed_again() -> None:
    engine = made()
    serve(engine, Request("a", LONG, CHAIN))
    assert serve(engine, Request("a", (*LONG, *CHAIN.tokens, 9), CHAIN)) == 1 + len(CHAIN)
    assert serve(engine, Request("a", (*LONG, *CHAIN.tokens, 9, *CHAIN.tokens))) == 0


def test_drafting_computes_each_token_once() -> None:
    """One after another, beside a branch; then the text goes on, in any case from where it was certain."""
    engine = made("olmo_hybrid")
    request = Request("a", LONG)
    serve(engine, request)
    for token in range(40):
        request = request.after((token,))
        assert serve(engine, request) == 1
    tree = TokenTree((*request.tree.tokens, 50), (*request.tree.parents, 38))
    assert serve(engine, Request("a", LONG, tree, wanted=(41,))) <= MARGIN
    assert serve(engine, Request("a", (*LONG, *range(30), 77))) <= 31
    assert len(engine._sessions["a"]) < STATES


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_long_prompt_is_computed_in_parts(name: str) -> None:
    engine = made(name, chunk=10)
    serve(engine, Request("a", LONG, BRANCHES), Request("b", LONG[5:]))


@pytest.mark.parametrize(
    "paths",
    [[(one, two, two) for one in range(8) for two in range(3)], [(1,) * depth + (2,) for depth in range(30)]],
    ids=["wide", "forks after each other"],
)
def test_a_large_tree_needs_no_more_states_than_a_session_has(paths: list[Ids], monkeypatch: pytest.MonkeyPatch):
    engine, most = made("gptj"), []
    compute = engine._computed  # type: ignore[attr-defined]

    def computed(*given: Any) -> Any:
        most.append(len(engine._sessions["a"]))  # type: ignore[attr-defined]
        return compute(*given)

    monkeypatch.setattr(engine, "_computed", computed)
    serve(engine, Request("a", LONG, tree_of(paths, 99)))
    assert len(most) > 24
    assert max(most) <= STATES + 1


def biased(model: PreTrainedModel, wrong: Any) -> PreTrainedModel:
    """A model whose forwards with a cache are wrong where `wrong` says so of their tokens."""
    usual = model.forward

    def forward(input_ids: torch.Tensor, cache_params: Any = None, use_cache: bool = True) -> Any:
        found = usual(input_ids, cache_params=cache_params, use_cache=use_cache)
        if cache_params is not None and wrong(input_ids.shape[1]):
            found.logits += torch.arange(VOCABULARY)
        return found

    model.forward = forward  # type: ignore[method-assign]
    return model


def test_a_model_that_goes_on_with_one_token_at_a_time_is_given_one() -> None:
    model = biased(random_model("mamba", VOCABULARY), lambda tokens: tokens > 1)
    engine = SequentialEngine(model, None, 64, 512, "")
    serve(engine, Request("a", LONG, BRANCHES), Request("b", PROMPT))
    assert serve(engine, Request("a", (*LONG, 1, 2), CHAIN)) <= 2 + len(CHAIN)


def test_a_model_whose_cache_is_wrong_is_refused_with_both_reasons() -> None:
    model = biased(random_model("mamba", VOCABULARY), lambda tokens: True)
    with pytest.raises(UnsupportedModelError, match=r"keys and values.*; session by session: .* along its paths"):
        engine_of(model, None, 64)


def test_what_the_models_own_cache_does_not_get_right_either_is_said_once() -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [3.0] * 6, "original_max_position_embeddings": 32}
    long = tiny_llama(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **factors})
    with pytest.raises(UnsupportedModelError, match="set --max-model-len to 32 or less") as refused:
        engine_of(long, None, 64)
    assert "session by session" not in str(refused.value)
    assert engine_of(long, 32, 64).max_length == 32


def test_a_line_says_why_sessions_do_not_share_forwards(caplog: pytest.LogCaptureFixture) -> None:
    made()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == [
        "sessions of this model run one after another, not together: this model does not keep keys and values "
        "(recurrence, or an encoder)"
    ]


def test_a_session_takes_what_its_states_take() -> None:
    constant, growing = made("mamba"), made("gptj")
    assert constant.token_bytes == 0
    assert growing.token_bytes == STATES * 4 * 2 * 64 * 4  # layers, keys and values, width, float32
    for engine in (constant, growing):
        assert engine.slots_in_use == 0
        serve(engine, Request("a", LONG, BRANCHES))
        held = sum(state.copied()[1] for state in engine._sessions["a"].values())
        assert 0 < held <= engine._size(len(LONG) + len(BRANCHES)) < 2.5 * held
        assert 0 < engine.slots_in_use < engine.slots
        engine.close("a")
        assert engine.slots_in_use == 0


def test_a_budget_that_holds_no_session_says_what_to_change() -> None:
    with pytest.raises(NumberOutOfRangeError, match=r"of up to 512 tokens needs 7 MiB .* set --cache-mib"):
        engine_of(random_model("gptj", VOCABULARY), 512, 3)
    assert 64 < made("gptj", budget=3).max_length < 512  # what fits, where no length was asked for


async def test_sessions_that_do_not_all_fit_take_turns_and_find_the_same() -> None:
    engine = made("gptj", budget=3)
    one = engine._size(len(LONG))
    engine._most = 2.5 * one
    assert not all(engine.admits(Request(name, LONG)) is False for name in "abc")
    thread = ModelThread(engine)
    prompts = [(number, *LONG[:30]) for number in range(4)]
    found = await gathered(thread, *(greedy(str(number), ids, 6) for number, ids in enumerate(prompts)))
    thread.close()
    for _ in range(6):
        prompts = [(*ids, int(plain(engine.model, ids).argmax())) for ids in prompts]
    assert [*found] == prompts
    assert thread.preemptions > 0
