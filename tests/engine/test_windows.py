"""Layers with a window keep the end of a text only, and logits are those of plain forwards all the same."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from crossdraft.engine import runner
from crossdraft.engine.compatibility import layers_of
from crossdraft.engine.engine import CHUNK, Engine, LayerPools
from crossdraft.engine.kv_cache import MIB, CachePlan, KVCache
from crossdraft.engine.kv_cache_manager import KVCacheManager, SlotAllocator
from crossdraft.engine.requests import CachedTokens, ContextOverflowError
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import MOST_NODES, TokenTree, tree_of
from tests.engine.taped import taped
from tests.engine.test_engine import assert_right, serve
from tests.engine.tiny import VOCABULARY, tiny_gemma2, tiny_mistral

WINDOW, AT_A_TIME, LENGTH = 20, 20, 1024  # tokens
KEPT = 256  # slots of a session in layers with the window
TEXT = tuple(random.Random(5).choices(range(VOCABULARY), k=400))
TREE = tree_of([TEXT[7:11], (*TEXT[7:9], 3), (5, 6)], 9)
SETTINGS = {"sliding_window": WINDOW, "max_position_embeddings": LENGTH}
HALF, ALL = tiny_gemma2(**SETTINGS), tiny_mistral(**SETTINGS)  # of the layers have a window


@pytest.fixture(
    params=[(HALF, False), (HALF, True), (ALL, False), (ALL, True)], ids=["half", "half, graphs", "all", "all, graphs"]
)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(runner, "capture_for", lambda _: taped)
    monkeypatch.setattr(runner, "SIZES", (8, 32))
    model, graphs = request.param
    return Engine(model, chunk=AT_A_TIME, graphs=graphs)


def sizes(engine: Engine, session: str) -> list[int]:
    """Slots that a session has in each pool."""
    entry = engine._manager.get(session)
    assert entry is not None
    return [extent.size for extent in entry.extents]


def test_a_long_text_keeps_what_its_windows_need(engine: Engine) -> None:
    assert serve(engine, Request("a", TEXT[:300], TREE)) == 300 + len(TREE)
    assert sizes(engine, "a")[-1] <= KEPT
    assert sizes(engine, "a")[:-1] in ([], [512])
    for end in range(
        300, 400, 8
    ):  # the committed branch moves, and the front of the extent is moved to again and again
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
            for request, logits in zip(
                requests, engine.step([replace(one, tokens=30) for one in requests]), strict=True
            ):
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
    pool = engine._cache.pools[-1]
    before = engine._manager.get("a")
    assert before is not None
    extent = before.extents[-1]
    pool.keys[0][:, :, extent.start : extent.end] = torch.nan
    engine.close("a")
    serve(engine, Request("b", TEXT[200:210]))
    after = engine._manager.get("b")
    assert after is not None
    assert after.extents[-1].start == extent.start
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
    model: PreTrainedModel = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            sliding_window=1024,
            max_position_embeddings=length,
        )
    ).eval()
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
