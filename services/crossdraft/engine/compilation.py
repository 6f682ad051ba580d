"""Layers that compute faster: compiled on CUDA, packed on a CPU.

What lies between the attentions of a model is compiled to few kernels by inductor, layer by layer.

All layers of a class share the compiled code, as it does not know which layer it runs: attention, with the KV cache, is
an operator that it only calls, and which finds layer and cache where the layer noted them (as vLLM's forward context).
Linear layers with the same input become one matrix product. On a CPU, where linear layers are packed, calls of compiled
layers were measured to be slower.
"""

import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import _config as shapes
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward, grouped_mm_experts_forward

from crossdraft.engine.attention import LAYOUT, NAME, attend
from crossdraft.engine.compatibility import PROBE, Forward, UnsupportedModelError, check_agreement
from crossdraft.engine.kv_cache import KVCache
from crossdraft.engine.requests import ForwardRequest

log = logging.getLogger(__name__)
COPIED = 3  # times that the weights of an expert are read and written where they are copied
GROUPED = (9, 10)  # compute capabilities for which torch has a kernel for products of groups
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch's own is lost when a machine starts again
ATEN = torch.ops.aten
REPEATED = [operation.default for operation in (ATEN.view, ATEN.reshape, ATEN.t, ATEN.permute, ATEN.mm, ATEN.addmm)]
PROBES = (PROBE, ForwardRequest(PROBE.session, (*PROBE.context, 0)))  # many tokens, and then one


def inductor(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """The backend of `torch.compile`; it starts no processes."""
    from torch._inductor.compile_fx import compile_fx  # takes seconds
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Once(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            compute_once(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))  # part of the key of what is kept

    settings = {"post_grad_custom_pre_pass": Once(), "compile_threads": 1}
    return cast(Callable[..., Any], compile_fx(graph, inputs, config_patches=settings))


def compute_once(graph: Graph) -> None:
    """Has a graph compute products of the same matrices once: those of joined linear layers."""
    first: dict[Hashable, Node] = {}
    for node in graph.nodes:
        if node.target in REPEATED:
            same = first.setdefault((node.target, node.args), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def experts_on_device(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As transformers' implementations of a mixture of experts, and nothing in it waits for the device.

    Torch's grouped product does, but for bfloat16 on some GPUs: it copies the sizes of the groups to the host. So a few
    tokens take copies of the weights of their experts, and more of them are given to all experts.

    From (tokens, width) to the same; `chosen`, numbers of experts, and `weights` are (tokens, k).
    """
    count, into = experts.num_experts, "gate_up_proj" if experts.has_gate else "up_proj"
    weight: Tensor = getattr(experts, into)
    if experts._is_expert_parallel or not _grouped_waits(weight):
        return grouped_mm_experts_forward(experts, hidden, chosen, weights)
    if COPIED * chosen.numel() <= count:
        return batched_mm_experts_forward(experts, hidden, chosen, weights)
    rows = hidden.expand(count, *hidden.shape)
    for name in (into, "down_proj"):
        matrix = getattr(experts, name)
        rows = rows @ (matrix if experts.is_transposed else matrix.transpose(1, 2))
        if experts.has_bias:
            rows = rows + getattr(experts, f"{name}_bias")[:, None]
        if name == into:
            rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    shares = weights.new_zeros(len(hidden), count).scatter_add(1, chosen, weights)
    return (rows * shares.T[:, :, None]).sum(0).to(hidden.dtype)


def _grouped_waits(weight: Tensor) -> bool:
    """Whether torch's grouped product waits for the device, of which `GroupedBlas.cpp` has the conditions."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return weight.device.type != "cpu"
    return torch.cuda.get_device_capability(weight.device)[0] not in GROUPED


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_on_device)


def use_experts_on_device(model: PreTrainedModel) -> None:
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        model.set_experts_implementation(NAME)


class Running(threading.local):
    """The compiled layer that a thread runs."""

    attentions: Sequence[nn.Module] = ()
    cache: KVCache


RUNNING = Running()
OPERATORS = torch.library.Library("crossdraft", "FRAGMENT")
OPERATORS.define(
    "attend(Tensor query, Tensor key, Tensor value, int place, float? scaling, float? cap, Tensor? sinks) -> Tensor"
)
OPERATORS.define("update(Tensor key, Tensor value, SymInt count) -> (Tensor, Tensor)")


def _attend(query: Tensor, key: Tensor, value: Tensor, place: int, scaling: Any, cap: Any, sinks: Any) -> Tensor:
    """As `attention.attend` for what a layer computed: (1, heads, tokens, width) to (1, tokens, heads, width)."""
    module, cache = RUNNING.attentions[place], RUNNING.cache
    if not cache.gathers:
        key, value = cache.update(key, value, module.layer_idx)  # type: ignore[arg-type]
    return attend(module, query, key, value, None, scaling=scaling, softcap=cap, s_aux=sinks)[0].contiguous()


def _attended(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _update(key: Tensor, value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `KVCache.update` where that gathers so many slots."""
    return RUNNING.cache.update(key, value, RUNNING.attentions[0].layer_idx)  # type: ignore[arg-type]


def _updated(key: Tensor, value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return key.new_empty(*key.shape[:2], count, key.shape[3]), value.new_empty(*value.shape[:2], count, value.shape[3])


OPERATORS.impl("attend", _attend, "CompositeExplicitAutograd")
OPERATORS.impl("update", _update, "CompositeExplicitAutograd")
torch.library.register_fake("crossdraft::attend", _attended, lib=OPERATORS)
torch.library.register_fake("crossdraft::update", _updated, lib=OPERATORS)


class CompiledForward:
    """The `forward` of one layer: compiled in an engine's forwards, in plain calls its own."""

    def __init__(self, layer: nn.Module, attentions: Sequence[nn.Module], code: Callable[..., Any]) -> None:
        self.layer, self.attentions, self.code = layer, attentions, code
        for place, module in enumerate(attentions):
            vars(module)["place"] = place
        vars(layer)["forward"] = self

    def __call__(self, *given: Any, **named: Any) -> Any:
        cache = next((value for value in (*given, *named.values()) if isinstance(value, KVCache)), None)
        if cache is None:
            return type(self.layer).forward(self.layer, *given, **named)
        RUNNING.attentions, RUNNING.cache = self.attentions, cache
        return self.code(self.layer, *given, **named)


class JoinedLinear(nn.Linear):
    """A linear layer whose weights are a part of those of several, in one matrix.

    In compiled code each multiplies by all of it: that is the same operation, which is done once.
    """

    joined: nn.Parameter  # (outputs of all, in)
    bias_of_all: nn.Parameter | None
    begin: int  # of its own outputs

    def forward(self, rows: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(rows)
        outputs = nn.functional.linear(rows, self.joined, self.bias_of_all)
        return outputs[..., self.begin : self.begin + self.out_features]


def compile_layers(model: PreTrainedModel, forward: Forward, close: Callable[[Hashable], None]) -> None:
    """Compiles the layers of a model, those of each class by themselves, and joins its linear layers.

    Those that cannot be compiled, or then compute something else, run as they were; the log says why. `forward` is that
    of an engine of this model, and `close` ends a session of it.
    """
    layers = _layers_of(model)
    for layer in layers:
        vars(layer).pop("forward", None)  # of another engine
    with _joined_linears(model):
        expected = [[*forward([request])[0]] for request in PROBES]
    close(PROBE.session)
    _keep_code()
    for kind in dict.fromkeys(map(type, layers)):
        members, began = [layer for layer in layers if type(layer) is kind], time.perf_counter()
        code = torch.compile(_own(kind), fullgraph=True, dynamic=True, backend=inductor)
        compiled = [CompiledForward(layer, _attentions(layer), code) for layer in members]
        try:
            with cast(Any, shapes).patch(use_duck_shape=False):  # sizes may be equal by chance
                for request, logits in zip(PROBES, expected, strict=True):
                    check_agreement(model, forward, logits, request)
        except UnsupportedModelError as error:
            for layer in members:
                del vars(layer)["forward"]
            why = str(error.__cause__ or error).partition("\n\n")[0].split()  # then torch says how to find out more
            log.warning("%s is not compiled: %s", kind.__name__, " ".join(why))
            continue
        finally:
            close(PROBE.session)
        ready = torch._dynamo.run(code)  # what would have to be compiled now runs as it is: requests wait
        for each in compiled:
            each.code = ready
        log.info("%d layers (%s) compiled in %.1f s", len(members), kind.__name__, time.perf_counter() - began)


def _attentions(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.modules() if LAYOUT in vars(module)]


def _layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The largest modules that are in a list and have attention."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    found = [layer for layers in lists for layer in layers if _attentions(layer)]
    inner = {id(module) for layer in found for module in layer.modules() if module is not layer}
    return [layer for layer in found if id(layer) not in inner]


def _own(kind: type[nn.Module]) -> Callable[..., Any]:
    """The `forward` of a class with code of its own: torch keeps what it compiled, and how often, at the code."""
    function = inspect.getattr_static(kind, "forward")
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=function.__name__)
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _keep_code() -> None:
    """Has torch keep compiled code in the user's cache, unless another place is set or it cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "crossdraft" / "compiled"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault(CACHE, str(folder))


@contextmanager
def _joined_linears(model: PreTrainedModel) -> Iterator[None]:
    """Joins linear layers that are called one after another with the same input in a forward that runs meanwhile."""
    calls: list[tuple[Tensor, nn.Linear]] = []

    def note(linear: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, nn.Linear)
        calls.append((given[0], linear))

    modules = [module for module in model.modules() if type(module) is nn.Linear]
    plain = [linear for linear in modules if type(linear.weight) is nn.Parameter]
    hooks = [linear.register_forward_pre_hook(note) for linear in plain]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for _, alike in groupby(calls, key=lambda call: (id(call[0]), call[1].bias is None)):
        members = [linear for linear in dict.fromkeys(linear for _, linear in alike) if type(linear) is nn.Linear]
        if len(members) > 1:
            _join(members)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # of the weights' memory before


@torch.no_grad()
def _join(members: Sequence[nn.Linear]) -> None:
    """Puts their weights into one matrix; they stay what they are."""
    joined = nn.Parameter(torch.cat([linear.weight.detach() for linear in members]), requires_grad=False)
    biases = [linear.bias.detach() for linear in members if linear.bias is not None]
    bias, begin = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None, 0
    for linear in members:
        linear.__class__ = JoinedLinear
        linear.weight.data = joined.data[begin : begin + linear.out_features]
        vars(linear).update(joined=joined, bias_of_all=bias, begin=begin)
        begin += linear.out_features


# Linear layers on a CPU, whose weights are reordered once for oneDNN, for the few rows of a pass or a drafting step.
#
# Torch otherwise reorders the weights in each call, or reads them badly for 2 to 16 rows: a pass of 9 tokens then costs
# up to 2.5 times one of a single token, and with packed weights 1.5 times. For each number of rows oneDNN compiles a
# kernel, in a millisecond, and keeps up to 1,024 of them, a third of a MiB each. So rows beyond a few are padded to one
# of few numbers.

ROWS = 8  # that the order of the weights is optimized for; others give the same numbers
STEPS = ((32, 1), (128, 8))  # up to so many rows their number is a multiple of this
COARSEST = 32  # ... and of this beyond


class PackedLinear(nn.Module):
    """A linear layer on a CPU, for inference; the same numbers but for rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    @property
    def weight(self) -> Tensor:
        """In the usual order, for who reads it, as some routers do: a copy."""
        dense: Tensor = self._weight.to_dense()
        return dense

    def forward(self, rows: Tensor) -> Tensor:
        """Shape (..., in) to (..., out)."""
        flat = rows.reshape(-1, self.in_features)
        count = len(flat)
        filled = nn.functional.pad(flat, (0, 0, 0, padded(count) - count)) if padded(count) > count else flat
        result: Tensor = torch.ops.mkldnn._linear_pointwise(filled, self._weight, self.bias, "none", [], "")
        return result[:count].view(*rows.shape[:-1], self.out_features)


def padded(rows: int) -> int:
    step = next((step for most, step in STEPS if rows <= most), COARSEST)
    return -(-rows // step) * step


def packable(weight: Tensor) -> bool:
    """Whether oneDNN computes with these numbers: float32 on a CPU, bfloat16 on one that multiplies them."""
    bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    plain = type(weight) in (Tensor, nn.Parameter)  # quantized weights are tensors of their own kind
    return plain and weight.device.type == "cpu" and (weight.dtype == torch.float32 or bfloat16)


def pack(model: PreTrainedModel) -> None:
    """Replaces the plain linear layers of a model that can be packed, where torch has oneDNN; others stay."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child) is nn.Linear and packable(child.weight):
                setattr(module, name, PackedLinear(child))
