"""The engine against plain forwards of the same model over whole sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from crossdraft.engine.engine import Engine
from crossdraft.engine.kv_cache import MemoryShare
from crossdraft.engine.requests import ContextOverflowError
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import Path, TokenTree, tree_of
from tests.engine.tiny import VOCABULARY, examples, tiny_llama

PROMPT = (5, 17, 3, 88, 41, 2)
MODEL = tiny_llama()
BRANCHES = tree_of([(1, 2, 3), (1, 2, 9, 4), (7, 8), (1, 60)], budget=20)


def plain(model: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    """Logits after the last of `ids`, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def assert_right(model: PreTrainedModel, request: Request, logits: torch.Tensor) -> None:
    paths = list(request.tree.paths())
    assert logits.shape == (len(request.rows()), VOCABULARY)
    for row, found in zip(request.rows(), logits, strict=True):
        torch.testing.assert_close(found, plain(model, request.context + paths[row]), atol=1e-5, rtol=0)


def serve(engine: Engine, *requests: Request) -> int:
    """Runs the requests, checks every logit, and returns how many tokens were fed."""
    before = engine.computed
    for request, logits in zip(requests, engine.forward(requests), strict=True):
        assert logits.dtype == torch.float32
        assert_right(engine.model, request, logits)
    return engine.computed - before


def test_prompt_chain_and_tree(model: PreTrainedModel) -> None:
    engine = Engine(model)
    assert serve(engine, Request("a", PROMPT)) == len(PROMPT)
    assert serve(engine, Request("a", (*PROMPT, 9), tree_of([(4, 5, 6)], 9))) == 4
    assert serve(engine, Request("b", PROMPT, BRANCHES)) == len(PROMPT) + len(BRANCHES)


def test_ragged_batch_of_sessions_with_different_pasts(model: PreTrainedModel) -> None:
    engine = Engine(model)
    serve(engine, Request("a", PROMPT * 4), Request("b", PROMPT[:1]), Request("c", (9, 9), BRANCHES))
    engine.close("b")
    longer, other = (*PROMPT * 4, 11), (9, 9, 1, 2, 9)
    assert serve(engine, Request("a", longer, BRANCHES), Request("c", other)) == 1 + len(BRANCHES) + 1
    assert serve(engine, Request("c", (*other, 3)), Request("a", (*longer, 3)), Request("d", PROMPT)) == 1 + 1 + len(
        PROMPT
    )


def test_rolling_back_keeps_the_common_prefix(model: PreTrainedModel) -> None:
    engine = Engine(model)
    serve(engine, Request("a", PROMPT * 3))
    assert serve(engine, Request("a", (*PROMPT * 2, 70, 71))) == 2
    assert serve(engine, Request("a", PROMPT)) == 1
    assert serve(engine, Request("a", (70, *PROMPT))) == 1 + len(PROMPT)


@pytest.mark.parametrize("path", [(1, 2, 3), (1, 2, 9, 4), (7, 8), (1, 60), (1, 2)])
def test_the_emitted_branch_is_not_computed_again(model: PreTrainedModel, path: Path) -> None:
    engine = Engine(model)
    serve(engine, Request("a", PROMPT, BRANCHES))
    corrected = (*PROMPT, *path, 50)
    assert serve(engine, Request("a", corrected, BRANCHES)) == 1 + len(BRANCHES)
    assert serve(engine, Request("a", (*corrected, *path), tree_of([(3, 3)], 9))) == 1 + 2


def test_the_same_context_keeps_the_leading_nodes_of_the_tree(model: PreTrainedModel) -> None:
    engine = Engine(model)
    serve(engine, Request("a", PROMPT, tree_of([(1, 2), (3,)], 9), wanted=(1, 2)))
    grown = TokenTree((1, 2, 3, 4, 5), (-1, 0, -1, 1, 2))
    assert serve(engine, Request("a", PROMPT, grown, wanted=(4, 5))) == 2
    assert serve(engine, Request("a", PROMPT, grown, wanted=(2, 5))) == 2
    assert serve(engine, Request("a", PROMPT, grown, wanted=())) == 0
    assert serve(engine, Request("a", (*PROMPT, 3, 5, 6))) == 1


@pytest.mark.parametrize(("path", "rest"), [((1, 2), [(3,), (9, 4)]), ((1,), [(60,), (2, 9, 4)]), ((7,), [(8,)])])
def test_what_follows_the_emitted_branch_is_not_computed_again(
    model: PreTrainedModel, path: Path, rest: list[Path]
) -> None:
    engine = Engine(model)
    serve(engine, Request("a", PROMPT, BRANCHES))
    kept = tree_of(rest, 20)
    grown = TokenTree((*kept.tokens, 13, 14), (*kept.parents, len(kept) - 1, -1))
    new = (len(kept) + 1, len(kept) + 2)
    assert serve(engine, Request("a", PROMPT + path, grown, new)) == 2
    assert serve(engine, Request("a", PROMPT + path, grown, (len(kept) + 2,))) == 1
    assert serve(engine, Request("a", PROMPT + path + rest[0], wanted=())) == 0


def test_prompts_are_fed_in_chunks(model: PreTrainedModel) -> None:
    engine = Engine(model, chunk=7)
    widths = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, args, __: widths.append(args[0].numel()))
    serve(engine, Request("a", PROMPT * 5, BRANCHES), Request("b", PROMPT * 2), Request("c", (1,)))
    hook.remove()
    fed = widths[: -3 - len(BRANCHES)]  # the rest are the plain forwards that the results are compared with
    assert sum(fed) == len(PROMPT) * 7 + len(BRANCHES) + 1
    assert sorted(fed)[-2:] == [7, 1 + len(BRANCHES)]  # a tree is not cut


def test_the_least_recently_used_session_is_evicted_and_comes_back() -> None:
    engine = Engine(tiny_llama(), budget=1)  # 1,820 places: extents of 1024, 512 and 256
    assert engine.slots == 1792
    prompts = [(number, *PROMPT) * 9 for number in range(15)]  # 63 tokens, which have 128 places with a tree
    for number, prompt in enumerate(prompts[:14]):
        serve(engine, Request(number, prompt, BRANCHES))
    assert (engine.sessions, engine.slots_in_use) == (14, 1792)
    assert serve(engine, Request(0, (*prompts[0], 1))) == 1
    serve(engine, Request(14, prompts[14], BRANCHES))
    assert serve(engine, Request(0, (*prompts[0], 1, 2))) == 1
    assert serve(engine, Request(1, (*prompts[1], 1))) == 1 + len(prompts[1])
    fresh = [(*prompt[::-1], 0) for prompt in prompts]
    assert serve(engine, *(Request(str(n), p, BRANCHES) for n, p in enumerate(fresh))) == 15 * (64 + len(BRANCHES))


def test_a_budget_without_room_for_a_slot_says_what_is_needed(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"16384 tokens needs 9 MiB.*has 8 MiB: set --max-model-len to 8192 or less"):
        Engine(tiny_llama(max_position_embeddings=16384), 16384, budget=8)
    with pytest.raises(ValueError, match="must be between 7 and the model's context 128"):
        Engine(llama, max_length=129)


def test_the_context_is_cut_to_what_the_cache_holds_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert Engine(tiny_llama(max_position_embeddings=16384), budget=8).max_length == 8192
        assert Engine(tiny_llama(), budget=MemoryShare(sessions=3)).slots == 3 * 128
    cut, whole = (record.getMessage() for record in caplog.records)
    assert "at most 8192 tokens, not the model's 16384 (--max-model-len sets this" in cut
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
        Engine(llama).forward([bad])


def test_one_session_twice_in_a_forward(llama: PreTrainedModel) -> None:
    assert serve(Engine(llama), Request("a", PROMPT, BRANCHES), Request("a", (*PROMPT, 1, 2, 9, 4, 5))) == (
        len(PROMPT) + len(BRANCHES) + 1
    )


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


def test_what_a_session_could_not_compute_reaches_no_other_one() -> None:
    """Its keys and values are NaN, and lie in places that others have after it, or start with."""
    llama = tiny_llama()
    with torch.no_grad():
        llama.get_input_embeddings().weight[95] = float("nan")
    engine, bad = Engine(llama, budget=1), tree_of([(95,) * 9], 9)
    text, other = tuple(range(20, 60)), tuple(range(50, 90))
    for number in range(14):  # all places
        engine.forward([Request(number, (number, *(95,) * 120))])
    engine.forward([Request("tree", text)])
    engine.forward([Request("tree", text, bad, wanted=(9,))])
    engine.forward([Request("text", other, bad)])  # in one forward: what is held of the text is NaN too
    for session in (*range(14), "tree", "text"):
        engine.close(session)
    serve(engine, Request("on", (*text, 1)), Request("like it", (*other, 1, 2, 3)))
    serve(engine, Request("a", PROMPT[:1]), Request("b", PROMPT * 2), Request("c", PROMPT[1:]))
    serve(engine, Request("on", (*text, 1, 2)), Request("like it", (*other, 1, 2, 3, 4, 5)))
    serve(engine, Request("a", PROMPT * 11), Request("b", PROMPT * 12), Request("c", PROMPT * 13))
    serve(engine, Request("a", (*PROMPT * 11, 7)), Request("b", (*PROMPT * 12, 7)), Request("c", (*PROMPT * 13, 7)))


@settings(max_examples=examples(10, 25))
@given(st.data())
def test_random_histories(data: st.DataObject) -> None:
    check_random_history(Engine(MODEL, max_length=48, chunk=data.draw(st.integers(3, 40))), data)


def check_random_history(engine: Engine, data: st.DataObject) -> None:
    """Any sequence of requests of a few sessions gives the plain forward's logits."""
    token = st.integers(0, 5)
    contexts = dict.fromkeys("abc", (1,))
    trees = dict.fromkeys("abc", TokenTree())  # what each session's slot holds beyond its context
    for _ in range(data.draw(st.integers(1, 5))):
        requests = []
        for name in data.draw(st.lists(st.sampled_from("abc"), unique=True, min_size=1)):
            emitted = data.draw(st.sampled_from(list(trees[name].paths())))
            again = [path[len(emitted) :] for path in trees[name].paths() if path[: len(emitted)] == emitted]
            kept = data.draw(st.sampled_from([len(contexts[name])] * 3 + [1]))
            fresh = tuple(data.draw(st.lists(token, max_size=3)))
            contexts[name] = (contexts[name][:kept] + emitted + fresh)[:30]
            paths = data.draw(st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), max_size=4))
            trees[name] = tree_of([*data.draw(st.permutations(again)), *paths][: data.draw(st.integers(0, 12))], 10)
            rows = st.none() | st.sets(st.integers(0, len(trees[name]))).map(lambda wanted: tuple(sorted(wanted)))
            requests.append(Request(name, contexts[name], trees[name], data.draw(rows)))
        serve(engine, *requests)
