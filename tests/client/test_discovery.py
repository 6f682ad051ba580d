"""Discovery: which services there are, which of them is next, and whether they can be used together."""

import asyncio
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from grpc import ChannelConnectivity

from crossdraft.client import GenerationRequest, Pipeline, RequestError, connect
from crossdraft.client.api import addresses_of
from crossdraft.client.roster import FORGIVEN_SECONDS, Roster
from crossdraft.drafter.service import DrafterService
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.rpc.errors import Replaced, ServiceError, Unreachable
from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.rpc.handlers import Replies
from crossdraft.rpc.links import Patience
from crossdraft.rpc.server import Listening, Server
from crossdraft.session.events import Command, Finished, Lost, Open, Ready
from crossdraft.session.session import Session
from crossdraft.speculation.controller import TargetController
from crossdraft.target.service import TargetService, TargetSession
from crossdraft.text.letters import Side
from crossdraft.types.messages import OpenTarget
from tests.clock import GONE
from tests.engine.test_loader import rewritten
from tests.ports import assignment
from tests.rpc.clock import until
from tests.rpc.linked import DESCRIPTION, PuppetService
from tests.rpc.sessions import DrafterClient, TargetClient
from tests.serving.ports import free_port
from tests.text.kinds import kind

PROMPT = "def main(argument):"
HEAD = "lm_head.weight"
SETTINGS = {"seed": 3, "max_tokens": 12, "overlap": "off"}
ALL = ("a", "b", "c")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdraft.client.discovery.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("crossdraft.client.discovery.MAX_PAUSE", 0.01)


def served(service: Any, role: Any = TARGET, address: str = "") -> Server:
    """A server that listens there, or at a port that is given to no other, so that another may come back there."""
    port = int(address.rpartition(":")[2]) if address else free_port()
    return Server(role, service, Listening(port=port, grace_seconds=0))


def puppet(**changes: object) -> PuppetService:
    """A service of a model that only answers, with a tokenizer."""
    some = kind("gpt2")
    described = replace(DESCRIPTION, tokenizer_json=some.json, vocabulary_size=some.size, **changes)
    return PuppetService(description=described)


async def written_by(pipeline: Pipeline, **changes: object) -> list[int]:
    return [token.id async for token in pipeline.generate(PROMPT, **(SETTINGS | changes))]


def test_addresses_are_separated_by_commas_and_counted_once() -> None:
    assert addresses_of("a:1, b:2,a:1,") == addresses_of(["a:1", "b:2"]) == ("a:1", "b:2")
    with pytest.raises(ValueError, match="at least one address of a target"):
        connect("")


@pytest.mark.parametrize(
    ("addresses", "complaint"),
    [
        ((5,), "give addresses as a text or texts, such as .*, got 5"),
        (("a:1", None, 5.0), "patience must be Patience, got 5.0"),
        (("localhost",), "an address of a target must be HOST:PORT, such as 127.0.0.1:7001 .*, got 'localhost'"),
        (("http://a:1",), "an address of a target must be HOST:PORT, without http://"),
        (("dns:///a:1",), "must be HOST:PORT, without dns://"),
        (("unix:7001",), "must be HOST:PORT, such as 127.0.0.1:7001 .*, got 'unix:7001'"),
        (("ipv4:127.0.0.1:1",), r"must be HOST:PORT, such as 127.0.0.1:7001 or \[::1\]:7001, got 'ipv4:"),
        (("a:1", "a:1,b:70000"), "an address of a drafter must be HOST:PORT, .* got 'b:70000'"),
    ],
)
def test_addresses_without_a_port_are_refused_before_anything_is_connected(addresses: tuple[str, ...], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        connect(*addresses)


async def test_one_target_is_enough(target: TargetClient, nowhere: str, caplog: pytest.LogCaptureFixture) -> None:
    async with connect(f"{nowhere},{target.address}") as pipeline:
        assert len(await written_by(pipeline)) == 12
    assert f"target at {nowhere}" in caplog.text
    assert "it is tried again" in caplog.text


async def test_who_waits_for_a_target_waits_for_the_one_that_comes_in_its_place() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with served(puppet()) as other:
            pipeline = connect(f"127.0.0.1:{silent.getsockname()[1]}")
            waiting = asyncio.create_task(pipeline.ready())
            await until(lambda: pipeline._discovery is not None and pipeline._discovery._targets)
            await pipeline.follow(other.address)
            await waiting
            await pipeline.__aexit__()


async def test_who_is_not_there_is_asked_again_by_each_who_waits(nowhere, taken, monkeypatch):
    monkeypatch.setattr("crossdraft.client.discovery.FIRST_PAUSE", 600)
    pipeline = connect([nowhere])
    with pytest.raises(Unreachable, match=f"target at {nowhere}"):
        await pipeline.ready()
    assert not pipeline.usable
    taken.close()
    async with served(puppet(), address=nowhere):
        await asyncio.gather(pipeline.ready(), pipeline.ready())
        assert pipeline.usable
        await pipeline.__aexit__()


async def test_without_any_target_all_their_errors_are_said(nowhere: str) -> None:
    said = rf"^none of 2 targets answered: target at {nowhere}: .*; target at 127.0.0.1:1: "
    with pytest.raises(Unreachable, match=said):
        async with connect([nowhere, "127.0.0.1:1"]):
            pass


async def test_a_drafter_that_reads_another_targets_states_is_not_used_from_the_start_on(target, caplog):
    why = "the drafter toy reads hidden states of 8 numbers, and this target has such of 48"
    async with served(puppet(hidden_size=8), DRAFTER) as unfit:
        async with connect(target.address, unfit.address) as pipeline:
            assert why in pipeline.drafter_fault
            assert why in caplog.text
            assert len(await written_by(pipeline)) == 12
        with pytest.raises(RequestError, match=why):
            async with connect(target.address, unfit.address, needs_drafter=True):
                pass


async def test_a_drafter_dead_from_the_start_is_used_once_it_is_there(target, drafter_model, taken, nowhere, caplog):
    async with connect(target.address, nowhere) as pipeline:
        assert pipeline.models.drafter is None
        plain = pipeline.generate(PROMPT, **SETTINGS)
        assert len([token async for token in plain]) == 12
        assert (plain.statistics.draft_tokens, plain.statistics.drafters_lost) == (0, 0)
        taken.close()
        async with served(DrafterService(drafter_model), DRAFTER, nowhere):
            await pipeline.drafter_known()
            drafted = pipeline.generate(PROMPT, **SETTINGS)
            assert len([token async for token in drafted]) == 12
        assert (drafted.ids, drafted.statistics.draft_tokens > 0) == (plain.ids, True)
    assert caplog.text.count("; it is tried again") == 1
    assert f"drafter at {nowhere} is there now" in caplog.text


async def test_a_service_that_does_not_answer_delays_connecting_for_a_bounded_time(target, monkeypatch):
    """A socket that listens, and that nobody accepts from."""
    monkeypatch.setattr("crossdraft.client.discovery.OTHERS_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with connect(target.address, address, Patience(describe_seconds=600)) as pipeline:
            assert pipeline.models.drafter is None


async def test_drafters_of_another_vocabulary_are_left_out(target, drafter, target_model, caplog):
    serving = served(DrafterService(target_model), DRAFTER)
    async with serving as other, connect(target.address, [drafter.address, other.address]) as pipeline:
        assert len(pipeline._connected.services.drafters) == 1
    assert "all drafters must serve the same vocabulary" in caplog.text


class Lasting(TargetService):
    """A service whose model goes on when its server ends."""

    async def close(self) -> None:
        pass


class Counting(Lasting):
    """Keeps what sessions were begun with."""

    def __init__(self, model: RunningModel) -> None:
        super().__init__(model)
        self.openings: list[OpenTarget] = []

    async def open(self, request: OpenTarget, replies: Replies[Any]) -> TargetSession:
        self.openings.append(request)
        return await super().open(request, replies)


async def gone(pipeline: Pipeline, server: Server) -> None:
    """Returns when it has ended, and the pipeline knows."""
    team = pipeline._connected
    await server.drain()
    await until(lambda: not (team._targets | team._drafters)[server.address].reachable)


@pytest.mark.parametrize("noticed", [False, True], ids=["at once", "later"])
async def test_a_target_that_is_back_with_another_model_is_read_anew(target_model, drafter_model, drafter, noticed):
    """The outputs of the model before end; none of their ids reach the other model."""
    other = Counting(drafter_model)
    async with served(Lasting(target_model)) as first, connect(first.address, drafter.address) as pipeline:
        running = pipeline.generate(PROMPT, **(SETTINGS | {"max_tokens": 100}))
        await anext(running)
        await (gone(pipeline, first) if noticed else first.drain())
        async with served(other, address=first.address):
            with pytest.raises(Replaced, match="was replaced by another model"):
                async for _ in running:
                    pass
            assert (other.openings, pipeline.models.target) == ([], other.description)
            assert (pipeline.target_there, pipeline.target_fault) == (True, "")
            async with connect(first.address) as anew:
                assert await written_by(pipeline) == await written_by(anew)
    assert {opening.prompt for opening in other.openings} == {anew.models.tokenization.encode_prompt(PROMPT)}


async def test_a_target_that_comes_back_with_the_same_model_goes_on_with_its_outputs(target_model: RunningModel):
    async with served(Lasting(target_model)) as first, connect(first.address) as pipeline:
        whole = await written_by(pipeline)
        running = pipeline.generate(PROMPT, **SETTINGS)
        ids = [(await anext(running)).id]
        await first.drain()
        async with served(Lasting(target_model), address=first.address):
            assert ids + [token.id async for token in running] == whole


async def test_one_of_several_targets_that_comes_back_with_another_model_is_not_used_until_it_is_the_same(
    target_model: RunningModel, drafter_model: RunningModel, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = served(Lasting(target_model)), Counting(drafter_model)
    await first.start()
    async with served(Lasting(target_model)) as second, connect([first.address, second.address]) as pipeline:
        whole = await written_by(pipeline)
        await gone(pipeline, first)
        assert pipeline.target_fault == "1 of 2 lost; tried again"
        async with served(other, address=first.address) as service:
            await until(lambda: "not used" in pipeline.target_fault)
            assert re.fullmatch(r"1 of 2 not used: serves .* must serve the same model", pipeline.target_fault)
            assert first.address not in pipeline.target_fault
            assert pipeline.target_there
            assert [await written_by(pipeline) for _ in range(3)] == [whole] * 3
        assert other.openings == []
        assert caplog.text.count("is not used") == 1
        async with served(Lasting(target_model), address=service.address):
            await until(lambda: not pipeline.target_fault)
            await second.drain()
            assert await written_by(pipeline) == whole


async def test_a_target_that_was_gone_for_long_keeps_no_other_model_away(target_model, drafter_model):
    async with (
        served(Lasting(drafter_model)) as other,
        served(Lasting(target_model)) as first,
        connect(first.address, patience=Patience(target_seconds=0.01)) as pipeline,
    ):
        await pipeline.follow([first.address, other.address])
        await until(lambda: "not used" in pipeline.target_fault)
        await first.drain()
        await until(lambda: other.address in pipeline._connected.services.targets)
        assert pipeline.target_fault == "1 of 2 lost; tried again"
        pipeline._patience = Patience()  # outputs may take longer
        assert len(await written_by(pipeline)) == 12


async def test_a_target_that_comes_back_with_less_context_says_so() -> None:
    async with served(puppet()) as first, connect(first.address) as pipeline:
        assert pipeline.models.context == 64
        await gone(pipeline, first)
        async with served(puppet(context=32), address=first.address):
            await until(lambda: pipeline.models.context == 32)


async def test_a_drafter_that_comes_back_with_another_vocabulary_is_used_again(target, drafter_model, target_model):
    serving = served(DrafterService(drafter_model), DRAFTER)
    async with serving as first, connect(target.address, first.address) as pipeline:
        whole, known = await written_by(pipeline), pipeline.models.drafter
        await gone(pipeline, first)
        assert pipeline.drafter_fault == "lost; tried again"
        async with served(DrafterService(target_model), DRAFTER, first.address):
            await until(lambda: not pipeline.drafter_fault)
            assert pipeline.models.drafter != known
            again = pipeline.generate(PROMPT, **SETTINGS)
            assert [token.id async for token in again] == whole
            assert again.statistics.draft_tokens > 0


@pytest.mark.parametrize("overlap", ["auto", "on", "off"])
async def test_an_explanation_says_that_no_drafter_has_answered_yet(target: TargetClient, nowhere: str, overlap: str):
    async with connect(target.address, nowhere) as pipeline:
        generation = pipeline.generate(PROMPT, **(SETTINGS | {"overlap": overlap, "explain": True}))
        assert len([token async for token in generation]) == 12
        reasons = {decision.choice.reason for decision in generation.decisions}
    assert reasons == {"the drafter is not there yet (unreachable); tried again"}


async def test_why_a_drafter_is_not_used_is_logged_once(target, monkeypatch, caplog):
    async with connect(target.address) as pipeline:
        pipeline.note_idle()
        assert caplog.text == ""
        monkeypatch.setattr(TargetController, "idle", lambda *_: "drafts nothing")
        for _ in range(2):
            pipeline.note_idle()
        assert caplog.text.count(": drafts nothing") == 1


async def test_a_prompt_is_written_in_the_ids_of_the_model_that_reads_it(target, drafter_model, monkeypatch):
    """Also if another model comes while it is being tokenized."""
    async with served(Lasting(drafter_model)) as other, connect(target.address) as pipeline:
        run = pipeline._tokenizing.run

        async def slow(*given: Any) -> Any:
            monkeypatch.setattr(pipeline._tokenizing, "run", run)
            found = await run(*given)
            await pipeline.follow(other.address)
            await until(lambda: other.address in pipeline._connected.services.targets)
            return found

        monkeypatch.setattr(pipeline._tokenizing, "run", slow)
        prompts, _ = await pipeline.prepared(GenerationRequest(PROMPT))
        assert prompts.target == pipeline.models.tokenization.encode_prompt(PROMPT)


async def test_who_gives_up_following_has_what_was_or_what_is_to_be() -> None:
    """Wherever that was cancelled: no service stays in use that was left out, and each connection is closed at last."""
    async with served(puppet()) as first, served(puppet()) as second:
        for turns in range(8):
            async with connect(first.address) as pipeline:
                found = pipeline._connected
                before = found._targets[first.address].client
                following = asyncio.create_task(pipeline.follow(second.address))
                for _ in range(turns):
                    await asyncio.sleep(0)
                following.cancel()
                await asyncio.wait([following])
                assert [*found._targets] in ([first.address], [second.address])
                assert (first.address in found.services.targets) == (first.address in found._targets)
            assert before.channel.get_state() is ChannelConnectivity.SHUTDOWN


async def test_who_does_not_wait_until_all_is_closed_leaves_nothing_open() -> None:
    async with served(puppet()) as target, served(puppet(), DRAFTER) as drafter:
        for turns in range(1, 12):
            pipeline = connect(target.address, drafter.address, needs_drafter=True)
            await pipeline.ready()
            found = pipeline._connected
            probes = [*found._targets.values(), *found._drafters.values()]
            closing = asyncio.create_task(pipeline.__aexit__())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            closed = lambda one: one.client.channel.get_state() is ChannelConnectivity.SHUTDOWN  # noqa: E731
            await until(lambda probes=probes, closed=closed: all(map(closed, probes)))
            assert all(one._task.done() for one in probes)


async def test_services_come_and_go_while_sessions_run(target_model: RunningModel, drafter: DrafterClient) -> None:
    """A session stays with a target that has left; the next one is opened with the one that came."""
    serving = served(Lasting(target_model)), served(Lasting(target_model))
    async with serving[0] as first, serving[1] as second, connect(first.address, drafter.address) as pipeline:
        running = pipeline.generate(PROMPT, **SETTINGS)
        ids = [(await anext(running)).id]
        await pipeline.follow(second.address, drafter.address)
        await asyncio.wait([one.tried for one in pipeline._connected._targets.values()])
        ids += [token.id async for token in running]
        assert running.statistics.targets_lost == 0
        assert first.address not in pipeline._connected.services.targets
        await first.drain()
        moved = pipeline.generate(PROMPT, **SETTINGS)
        assert [token.id async for token in moved] == ids
        assert moved.statistics.targets_lost == 0


async def test_another_model_is_served_once_the_targets_of_the_one_before_have_left(target, drafter):
    """As in an update. An output stays with the model that it began with."""
    async with served(puppet()) as other, connect(target.address, drafter.address) as pipeline:
        known, paired = pipeline.models.target, pipeline.models.drafter
        running = pipeline.generate(PROMPT, **SETTINGS)
        ids = [(await anext(running)).id]
        await pipeline.follow([target.address, other.address], drafter.address)
        await pipeline._connected._targets[other.address].tried
        assert pipeline.models.target is known
        services = pipeline._connected.services
        await pipeline.follow(other.address, drafter.address)
        await until(lambda: other.address in pipeline._connected.services.targets)
        assert pipeline.models.target != known
        assert pipeline.models.drafter == paired
        assert other.address not in services.targets
        ids += [token.id async for token in running]
        await pipeline.follow(target.address, drafter.address)
        await until(lambda: target.address in pipeline._connected.services.targets)
        assert await written_by(pipeline) == ids


@pytest.fixture
def tuned(target_model: RunningModel, target_folder: Path, tmp_path: Path) -> Iterator[RunningModel]:
    """The target's name and tokenizer with other weights."""
    rewritten(copytree(target_folder, tmp_path / "tuned"), lambda all: all | {HEAD: all[HEAD] * 1.5 + 0.01})
    loaded = load_model(LoadOptions(str(tmp_path / "tuned")))
    described = replace(loaded.description, model=target_model.description.model)
    model = RunningModel.of(replace(loaded, description=described), Side.TARGET, ModelOptions("", cache_mib=1))
    yield model
    model.close()


async def test_targets_of_one_name_with_other_weights_are_refused(target, target_model, tuned):
    one, other = (f"{model.description.fingerprint[:12]}, 128 tokens" for model in (target_model, tuned))
    async with served(Lasting(tuned)) as other_one:
        with pytest.raises(RequestError, match="same model") as refused:
            async with connect([target.address, other_one.address]):
                pass
    for said in (one, other, ": other weights or dtype, or another version; all targets"):
        assert said in str(refused.value)


async def test_in_an_update_the_first_model_is_served_until_its_targets_have_left(target, tuned):
    async with served(Lasting(tuned)) as other, connect([target.address, other.address], updated=True) as pipeline:
        first = pipeline.models.target.fingerprint
        stays = next(one for one in (target.address, other.address) if one not in pipeline._connected.services.targets)
        assert len(await written_by(pipeline)) == 12
        await pipeline.follow(stays)
        await until(lambda: stays in pipeline._connected.services.targets)
        assert pipeline.models.target.fingerprint != first
        assert len(await written_by(pipeline)) == 12


async def test_no_output_goes_on_with_other_weights(target_model: RunningModel, tuned: RunningModel) -> None:
    """As in an update: outputs under way end, those that are begun afterwards are made by the new ones."""
    async with (
        served(Lasting(target_model)) as first,
        served(Lasting(tuned)) as second,
        connect(first.address) as pipeline,
        connect(second.address) as alone,
    ):
        running, waiting = (pipeline.generate(PROMPT, **(SETTINGS | {"max_tokens": 60})) for _ in range(2))
        await anext(running)
        tokenization = pipeline.models.tokenization
        await pipeline.follow([first.address, second.address])
        await pipeline._connected._targets[second.address].tried
        await pipeline.follow(second.address)
        await first.drain()
        await until(lambda: second.address in pipeline._connected.services.targets)
        assert pipeline.models.tokenization is tokenization  # it is not read again
        for output in (running, waiting):
            with pytest.raises(Replaced, match="was replaced by another model"):
                [token async for token in output]
        assert await written_by(pipeline) == await written_by(alone)


async def test_drafters_of_one_vocabulary_may_have_other_weights(target, drafter, drafter_folder, tmp_path):
    rewritten(copytree(drafter_folder, tmp_path / "tuned"), lambda all: all | {HEAD: all[HEAD] * 1.5})
    loaded = load_model(LoadOptions(str(tmp_path / "tuned")))
    async with (
        served(DrafterService(RunningModel.of(loaded, Side.DRAFTER, ModelOptions("", cache_mib=1))), DRAFTER) as other,
        connect(target.address, [drafter.address, other.address], needs_drafter=True) as pipeline,
    ):
        assert len(pipeline._connected.services.drafters) == 2


async def test_a_drafter_that_comes_later_is_trusted_no_more_than_one_from_the_start(target, drafter):
    async with connect(target.address, trusted=False) as pipeline:
        assert pipeline.generate(PROMPT, method="coupled").ids == []  # plain, as there is no drafter
        await pipeline.follow(target.address, drafter.address)
        await pipeline.drafter_known()
        with pytest.raises(RequestError, match="this drafter is not trusted"):
            pipeline.generate(PROMPT, method="coupled")


async def test_of_several_lists_of_services_the_last_one_counts(target: TargetClient, nowhere: str) -> None:
    """Also when the leave of one that has gone is still being taken."""
    async with connect(target.address, [nowhere, "127.0.0.1:1"]) as pipeline:
        team = pipeline._connected
        await asyncio.gather(team.follow([target.address], ["127.0.0.1:2"]), team.follow([target.address], []))
        assert list(team._targets) == [target.address]
        assert not team._drafters


@pytest.mark.parametrize("lives", [True, False])
async def test_connecting_waits_for_a_drafter_while_its_process_lives(target, drafter_model, taken, nowhere, lives):
    asked = []

    def process(address: str) -> bool:
        asked.append(address)
        return lives or address != nowhere  # the target is there, however slow the machine is

    pipeline = connect(target.address, nowhere, Patience(describe_seconds=0.05, lives=process), needs_drafter=True)
    connecting = asyncio.create_task(pipeline.__aenter__())
    if not lives:
        with pytest.raises(ServiceError):
            await connecting
        return
    await until(lambda: connecting.done() or asked.count(nowhere) > 3)  # it has failed that often
    assert not connecting.done()
    taken.close()
    async with served(DrafterService(drafter_model), DRAFTER, nowhere):
        await connecting
        assert pipeline.models.drafter is not None
        await pipeline.__aexit__(None, None, None)


async def test_who_needs_a_drafter_is_not_ready_without_one_at_the_second_call_either(target, nowhere):
    pipeline = connect(target.address, nowhere, needs_drafter=True)
    for _ in range(2):
        with pytest.raises(ServiceError, match=nowhere):
            await pipeline.ready()
        assert not pipeline.usable
    await pipeline.__aexit__(None, None, None)


def roster(*failed: float, there: Callable[[str], bool | None] = lambda _: None) -> Roster[str]:
    """Services at three addresses, which have failed at these times."""
    services: Roster[str] = Roster("target", there)
    for address in ALL:
        services.add(address, address.upper())
    for address, now in zip(ALL, failed, strict=False):
        services.failed(address, now)
    return services


def taken(services: Roster[str], count: int = 1, used: str = "", failed: str = "", now: float = 0.0) -> str:
    """The addresses of so many sessions; `-` where there is none."""
    return "".join(services.take(tuple(used), tuple(failed), now) or "-" for _ in range(count))


def test_sessions_are_spread_and_given_back() -> None:
    services = roster()
    services.add("a", "other")  # an address is there once
    assert taken(services, 6) == "abcabc"
    services.give_back("b")
    assert taken(services) == "b"
    assert (len(services), services["a"], services["b"]) == (3, "A", "B")
    assert taken(services, failed="abc") == taken(Roster("drafter")) == "-"


def test_the_one_that_failed_least_recently_is_next_until_failures_are_forgiven() -> None:
    assert taken(services := roster(3.0, 1.0, 2.0), 3, now=4.0) == "bbb"
    assert taken(services, failed="b", now=4.0) == "c"
    services = roster(0.0)  # the beginning of the clock
    assert taken(services, now=FORGIVEN_SECONDS - 1) + taken(services, now=FORGIVEN_SECONDS) == "ba"


def test_one_in_use_is_taken_only_if_no_other_is_left() -> None:
    services = roster()
    services.failed("c", 1.0)
    assert (taken(services, used="ab", now=2.0), taken(services, used="ab", failed="c", now=2.0)) == ("c", "a")


def test_one_that_leaves_keeps_its_sessions_and_gets_no_more_and_may_come_back() -> None:
    services = roster()
    assert taken(services) == "a"
    services.remove("a")
    assert (len(services), {*taken(services, 4)}) == (2, {"b", "c"})
    assert "a" in services
    services.failed("a", 1.0)
    services.give_back("a")
    assert "a" not in services
    services.failed("a", 2.0)
    services = roster()
    for _ in range(2):
        services.remove("a")  # without sessions it leaves at once
        assert "a" not in services
    taken(services, failed="c")
    services.remove("b")
    services.add("b", "another")
    assert (len(services), services["b"]) == (2, "another")


def test_one_that_is_known_to_be_there_is_taken_before_others() -> None:
    services = roster(2.0, 1.0, 3.0, there={"A": None, "B": False, "C": True}.get)
    assert taken(services, now=4.0) + taken(services, used="c", now=4.0) == "ca"
    assert taken(services, used="ac", now=4.0) + taken(services, failed="c", now=4.0) == "ca"
    assert taken(services, now=2.0 + FORGIVEN_SECONDS) == "a"


@dataclass
class Lives:
    """When targets are there, on a clock of their own; to find out that one is not takes half a second."""

    back: Sequence[float]  # of each, in seconds
    now: float = 0.0

    def tried(self, services: Roster[float], opening: Open) -> Ready | Lost:
        self.now += opening.after
        address = services.take((), (), self.now)
        if services[address] <= self.now:
            return Ready(opening.lane)
        self.now += 0.5
        services.failed(address, self.now)
        services.give_back(address)
        return Lost(opening.lane, GONE)


@pytest.mark.parametrize("back", [20.0, 27.0, 28.0, 28.5, 29.0])
def test_of_two_killed_targets_one_that_is_back_before_the_wait_ends_is_used(back: float) -> None:
    lives = Lives((100.0, back))
    services: Roster[float] = Roster("target", lambda since: since <= lives.now)
    for since in lives.back:
        services.add(f"back at {since}", since)
    session = Session(assignment(drafts=False, target_seconds=30.0))
    out: list[Command] = session.start(0.0)
    event: Ready | Lost | None = None
    while not isinstance(event, Ready):
        event = lives.tried(services, next(one for one in out if isinstance(one, Open)))
        out = session.handle(event, lives.now)
        assert not any(isinstance(one, Finished) for one in out), f"after {lives.now} s"
    assert lives.now <= back + 1.5
