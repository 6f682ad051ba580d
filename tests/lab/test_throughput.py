"""`crossdraft bench throughput`: what is asked for, how it is summed up, and what is refused."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdraft.cli.running import CommandFailed, UsageError
from crossdraft.client import SamplingOptions
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.lab import throughput
from crossdraft.lab.commands import BOUND, ThroughputPlan
from crossdraft.lab.outputs import Output, RunResult, Work
from crossdraft.lab.throughput import AssistedGeneration, Theirs, Throughput, ThroughputResult, measured, prompts_of
from crossdraft.serving.models import Servers, serving
from tests.lab.conftest import Measure, figures
from tests.lab.test_models import IDS, greedy
from tests.prompts import FILE


def made(*moments: float, asked: float = 0.0, **counted: float) -> Output:
    told = figures(tokens=len(moments), **counted) if counted else None
    return Output(asked, moments, moments[-1], figures=told)


def plan(**changed: Any) -> Throughput:
    """Of one output at once, unless something else is said."""
    return Throughput(replace(ThroughputPlan(configuration=("plain",), concurrency=(2,), tokens=4), **changed))


def test_speed_is_all_tokens_over_all_time_and_latencies_count_from_the_asking() -> None:
    outputs = (made(1.0, 1.5, 2.0), made(3.0, 3.5, 4.0, asked=2.0))
    found = measured("plain", 2, [RunResult(outputs, 4.0, Work(2.0, 1.0, 0.4)), RunResult(outputs, 8.0, Work(4.0))])
    assert (found.tokens, found.outputs, found.tokens_per_second) == (12, 4, 1.0)
    assert found.first_token_ms is not None
    assert found.end_to_end_ms is not None
    assert found.per_token_ms is not None
    assert (found.first_token_ms.p50, found.end_to_end_ms.p50, found.per_token_ms.p50) == (1000, 2000, 500)
    assert (found.target_cores, found.drafter_cores, found.loop_cores) == pytest.approx((0.5, 1 / 12, 0.4 / 12))
    assert (found.busy, found.sessions, found.acceptance) == (None, None, None)


def test_what_services_and_pipelines_count_is_summed_up() -> None:
    one, other = {"passes": 4, "accepted": 6, "corrected": 2}, {"passes": 2, "accepted": 2, "corrected": 6}
    outputs = (made(*range(1, 7), **one), made(*range(1, 7), **other))
    found = measured("crossdraft", 2, [RunResult(outputs, 10.0, Work(1.0, 0.0, 0.0, 4, 10, 5.0))])
    assert (found.tokens_per_pass, found.acceptance) == (2.0, 0.5)
    assert (found.sessions, found.forward_ms, found.busy) == (2.5, 1250, 0.5)


def test_outputs_that_repeat_themselves_are_counted_and_left_out_beside_all() -> None:
    repeating = replace(made(*range(1, 9), passes=2), ids=(1, 2, 3, 4) * 2)
    other = replace(made(*range(2, 18, 2), passes=4), ids=tuple(range(8)))
    found = measured("plain", 2, [RunResult((repeating, other), 20.0, Work())])
    assert (found.repeating, found.tokens_per_pass, found.others_per_pass) == (1, 16 / 6, 2.0)
    assert found.others_per_token_ms is not None
    assert found.others_per_token_ms.p50 == 2000
    assert throughput.SPEEDS["without repeats: p50"](found) == "2000.0 (1)"
    assert throughput.WORK["without repeats"](found) == "2.00"
    alone = measured("plain", 1, [RunResult((repeating,), 20.0, Work())])
    assert (alone.others_per_token_ms, throughput.SPEEDS["without repeats: p50"](alone)) == (None, " (1)")


def test_models_on_a_cpu_are_bound_to_cores_and_warmed_up_with_a_few_outputs() -> None:
    far = replace(BOUND, device="cuda:0", cuda_graph_sizes=(1, 8), cache_mib=8192)
    near = replace(BOUND, quantization="int8")
    there = plan(configuration=("tree",), engine=far, concurrency=(1, 16), tokens=64)
    here = plan(configuration=("crossdraft", "plain"), engine=near, clients_at=20.0, concurrency=(300,))
    assert there.warm_ups == ((1, 32), (16, 32))
    assert here.warm_ups == ((4, 8),)
    (target, drafter), (other, helping) = throughput.models_of(there), throughput.models_of(here)
    assert throughput.models_of(plan())[1] is None  # nobody drafts
    assert drafter is not None
    assert helping is not None
    for model, mib in ((target[0], 8192), (drafter[0], 1024)):
        assert (model.device, model.graph_sizes, model.budget, model.threads) == ("cuda:0", (1, 8), mib, 1)
    assert (other[0].enable_prefix_caching, other[0].quantization, helping[0].quantization) == (False, "int8", None)
    assert (other[1].sessions.max_sessions, other[1].port, helping[1].port) == (2400, None, None)
    for one in (there, here):
        assert ("thread is on the first" in one.conditions) == (one is here)


def test_streaming_counts_only_while_all_outputs_are_under_way() -> None:
    assert throughput.streaming([(made(0.0, 1.0, 2.0, 3.0), made(1.0, 1.5, 2.0, 2.5, 3.0, 9.0))]) == (2 + 4) / 2
    assert throughput.streaming([(made(0.0, 1.0), made(2.0, 3.0))]) is None


def test_prompts_are_enough_and_no_two_begin_alike() -> None:
    texts = [tuple(range(100, 140)), tuple(range(20))]
    found = prompts_of(texts, 5, 10)
    assert [ids[0] for ids in found] == [100, 0, 108, 8, 116]
    assert max(map(len, found)) == 10
    assert [plan(each=2).outputs(count) for count in (1, 3)] == [4, 6]  # a few at least
    with pytest.raises(UsageError, match=r"enough for \d+ outputs, and 20 are asked for"):
        prompts_of(texts, 20, 10)
    assert prompts_of(texts, 5, 10, count=20)[:5] == found


def served(at_once: int, most: int, temperature: float = 0.0, name: str = "plain") -> ThroughputResult:
    """Outputs of 20 tokens/s, or just less if there are more of them than so many."""
    moments = [number * (0.051 if at_once > most else 0.05) for number in range(1, 9)]
    return measured(name, at_once, [RunResult((made(*moments),) * at_once, 1.0, Work(1.0))], temperature)


@pytest.mark.parametrize(
    ("most", "tried", "line"),
    [
        (100, [1, 16, 64, 128, 96], "96, and not 128"),
        (10**6, [1, 16, 64, 128, 200], "at least 200"),
        (20, [1, 16, 64, 40, 28, 22, 19], "19, and not 22"),
        (0, [1, 16, 64], "0, and not 1"),
    ],
)
def test_numbers_of_clients_are_doubled_and_then_halved(most: int, tried: list[int], line: str) -> None:
    known = [served(count, most) for count in (1, 16, 64)]
    while count := throughput.next_clients(known, 20, 200):
        known.append(served(count, most))
    assert [one.at_once for one in known] == tried
    other = served(1, 1, 0.7, "crossdraft")
    said, others = throughput.clients_served([*known, other], 20)
    assert said.endswith(f"T = 0, plain: {line}")
    assert others.endswith("T = 0.7, crossdraft: at least 1")


@pytest.mark.parametrize(
    "changed",
    [*({"configuration": ("vllm",)}, {"configuration": ()}, {"method": "none"}), {"temperatures": (0.0, -1.0)}],
)
def test_wrong_plans_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        plan(**changed).check()


class Pair(AssistedGeneration):
    """Takes longest unless 3 tokens are drafted at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int | None, float]] = []
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def outputs(self, prompts: Any, tokens: int, k: int | None, temperature: float) -> tuple[Output, ...]:
        self.asked.append((k, temperature))
        self.now += 1.0 if k == 3 else 2.0
        return tuple(made(*range(1, 1 + tokens)) for _ in prompts)


@pytest.mark.parametrize(("threads", "cores"), [(1, 1), (2, 0)])
async def test_assisted_generation_uses_its_fastest_number_and_makes_few_outputs(
    threads: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[Any] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    monkeypatch.setattr(throughput.torch, "set_num_threads", bound.append)
    pair, prompts = Pair(monkeypatch), [(1,)] * 20
    assisted = Theirs(pair, threads, bound=True, options=SamplingOptions(0.0))
    await assisted.warm_up(prompts)
    found = await assisted.run(prompts, 6, 16, SamplingOptions(0.5))
    assert (assisted.name.split(", ")[-1], pair.asked[-1]) == ("K = 3", (3, 0.5))
    assert (len(found.outputs), found.seconds, found.work.steps) == (throughput.ONE_BY_ONE, 1.0, 0)
    assert bound == [threads, *[{min(os.sched_getaffinity(0))}] * cores]


def test_a_full_event_loop_is_said() -> None:
    busy = measured("plain", 64, [RunResult((made(1.0, 2.0),), 2.0, Work(1.0, 0.0, 1.9))])
    idle = measured("plain", 1, [RunResult((made(1.0, 2.0),), 2.0, Work(1.0, 0.0, 0.1))])
    *_, warning = plan().report([idle, busy])
    assert "outputs waited for it: plain with 64" in str(warning)
    assert len(list(plan().report([idle]))) == 3


def test_outputs_over_models_in_this_process(
    measure: Measure, target_folder: Path, drafter_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Servers] = []
    bound: dict[int, set[int]] = {}

    @asynccontextmanager
    async def noted(*models: Any) -> AsyncIterator[Servers]:
        async with serving(*models) as servers:
            served.append(servers)
            yield servers

    monkeypatch.setattr(throughput, "serving", noted)
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    models = ("--target", target_folder, "--drafter", drafter_folder, "--cache-mib", 16)
    options = ("--concurrency", "1,2", "--tokens", 3, "--prompt-tokens", 8, "--limit", 4, "--prompts", FILE)
    names = ("crossdraft", "lock-step", "tree", "overlapped", "plain")
    sampled = ("--temperature", "0,0.7", "--top-k", 2, "--clients-at", 0.001)
    found = measure("throughput", *models, "--configuration", ",".join(names), *options, *sampled)
    ran = [(one["temperature"], one["configuration"], one["at_once"], one["outputs"], one["tokens"]) for one in found]
    cells = [(name, count) for count in (1, 2) for name in names]
    of_one = [one for one in ran if one[0] == 0.0]
    assert of_one[: len(cells)] == [(0.0, name, count, 4, 12) for name, count in cells]
    assert [(0.7, *one[1:]) for one in of_one] == [one for one in ran if one[0] == 0.7]
    more = [count for _, name, count, *_ in of_one[len(cells) :] if name == "plain"]
    assert more == [4, 8, 16]
    assert [(one[1], one[2]) for one in of_one[len(cells) :]] == [
        (name, count) for name in ("crossdraft", "plain") for count in more
    ]
    assert all(1 <= one["sessions"] <= one["at_once"] for one in found)
    assert all(one["tokens_per_pass"] >= 1 for one in found)
    assert all((one["to_plain"] == 1) == (one["configuration"] == "plain") for one in found if one["at_once"] <= 2)
    assert {one["configuration"] for one in found if one["draft_ms"] is not None} >= set(names[1:4])
    ((target, drafter),) = (one.values() for one in served)
    assert (target.address, drafter.address) == (target.here, drafter.here)  # there is no port
    assert len(bound) == 2
    assert all(len(cores) == 1 for cores in bound.values())


def test_assisted_generation_tells_when_tokens_came() -> None:
    pair = AssistedGeneration("bundled:target", "bundled:drafter-b")
    (made,) = pair.outputs([IDS[0]], 6, 2, 0.0)
    assert made.ids == greedy(load_model(LoadOptions("bundled:target", dtype="float32")).model, IDS[0], 6)
    assert len(made.moments) == 6
    assert [made.asked, *made.moments] == sorted([made.asked, *made.moments])


def test_sampled_outputs_are_target_ids_and_differ() -> None:
    torch.manual_seed(1)
    pair = AssistedGeneration("bundled:target", "bundled:drafter-b")
    found = [one.ids for one in pair.outputs([IDS[0]] * 8, 3, 2, 1.0)]
    assert {len(ids) for ids in found} == {3}
    assert all(0 <= token < 4096 for ids in found for token in ids)
    assert len(set(found)) > 2


async def test_what_transformers_cannot_do_is_said() -> None:
    pair = AssistedGeneration("bundled:target", "bundled:drafter-c")
    assisted = Theirs(pair, 1, bound=False, options=SamplingOptions(1.0))
    with pytest.raises(CommandFailed, match="transformers failed: "):
        await assisted.run([IDS[0]], 3, 1, SamplingOptions(1.0))


@pytest.mark.full
def test_a_whole_run_of_the_bundled_target(measure: Measure) -> None:
    options = ("--concurrency", "2", "--tokens", 4, "--prompt-tokens", 12, "--limit", 4, "--prompts", FILE)
    (plain, theirs) = measure("throughput", "--configuration", "plain", "--configuration", "assisted", *options)
    assert (plain["configuration"], theirs["configuration"].split(",")[0]) == ("plain", "assisted")
    assert (plain["tokens"], theirs["tokens"]) == (16, 16)
    assert 1 <= plain["sessions"] <= 2
