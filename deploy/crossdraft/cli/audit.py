"""`crossdraft audit`: whether what an endpoint of OpenAI's API generates has the distribution of its model."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from crossdraft.cli.generate import named
from crossdraft.cli.processes import MIN_OUTPUTS, HttpServer, Wanted, base_url, running, threads_each
from crossdraft.cli.prompts import read, texts_of
from crossdraft.cli.running import (
    PROMPTS,
    STARTS_PROCESSES,
    CommandFailed,
    UsageError,
    check_report,
    checked_options,
    counted,
    needs_extra,
    print_whole,
    run_to_end,
    write_report,
)
from crossdraft.client.api import software
from crossdraft.config.commands import AuditedEndpoint, AuditOptions, AuditReference, ReportFile
from crossdraft.config.engine import EngineOptions

try:
    from crossdraft.audit.checks import NOT_CHECKED, AuditPlan
    from crossdraft.audit.checks import audit as run_audit
    from crossdraft.audit.endpoint import CannotBeAudited, Endpoint, Pace
    from crossdraft.audit.report import Report, plain, reach_of, tables_of, verdict_of
except ImportError as absent:
    raise UsageError(f"an audit {needs_extra('audit')} ({absent})") from absent


def audit(endpoint: AuditedEndpoint, reference: AuditReference, options: AuditOptions, file: ReportFile) -> None:
    """Runs the audit; tables on stdout, and a file if a path is given.

    Raises:
        UsageError: a value is out of its range, or options do not go together.
            CommandFailed: a fault was found, or the reference does not start.
    """
    check_report(file)
    if reference.reference_url and reference.model:
        raise UsageError("--reference-url and --model are two references: give one of them")
    if fields_of("--reference-body", reference.reference_body) and not (reference.reference_url or reference.model):
        raise UsageError("--reference-body needs a reference: give --reference-url or --model")
    with checked_options():
        given = read(options.prompts)
        texts = tuple(str(one.content) for one in texts_of(given))
        plan = AuditPlan(**named(AuditPlan, vars(options) | {"prompts": texts if options.prompts else PROMPTS + texts}))
    prompt, pace = plan.prompts[0], Pace(options.concurrency, options.requests_per_second, options.timeout)
    audited = Endpoint(
        base_url(endpoint.url),
        prompt=prompt,
        key=endpoint.api_key,
        model=endpoint.served_model_name,
        api=endpoint.api,
        choices=options.choices,
        extra=fields_of("--extra-body", endpoint.extra_body),
        pace=pace,
    )
    url = base_url(reference.reference_url, "--reference-url") if reference.reference_url else ""
    extra = fields_of("--reference-body", reference.reference_body)
    other = partial(Endpoint, prompt=prompt, key=reference.reference_api_key, extra=extra, pace=pace)
    try:
        run_to_end(Audit(plan, audited, other, url, reference.model, reference.engine, file).run(), STARTS_PROCESSES)
    except CannotBeAudited as error:
        raise UsageError(str(error)) from error


def fields_of(option: str, text: str) -> dict[str, Any]:
    """Raises UsageError unless it is a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f'{option} must be a JSON object, such as {{"user": "me"}}, got {text}')
    return found


@dataclass(frozen=True, eq=False)
class Audit:
    """What is to be audited, against what."""

    plan: AuditPlan
    endpoint: Endpoint
    other: Callable[..., Endpoint]  # the reference, by its URL and its API
    reference_url: str  # empty: none
    model: str  # to be served as the reference; empty: none
    engine: EngineOptions  # of it
    file: ReportFile

    async def run(self) -> None:
        """Raises CommandFailed, also if a fault was found."""
        begun, plan = datetime.now(UTC).isoformat(timespec="seconds"), self.plan
        async with self.endpoint as endpoint, self._reference() as other:
            asked = [one for one in (endpoint, other) if one is not None]
            planned = plan.requests(endpoint, other)
            with counted(planned, "requests") as advance:
                for one in asked:
                    one.advance = advance
                before = await endpoint.drafted()
                result = await run_audit(plan, endpoint, other)
                after = await endpoint.drafted()
        able, beside = endpoint.abilities, self.model or self.reference_url
        counts = planned, sum(one.requests for one in asked), sum(one.retries for one in asked)
        about = endpoint.url, endpoint.model, able.api, able.top, beside
        drafted = None if before is None or after is None else (after[0] - before[0], after[1] - before[1])
        self._show(Report(begun, software(), *about, plan, *counts, drafted, result))

    @asynccontextmanager
    async def _reference(self) -> AsyncIterator[Endpoint | None]:
        """Asked by the endpoint's API; a model is served as long as the block. Raises CommandFailed."""
        url = self.reference_url
        async with AsyncExitStack() as stack:
            if self.model:
                wanted = Wanted("target", self.model, threads_each(1), engine=self.engine)
                (target,) = await stack.enter_async_context(running([wanted]))
                (front,) = await stack.enter_async_context(running([HttpServer(target.address, "", MIN_OUTPUTS)]))
                url = f"http://{front.address}"
            yield await stack.enter_async_context(self.other(url, api=self.endpoint.abilities.api)) if url else None

    def _show(self, report: Report) -> None:
        """Raises CommandFailed if there is a fault, nothing was checked, or a file cannot be written."""
        for table in tables_of(report):
            print_whole(table)
        for line in reach_of(report):
            print(line)
        write_report(self.file, plain(report))
        if all(check.verdict == NOT_CHECKED for check in report.result.checks):
            raise CannotBeAudited("nothing is checked")
        if report.result.faults:
            raise CommandFailed(f"faults were found: {', '.join(report.result.faults)}")
        print(verdict_of(report))
