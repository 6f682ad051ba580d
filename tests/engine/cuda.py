"""What `torch.cuda` is asked to do for a capture, on a machine without it."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch


class Cuda:
    """Names of `torch.cuda` that note what is done, with the arguments that the real ones take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
        real = inspect.signature(torch.cuda.graph.__init__)
        self.events: list[str] = []
        self.streams = ["usual"]
        note = self.events.append

        class Stream:
            def __init__(self, name: object) -> None:
                self.name = str(name)

            def wait_stream(self, other: "Stream") -> None:
                note(f"{self.name} waits for {other.name}")

        @contextmanager
        def stream(one: Stream) -> Iterator[None]:
            self.streams.append(one.name)
            yield
            self.streams.pop()

        @contextmanager
        def graph(*given: object, **options: object) -> Iterator[None]:
            real.bind(None, *given, **options)
            assert given[1:] == ("pool", self.side)
            assert options == {"capture_error_mode": "thread_local"}
            self.streams.append("capturing")
            yield
            if broken:  # as the real one, which leaves its stream then
                raise RuntimeError("captured nothing")
            self.streams.pop()

        self.side = Stream("side")
        recorded = SimpleNamespace(replay=lambda: note("replayed"))
        names = {
            "Stream": lambda device: self.side,
            "graph_pool_handle": lambda: "pool",
            "device": lambda device: nullcontext(),
            "current_stream": lambda: Stream(self.streams[-1]),
            "stream": stream,
            "set_stream": lambda one: setattr(self, "streams", [one.name]),
            "CUDAGraph": lambda: recorded,
        }
        assert all(hasattr(torch.cuda, name) for name in names)
        monkeypatch.setattr(torch, "cuda", SimpleNamespace(**names, graph=graph))
