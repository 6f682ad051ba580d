"""The engine against plain forwards of the same model over whole sequences."""

import copy
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from crossdraft.engine.compatibility import layers_of
from crossdraft.engine.engine import CHUNK, Engine, LayerPools
from crossdraft.engine.kv_cache import MIB, CachePlan, KVCache, MemoryShare
from crossdraft.engine.kv_cache_manager import KVCacheManager, SlotAllocator
from crossdraft.engine.requests import CachedTokens, ContextOverflowError
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import MOST_NODES, Path, TokenTree, tree_of
from tests.engine.tiny import VOCABULARY, examples, tiny_gemma2, tiny_gpt2, tiny_llama, tiny_mistral, tiny_qwen2

PROMPT = (5, 17, 3, 88, 41, 2)
BRANCHES = tree_of([(1, 2, 3), (1, 2, 9, 4), (7, 8), (1, 60)], budget=20)
WINDOWED = [tiny_gemma2(sliding_window=7), tiny_mistral(sliding_window=7)]  # in half of the layers, in all
MODELS = [tiny_llama(), tiny_gpt2(), tiny_qwen2(), tiny_gemma2(), *WINDOWED]
SMALL = 4  # extents of 64 places that all sessions share, in the random schedules


@cache
def eager(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with transformers' own attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


@cache
def known(model: PreTrainedModel) -> dict[Path, torch.Tensor]:
    """By text, the logits after it."""
    return {}


@torch.no_grad()
def plain(model: PreTrainedModel, *texts: Path) -> torch.Tensor:
    """Logits after each text, without a cache: a forward has those of all texts that its own begins with."""
    found = known(model)
    while missing := {*texts} - found.keys():
        longest = max(missing, key=len)
        rows = eager(model)(torch.tensor([longest]), use_cache=False).logits[0]
        begun = [text for text in missing if longest[: len(text)] == text]
        found.update({text: rows[len(text) - 1].clone() for text in begun})
    return torch.stack([found[text] for text in texts])


def assert_right(model: PreTrainedModel, request: Request, logits: torch.Tensor, apart: float = 1e-5) -> None:
    paths = list(request.tree.paths())
    assert logits.shape == (len(request.rows()), VOCABULARY)
    if texts := [request.context + paths[row] for row in request.rows()]:
        torch.testing.assert_close(logits, plain(model, *texts), atol=apart, rtol=0)


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
    assert engine.remaining(asked := Request("a", PROMPT, wanted=())) == 0  # which is planned now, and that alone
    assert serve(engine, replace(asked, tree=grown, wanted=(4, 5))) == 2
    assert serve(engine, Request("a", PROMPT, grown, wanted=(2, 5))) == 2
    assert serve(engine, Request("a", PROMPT, grown, wanted=())) == 0
    assert serve(engine, Request("a", (*PROMPT, 3, 5, 6))) == 1


@pytest.mark.parametrize(("path", "rest"), [((1, 2), [(3,), (9, 4)]), ((1,), [(60,), (2, 9, 4)]), ((7,), [(8,)])])
def test_what_follows_the_emitted_branch_is_not_computed_again(llama: PreTrainedModel, path: Path, rest: list[Path]):
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


# Partial steps, slots and other sessions' texts.


def small(model: PreTrainedModel, places: int, graphs: bool = False, chunk: int = CHUNK) -> Engine:
    """An engine with so few places that sessions have to wait."""
    engine = Engine(model, graphs=graphs, chunk=chunk)
    for pool in engine._manager.pools:
        pool.allocator = SlotAllocator(places)
    return engine


def test_who_has_no_places_waits_and_nothing_of_it_is_fed(llama: PreTrainedModel) -> None:
    engine = small(llama, 128)
    first, second, third = (Request(name, (number, *PROMPT)) for number, name in enumerate("abc"))
    assert engine.slots == 128
    for request in (first, second):
        assert engine.admits(request)
        serve(engine, request)
    assert engine.slots_in_use == 128
    assert not engine.admits(third)
    assert engine.step([replace(third, tokens=9)]) == [None]
    engine.close("b")
    assert engine.slots_in_use == 64
    assert engine.admits(third)
    assert serve(engine, third) == 1 + len(PROMPT)
    assert not engine.admits(Request("a", first.context * 10))
    with pytest.raises(ValueError, match="too few free slots for these requests: close other sessions"):
        engine.forward([Request("a", first.context * 10)])


def test_one_session_twice_in_a_step_is_fed_once(llama: PreTrainedModel) -> None:
    engine = Engine(llama)
    first, second = engine.step([Request("a", PROMPT, tokens=9), Request("a", (*PROMPT, 1), tokens=9)])
    assert second is None
    assert_right(llama, Request("a", PROMPT), first)


def test_plain_calls_of_the_model_go_on_beside_the_engine(llama: PreTrainedModel) -> None:
    model, engine = llama, Engine(llama)
    serve(engine, Request("a", PROMPT))
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    padded = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        both = model(ids, attention_mask=padded, position_ids=(padded.cumsum(1) - 1).clamp(min=0)).logits[:, -1]
        loss = model(ids, labels=ids).loss
    torch.testing.assert_close(both[0], plain(model, PROMPT)[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(both[1], plain(model, PROMPT[::-1][2:])[0], atol=1e-5, rtol=0)
    assert float(loss) > 0
    assert serve(engine, Request("a", (*PROMPT, 1))) == 1


@settings(max_examples=examples(15, 60))
@given(st.data())
def test_random_schedules(data: st.DataObject) -> None:
    """Sessions come, share steps, wait for places, roll back, end and go on from each other's texts."""
    model = data.draw(st.sampled_from(MODELS))
    # Layers with a window keep fewer tokens than a session may have where few are computed at a time.
    engine = small(model, SMALL * 64, data.draw(st.booleans()), data.draw(st.sampled_from([CHUNK, 20])))
    token = st.integers(0, 2)
    requests: dict[str, Request] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from("abcdef"))
        if data.draw(st.integers(0, 5)) == 0:
            engine.close(name)
            requests.pop(name, None)
        else:
            before = requests.get(name) or data.draw(st.sampled_from([None, *requests.values()]))
            requests[name] = _next(data, before, name, token)
        names = data.draw(st.permutations(sorted(requests)))
        shares = [replace(requests[one], tokens=data.draw(st.sampled_from([1, 3, 20, 100]))) for one in names]
        admitted = {one: engine.admits(requests[one]) for one in names}
        dues = {one: engine.remaining(requests[one]) for one in names}
        before = engine.computed
        for share, logits in zip(shares, engine.step(shares), strict=True):
            if logits is not None:
                assert admitted[share.session]
                assert_right(model, share, logits)
        assert engine.computed - before <= sum(dues.values())
        assert not shares or not admitted[names[0]] or engine.computed > before or dues[names[0]] == 0
    for name in requests:
        engine.close(name)


def _next(data: st.DataObject, before: Request | None, name: str, token: st.SearchStrategy[int]) -> Request:
    """What a session asks for after `before`: more of its text, a branch of its tree, or an earlier point."""
    context, tree = (before.context, before.tree) if before is not None else ((1,), TokenTree())
    emitted = data.draw(st.sampled_from(list(tree.paths())))
    kept = data.draw(st.sampled_from([len(context)] * 3 + [1, 40]))
    fresh = tuple(data.draw(st.lists(token, max_size=3))) * data.draw(st.sampled_from([1, 1, 12]))
    paths = data.draw(st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), max_size=4))
    again = [path[len(emitted) :] for path in tree.paths() if path[: len(emitted)] == emitted]
    grown = tree_of([path for path in (*again, *paths) if path], 10)
    rows = st.none() | st.sets(st.integers(0, len(grown))).map(lambda wanted: tuple(sorted(wanted)))
    return Request(name, (context[:kept] + emitted + fresh)[:100], grown, data.draw(rows))


# Layers with a window keep the end of a text only, and logits are those of plain forwards all the same.


WINDOW, AT_A_TIME, LENGTH = 20, 20, 1024  # tokens
KEPT = 256  # slots of a session in layers with the window
TEXT = tuple(random.Random(5).choices(range(VOCABULARY), k=400))
TREE = tree_of([TEXT[7:11], (*TEXT[7:9], 3), (5, 6)], 9)
SETTINGS = {"sliding_window": WINDOW, "max_position_embeddings": LENGTH}
HALF, ALL = tiny_gemma2(**SETTINGS), tiny_mistral(**SETTINGS)  # of the layers have a window


@pytest.fixture(
    params=[(HALF, False), (HALF, True), (ALL, False), (ALL, True)], ids=["half", "half, graphs", "all", "all, graphs"]
)
def engine(request: pytest.FixtureRequest) -> Engine:
    model, graphs = request.param
    return Engine(model, chunk=AT_A_TIME, graphs=graphs)


def sizes(engine: Engine, session: str) -> list[int]:
    """Slots that a session has in each pool."""
    return [extent.size for extent in engine._manager.get(session).extents]


def test_a_long_text_keeps_what_its_windows_need(engine: Engine) -> None:
    assert serve(engine, Request("a", TEXT[:300], TREE)) == 300 + len(TREE)
    assert sizes(engine, "a")[-1] <= KEPT
    assert sizes(engine, "a")[:-1] in ([], [512])
    for end in range(300, 400, 8):  # the committed branch moves, again and again to the front of the extent
        context = (*TEXT[:300], *(TEXT[7], TEXT[8], 3) * 40)[:end]
        assert serve(engine, Request("a", context, tree_of([(TEXT[7], TEXT[8], 3, 1), (5, 6)], 9))) <= 15
    assert sizes(engine, "a")[-1] <= KEPT


def test_going_back_within_what_is_kept_and_further(engine: Engine) -> None:
    serve(engine, Request("a", TEXT[:300]))
    assert serve(engine, Request("a", (*TEXT[:290], 1, 2, 3))) == 3
    assert serve(engine, Request("a", TEXT[:291], TREE)) == 1 + len(TREE)
    assert serve(engine, Request("a", (*TEXT[:200], 4))) == 201  # what its last token sees is gone
    assert serve(engine, Request("a", TEXT[:300])) == 100


def test_a_prefix_is_taken_where_its_end_is_kept(engine: Engine) -> None:
    serve(engine, Request("a", TEXT[:300]))
    assert serve(engine, Request("b", (*TEXT[:300], 1, 2))) == 2
    assert engine.remaining(Request("c", (*TEXT[:50], 1, 2))) == 52
    assert serve(engine, Request("c", (*TEXT[:50], 1, 2))) == 52
    assert serve(engine, Request("a", (*TEXT[:300], 7)), Request("b", (*TEXT[:300], 1, 2, 3), TREE)) == 2 + len(TREE)
    engine.close("a")
    assert serve(engine, Request("d", (*TEXT[:300], 7, 8, 9))) == 2
    engine.close("c")
    assert serve(engine, Request("e", (*TEXT[:40], 9))) == 1  # "c" is short: of it nothing is gone


def test_sessions_of_many_lengths_share_steps_and_wait_for_slots() -> None:
    chance = random.Random(3)
    for model in (HALF, ALL):
        engine = Engine(model, chunk=AT_A_TIME)
        slots = {None: 4 * LENGTH, WINDOW: 5 * 64}
        for pool in engine._manager.pools:
            pool.allocator = SlotAllocator(slots[pool.window])
        texts = {name: TEXT[chance.randrange(90) :] for name in "abcdefghijkl"}
        ends = dict.fromkeys(texts, 1)
        admitted = denied = 0
        for _ in range(120):
            names = chance.sample(sorted(texts), 4)
            requests = []
            for name in names:
                ends[name] = min(len(texts[name]), max(1, ends[name] + chance.choice([1, 1, 2, 5, 60, -3, -40])))
                requests.append(Request(name, texts[name][: ends[name]], chance.choice([TREE, TokenTree()])))
            for request in requests:
                if not engine.admits(request):
                    denied += 1
                    engine.close(chance.choice([name for name in texts if name not in names]))
            stepped = engine.step([replace(one, tokens=30) for one in requests])
            for request, logits in zip(requests, stepped, strict=True):
                if logits is not None:
                    admitted += 1
                    assert_right(model, request, logits)
        assert admitted > 50
        assert denied


def test_a_branch_longer_than_the_window_is_committed() -> None:
    """Its nodes move to before what its last token sees."""
    model = tiny_gemma2(sliding_window=4, max_position_embeddings=512)
    engine, chance = Engine(model, chunk=8, reuse=False), random.Random(0)
    texts: dict[str, tuple[int, ...]] = {"a": (1,), "b": (2,)}
    branch: dict[str, tuple[int, ...]] = {"a": (), "b": ()}
    for turn in range(16):
        name = "ab"[turn % 2]
        texts[name] = (*texts[name], *branch[name], turn)
        branch[name] = tuple(chance.choices(range(VOCABULARY), k=12))
        serve(engine, Request(name, texts[name], tree_of([(96 - turn,), branch[name]], 30)))


def test_nothing_of_an_ended_session_is_left_where_its_window_was() -> None:
    engine = Engine(HALF, chunk=AT_A_TIME, reuse=False)
    serve(engine, Request("a", TEXT[:120], TREE))
    pool, extent = engine._cache.pools[-1], engine._manager.get("a").extents[-1]
    pool.keys[0][:, :, extent.start : extent.end] = torch.nan
    engine.close("a")
    serve(engine, Request("b", TEXT[200:210]))
    assert engine._manager.get("b").extents[-1].start == extent.start
    assert pool.keys[0][:, :, extent.start : extent.end].isfinite().all()


@pytest.mark.parametrize("window", [20, 385, 512, 1024])
def test_what_is_kept_is_what_a_session_asks_for(window: int) -> None:
    """With a tree as large as ours are, after another one."""
    model = tiny_gemma2(sliding_window=window, max_position_embeddings=8192)
    pools = LayerPools.of(model, layers_of(model), 8192, CHUNK)
    assert pools.windowed is not None
    tree = tree_of([tuple(range(MOST_NODES))], MOST_NODES)
    pool = Engine(HALF)._cache.pools[0]
    pool.allocator, pool.window, pool.chunk = SlotAllocator(pools.windowed.kept), window, CHUNK
    request = Request("a", (1,) * 8000, tree)
    assert pool.needed(request, CachedTokens(request.context, tree)) <= pools.windowed.kept
    assert KVCacheManager([pool]).can_allocate(request)


def test_a_tree_that_would_never_have_slots_is_refused() -> None:
    engine = Engine(HALF, chunk=AT_A_TIME)
    engine._cache.pools[1].allocator = SlotAllocator(KEPT)
    engine.check(Request("a", TEXT, tree_of([tuple(range(60))], 60)))
    with pytest.raises(ContextOverflowError, match="a tree of 120 nodes does not fit beside the model's window"):
        engine.check(Request("a", TEXT, TokenTree((1,) * 120, tuple(range(-1, 119)))))


@pytest.mark.parametrize(("layers", "share"), [(6, 0.25), (26, 0.25)])
def test_memory_of_gemma_3(layers: int, share: float) -> None:
    """Five of six layers have a window of 1,024 tokens, as in Gemma 3 (arXiv 2503.19786); sessions of 32k tokens."""
    length = 32_768
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "sliding_window": 1024}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": layers}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, max_position_embeddings=length)).eval()
    kinds = layers_of(model)
    pools = LayerPools.of(model, kinds, length, CHUNK)
    whole = KVCache.slot_bytes(kinds.shapes, torch.float32) * length
    assert pools.windowed is not None
    session = pools.slot_bytes * length + pools.window_bytes
    assert session <= share * whole
    plan = CachePlan.of(pools.slot_bytes, -(-session // MIB) + 1, 0.0, length, True, pools.windowed)
    assert plan.length == length
    engine = Engine(model, budget=-(-session // MIB) + 1)
    assert engine.max_length == length
    assert engine._cache.mib <= -(-session // MIB) + 1
