"""One model over several devices, each with a process of its own: a rank, with its share of transformers' plan.

All ranks run the same engine, on their own heads of weights and KV cache. What an engine does follows from the calls
that change it: rank 0, which serves, tells the others each of these before it makes it, and all meet in the forward.
Calls go over connections, not over collectives: ranks wait for them without a time-out, and a process that dies is
noticed at once. Then all end, as none can go on alone; whoever started rank 0 starts it again, and it the others.
"""

import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import msgpack  # type: ignore[import-untyped]  # there are no stubs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from crossdraft.engine.compilation import pack
from crossdraft.engine.device import device_of
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import check_divisible
from crossdraft.engine.model_thread import CloseFunction, StepFunction
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError
from crossdraft.engine.requests import ForwardRequest, common_prefix
from crossdraft.engine.served_model import MakeBeside, ModelOptions, RunningModel, load, run_model
from crossdraft.text.letters import Side
from crossdraft.types.trees import TokenTree

log = logging.getLogger(__name__)
LOADING = timedelta(hours=2)  # that ranks wait for each other: their disks may differ; the dead are noticed sooner
OWN_SECONDS = 3.0  # for rank 0 to meet an error that has ended another one while they load, and to say so itself
END_SECONDS = 10.0  # for ranks to end when they are told to
END = b""  # in place of a call
# Starts processes that call `follow`, all but the first of a model; given the host and the port of the store by which
# ranks find each other, it returns this side of their connections.
StartRanks = Callable[[ModelOptions, str, int], list[Connection]]


def start_here(options: ModelOptions, host: str, port: int) -> list[Connection]:
    """Processes of this machine, which end with this one; raises NumberOutOfRangeError if it has too few GPUs."""
    gpus, size = torch.cuda.device_count(), options.tensor_parallel_size
    if 0 < gpus < size:
        raise NumberOutOfRangeError(f"--tensor-parallel-size {size} takes as many GPUs, and {gpus} can be seen here")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    context, connections = multiprocessing.get_context("spawn"), []
    for number in range(1, size):
        ours, theirs = context.Pipe()
        context.Process(target=_followed, args=(options, number, host, port, theirs), daemon=True).start()
        theirs.close()
        connections.append(ours)
    return connections


def _followed(options: ModelOptions, number: int, host: str, port: int, connection: Connection) -> None:
    """The main function of a process: signals are for rank 0, which may have to drain."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    follow(options, number, host, port, connection)


def run_ranks(
    options: ModelOptions,
    side: Side,
    beside: MakeBeside = lambda _, __: None,
    host: str = "127.0.0.1",
    start: StartRanks = start_here,
) -> RunningModel:
    """As `run_model`, with `options.tensor_parallel_size` ranks: the others are started, and find this one at `host`.
    Raises ValueError: with a text that says what to change."""
    if options.tensor_parallel_size == 1:
        return run_model(options, side, beside)
    _check(options)
    if options.threads is None and not torch.accelerator.is_available():
        options = replace(options, threads=max(1, torch.get_num_threads() // options.tensor_parallel_size))
    # The store by itself would listen on all interfaces.
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port, held = listening.getsockname()[1], listening.detach()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=held)
    leader = Leader(start(options, host, port))
    try:
        _join(options, 0, store)
        running = run_model(options, side, beside)
    except BaseException:
        leader.end()
        raise
    running.thread.lead(leader.step, leader.close)
    leader.patience = 0.0
    return replace(running, end=leader.end)


def _accelerator() -> torch.device | None:
    """That of this machine, as transformers takes it: a build for CUDA may run where there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def _check(options: ModelOptions) -> None:
    if dist.is_initialized():
        raise ModelLoadError("this process has a model over several devices already, and can have one only")
    device, usual = device_of(options.device), _accelerator() or torch.device("cpu")
    if device.type != usual.type or (device.index is not None and options.device != "auto"):
        raise ModelLoadError(
            f"with --tensor-parallel-size torch runs on {usual.type} here: --device must be {usual.type} or auto "
            f"and is {options.device} (CUDA_VISIBLE_DEVICES chooses GPUs)"
        )
    if options.lora_modules:
        raise ModelLoadError("--lora-modules and --tensor-parallel-size do not go together: leave one of them out")
    if options.quantization is not None:
        raise ModelLoadError("--quantization and --tensor-parallel-size do not go together: leave one of them out")
    check_divisible(options.name, options.tensor_parallel_size, options.trust_remote_code)


def _join(options: ModelOptions, number: int, store: TCPStore) -> None:
    """Makes this process the rank with this number, for transformers; returns once all are there."""
    device, local = _accelerator(), 0
    if device is not None:
        local = number % torch.accelerator.device_count()  # in a cluster each sees only its own device
        torch.accelerator.set_device_index(local)
        device = torch.device(device.type, local)
    os.environ["LOCAL_RANK"] = str(local)
    backend, size = dist.get_default_backend_for_device(device or "cpu"), options.tensor_parallel_size
    dist.init_process_group(backend, timeout=LOADING, rank=number, world_size=size, store=store, device_id=device)


class Leader:
    """Rank 0's side of its connections to the others. Where one of these dies, this process ends."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._sessions: dict[Hashable, tuple[int, tuple[int, ...]]] = {}  # their numbers, and contexts as told last
        self._numbers = count()
        self._ending = Event()
        self.patience = OWN_SECONDS  # with those that die
        self._watching = Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    def step(self, own: StepFunction) -> StepFunction:
        """A step that all make, in which any error ends this process: ranks do not agree any more."""

        def led(requests: Sequence[ForwardRequest]) -> list[Tensor | None]:
            try:
                self._tell([self._told(request) for request in requests])
                return own(requests)
            except BaseException as error:
                log.critical("a step of rank 0 failed, all ranks of the model end", exc_info=error)
                os._exit(1)

        return led

    def close(self, own: CloseFunction) -> CloseFunction:
        """The end of a session, of which the others are told."""

        def led(session: Hashable) -> None:
            if session in self._sessions:
                self._tell(self._sessions.pop(session)[0])
            own(session)

        return led

    def end(self) -> None:
        """Ends the others."""
        self._ending.set()
        for connection in self._connections:
            with suppress(OSError):
                connection.send_bytes(END)
        self._watching.join(END_SECONDS)
        for connection in self._connections:
            connection.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _told(self, request: ForwardRequest) -> tuple[object, ...]:
        """Of a context only what is new: it may have a hundred thousand tokens."""
        number, before = self._sessions.get(request.session) or (next(self._numbers), ())
        self._sessions[request.session] = number, request.context
        shared, tree = common_prefix(before, request.context), request.tree
        nodes = tree.tokens, tree.parents, request.wanted, request.more
        return number, shared, request.context[shared:], *nodes, request.tokens

    def _tell(self, call: object) -> None:
        data = msgpack.packb(call, default=int)
        for connection in self._connections:
            connection.send_bytes(data)

    def _watch(self) -> None:
        left = [*self._connections]
        while left:
            for connection in wait(left):
                assert isinstance(connection, Connection)  # which nothing but its end comes from
                if not self._ending.wait(self.patience):
                    log.critical("a rank of the model has died, and all end")
                    os._exit(1)
                left.remove(connection)


def follow(options: ModelOptions, number: int, host: str, port: int, connection: Connection) -> None:
    """As the rank with this number does what rank 0 tells, until that ends; where it is lost this process ends."""
    calls: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_receive, args=(connection, calls), daemon=True).start()
    _join(options, number, TCPStore(host, port, is_master=False, timeout=LOADING))
    loaded = load(options)
    pack(loaded.model)
    reuse, sizes = options.enable_prefix_caching, options.graph_sizes
    engine = Engine(loaded.model, options.max_model_len, options.budget, reuse=reuse, graph_sizes=sizes)
    engine.populate()
    contexts: dict[int, tuple[int, ...]] = {}
    while (call := calls.get()) is not None:
        if isinstance(call, int):
            engine.close(call)
            del contexts[call]
        else:
            engine.step([_scheduled(request, contexts) for request in call])


def _receive(connection: Connection, calls: "SimpleQueue[Any]") -> None:
    """In a thread: the main one may be in a collective whose other side is gone."""
    with suppress(EOFError, OSError):
        while (data := connection.recv_bytes()) != END:
            calls.put(msgpack.unpackb(data, use_list=False))
        calls.put(None)
        connection.recv_bytes()
    os._exit(0)


def _scheduled(told: tuple[Any, ...], contexts: dict[int, tuple[int, ...]]) -> ForwardRequest:
    """What `Leader` told, with the contexts that sessions had."""
    session, shared, rest, tokens, parents, wanted, more, most = told
    contexts[session] = context = contexts.get(session, ())[:shared] + rest
    return ForwardRequest(session, context, TokenTree(tokens, parents), wanted, more, tokens=most)
