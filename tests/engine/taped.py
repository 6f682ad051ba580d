"""What a device would be asked to do, on a CPU: operations on tensors are noted, and done again without Python, as CUDA
graphs do; and calls for which the host would wait for the device are counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crossdraft.engine import attention
from crossdraft.engine.attention import Group, Marks, Scores, Strided
from crossdraft.engine.model_thread import ModelThread
from crossdraft.engine.sampling import distributions

SIZES = (1, 4, 16, 64)  # tokens of forwards that are captured, in the tests of the engine
WAITING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2"}
FROM_THE_HOST = {"lift_fresh", "lift_fresh_copy"}
TO_THE_HOST = {"cpu", "item", "tolist", "nonzero", "masked_select", "equal", "unique", "__bool__", "__int__"}
TO_THE_HOST |= {"__float__", "__index__", "argwhere", "is_nonzero"}


def by_marks(query: Tensor, key: Tensor, value: Tensor, marks: Tensor, how: Scores) -> Tensor:
    """What the kernel computes, block by block with torch; waits for the device."""
    found = value.new_zeros(query.shape[1], len(query), value.shape[2])
    for token in (marks[1] > 0).nonzero()[:, 0].tolist():
        end = token + int(marks[1, token])
        own = Marks(*marks[:, token:end])
        start, used = int(own.firsts.min()), int(own.targets.max()) + 1
        slots = torch.arange(start, used, device=query.device)
        nodes = slots - own.bases[:, None]
        seen = (slots >= own.firsts[:, None]) & (slots < own.limits[:, None])
        seen |= (nodes >= 0) & (nodes < 64) & (own.lines[:, None] >> nodes.clamp(0, 63) & 1 != 0)
        mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, -torch.inf)
        group = Group(token, end, 1, end - token, used - start, Strided(start, 0), mask[None, None])
        found[token:end] = attention._group(group, query, key, value, how)
    return found


class NeverWaiting(TorchDispatchMode):
    """Where the host would have to wait for what a device computes is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = tree_leaves(args[1:]) if name.startswith("index") else []
        if name in WAITING or any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices):
            raise RuntimeError(f"the host would wait: {func}")
        return func(*args, **(kwargs or {}))


class Tape(NeverWaiting):
    """What a block does to tensors. What needs the host, as no capture of CUDA may, is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Callable[..., Any], Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in FROM_THE_HOST:
            raise RuntimeError(f"numbers of the host: {func}")
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.steps.append((func, args, kwargs or {}, tree_leaves(made)))
        return made

    def replay(self) -> None:
        """Does it again: tensors that were there before are the same, those made on the way are made anew."""
        anew: dict[int, Tensor] = {}

        def now(value: Any) -> Any:
            if isinstance(value, Tensor):
                return anew.get(id(value), value)
            return [*map(now, value)] if isinstance(value, list | tuple) else value

        for func, args, kwargs, made in self.steps:
            again = func(*map(now, args), **{name: now(value) for name, value in kwargs.items()})
            anew.update({id(old): new for old, new in zip(made, tree_leaves(again), strict=True)})


def taped(run: Callable[[], None]) -> Callable[[], None]:
    """A `GraphCapture`: runs it, notes what it does, and returns what does it again."""
    run()
    tape = Tape()
    with tape:
        run()
    return tape.replay


class Waits(TorchFunctionMode):
    """Notes each call for which the host would wait for a device, as the same code would on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        places = args[1] if name in ("__getitem__", "__setitem__") else ()
        masked = any(isinstance(place, Tensor) and place.dtype == torch.bool for place in tree_leaves(places))
        if name in TO_THE_HOST or masked:
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """For what do the steps of model threads wait, without what is only for a CPU, where nothing waits."""
    seen, stepped = Waits(), ModelThread._step

    def step(self: ModelThread, *given: Any) -> None:
        with seen:
            stepped(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(ModelThread, "_step", step)
        patch.setattr(distributions, "NUCLEUS", 1 << 20)
        yield seen.calls
