"""When a device was done with a step, by the host's clock."""

from collections.abc import Callable
from functools import cached_property

import torch


class Span:
    """From now on, until a device has done what it is given before `end` is called.

    CUDA works on while the host is elsewhere: the device notes both moments itself, and whoever asks first when it was
    done waits until it is. Anything else has done its work when the call returns.

    Args:
        device: for the calling thread's stream of it.
        clock: of the host, in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.began = clock()
        self._clock, self._device = clock, device
        self._returned = self.began  # when the host had given it all
        self._notes: list[torch.cuda.Event] = []
        self._note()

    def end(self) -> None:
        """All is given."""
        self._returned = self._clock()
        self._note()

    @cached_property
    def ended(self) -> float:
        """When it was done; not before the host had given it all. RuntimeError: the device failed."""
        if not self._notes:
            return self._returned
        first, last = self._notes
        last.synchronize()
        milliseconds: float = first.elapsed_time(last)
        return max(self._returned, self.began + milliseconds / 1000)

    def _note(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._notes.append(event)
