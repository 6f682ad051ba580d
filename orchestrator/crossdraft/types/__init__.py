"""Plain values that everybody speaks, and how they are made."""

from typing import TYPE_CHECKING, Any

__all__ = ["quick_dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass as quick_dataclass
else:
    from dataclasses import dataclass

    def quick_dataclass(*, eq: bool = True, frozen: bool) -> Any:
        """A frozen dataclass, for values of which thousands are made each second.

        Only the type checker keeps its fields from being changed: Python's own frozen ones take five times as long to
        make, and an output would spend a seventh of its time in the event loop on that.
        """
        assert frozen
        return dataclass(eq=eq, unsafe_hash=eq)
