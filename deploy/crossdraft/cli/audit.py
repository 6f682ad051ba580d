"""`crossdraft audit`: whether what an endpoint of OpenAI's API generates has the distribution of its model."""

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from crossdraft.cli.measuring import Columns, Table, print_table
from crossdraft.cli.processes import Wanted, base_url, http_server, running, threads_each
from crossdraft.cli.prompts import texts_of
from crossdraft.cli.running import (
    PROMPTS,
    STARTS_PROCESSES,
    CommandFailed,
    UsageError,
    check_output,
    checked_options,
    counted,
    needs_extra,
    run_to_end,
    write_text,
)
from crossdraft.client.api import software
from crossdraft.config.commands import AuditedEndpoint, AuditOptions, AuditReference, AuditSizes
from crossdraft.config.fields import bare_key, part_of

try:
    from crossdraft.audit.checks import NOT_CHECKED, AuditPlan, Result
    from crossdraft.audit.checks import audit as run_audit
    from crossdraft.audit.endpoint import CannotBeAudited, Endpoint
    from crossdraft.audit.statistics import POWER
except ImportError as absent:
    raise UsageError(f"an audit {needs_extra('audit')} ({absent})") from absent

FORMAT = 2
SHOWN = 8  # differences and tests in the tables; the JSON has all
CHECKS: Columns = {
    "check": lambda check: check.name,
    "finding": lambda check: check.finding,
    "verdict": lambda check: check.verdict,
}
DIFFERENCES: Columns = {
    "prompt": lambda one: one.prompt,
    "what came": lambda one: one.text,
    "token": lambda one: one.token,
    "gap, nats": lambda one: f"{'over ' * one.at_least}{one.gap:.3g}",
}
TESTS: Columns = {  # of a test and its corrected p
    "test": lambda one: one[0].kind,
    "of": lambda one: one[0].where,
    "draws": lambda one: f"{one[0].count:,}",
    "statistic": lambda one: f"{one[0].statistic:.1f}",
    "df": lambda one: one[0].freedom or "",
    "p": lambda one: f"{one[0].p:.2g}",
    "corrected p": lambda one: f"{one[1]:.2g}",
}
FEW_DRAFTED = 1000  # draft tokens: with fewer, speculation was hardly tested
WANTED_ERROR = 0.02  # of a temperature, for which the report says how many samples would find it


def audit(endpoint: AuditedEndpoint, reference: AuditReference, options: AuditOptions) -> None:
    """Runs the audit; tables on stdout, and a file if a path is given."""
    if options.json_file is not None:
        check_output(options.json_file)
    if reference.reference_url and reference.model:
        raise UsageError("--reference-url and --model are two references: give one of them")
    with checked_options():
        texts = texts_of(options.prompts)
        plan = AuditPlan(texts if options.prompts else PROMPTS + texts, **vars(part_of(AuditSizes, options)))
    try:
        run_to_end(run(plan, endpoint, reference, options), STARTS_PROCESSES)
    except CannotBeAudited as error:
        raise UsageError(str(error)) from error


def fields_of(option: str, text: str) -> dict[str, Any]:
    """Raises UsageError unless it is a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f'{option} must be a JSON object, such as {{"user": "me"}}, got {text}')
    return found


async def run(plan: AuditPlan, audited: AuditedEndpoint, reference: AuditReference, options: AuditOptions) -> None:
    """Raises UsageError; CommandFailed, also if a fault was found; CannotBeAudited, also if nothing was checked."""
    url = base_url(reference.reference_url, "--reference-url") if reference.reference_url else ""
    extra = fields_of("--reference-body", reference.reference_body)
    if extra and not (url or reference.model):
        raise UsageError("--reference-body needs a reference: give --reference-url or --model")
    with checked_options():
        key, other_key = map(bare_key, (audited.api_key, reference.reference_api_key))
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    asks = partial(Endpoint, prompt=plan.prompts[0], concurrency=options.concurrency, timeout=options.timeout)
    async with AsyncExitStack() as stack:
        endpoint = asks(
            url=base_url(audited.url),
            key=key,
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
            other = asks(url=url, key=other_key, extra=extra, api=able.api)
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
    show(Report(begun, software(), *about, plan, *counts, drafted, result), options.json_file)


@dataclass(frozen=True)
class Report:
    """What was asked of whom, and what was found."""

    begun: str  # ISO 8601, UTC
    software: str  # version of this package
    url: str
    model: str
    api: str  # completions or chat
    listed: int  # tokens with log-probabilities at each place
    reference: str  # URL or model; empty: none
    plan: AuditPlan
    planned: int  # requests
    requests: int  # that were sent: also those that learnt what the endpoint lets one ask for, and retries
    retries: int
    draft_tokens: tuple[int, int] | None  # of the server meanwhile, and accepted ones; None: it does not say
    result: Result


def show(report: Report, json_file: Path | None) -> None:
    """Prints and writes it. Raises CommandFailed if there is a fault, and CannotBeAudited if nothing was checked."""
    for table in tables_of(report):
        print_table(table)
    for line in reach_of(report):
        print(line)
    if json_file is not None:
        record = {"format": FORMAT, **asdict(report), "faults": report.result.faults}
        write_text(json_file, json.dumps(record, indent=1) + "\n")
    if all(check.verdict == NOT_CHECKED for check in report.result.checks):
        raise CannotBeAudited("nothing is checked")
    if report.result.faults:
        raise CommandFailed(f"faults were found: {', '.join(report.result.faults)}")
    print(verdict_of(report))


def tables_of(report: Report) -> Iterator[Table]:
    result = report.result
    beside = f", against {report.reference}" if report.reference else ""
    yield Table.of(result.checks, CHECKS, f"{report.model} at {report.url} ({report.api}){beside}")
    if result.differences:
        farthest = sorted(result.differences, key=lambda one: -one.gap)[:SHOWN]
        yield Table.of(farthest, DIFFERENCES, "greedy: the farthest differences")
    if result.tests:
        ranked = sorted(zip(result.tests, result.adjusted, strict=True), key=lambda one: one[0].p)
        yield Table.of(ranked[:SHOWN], TESTS, "distributions: the least probable")


def reach_of(report: Report) -> Iterator[str]:
    """What the sample can show, and what it cost, a sentence each."""
    plan, power, drafted = report.plan, report.result.power, report.draft_tokens
    yield f"{report.requests} requests ({report.planned} planned, {report.retries} sent again)."
    yield f"Draft tokens meanwhile: {'not known' if drafted is None else '{:,}, accepted {:,}'.format(*drafted)}."
    if power is None:
        return
    yield (
        f"With {plan.samples:,} samples of each of {plan.sampled} prompts, up to {plan.tokens} tokens each, this audit "
        f"finds the following with a probability of {POWER:.0%}; it raises a false alarm with at most {plan.level:g}:"
    )
    if power.temperature is not None:
        needed = plan.samples * ((1 + 1 / WANTED_ERROR) / (1 + 1 / power.temperature)) ** 2
        yield f"- a temperature that is off by {power.temperature:.1%} (for {WANTED_ERROR:.0%}: --samples {needed:.0f})"
    yield f"- a listed token that never comes, if it was expected {power.missing:.0f} times in all"


def verdict_of(report: Report) -> str:
    """What the audit comes to, where it found no fault."""
    found = "No fault was found in what was checked"
    if report.draft_tokens is None:
        return f"{found}; the server does not say whether it drafted meanwhile."
    drafted = report.draft_tokens[0]
    return found + f", but with {drafted} draft tokens speculation was hardly tested" * (drafted < FEW_DRAFTED) + "."
