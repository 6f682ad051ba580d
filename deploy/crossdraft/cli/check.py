"""`crossdraft check`: whether a model is served exactly, and what it needs of memory.

Its logits are compared with the model's own in all that serving does with them; with a drafter also its greedy outputs,
plain, in lock-step and overlapped, with transformers' own `generate`.
"""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from crossdraft.cli.measuring import Columns, Table, finished, print_table
from crossdraft.cli.running import CommandFailed, check_output, checked_options, run_to_end, write_text
from crossdraft.client import GenerationRequest, SamplingOptions, connect
from crossdraft.config.engine import EngineOptions
from crossdraft.config.request import Overlap
from crossdraft.drafter.service import drafter_server
from crossdraft.engine.compatibility import UnsupportedModelError
from crossdraft.engine.conformance import Conformance, GreedyToken, Ids, conformance, greedy
from crossdraft.engine.device import device_of
from crossdraft.engine.loader import LoadedModel
from crossdraft.engine.names import RANDOM_PREFIX, ModelLoadError, laboratory
from crossdraft.engine.served_model import ModelOptions, load
from crossdraft.rpc.links import Patience
from crossdraft.rpc.server import Listening
from crossdraft.session.models import tokenization_of
from crossdraft.target.service import target_server
from crossdraft.text.letters import Side

EVERY = f"{RANDOM_PREFIX}all"
EXACT, DIFFERS, REFUSED, MISSING = "exact", "differs", "refused", "not loaded"
TOKENS = 40  # of each greedy output
PROMPTS = (16, 33, 100)  # tokens; the last is longer than three windows of a random model
ALL_TOKENS = TOKENS * len(PROMPTS)
TIE = 1e-4  # nats: two tokens that are no further apart may come in either order
CACHE_MIB = 64  # of services that are started for greedy outputs, where no size was named
AT_ONCE = Listening(grace_seconds=0)
PATIENCE = Patience(600.0, 600.0, 600.0)  # the services are in this process, and the machine may be busy
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lock-step": {"overlap": Overlap.OFF, "num_speculative_tokens": 4},
    "overlapped": {"overlap": Overlap.ON, "max_draft_tokens": 8, "min_draft_tokens": 2},
}


@dataclass(frozen=True)
class ModelCheck:
    """What was found of one model."""

    model: str
    outcome: str  # EXACT, DIFFERS, REFUSED or MISSING
    reason: str = ""  # why it is refused or not loaded, what differs, or why its sessions run one after another
    logits: Conformance | None = None
    outputs: dict[str, int] = field(default_factory=dict)  # by configuration: tokens that `generate` has, too
    judged: int = 0  # draft tokens that all outputs were compared with

    @property
    def windows(self) -> str:
        """Of its layers, in words."""
        found = () if self.logits is None else self.logits.windows
        return ", ".join("whole text" if window is None else f"{window.size} tokens" for window in found)

    @property
    def difference(self) -> str:
        """The largest of its logits, in words."""
        return "" if self.logits is None else f"{max(case.difference for case in self.logits.results):.0e}"


COLUMNS: Columns = {
    "model": lambda checked: checked.model.removeprefix(RANDOM_PREFIX),
    "": lambda checked: checked.outcome,
    "layers see": lambda checked: checked.windows,
    "largest difference": lambda checked: checked.difference,
    "tokens equal": lambda checked: ", ".join(map(str, checked.outputs.values())),
    "draft tokens judged": lambda checked: checked.judged or "",
    "why": lambda checked: checked.reason,
}

CASES: Columns = {
    "the model's own logits after": lambda case: case.name,
    "": lambda case: EXACT if case.exact else DIFFERS,
    "largest difference": lambda case: f"{case.difference:.1e}",
}


def check(
    models: Sequence[str], drafter: str | None, engine: EngineOptions, as_json: bool, markdown: Path | None
) -> None:
    """Checks models one after another, and prints what was found."""
    if markdown is not None:
        check_output(markdown)
    with checked_options():
        device_of(engine.device)
        names = laboratory("models", EVERY).architectures() if EVERY in models else ()
    every = {RANDOM_PREFIX + name for name in names}
    found: list[ModelCheck] = []
    try:
        run_to_end(_check_all(sorted(every | {*models} - {EVERY}), drafter, engine, found))
    finally:  # also what was found before an error
        if as_json:
            print(json.dumps([asdict(checked) for checked in found], default=str))
        else:
            _print(found)
        if markdown is not None:
            write_text(markdown, Table.of(found, COLUMNS).markdown())
    wrong = (DIFFERS, REFUSED, MISSING)  # of all architectures some are refused
    bad = [checked for checked in found if checked.outcome in (wrong[:1] if checked.model in every else wrong)]
    if bad:
        raise CommandFailed(*(f"{checked.model} {checked.outcome}: {checked.reason}" for checked in bad))


async def _check_all(names: Sequence[str], drafter: str | None, engine: EngineOptions, found: list[ModelCheck]) -> None:
    async with AsyncExitStack() as stack:
        address = None
        if drafter is not None:
            server = await drafter_server(_options(drafter, engine), AT_ONCE)
            address = (await stack.enter_async_context(server)).address
        for name in names:
            found.append(await _checked(name, address, engine))
            gc.collect()  # an engine and its thread refer to each other, and its memory is soon needed


async def _checked(name: str, drafter: str | None, engine: EngineOptions) -> ModelCheck:
    try:
        logits = await asyncio.to_thread(lambda: conformance(_loaded(name, engine).model, engine.max_model_len))
    except (UnsupportedModelError, ModelLoadError) as error:
        outcome = REFUSED if isinstance(error, UnsupportedModelError) else MISSING
        return ModelCheck(name, outcome, str(error).partition("\n")[0])
    wrong = [f"{case.name} by {case.difference:.1g}" for case in logits.results if not case.exact]
    outputs, judged = ({}, 0) if drafter is None else await _outputs(name, drafter, engine)
    wrong += [f"{how}: {equal} of {ALL_TOKENS} tokens" for how, equal in outputs.items() if equal < ALL_TOKENS]
    notes = [f"session by session: {logits.unbatched}"] if logits.unbatched else []
    return ModelCheck(name, DIFFERS if wrong else EXACT, "; ".join(wrong + notes), logits, outputs, judged)


def _options(name: str, engine: EngineOptions) -> ModelOptions:
    return ModelOptions.of(name, replace(engine, cache_mib=engine.cache_mib or CACHE_MIB))


def _loaded(name: str, engine: EngineOptions) -> LoadedModel:
    """As services load it, with a vocabulary that they serve; raises UnsupportedModelError, ModelLoadError."""
    loaded = load(_options(name, engine))
    try:
        tokenization_of(loaded.description, Side.TARGET)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    return loaded


def _expected(name: str, engine: EngineOptions) -> list[tuple[Ids, list[GreedyToken]]]:
    """Prompts, and what `generate` says after each; the model is gone when its service is started."""
    loaded = _loaded(name, engine)
    size = loaded.description.vocabulary_size
    prompts = [tuple((7 * place + place // 5) % (size - 3) + 3 for place in range(length)) for length in PROMPTS]
    return [(prompt, greedy(loaded.model, prompt, TOKENS)) for prompt in prompts]


async def _outputs(name: str, drafter: str, engine: EngineOptions) -> tuple[dict[str, int], int]:
    """Of greedy outputs, by configuration, tokens that are those of `generate`; and draft tokens that were judged."""
    expected = await asyncio.to_thread(_expected, name, engine)
    server = await target_server(_options(name, engine), AT_ONCE)
    equal, judged = dict.fromkeys(CONFIGURATIONS, 0), 0
    async with (
        server,
        connect(server.address, patience=PATIENCE) as plain,
        connect(server.address, drafter, PATIENCE, needs_drafter=True) as drafted,
    ):
        for configuration, settings in CONFIGURATIONS.items():
            for prompt, due in expected:
                request = GenerationRequest(
                    prompt, max_tokens=TOKENS, options=SamplingOptions(0), ignore_eos=True, **settings
                )
                output = (drafted if settings else plain).run(request)
                judged += sum((await finished(output, lost=True)).judged_at)
                equal[configuration] += _equal(output.ids, due)
    return equal, judged


def _equal(ids: Sequence[int], due: Sequence[GreedyToken]) -> int:
    """Tokens that are equal; behind a tie nothing is compared."""
    for place, (token, expected) in enumerate(zip(ids, due, strict=True)):
        if token != expected.token:
            return len(due) if expected.ahead <= TIE else place
    return len(due)


def _print(found: Sequence[ModelCheck]) -> None:
    for checked in found if len(found) == 1 else ():
        if checked.logits is not None:
            _print_cases(checked.logits)
    print_table(Table.of(found, COLUMNS))
    counted = Counter(checked.outcome for checked in found)
    print(", ".join(f"{counted[outcome]} {outcome}" for outcome in (EXACT, DIFFERS, REFUSED, MISSING)))


def _print_cases(logits: Conformance) -> None:
    print_table(Table.of(logits.results, CASES))
    memory = logits.memory
    if logits.unbatched:
        print(f"its sessions run one after another, and none begins with a prefix of another one: {logits.unbatched}")
    print(
        f"weights {memory.weights_mib:,.0f} MiB; cache {memory.token_bytes:,} bytes a token, "
        f"{memory.session_mib:,.2f} MiB for a session of {memory.context:,} tokens "
        f"(--max-model-len makes it shorter, --cache-mib sets the size of all)"
    )
