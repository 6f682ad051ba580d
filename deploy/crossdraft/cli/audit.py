"""`crossdraft audit`: whether what an endpoint of OpenAI's API generates has the distribution of its model."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from crossdraft.cli.options import AuditedEndpoint, AuditOptions, AuditReference, LoadFiles, named
from crossdraft.client.api import software
from crossdraft.console.processes import MIN_OUTPUTS, HttpServer, Wanted, base_url, running, threads_each
from crossdraft.console.running import (
    PICTURES,
    PROMPTS,
    STARTS_PROCESSES,
    CommandFailed,
    UsageError,
    check_output,
    checked_options,
    counted,
    print_whole,
    run_to_end,
    save_picture,
    write_text,
)
from crossdraft.loadtest.requests import bundled, read, texts_of

try:
    from crossdraft.audit.checks import Plan
    from crossdraft.audit.checks import audit as run_audit
    from crossdraft.audit.endpoint import Endpoint, Pace
    from crossdraft.audit.report import Report, figure_of, plain, reach_of, tables_of
except ImportError as absent:
    raise UsageError(f"an audit needs what `pip install 'crossdraft[audit]'` installs: {absent}") from absent


def audit(endpoint: AuditedEndpoint, reference: AuditReference, options: AuditOptions, files: LoadFiles) -> None:
    """Runs the audit; tables on stdout, and files if paths are given.

    Raises:
        UsageError: a value is out of its range, or options do not go together.
        CannotBeAudited: the endpoint does not do what an audit needs.
        CommandFailed: a fault was found, or the reference does not start.
    """
    for path, endings in ((files.json_file, ()), (files.picture, PICTURES)):
        if path is not None:
            check_output(path, *endings)
    if reference.reference_url and reference.model:
        raise UsageError("--reference-url and --model are two references: give one of them")
    with checked_options():
        given = bundled() if options.prompts is None else read(options.prompts)
        texts = tuple(str(one.content) for one in texts_of(given))
        prompts = PROMPTS + texts if options.prompts is None else texts
        audited = Audited(
            Plan(**named(Plan, vars(options) | {"prompts": prompts})),
            Pace(options.concurrency, options.requests_per_second, options.timeout),
            base_url(endpoint.url),
            fields_of("--extra-body", endpoint.extra_body),
            base_url(reference.reference_url, "--reference-url") if reference.reference_url else "",
            fields_of("--reference-body", reference.reference_body),
        )
    run_to_end(Audit(audited, endpoint, reference, options.choices, files).run(), STARTS_PROCESSES)


def fields_of(option: str, text: str) -> dict[str, Any]:
    """Raises UsageError unless it is a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f'{option} must be a JSON object, such as {{"user": "me"}}, got {text}')
    return found


@dataclass(frozen=True)
class Audited:
    """What the options say, checked."""

    plan: Plan
    pace: Pace
    url: str
    extra: dict[str, Any]  # fields of every request
    reference_url: str  # empty: none
    reference_extra: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Audit:
    """A running audit."""

    audited: Audited
    endpoint: AuditedEndpoint
    reference: AuditReference
    choices: int
    files: LoadFiles

    async def run(self) -> None:
        """Raises CommandFailed, also if a fault was found."""
        begun, plan, given = datetime.now(UTC).isoformat(timespec="seconds"), self.audited.plan, self.endpoint
        asked = Endpoint(
            self.audited.url,
            prompt=plan.prompts[0],
            key=given.api_key,
            model=given.served_model_name,
            api=given.api,
            choices=self.choices,
            extra=self.audited.extra,
            pace=self.audited.pace,
        )
        async with asked as endpoint, self._other(endpoint.abilities.api) as other:
            planned = plan.requests(endpoint, other)
            with counted(planned, "requests") as advance:
                result = await run_audit(plan, endpoint, other, advance)
        both = [one for one in (endpoint, other) if one is not None]
        able, beside = endpoint.abilities, self.reference.model or self.audited.reference_url
        counts = planned, sum(one.requests for one in both), sum(one.retries for one in both)
        about = endpoint.url, endpoint.model, able.api, able.top, beside
        self._show(Report(begun, software(), *about, plan, *counts, result))

    @asynccontextmanager
    async def _other(self, api: str) -> AsyncIterator[Endpoint | None]:
        """The reference, asked by the same API; a model is served as long as the block. Raises CommandFailed."""
        url, given, plan = self.audited.reference_url, self.reference, self.audited.plan
        async with AsyncExitStack() as stack:
            if given.model:
                wanted = Wanted("target", given.model, threads_each(1), engine=given.engine)
                (target,) = await stack.enter_async_context(running([wanted]))
                (front,) = await stack.enter_async_context(running([HttpServer(target.address, "", MIN_OUTPUTS)]))
                url = f"http://{front.address}"
            if not url:
                yield None
                return
            key, extra, pace = given.reference_api_key, self.audited.reference_extra, self.audited.pace
            other = Endpoint(url, prompt=plan.prompts[0], key=key, api=api, extra=extra, pace=pace)
            yield await stack.enter_async_context(other)

    def _show(self, report: Report) -> None:
        """Raises CommandFailed if there is a fault, or a file cannot be written."""
        for table in tables_of(report):
            print_whole(table)
        for line in reach_of(report):
            print(line)
        if self.files.json_file is not None:
            write_text(self.files.json_file, json.dumps(plain(report), indent=1) + "\n")
        if self.files.picture is not None:
            save_picture(figure_of(report), self.files.picture)
        if report.result.faults:
            raise CommandFailed(f"faults were found: {', '.join(report.result.faults)}")
