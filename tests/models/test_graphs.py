"""Forwards in buckets against plain ones; on a CPU a tape of operations stands for CUDA's graphs."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from crossdraft.models import graphs
from crossdraft.models.engine import Engine, Work
from crossdraft.models.forwards import Forwards
from crossdraft.verification.trees import tree_of
from tests.models.taped import taped
from tests.models.test_engine import BRANCHES, PROMPT, check_random_history, serve
from tests.models.tiny import tiny_gemma2, tiny_llama, tiny_qwen2


@pytest.fixture(autouse=True, scope="module")
def recorder() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "recorder_for", lambda _: taped)
        yield


@pytest.fixture
def never_flat(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called on, forwards that go as they are fail."""

    def fail(*_: object) -> None:
        raise AssertionError("a forward went as it is")

    return lambda: monkeypatch.setattr(Forwards, "_flat", fail)


def test_trees_and_ragged_batches_of_all_architectures(model: PreTrainedModel, never_flat: Callable[[], None]) -> None:
    engine = Engine(model, static=True)
    never_flat()
    for turn in range(2):  # the second one replays what the first has recorded
        names = [f"{letter}{turn}" for letter in "abcd"]
        shift = tuple((token + turn) % 90 for token in PROMPT)
        serve(
            engine, Work(names[0], shift * 4), Work(names[1], shift[:1], BRANCHES), Work(names[2], (9, turn), BRANCHES)
        )
        serve(engine, Work(names[0], (*shift * 4, 1)), Work(names[3], shift[::-1], tree_of([(4, 5, 6)], 9), (0, 3)))
        assert serve(engine, Work(names[2], (9, turn, 1, 2, 9, 50), BRANCHES)) == 1 + len(BRANCHES)
        assert serve(engine, Work(names[0], (*shift * 4, 1, 2)), Work(names[1], (shift[0], 7, 8, 3))) == 2
        for name in names:
            engine.close(name)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2, tiny_gemma2])
def test_random_histories(make: Callable[[], PreTrainedModel], data: st.DataObject) -> None:
    check_random_history(Engine(made(make), max_length=48, chunk=data.draw(st.integers(3, 40)), static=True), data)


MODELS: dict[Callable[[], PreTrainedModel], PreTrainedModel] = {}


def made(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return MODELS[make] if make in MODELS else MODELS.setdefault(make, make())
