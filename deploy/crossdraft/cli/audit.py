"""`crossdraft audit`: whether what an endpoint of OpenAI's API generates has the distribution of its model."""

import json
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

from crossdraft.cli.generate import named
from crossdraft.cli.processes import Wanted, base_url, http_server, running, threads_each
from crossdraft.cli.prompts import texts_of
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

try:
    from crossdraft.audit.checks import NOT_CHECKED, AuditPlan
    from crossdraft.audit.checks import audit as run_audit
    from crossdraft.audit.endpoint import CannotBeAudited, Endpoint
    from crossdraft.audit.report import Report, plain, reach_of, tables_of, verdict_of
except ImportError as absent:
    raise UsageError(f"an audit {needs_extra('audit')} ({absent})") from absent


def audit(endpoint: AuditedEndpoint, reference: AuditReference, options: AuditOptions, file: ReportFile) -> None:
    """Runs the audit; tables on stdout, and a file if a path is given."""
    check_report(file)
    if reference.reference_url and reference.model:
        raise UsageError("--reference-url and --model are two references: give one of them")
    with checked_options():
        texts = texts_of(options.prompts)
        plan = AuditPlan(**named(AuditPlan, vars(options) | {"prompts": texts if options.prompts else PROMPTS + texts}))
    try:
        run_to_end(run(plan, endpoint, reference, options, file), STARTS_PROCESSES)
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


async def run(
    plan: AuditPlan, audited: AuditedEndpoint, reference: AuditReference, options: AuditOptions, file: ReportFile
) -> None:
    """Raises UsageError; CommandFailed, also if a fault was found; CannotBeAudited, also if nothing was checked."""
    url = base_url(reference.reference_url, "--reference-url") if reference.reference_url else ""
    extra = fields_of("--reference-body", reference.reference_body)
    if extra and not (url or reference.model):
        raise UsageError("--reference-body needs a reference: give --reference-url or --model")
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    asks = partial(Endpoint, prompt=plan.prompts[0], concurrency=options.concurrency, timeout=options.timeout)
    async with AsyncExitStack() as stack:
        endpoint = asks(
            url=base_url(audited.url),
            key=audited.api_key,
            model=audited.served_model_name,
            api=audited.api,
            choices=options.choices,
            extra=fields_of("--extra-body", audited.extra_body),
        )
        await stack.enter_async_context(endpoint)
        able, other = endpoint.abilities, None
        if reference.model:
            wanted = Wanted("target", reference.model, threads_each(1), engine=reference.engine)
            (target,) = await stack.enter_async_context(running([wanted]))
            (front,) = await stack.enter_async_context(running([http_server(target.address)]))
            url = f"http://{front.address}"
        if url:
            other = asks(url=url, key=reference.reference_api_key, extra=extra, api=able.api)
            await stack.enter_async_context(other)
        planned, asked = plan.requests(endpoint, other), [one for one in (endpoint, other) if one is not None]
        with counted(planned, "requests") as advance:
            for one in asked:
                one.advance = advance
            before = await endpoint.drafted()
            result = await run_audit(plan, endpoint, other)
            after = await endpoint.drafted()
    about = endpoint.url, endpoint.model, able.api, able.top, reference.model or url
    counts = planned, sum(one.requests for one in asked), sum(one.retries for one in asked)
    drafted = None if before is None or after is None else (after[0] - before[0], after[1] - before[1])
    show(Report(begun, software(), *about, plan, *counts, drafted, result), file)


def show(report: Report, file: ReportFile) -> None:
    """Prints and writes it. Raises CommandFailed if there is a fault, and CannotBeAudited if nothing was checked."""
    for table in tables_of(report):
        print_whole(table)
    for line in reach_of(report):
        print(line)
    write_report(file, plain(report))
    if all(check.verdict == NOT_CHECKED for check in report.result.checks):
        raise CannotBeAudited("nothing is checked")
    if report.result.faults:
        raise CommandFailed(f"faults were found: {', '.join(report.result.faults)}")
    print(verdict_of(report))
