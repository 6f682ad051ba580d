"""What vLLM calls: the class, its options, ranks and versions, what is logged; and the function that it mends."""

import io
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from crossdraft.engine.names import BUNDLED
from crossdraft.integrations.vllm import RemoteDrafter, interface
from crossdraft.integrations.vllm.interface import NAME, Options, ensure_exact, expand, propose, share
from crossdraft.integrations.vllm.pacing import FIRST_PAUSE, MAX_PAUSE, Seldom
from crossdraft.integrations.vllm.services import TokenIds
from crossdraft.rpc.security import TlsFiles

CONTEXT = 8  # tokens of a request at most


class Noted:
    """In place of `Proposals`: notes what it is called with, and proposes the same always."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[list[int]], list[list[int]], bool]] = []
        self.idled = 0

    def step(self, rows: Sequence[TokenIds], sampled: Sequence[Sequence[int]], alone: bool) -> list[list[int]]:
        self.steps.append(([row.tolist() for row in rows], list(map(list, sampled)), alone))
        return [[7, 7, 7] for _ in rows]

    def idle(self) -> None:
        self.idled += 1


def called(noted: Noted, sampled: list[list[int]], rows: list[list[int]]) -> list[list[int]]:
    """A call as vLLM makes it: the arrays are those of its whole batch, larger than what is in use."""
    ids = np.full((len(rows) + 3, CONTEXT), -1, dtype=np.int32)
    counts = np.zeros(len(rows) + 3, dtype=np.int32)
    for place, row in enumerate(rows):
        ids[place, : len(row)], counts[place] = row, len(row)
    return propose(noted, sampled, counts, ids, CONTEXT)  # type: ignore[arg-type]


def test_a_step_has_the_rows_that_emitted_something() -> None:
    """A prompt that is read in chunks emits nothing until its last one."""
    noted = Noted()
    assert called(noted, [[3], [], [5, 6]], [[1, 2, 3], [1, 2], [4, 5, 6]]) == [[7, 7, 7], [], [7, 7, 7]]
    assert noted.steps == [([[1, 2, 3], [4, 5, 6]], [[3], [5, 6]], False)]
    called(noted, [[3]], [[1, 2, 3]])
    assert noted.steps[-1][2]
    assert called(noted, [[], []], [[1], [2]]) == [[], []]
    assert noted.idled == 1


def test_nothing_is_proposed_beyond_the_context() -> None:
    noted = Noted()
    assert called(noted, [[6], [8]], [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8]]) == [[7], []]


OWN = {"CROSSDRAFT_DRAFTER": "one:1, 10.0.0.2:7102"}
FILES = {f"CROSSDRAFT_TLS_{name}": f"/{name}" for name in ("CA", "CERT", "KEY")}


def test_options_come_from_the_environment() -> None:
    assert Options.read(OWN) == Options(("one:1", "10.0.0.2:7102"))
    assert Options.read({name: f" {value}\n" for name, value in (OWN | FILES).items()}) == Options.read(OWN | FILES)
    more = {"CROSSDRAFT_MAX_WAIT_MS": "0", "CROSSDRAFT_ASSUME_GREEDY": "1", "CROSSDRAFT_ANY_VLLM": "0"}
    files = TlsFiles(Path("/CA"), Path("/CERT"), Path("/KEY"))
    assert Options.read(OWN | FILES | more) == Options(("one:1", "10.0.0.2:7102"), files, 0.0, only_greedy=True)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "set CROSSDRAFT_DRAFTER"),
        ({"CROSSDRAFT_DRAFTER": "host"}, "HOST:PORT"),
        ({"CROSSDRAFT_DRAFTER": "host:70000"}, "HOST:PORT"),
        (OWN | {"CROSSDRAFT_TLS_CA": "/ca"}, "set all of CROSSDRAFT_TLS_CA"),
        (OWN | {"CROSSDRAFT_MAX_WAIT_MS": "soon"}, "CROSSDRAFT_MAX_WAIT_MS must be a number"),
        (OWN | {"CROSSDRAFT_MAX_WAIT_MS": "nan"}, "CROSSDRAFT_MAX_WAIT_MS must be a number"),
        (OWN | {"CROSSDRAFT_ASSUME_GREEDY": "false"}, "CROSSDRAFT_ASSUME_GREEDY must be 0 or 1, got 'false'"),
    ],
)
def test_what_cannot_be_used_is_named(environment: Mapping[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Options.read(environment)


def test_an_address_has_a_host_and_a_port_only_and_that_of_ipv6_stands_in_brackets() -> None:
    urls = ("http://127.0.0.1:7462", "qwen=127.0.0.1:7462")
    for address in (*urls, "a b:7462", "::1:7462", "[]:1", "host:", "host:0", ":7", "a:b:1"):
        with pytest.raises(ValueError, match=r"HOST:PORT, .* without http:// and without a name"):
            Options.read({"CROSSDRAFT_DRAFTER": f"one:1,{address}"})
    assert Options.read({"CROSSDRAFT_DRAFTER": "[::1]:7462,a-b.c_d:1"}).drafters == ("[::1]:7462", "a-b.c_d:1")


def test_misspelt_variables_are_noticed_and_those_of_others_are_not() -> None:
    others = {"CROSSDRAFT_API_KEY": "k", "CROSSDRAFT_VLLM_ENV": "v", "CROSSDRAFT_CACHE_MIB": "1", "VLLM_DRAFTER": ""}
    assert interface.misspelt(OWN | FILES | others) == []
    assert interface.misspelt({"CROSSDRAFT_ALLWAYS_DRAFT": "1", "CROSSDRAFT_MAX_WAIT": "0"}) == [
        "CROSSDRAFT_ALLWAYS_DRAFT (is CROSSDRAFT_ALWAYS_DRAFT meant?)",
        "CROSSDRAFT_MAX_WAIT (is CROSSDRAFT_MAX_WAIT_MS meant?)",
    ]


def test_other_versions_are_refused_unless_they_are_allowed() -> None:
    for version in ("0.32.0", "0.32.1+cu130", "0.33.0"):
        interface.check_version(version, any_version=False)
    interface.check_version("0.99.0", any_version=True)
    with pytest.raises(
        interface.NotSupportedError, match=r"vLLM 0\.32, 0\.33, and this is 0\.34\.0: .*CROSSDRAFT_ANY_VLLM=1"
    ):
        interface.check_version("0.34.0", any_version=False)


def test_without_trust_nothing_is_proposed() -> None:
    assert interface.may_draft(exact=True, only_greedy=False)
    assert not interface.may_draft(exact=False, only_greedy=False)
    assert interface.may_draft(exact=False, only_greedy=True)


class Rank:
    """One rank of a group: what rank 0 gives is what all get."""

    def __init__(self, rank: int, box: list[Any]) -> None:
        self.rank_in_group, self.world_size, self._box = rank, 2, box

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        if self.rank_in_group == src:
            self._box.append(obj)
        return self._box[-1]


def test_every_rank_has_the_drafts_of_the_first() -> None:
    box: list[Any] = []
    assert (share(Rank(0, box), [[1], []]), share(Rank(1, box), None)) == ([[1], []], [[1], []])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The parts of vLLM that the class imports, and the group that it will find."""
    found: dict[str, Any] = {"group": None}
    state = ModuleType("vllm.distributed.parallel_state")
    state.get_tp_group = lambda: found["group"]  # type: ignore[attr-defined]
    sampler = ModuleType("vllm.v1.sample.rejection_sampler")
    setattr(sampler, NAME, expand)
    found["sampler"] = sampler
    for module in (*map(ModuleType, ("vllm", "vllm.distributed", "vllm.v1", "vllm.v1.sample")), state, sampler):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(interface, "_installed", lambda: "0.32.0")
    monkeypatch.setattr(interface.atexit, "register", lambda _: None)
    monkeypatch.setitem(os.environ, "CROSSDRAFT_DRAFTER", "127.0.0.1:1")
    return found


def config() -> SimpleNamespace:
    """What the class reads of a VllmConfig."""
    model = SimpleNamespace(max_model_len=CONTEXT, tokenizer=str(BUNDLED / "target"), get_vocab_size=lambda: 4096)
    drafts = SimpleNamespace(num_speculative_tokens=4, draft_model_config=SimpleNamespace(max_model_len=CONTEXT))
    device = SimpleNamespace(device="cpu")
    return SimpleNamespace(model_config=model, speculative_config=drafts, device_config=device)


STEP = [[3]], np.array([3], dtype=np.int32), np.array([[1, 2, 3]], dtype=np.int32)  # one request's, as vLLM asks


def test_only_the_first_rank_asks(installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    box: list[Any] = []
    started: list[float] = []
    monkeypatch.setattr(interface.Proposals, "start", lambda _, seconds: started.append(seconds))
    monkeypatch.setattr(interface.Proposals, "step", lambda *_: [[1, 2]])
    for rank in (0, 1):
        installed["group"] = Rank(rank, box)
        drafter = RemoteDrafter(config())
        assert (len(started), drafter.propose(*STEP)) == (1, [[1, 2]])
        if rank:
            continue
        monkeypatch.setattr(interface.Proposals, "step", None)  # no other rank may call it


def test_after_a_fault_vllm_goes_on_without_drafts_and_no_rank_waits(installed, monkeypatch, caplog):
    box: list[Any] = []
    calls: list[object] = []

    def broken(*_: object) -> None:
        calls.append(None)
        raise KeyError("a fault")

    monkeypatch.setattr(interface.Proposals, "start", lambda *_: None)
    monkeypatch.setattr(interface.Proposals, "step", broken)
    installed["group"] = Rank(0, box)
    drafter = RemoteDrafter(config())
    assert [drafter.propose(*STEP) for _ in range(3)] == [[[]]] * 3
    assert share(Rank(1, box), None) == [[]]
    assert (len(calls), caplog.text.count("proposes no more drafts")) == (1, 1)
    assert "a fault" in caplog.text


def test_a_vllm_that_cannot_be_mended_gets_no_drafts(installed, monkeypatch, caplog):
    installed["group"] = Rank(0, [])
    monkeypatch.delattr(installed["sampler"], NAME)
    drafter = RemoteDrafter(config())
    assert "CROSSDRAFT_ASSUME_GREEDY" in caplog.text
    assert drafter.propose(*STEP) == [[]]


def test_vllm_calls_it_however_near_a_request_is_to_its_end(installed: dict[str, Any]) -> None:
    """vLLM asks whether ids and draft tokens fit into the draft model's context; the target's own stays what it is."""
    installed["group"] = Rank(1, [])
    given = config()
    given.speculative_config.draft_model_config = given.model_config
    RemoteDrafter(given)
    assert given.speculative_config.draft_model_config.max_model_len == CONTEXT + 4
    assert given.model_config.max_model_len == CONTEXT


def test_lines_say_where_they_come_from_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    log = logging.Logger("alone")
    interface.show(log)
    interface.show(log)
    log.warning("it is so")
    assert shown.getvalue().startswith("WARNING ")
    assert shown.getvalue().count("crossdraft: it is so\n") == 1


def test_what_comes_again_and_again_is_told_once_a_minute_and_then_less_often(caplog: pytest.LogCaptureFixture) -> None:
    now, told = 1000.0, []
    seldom = Seldom(logging.getLogger("seldom"), lambda: now)
    for _ in range(20 * 3600):
        seldom.warning("the %s", "same")
        if caplog.records:
            told.append(now)
        caplog.clear()
        now += 1.0
    gaps = [later - one for one, later in pairwise(told)]
    assert (gaps[:3], gaps[-1]) == ([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE], MAX_PAUSE)


CPU = torch.device("cpu")


def unwritten(x: torch.Tensor, ends: torch.Tensor, count: int, **replaced: int) -> torch.Tensor:
    """As vLLM 0.32's CPU build does for floats: a converted copy is filled, and the output is not."""
    out = x.new_empty(count)
    copy = out.to(torch.int64)
    copy.copy_(expand(x.to(torch.int64), ends, count, **replaced))
    return out


def unreplaced(x: torch.Tensor, ends: torch.Tensor, count: int, **replaced: int) -> torch.Tensor:
    """Greedy requests of a mixed batch would be divided by zero."""
    return expand(x, ends, count)


def rounded(x: torch.Tensor, ends: torch.Tensor, count: int, **replaced: int) -> torch.Tensor:
    return expand(x.to(torch.int64), ends, count, **replaced).to(x.dtype)


def unwritten_integers(x: torch.Tensor, ends: torch.Tensor, count: int, **replaced: int) -> torch.Tensor:
    """Temperatures are right, and top-k is not."""
    found = expand(x, ends, count, **replaced)
    return found if x.is_floating_point() else torch.zeros_like(found)


def test_it_expands() -> None:
    x, ends = torch.tensor([0.5, 0.0, 2.0, 3.0]), torch.tensor([2, 3, 3, 4], dtype=torch.int32)
    assert expand(x, ends, 4, 0, 1).tolist() == [0.5, 0.5, 1.0, 3.0]
    assert expand(torch.tensor([5, 6]), torch.tensor([1, 3]), 3).tolist() == [5, 6, 6]


def test_a_right_function_is_left_alone_and_without_it_nothing_can_be_trusted() -> None:
    def own(*given: object, **named: object) -> torch.Tensor:
        return expand(*given, **named)  # type: ignore[arg-type]

    module = SimpleNamespace(**{NAME: own})
    assert ensure_exact(module, CPU)
    assert getattr(module, NAME) is own
    assert not ensure_exact(SimpleNamespace(), CPU)


@pytest.mark.parametrize("wrong", [unwritten, unreplaced, rounded, unwritten_integers])
def test_a_wrong_one_is_replaced_with_one_warning(wrong: object, caplog: pytest.LogCaptureFixture) -> None:
    module = SimpleNamespace(**{NAME: wrong})
    with caplog.at_level(logging.WARNING):
        assert ensure_exact(module, CPU)
        assert ensure_exact(module, CPU)  # a second engine of the process
    assert interface.is_right(getattr(module, NAME), CPU)
    assert len(caplog.records) == 1
