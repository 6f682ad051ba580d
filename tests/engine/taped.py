"""A capture for a CPU in place of CUDA graphs: operations on tensors are noted, and done again without Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

WAITING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2"}
FROM_THE_HOST = {"lift_fresh", "lift_fresh_copy"}


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
        for func, args, kwargs, made in self.steps:
            args, kwargs = tree_map_only(Tensor, lambda known: anew.get(id(known), known), (args, kwargs))
            again = tree_leaves(func(*args, **kwargs))
            anew.update({id(old): new for old, new in zip(made, again, strict=True) if isinstance(old, Tensor)})


def taped(run: Callable[[], None]) -> Callable[[], None]:
    """A `GraphCapture`: runs it, notes what it does, and returns what does it again."""
    run()
    tape = Tape()
    with tape:
        run()
    return tape.replay
