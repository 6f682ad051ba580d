"""Spans on a CPU, and on a device that requests while the host goes on."""

import pytest
import torch

from crossdraft.engine.device import DeviceTimer


class Host:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Event:
    """A note of a device that requests for two seconds on what it is given; waiting for it is known."""

    host: Host
    device = 100.0  # when it is done with what it was given so far
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, stream: str) -> None:
        assert stream == "of cuda:1"
        self.at = max(Event.device, Event.host.now)

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later.at - self.at)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(Event, "host", host, raising=False)
    monkeypatch.setattr(Event, "waits", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    return host


def test_a_cpu_is_done_when_the_call_returns() -> None:
    host = Host()
    span = DeviceTimer(torch.device("cpu"), host)
    host.now = 103.0
    span.end()
    host.now = 110.0
    assert (span.began, span.ended) == (100.0, 103.0)


def test_cuda_is_done_when_it_says_so_but_not_before_the_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes longer in a step that is made to take its time."""
    span = DeviceTimer(torch.device("cuda:1"), host)
    monkeypatch.setattr(Event, "device", 102.0)
    host.now = 100.5  # all is launched
    span.end()
    host.now = 105.0  # somebody asks much later
    assert Event.waits == 0
    assert (span.ended, span.ended) == (102.0, 102.0)
    assert Event.waits == 1
    slow = DeviceTimer(torch.device("cuda:1"), host)
    host.now = 109.0
    slow.end()
    assert slow.ended == 109.0
