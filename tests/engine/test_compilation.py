"""Layers that are compiled: what they compute, how many kernels they are, and what stays as it is."""

import copy
import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from transformers import PreTrainedModel

from crossdraft.engine import compilation
from crossdraft.engine.compilation import CompiledForward, JoinedLinear, PackedLinear, pack, padded
from crossdraft.engine.engine import Engine
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.lab import models
from crossdraft.lab.models import architectures, random_model
from crossdraft.types.trees import tree_of
from tests.engine.test_engine import BRANCHES, serve
from tests.engine.tiny import VOCABULARY, tiny_llama

TEXT = tuple((5 * number + number // 7) % VOCABULARY for number in range(60))
KERNEL = re.compile(r"^ *(?:buf\d+ = )?(cpp_\w+|extern_kernels\.\w+|torch\.ops\.\w+\.\w+)[\w.]*\(", re.MULTILINE)
# Their own code takes something from the host, or asks the device for a size, and xmod wants a language first.
HOSTS = {"cpmant", "falcon", "jetmoe", "longcat_flash", "phimoe", "xlm", "xmod"}
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor looks for g++ on a CPU, which is not here")
REAL = compilation.inductor
REQUESTS = [Request("a", (5, 17, 3, 88), tree_of([(1, 2), (1, 3), (9,)], 9)), Request("b", (4,))]


class Traced:
    """A backend that compiles nothing, and counts."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*given: Any) -> Any:
            self.calls += 1
            return graph.forward(*given)

        return run


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    backend = Traced()
    monkeypatch.setattr(compilation, "inductor", backend)
    return backend


def serve_some(engine: Engine) -> None:
    """Forwards of one token and of many, of several sessions, and with trees; `serve` compares them."""
    serve(engine, Request("a", TEXT[:40]), Request("b", TEXT[:3], BRANCHES))
    serve(engine, Request("a", (*TEXT[:40], 3)))
    serve(engine, Request("a", (*TEXT[:40], 3, 4), BRANCHES), Request("c", TEXT))
    for session in "abc":
        engine.close(session)


@pytest.mark.parametrize(
    ("name", "graphs"), [("llama", 2), ("gemma3_text", 2), ("gpt_oss", 2), ("deepseek_v3", 4), ("gpt2", 2)]
)
def test_a_kind_of_layer_is_compiled_for_one_token_and_for_more_and_for_nothing_else(name, graphs, traced):
    """Windows, sinks, norms on both sides; of DeepSeek's layers one has no experts."""
    engine = Engine(random_model(name, VOCABULARY), 128, budget=16, compiled=True)
    assert traced.graphs == graphs
    traced.calls = 0
    serve_some(engine)
    assert traced.graphs == graphs
    assert traced.calls == 4 * 3


def test_a_request_waits_for_no_compilation(traced: Traced) -> None:
    engine = Engine(tiny_llama(), compiled=True)
    graphs = traced.graphs
    with torch.random.fork_rng():  # what compiled code depends on is another: it runs uncompiled
        torch.use_deterministic_algorithms(True)
        try:
            traced.calls = 0
            serve_some(engine)
        finally:
            torch.use_deterministic_algorithms(False)
    assert (traced.graphs, traced.calls) == (graphs, 0)


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (lambda graph, inputs: (_ for _ in ()).throw(RuntimeError("no compiler here")), "no compiler here"),
        (lambda graph, inputs: lambda *given: [0 * one for one in graph.forward(*given)], "relative difference"),
    ],
    ids=["fails", "computes something else"],
)
def test_layers_that_cannot_be_compiled_run_as_they_are(backend, why, monkeypatch, caplog):
    monkeypatch.setattr(compilation, "inductor", backend)
    engine = Engine(tiny_llama(), compiled=True)
    (said,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert said.startswith("LlamaDecoderLayer is not compiled: ")
    assert why in said
    assert "\n" not in said
    assert not any(isinstance(vars(module).get("forward"), CompiledForward) for module in engine.model.modules())
    serve_some(engine)


def test_joined_weights_are_one_matrix_and_the_same_parameters(traced: Traced) -> None:
    model = tiny_llama(attention_bias=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(torch.tensor([TEXT])).logits
    Engine(model, compiled=True)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    layer = model.model.layers[1]
    for members in ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"):
        linears = [getattr(layer.self_attn, name, None) or getattr(layer.mlp, name) for name in members]
        assert all(type(one) is JoinedLinear for one in linears)
        assert len({one.weight.untyped_storage().data_ptr() for one in linears}) == 1
    assert type(layer.self_attn.o_proj) is nn.Linear
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(torch.tensor([TEXT])).logits, expected)


def test_two_engines_of_a_model_do_not_disturb_each_other(traced: Traced) -> None:
    model = tiny_llama()
    engines = [Engine(model, compiled=True), Engine(model, compiled=True)]
    for engine in (*engines, *engines):
        serve_some(engine)


class Written(BaseException):
    """Code is written; nothing is compiled."""


def kernels_of(graph: GraphModule, inputs: Any) -> list[str]:
    """What inductor's code calls; no compiler takes part, not even to find out what the processor can do."""
    from torch._inductor import config, cpu_vec_isa  # takes seconds
    from torch._inductor.graph import GraphLowering

    code: list[str] = []
    write = GraphLowering.codegen

    def written(lowering: Any) -> Any:
        code.append(write(lowering)[0].value)
        raise Written

    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True):
        patch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
        patch.setattr(GraphLowering, "codegen", written)
        with pytest.raises(Written):
            REAL(graph, inputs)
    (found,) = code
    return KERNEL.findall(found.partition("def call(")[2])


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of inductor, when it is imported
@COMPILER
def test_a_llama_layer_is_at_most_12_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[str] = []

    def backend(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        if not kernels:  # for many tokens; for one it takes as long again
            kernels.extend(kernels_of(graph, inputs))
        return graph.forward

    monkeypatch.setattr(compilation, "inductor", backend)
    Engine(tiny_llama(), compiled=True)
    assert kernels.count("torch.ops.crossdraft.attend") == 1
    assert sum(name.startswith("extern_kernels") for name in kernels) == 4
    assert len(kernels) <= 12


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@COMPILER
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_compiled_for_a_cpu(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    engine = Engine(random_model(name, VOCABULARY), 128, budget=16, compiled=True)
    assert any(isinstance(vars(module).get("forward"), CompiledForward) for module in engine.model.modules())
    serve_some(engine)


@pytest.mark.parametrize("experts", [4, 64], ids=["all experts", "copies"])
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "mixtral", "qwen3_moe"])
def test_experts_compute_the_same_where_groups_would_wait_for_the_device(name, experts, monkeypatch):
    for size in ("num_experts", "num_local_experts", "n_routed_experts"):
        monkeypatch.setitem(models.RANDOM_SIZES, size, experts)
    model, ids = random_model(name, VOCABULARY), torch.tensor([TEXT[:9]])
    expected = model(ids).logits
    monkeypatch.setattr(compilation, "_grouped_waits", lambda weight: True)
    monkeypatch.setattr(compilation, "grouped_mm_experts_forward", None)
    compilation.use_experts_on_device(model)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_forward_takes_nothing_from_the_host() -> None:
    """`random:` models on a device that only computes shapes; in a process of its own, as torch keeps the device."""
    names = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "mistral", "qwen3", "mamba"]
    found = host_tensors_of(names)
    assert all(not found[name] for name in names), found


@pytest.mark.full
def test_nor_does_one_of_any_architecture_that_does_not_wait_by_itself() -> None:
    found = {name: what for name, what in host_tensors_of(architectures()).items() if what}
    assert found.keys() == HOSTS, found


def host_tensors_of(names: list[str]) -> dict[str, list[str]]:
    """By `elsewhere`, which sees a planted tensor, and that it was moved."""
    command = [sys.executable, "-m", "tests.engine.elsewhere", *names]
    found: dict[str, list[str]] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert any("_to_copy" in what for what in found.pop("planted"))
    assert not found.pop("planted, moved")
    return found


# Packed linear layers.


def linears(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, nn.Linear | PackedLinear)}


def test_a_packed_model_computes_the_same(llama: PreTrainedModel) -> None:
    plain, packed = Engine(copy.deepcopy(llama)), copy.deepcopy(llama)
    pack(packed)
    assert linears(packed) == {PackedLinear}
    for one, other in zip(Engine(packed).forward(REQUESTS), plain.forward(REQUESTS), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rows", "bias"), [(0, True), (1, False), (9, True), (33, False), (70, True), (129, False)])
def test_any_number_of_rows(rows: int, bias: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(rows)
        linear = nn.Linear(33, 50, bias)
    packed = PackedLinear(linear)
    assert torch.equal(packed.weight, linear.weight)  # routers read it
    found = packed(torch.ones(2, rows, 33).cumsum(1))
    torch.testing.assert_close(found, linear(torch.ones(2, rows, 33).cumsum(1)).detach(), atol=1e-4, rtol=1e-5)


def test_bfloat16_is_packed_where_the_processor_multiplies_it_and_float16_never(llama: PreTrainedModel) -> None:
    model = copy.deepcopy(llama).bfloat16()
    plain = Engine(copy.deepcopy(model)).forward(REQUESTS)
    pack(model)
    assert linears(model) == {PackedLinear if torch.ops.mkldnn._is_mkldnn_bf16_supported() else nn.Linear}
    for one, other in zip(Engine(model).forward(REQUESTS), plain, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
    half = copy.deepcopy(llama).half()
    pack(half)
    assert linears(half) == {nn.Linear}


def test_programs_are_made_for_few_numbers_of_rows() -> None:
    made = {rows: padded(rows) for rows in range(513)}
    assert all(rows <= filled <= 1.25 * rows for rows, filled in made.items())
    assert all(filled == rows for rows, filled in made.items() if rows <= 32)
    assert len(set(made.values())) < 60
