"""Models on a device that is not the host, of which only shapes are computed: what a forward takes from the host.

`python -m tests.engine.elsewhere NAME…` prints as JSON what was found of each `random:` architecture. It has a process
of its own, as torch keeps the device.
"""

import json
import logging
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

from crossdraft.engine.compatibility import FAILURES, NOTING, ModelLayers, UnsupportedModelError, layers_of
from crossdraft.engine.compilation import use_experts_on_device
from crossdraft.engine.kv_cache import KVCache
from crossdraft.engine.loader import move_attributes
from crossdraft.engine.names import ModelLoadError
from crossdraft.lab.models import random_model

DEVICE = torch.device("privateuseone:0")
WAITS = (DataDependentOutputException, DynamicOutputShapeException)
TOKENS = 6


class HostTensors(TorchDispatchMode):
    """Notes operations with a tensor that is on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if any(tensor.device != DEVICE for tensor in tensors):
            where = [frame for frame in traceback.extract_stack() if "transformers/models" in frame.filename]
            self.found.append(f"{func} in {where[-1].line if where else 'none of its lines'}")
        return result


def host_tensors(model: PreTrainedModel, prepare: Callable[[nn.Module, torch.device], None]) -> list[str]:
    """What a forward of a few tokens takes from the host after the model was moved, and prepared so."""
    layers: ModelLayers | None = None
    with suppress(UnsupportedModelError):
        layers = layers_of(model)
    if layers is not None and not layers.attention:  # it has a way of its own, as sessions that run by themselves
        layers = None
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad(), HostTensors() as mode:
        known: dict[int, Tensor] = {}

        def faked(tensor: Tensor) -> Tensor:
            return known.setdefault(id(tensor), fake.from_tensor(tensor.detach()))

        for module in model.modules():
            for name, value in vars(module).items():
                if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                    vars(module)[name] = tree_map_only(Tensor, faked, value)
            for name, parameter in module._parameters.items():
                module._parameters[name] = parameter if parameter is None else nn.Parameter(parameter.to(DEVICE), False)
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer if buffer is None else buffer.to(DEVICE)
        prepare(model, DEVICE)
        use_experts_on_device(model)
        ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=DEVICE)
        options: dict[str, Any] = {}
        if layers is not None:
            model.set_attn_implementation(NOTING)
            cache = KVCache(layers.shapes, [64], model.dtype, DEVICE, layers.gathers)
            cache.map_slots([ids[0]], ids[0], ids[0] if layers.gathers else None)
            mask = torch.zeros(1, 1, 1, 1, device=DEVICE)  # as it is passed by the engine
            options = {"position_ids": ids + 1, "attention_mask": mask, "past_key_values": cache}
        mode.found.clear()
        try:
            model(ids, use_cache=layers is not None, **options)
        except WAITS as error:
            return [f"waits: {error.func}"]
        except FAILURES as error:
            return [f"fails: {str(error)[:120]}"]
        return mode.found


def planted() -> PreTrainedModel:
    """One that has a tensor where `Module.to` does not look, and copies it in each forward."""
    model = random_model("llama", 97)
    norm = model.model.norm
    norm.scales = {"of all": [torch.ones(64)]}
    norm.register_forward_hook(lambda module, given, result: result * module.scales["of all"][0].to(result.device))
    return model


def main() -> None:
    logging.disable(logging.ERROR)
    _setup_privateuseone_for_python_backend()
    results = {}
    for name in sys.argv[1:]:
        try:
            results[name] = host_tensors(random_model(name, 97), move_attributes)
        except ModelLoadError:
            results[name] = []
    results["planted, moved"] = host_tensors(planted(), move_attributes)
    results["planted"] = host_tensors(planted(), lambda model, device: None)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
