"""`crossdraft loadtest`: sends requests to a server that runs already, or to one that it starts over services.

Where it starts them, the drafter stands behind an emulated network, whose delays are measured one after another.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, ClassVar

from crossdraft.cli.measuring import Columns, Table
from crossdraft.cli.processes import base_url, http_server, running
from crossdraft.cli.prompts import read, texts_of
from crossdraft.cli.running import (
    STARTS_PROCESSES,
    CommandFailed,
    ProgressCounter,
    Run,
    UsageError,
    checked_options,
    needs_extra,
)
from crossdraft.client import GenerationRequest, SamplingOptions
from crossdraft.lab.commands import LoadPlan
from crossdraft.lab.harness import Benchmark, gathered
from crossdraft.lab.loadtest.clients import Body, Stream, http_stream, send
from crossdraft.lab.loadtest.figures import HOP, ROLES, SEEN, LoadRun
from crossdraft.lab.outputs import Output
from crossdraft.lab.services import Served, service
from crossdraft.session.models import requested_method
from crossdraft.types.request import Chat
from crossdraft.verification.methods import method_named

# Of each stage: its delay in ms, one way, or None where nothing is emulated; how an output is asked for.
Stages = AsyncGenerator[tuple[float | None, Stream], None]


class LoadTest(Benchmark[LoadPlan, LoadRun]):
    """A test."""

    unit: ClassVar[str] = "requests"
    runner: ClassVar[Run] = staticmethod(STARTS_PROCESSES)

    @cached_property
    def prompts(self) -> tuple[Body, ...]:
        """Fields of requests, in turns; raises UsageError. Unless chats are sent, prompts are what their messages say:
        a model without a chat template has no others."""
        with checked_options():
            if not self.plan.chat:
                return tuple({"prompt": text} for text in texts_of(self.plan.prompts))
            return tuple({"messages": _messages(prompt.content)} for prompt in read(self.plan.prompts))

    @cached_property
    def like(self) -> Body:
        """What all requests have in common; raises UsageError if no server would take it."""
        plan, k = self.plan, self.plan.num_speculative_tokens
        forced: dict[str, Any] = {} if k is None else {"overlap": "off", "num_speculative_tokens": k}
        with checked_options():
            sampling = SamplingOptions(plan.temperature)
            requested_method(
                GenerationRequest("x", method=plan.method, max_tokens=plan.max_tokens, options=sampling, **forced)
            )
        speculative = _given(trace=True, method=plan.method, drafter=plan.use_drafter, **forced)
        return _given(
            model=plan.model or None,
            max_tokens=plan.max_tokens,
            temperature=plan.temperature,
            ignore_eos=plan.ignore_eos,
            stream=True,
            speculative=speculative,
        )

    def requests(self, count: int) -> Iterator[Body]:
        """The prompts take turns, and seeds follow the first one, if a method is named that takes one."""
        plan = self.plan
        seeded = plan.method is not None and plan.temperature > 0 and method_named(plan.method).seedable
        for number in range(count):
            seed = {"seed": plan.seed + number} if seeded else {}
            yield {**self.like, **self.prompts[number % len(self.prompts)], **seed}

    @property
    def delays(self) -> tuple[float, ...]:
        """To the drafter, in ms, one way."""
        return self.plan.services.delay_ms or (0.0,)

    @cached_property
    def models(self) -> dict[str, Served]:
        """Those that are started, by role; raises UsageError."""
        given = self.plan.services
        return {
            "target": Served(given.target_model, given.pace_target, engine=given.engine),
            "drafter": Served(given.drafter_model, given.pace_drafter, engine=given.engine),
        }

    @property
    def total(self) -> int:
        return len(self.delays) * self.plan.requests

    def described(self) -> dict[str, Any]:
        """Without address and key."""
        return {name: value for name, value in super().described().items() if name not in ("url", "api_key")}

    def check(self) -> None:
        if self.plan.url:
            base_url(self.plan.url)
            if self.plan.services.delay_ms:
                raise UsageError("--delay-ms needs services that this command starts: leave out --url")
        _ = self.models, self.prompts, self.like  # which raise UsageError

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[LoadRun, None]:
        async with aclosing(self.stages()) as stages:
            async for delay_ms, stream in stages:
                if self.plan.warm_up:
                    advance(0, "warm-up")
                    outputs = await self._made(stream, self.plan.warm_up, lambda: None)
                    if not any(output.ok for output in outputs):
                        error, fault = outputs[0].error, outputs[0].fault
                        raise CommandFailed(f"the first requests failed ({error}): {fault or 'no token came'}")
                advance(0, "" if delay_ms is None else f"{delay_ms:g} ms")
                yield LoadRun.of(delay_ms, await self._made(stream, self.plan.requests, advance))

    async def _made(self, stream: Stream, count: int, advance: Any) -> list[Output]:
        """The first `count` requests."""

        async def sent(asked: Body) -> Output:
            output = await send(stream, asked, self.plan.timeout)
            advance()
            return output

        return await gathered(sent, self.requests(count), self.plan.clients)

    async def stages(self) -> Stages:
        """One of a server that runs already, or one for each delay to the drafter, each with a server of its own, over
        services that run throughout; raises CommandFailed."""
        try:
            if self.plan.url:
                async with http_stream(base_url(self.plan.url), self.plan.api_key, self.plan.chat) as stream:
                    yield None, stream
                return
            async with (
                service("target", self.models["target"], 0, False) as target,
                service("drafter", self.models["drafter"], 1, any(self.delays)) as drafter,
            ):
                for delay in self.delays:
                    await drafter.delay(delay)
                    server = http_server(target.address, drafter.address, self.plan.clients)
                    async with (
                        running([server]) as (front,),
                        http_stream(f"http://{front.address}", chat=self.plan.chat) as stream,
                    ):
                        yield delay if any(self.delays) else None, stream
        except ImportError as error:
            raise CommandFailed(f"a load test {needs_extra('http')}") from error

    def report(self, results: Sequence[LoadRun]) -> Iterator[Table | str]:
        yield Table.of(results, SEEN).turned()
        for role in ROLES:
            found = [(run.name, hop) for run in results for hop in run.hops if hop.role == role]
            columns: Columns = {name: lambda pair, of=of: of(pair[1]) for name, of in HOP.items()}  # type: ignore[misc]
            if found:
                yield Table.of(found, {f"orchestrator and {role}": lambda pair: pair[0], **columns}).turned()
        for run in results:
            if run.errors:
                counted = ", ".join(f"{count} {kind}" for kind, count in run.errors.items())
                said = "; ".join(f"{kind}: {text}" for kind, text in sorted(run.faults.items()))
                yield f"{run.name}: {sum(run.errors.values())} of {run.requests} requests failed: {counted}. {said}"

    def finish(self, results: Sequence[LoadRun]) -> None:
        if not any(run.requests > sum(run.errors.values()) for run in results):
            raise CommandFailed("no request was answered")


def _messages(content: str | Chat) -> list[Body]:
    """As the API has them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [{"role": message.role, "content": message.content, **message.more} for message in content.messages]


def _given(**fields: Any) -> Body:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
