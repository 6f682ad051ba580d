"""The engine against plain forwards of the same model over whole sequences."""

import copy
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from crossdraft.engine.engine import Engine
from crossdraft.engine.kv_cache import MemoryShare
from crossdraft.engine.requests import ContextOverflowError
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import Path, TokenTree, tree_of
from tests.engine.tiny import VOCABULARY, tiny_llama

PROMPT = (5, 17, 3, 88, 41, 2)
BRANCHES = tree_of([(1, 2, 3), (1, 2, 9, 4), (7, 8), (1, 60)], budget=20)


@cache
def eager(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with transformers' own attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


@cache
def plain(model: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    """Logits after the last of `ids`, without a cache."""
    with torch.no_grad():
        return eager(model)(torch.tensor([ids]), use_cache=False).logits[0, -1]


def assert_right(model: PreTrainedModel, request: Request, logits: torch.Tensor, apart: float = 1e-5) -> None:
    paths = list(request.tree.paths())
    assert logits.shape == (len(request.rows()), VOCABULARY)
    for row, found in zip(request.rows(), logits, strict=True):
        torch.testing.assert_close(found, plain(model, request.context + paths[row]), atol=apart, rtol=0)


def serve(engine: Engine, *requests: Request, apart: float = 1e-5) -> int:
    """Runs the requests, checks every logit, and returns how many tokens were fed."""
    before = engine.computed
    for request, logits in zip(requests, engine.forward(requests), strict=True):
        assert logits.dtype == torch.float32
        assert_right(engine.model, request, logits, apart)
    return engine.computed - before


def test_the_same_context_keeps_the_leading_nodes_of_the_tree(llama: PreTrainedModel) -> None:
    engine = Engine(llama)
    serve(engine, Request("a", PROMPT, tree_of([(1, 2), (3,)], 9), wanted=(1, 2)))
    grown = TokenTree((1, 2, 3, 4, 5), (-1, 0, -1, 1, 2))
    assert serve(engine, Request("a", PROMPT, grown, wanted=(4, 5))) == 2
    assert serve(engine, Request("a", PROMPT, grown, wanted=(2, 5))) == 2
    assert serve(engine, Request("a", PROMPT, grown, wanted=())) == 0
    assert serve(engine, Request("a", (*PROMPT, 3, 5, 6))) == 1


@pytest.mark.parametrize(("path", "rest"), [((1, 2), [(3,), (9, 4)]), ((1,), [(60,), (2, 9, 4)]), ((7,), [(8,)])])
def test_what_follows_the_emitted_branch_is_not_computed_again(
    llama: PreTrainedModel, path: Path, rest: list[Path]
) -> None:
    engine = Engine(llama)
    serve(engine, Request("a", PROMPT, BRANCHES))
    kept = tree_of(rest, 20)
    grown = TokenTree((*kept.tokens, 13, 14), (*kept.parents, len(kept) - 1, -1))
    new = (len(kept) + 1, len(kept) + 2)
    assert serve(engine, Request("a", PROMPT + path, grown, new)) == 2
    assert serve(engine, Request("a", PROMPT + path, grown, (len(kept) + 2,))) == 1
    assert serve(engine, Request("a", PROMPT + path + rest[0], wanted=())) == 0


def test_the_context_is_cut_to_what_the_cache_holds_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert Engine(tiny_llama(max_position_embeddings=16384), budget=8).max_length == 8192
        named = tiny_llama()
        named.name_or_path = "bundled:target"
        assert Engine(named, budget=MemoryShare(sessions=3)).slots == 3 * 128
    cut, whole = (record.getMessage() for record in caplog.records)
    assert "at most 8192 tokens, not the model's 16384 (--max-model-len sets this" in cut
    assert whole.startswith("bundled:target: KV cache of ")
    assert "for 384 tokens, of which a session has at most 128" in whole


def test_overflow_is_refused_and_changes_nothing(llama: PreTrainedModel) -> None:
    engine = Engine(llama, max_length=16)
    serve(engine, Request("a", PROMPT))
    with pytest.raises(ContextOverflowError, match="exceed 16"):
        engine.forward([Request("a", (*PROMPT, 1)), Request("b", PROMPT, tree_of([tuple(range(11))], 20))])
    assert serve(engine, Request("a", (*PROMPT, 1))) == 1
    assert serve(engine, Request("b", PROMPT, tree_of([tuple(range(10))], 20))) == 16


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (Request("a", ()), "at least one token"),
        (Request("a", (VOCABULARY,)), "ids must be 0 to 96, got 97"),
        (Request("a", (1,), TokenTree((-1,), (-1,))), "got -1"),
        (Request("a", (1,), wanted=(1,)), "within 0 to 0"),
        (Request("a", (1,), BRANCHES, wanted=(2, 1)), "ascend"),
    ],
)
def test_bad_requests(llama: PreTrainedModel, bad: Request, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Engine(llama).check(bad)


def test_a_forward_that_fails_leaves_no_trace_in_the_results(llama: PreTrainedModel) -> None:
    engine = Engine(llama)
    serve(engine, Request("a", PROMPT))

    def fail(*_: object) -> None:
        raise MemoryError

    hook = llama.get_output_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        engine.forward([Request("a", (*PROMPT, 1, 2))])
    hook.remove()
    assert serve(engine, Request("a", (*PROMPT, 1, 2))) == len(PROMPT) + 2
