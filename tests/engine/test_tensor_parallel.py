"""A model that two processes share computes what one process does, whatever the order of calls."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from crossdraft.engine import tensor_parallel
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.engine.names import ModelLoadError
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.engine.tensor_parallel import run_ranks
from crossdraft.text.letters import Side
from crossdraft.types.trees import tree_of
from tests.engine.tiny import tiny_gpt2

TARGET = "bundled:target"
LENGTH = 128  # tokens of a session
MIB = 2  # of a whole KV cache: places for three sessions of 64 tokens
SESSIONS = "abcde"
STEPS = 40


def options(**changes: object) -> ModelOptions:
    settings = {"name": TARGET, "device": "cpu", "cache_mib": MIB // 2, "max_model_len": LENGTH, "threads": 1}
    return ModelOptions(**{**settings, "tensor_parallel_size": 2, **changes})


def test_each_follower_knows_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = Mock()
    monkeypatch.setattr(tensor_parallel, "follow", follow)
    monkeypatch.setattr(tensor_parallel.signal, "signal", Mock())
    for rank in (1, 2, 3):
        tensor_parallel._followed(options(), rank, "127.0.0.1", 1, Mock())
    assert [call.args[1] for call in follow.call_args_list] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tensor_parallel_size": 3}, "must divide num_attention_heads, 4, got 3"),
        ({"quantization": "int8"}, "--quantization and --tensor-parallel-size do not go together"),
        ({"name": "random:llama"}, "random:llama is made in one process: leave out --tensor-parallel-size"),
        ({"device": "meta"}, "--device must be .* or auto and is meta"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_starts(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ModelLoadError, match=complaint):
        run_ranks(options(**changes), Side.TARGET)


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="no tensor-parallel plan for gpt2"):
        run_ranks(options(name=str(tmp_path)), Side.TARGET)


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningModel]:
    """Two ranks, of which this process is the first."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_RANK", "GLOO_SOCKET_IFNAME"):
            patch.setenv(name, "")
            patch.delenv(name)
        running = run_ranks(options(), Side.TARGET)
        yield running
        running.close()


@pytest.fixture(scope="module")
def whole() -> Engine:
    return Engine(load_model(LoadOptions(TARGET)).model, LENGTH, MIB)


def test_ranks_serve_the_model_that_one_process_serves(shared: RunningModel) -> None:
    alone = run_ranks(options(tensor_parallel_size=1, cache_mib=MIB), Side.TARGET)
    alone.close()
    assert shared.description == alone.description


def text(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4096) for _ in range(length))


def grown(rng: random.Random, before: Request | None, beginning: tuple[int, ...]) -> Request:
    """A new text, one that goes on, or one that is rolled back, with a tree after it."""
    context = (*beginning, *text(rng, rng.randrange(1, 20)))
    if before is not None and len(before.context) < 90:
        path = [*before.tree.paths()][rng.randrange(1 + len(before.tree))]
        context = (*before.context[: rng.choice((None, None, -3)) or None], *path, *text(rng, 1))
    tree = tree_of([text(rng, rng.randrange(4)) for _ in range(3)], 9)
    wanted = None if rng.random() < 0.7 else tuple(sorted(rng.sample(range(1 + len(tree)), 1)))
    return Request(before.session if before else "", context, tree, wanted)


def test_batches_with_trees_shares_endings_and_too_little_room(shared: RunningModel, whole: Engine) -> None:
    thread, parts, rng = shared.thread, shared.thread.engine, random.Random(3)
    assert parts.slots == whole.slots
    beginning = text(rng, 40)  # of all texts: sessions begin with what others have computed
    latest: dict[str, Request] = {}
    due: dict[str, Request] = {}
    denied = answered = 0
    for _ in range(STEPS):
        for session in rng.sample(SESSIONS, 3):
            if session not in due:
                made = grown(rng, latest.get(session), beginning)
                due[session] = latest[session] = Request(session, made.context, made.tree, made.wanted)
        step = [replace(request, tokens=rng.choice((5, 100))) for request in due.values()]
        assert [parts.admits(one) for one in step] == [whole.admits(one) for one in step]
        for one, found, expected in zip(step, thread._engine_step(step), whole.step(step), strict=True):
            assert (found is None) is (expected is None)
            denied += not whole.admits(one)
            if found is not None and expected is not None:
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
                assert torch.equal(found.argmax(-1), expected.argmax(-1))
                del due[one.session]
                answered += 1
        for session in rng.sample(SESSIONS, rng.randrange(3)):  # ended, or preempted where it is due
            thread._admission.free(session)
            whole.close(session)
            if session not in due:
                latest.pop(session, None)
    assert answered > STEPS // 2
    assert denied


def test_a_process_has_one_shared_model(shared: RunningModel) -> None:
    with pytest.raises(ModelLoadError, match="has a model over several devices already"):
        run_ranks(options(), Side.TARGET)
