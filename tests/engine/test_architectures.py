"""Windows, sinks, latent attention and others against plain forwards, beyond the window."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from crossdraft.engine import attention, compatibility, runner
from crossdraft.engine.attention import Window
from crossdraft.engine.compatibility import UnsupportedModelError, window_of
from crossdraft.engine.engine import Engine
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import tree_of
from tests.engine.architectures import ARCHITECTURES, WINDOW, made
from tests.engine.taped import taped
from tests.engine.test_engine import BRANCHES, serve

KERNEL = attention._by_kernel
TEXT = tuple((5 * number + number // 7) % 97 for number in range(5 * WINDOW))  # 40 tokens, longer than a hashed block
DEEP = tree_of([tuple(range(50, 50 + 2 * WINDOW)), (50, 51, 3, 4), (7, 8)], budget=40)  # a path of two windows


@pytest.fixture(autouse=True, scope="module")
def capture() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "capture_for", lambda _: taped)
        patch.setattr(runner, "SIZES", (8, 32))
        yield


@pytest.mark.parametrize("graphs", [False, True], ids=["flat", "graphs"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_the_models_own_beyond_the_window(name: str, graphs: bool) -> None:
    engine = Engine(made(name), chunk=2 * WINDOW - 1, graphs=graphs)
    assert (engine.runner.graphs is not None) == (graphs and not engine._cache.gathers)
    serve(engine, Request("a", TEXT), Request("b", TEXT[:1], DEEP), Request("c", TEXT[5:15]))  # in chunks
    longer = (*TEXT, 9)
    assert serve(engine, Request("a", longer, DEEP), Request("b", TEXT[: 2 * WINDOW])) == 1 + len(DEEP) + 2 * WINDOW - 1
    emitted = (*longer, 50, 51, 3)  # nodes that are not the first ones, which move
    assert serve(engine, Request("a", (*emitted, 6), BRANCHES, wanted=(0, 4))) == 1 + len(BRANCHES)
    assert serve(engine, Request("a", TEXT[:30], DEEP, wanted=(0, 5, 16))) == 1 + len(DEEP)  # rolled back
    engine.close("a")
    assert serve(engine, Request("d", (*TEXT[:30], *TEXT[:12])), Request("c", (*TEXT[5:15], 2))) == 42 + 1
    engine.close("d")
    assert serve(engine, Request("e", (*TEXT[:30], *TEXT[:6], 1, 2))) == 2  # what it has in common with d


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt_oss" else pytest.mark.full) for name in ARCHITECTURES]
)
def test_so_they_are_by_the_kernel_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter."""
    monkeypatch.setattr(attention, "_by_kernel", KERNEL)
    monkeypatch.setattr(attention, "PARTS", 2)
    engine = Engine(made(name), chunk=2 * WINDOW - 1, graphs=True, graph_sizes=(8,))
    serve(engine, Request("a", TEXT[: WINDOW + 2]), Request("b", TEXT[:3]))
    serve(engine, Request("a", (*TEXT[: WINDOW + 2], 9), tree_of([(50, 51), (50, 3)], 3)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "layer_types": None}),
        ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 0, "layer_types": None}),
    ],
)
def test_a_window_that_is_off_is_no_window(name: str, changes: dict[str, object]) -> None:
    engine = Engine(made(name, **changes))
    assert {*engine.windows} == {None}
    serve(engine, Request("a", TEXT))


def masked(sees: Callable[[Tensor, Tensor], Tensor]) -> Window | None:
    """The window that is found in a mask of 50 tokens."""
    return window_of(lambda _, __, place, key: (key <= place) & sees(place, key), 50, torch.device("cpu"))


def test_windows_are_read_from_masks() -> None:
    assert masked(lambda place, key: key > place - 50) is None
    for size in (1, 2, 7, 49):
        assert masked(lambda place, key, size=size: key > place - size) == Window(size)
    for size in (2, 7, 25, 49):
        assert masked(lambda place, key, size=size: key // size == place // size) == Window(size, chunked=True)
    for odd in (lambda place, key: (place - key) % 3 == 0, lambda place, key: (key > place - 5) | (key < 3)):
        with pytest.raises(UnsupportedModelError, match="neither causal, nor a sliding window, nor one of chunks"):
            masked(odd)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="set sliding_window to null"):
        Engine(made("mistral", sliding_window=0))


def test_windows_that_no_mask_tells_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, note = made("mistral"), compatibility._note
    patched = partial(monkeypatch.setitem, compatibility.AttentionInterface._global_mapping)
    patched(compatibility.NOTING, lambda *given, **options: note(*given[:4], None, **options))
    with pytest.raises(UnsupportedModelError, match=f"set --max-model-len to {WINDOW} or less"):
        Engine(model)
    serve(Engine(model, max_length=WINDOW), Request("a", TEXT[:WINDOW]))
