"""What `crossdraft bench throughput` found, as Markdown."""

from collections.abc import Sequence

from crossdraft.cli.overlap_report import markdown
from crossdraft.cli.throughput_figures import Measured
from crossdraft.loadtest.spreads import Spread

FULL = 0.9  # cores of an event loop from which on it may be what outputs wait for
SPEEDS = (
    *("at once", "way", "tokens/s", "while all stream", "first token, ms: p50", "p99", "ms a token: p50", "p99"),
    *("gaps, ms: p99", "whole output, ms: p50", "p99", "same ids"),
)
WORK = (
    *("at once", "way", "tokens/pass", "accepted", "sessions a forward", "tokens a forward", "target's model busy"),
    *(
        "cores: target",
        "drafter",
        "here",
        "... its event loop",
        "CPU here, ms a token",
        "tokens a CPU second of the target",
    ),
)


def report(found: Sequence[Measured], conditions: str) -> str:
    """Two tables, and what must be known to read them."""
    texts = [conditions, "\n\n", markdown(SPEEDS, [_speed(one) for one in found])]
    texts += ["\n", markdown(WORK, [_work(one) for one in found])]
    full = [f"{one.way} with {one.at_once}" for one in found if one.loop_cores >= FULL]
    if full:
        texts.append(
            f"\nThis process's event loop was as busy as it can be, and outputs waited for it: {', '.join(full)}\n"
        )
    return "".join(texts)


def _speed(one: Measured) -> tuple[str, ...]:
    return (
        str(one.at_once),
        one.way,
        f"{one.tokens_per_second:.1f}",
        _shown(one.streaming, ".1f"),
        *_spread(one.first_token_ms, 0),
        *_spread(one.per_token_ms, 1),
        _spread(one.gap_ms, 0)[1],
        *_spread(one.end_to_end_ms, 0),
        "" if one.same is None else f"{one.same} of {one.outputs}",
    )


def _work(one: Measured) -> tuple[str, ...]:
    return (
        str(one.at_once),
        one.way,
        _shown(one.tokens_per_pass, ".2f"),
        _shown(one.acceptance, ".2f"),
        _shown(one.sessions, ".1f"),
        _shown(one.fed, ".1f"),
        _shown(one.busy, ".0%"),
        *(f"{cores:.2f}" for cores in (one.target_cores, one.drafter_cores, one.here_cores, one.loop_cores)),
        f"{one.here_ms:.2f}",
        f"{one.tokens_per_target_second:.1f}",
    )


def _spread(spread: Spread | None, digits: int) -> tuple[str, str]:
    return ("", "") if spread is None else (f"{spread.p50:.{digits}f}", f"{spread.p99:.{digits}f}")


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
