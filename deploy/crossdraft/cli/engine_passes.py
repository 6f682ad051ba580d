"""`crossdraft bench engine`: the engine's pass beside a bare forward of the same model over the same tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from crossdraft.cli.benching import write_json, write_text
from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.outputs import check_output
from crossdraft.cli.overlap_report import markdown
from crossdraft.cli.running import warnings_shown
from crossdraft.models.enginetime import Load, PassTime, times_of
from crossdraft.models.names import ModelLoadError, NumberOutOfRangeError
from crossdraft.models.timing import Floor

MILLISECONDS = 1000.0
GB = 1e9  # bytes
HEADINGS = (
    *("sessions", "tokens each", "engine, ms", "of it in the model", "bare, ms", "engine / bare"),
    *("engine / each alone", "logits apart by"),
)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    target: str  # a model's name
    dtype: str
    device: str
    mib: int  # for keys and values
    loads: tuple[Load, ...]
    context: int  # tokens of each session before the pass
    turns: int
    enforce_eager: bool = False


def loads_of(texts: Sequence[str]) -> tuple[Load, ...]:
    """From SESSIONSxTOKENS each; raises Misused."""
    return tuple(map(_load, texts))


def _load(text: str) -> Load:
    try:
        sessions, tokens = map(int, text.split("x"))
    except ValueError as error:
        raise Misused(f"--load takes SESSIONSxTOKENS such as 16x6, got {text!r}") from error
    if sessions < 1 or tokens < 1:
        raise Misused(f"--load takes 1 or more sessions and tokens, got {text}")
    return Load(sessions, tokens)


def measure(plan: Plan, json_path: Path | None, markdown_path: Path | None = None) -> None:
    """Measures all loads; a table on stdout, and files if paths are given.

    Raises:
        Misused: a number does not fit the model.
        CommandFailed: the model cannot be loaded or run.
    """
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    try:
        where = (plan.target, plan.dtype, plan.device, plan.mib)
        with warnings_shown():
            times, floor, captured = times_of(*where, plan.loads, plan.context, plan.turns, plan.enforce_eager)
    except NumberOutOfRangeError as error:
        raise Misused(str(error)) from error
    except (ModelLoadError, ValueError) as error:
        raise CommandFailed(str(error)) from error
    text = report(plan, times, floor, captured)
    print(text, end="")
    if markdown_path is not None:
        write_text(markdown_path, text)
    if json_path is not None:
        figures = [asdict(one) | {"overhead": one.overhead, "beside_alone": one.beside_alone} for one in times]
        write_json(json_path, {"plan": asdict(plan), "floor": asdict(floor), "times": figures, "captured": captured})


def report(plan: Plan, times: Sequence[PassTime], floor: Floor, captured: int) -> str:
    """A table, and what the weights alone take."""
    graphs = (
        "" if plan.device == "cpu" else f" Shapes of the engine's forwards that were captured as graphs: {captured}."
    )
    return (
        f"{markdown(HEADINGS, [_row(one) for one in times])}\n{plan.target} in {plan.dtype} on {plan.device}, after "
        f"texts of {plan.context} tokens. A pass reads {floor.weights / GB:.2f} GB of weights, which takes "
        f"{MILLISECONDS * floor.seconds:.2f} ms at the {floor.bandwidth / GB:.1f} GB a second that were measured."
        f"{graphs}\n"
    )


def _row(one: PassTime) -> tuple[str, ...]:
    return (
        *(str(one.load.sessions), str(one.load.tokens)),
        *(f"{MILLISECONDS * seconds:.2f}" for seconds in (one.engine, one.model, one.bare)),
        *(f"{one.overhead:.3f}", f"{one.beside_alone:.3f}", f"{one.difference:.1g}"),
    )
