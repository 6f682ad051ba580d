"""`crossdraft replay` and `crossdraft timeline`: what a flight record says."""

import sys
from pathlib import Path

from crossdraft.cli.running import CommandFailed, UsageError, check_output, write_text
from crossdraft.trace.page import page_of
from crossdraft.trace.recording import Recording, RecordingError, read
from crossdraft.trace.replay import assignment_of
from crossdraft.trace.replay import replay as run
from crossdraft.trace.timeline import WORKS, SessionFigures, Timeline, spans_of
from crossdraft.types.request import Overlap

NOT_CHECKED = "Replies and their times are the recorded ones; whether they are the models' is not checked."
PAGES = (".html", ".htm")
MARGIN = 0.03  # of what is shown, before its first pass


def replay(file: Path) -> None:
    """Verifies again from the recorded replies, and prints whether the verdicts are the same.

    Raises:
        UsageError: the recording cannot be read.
        CommandFailed: the verdicts differ, or the recording cannot be replayed.
    """
    recording = recording_of(file)
    try:
        replayed = run(recording)
    except RecordingError as error:
        raise CommandFailed(str(error)) from error
    if replayed.difference is not None:
        raise CommandFailed(f"{replayed.rounds} rounds have the same verdicts; {replayed.difference}")
    print(f"{replayed.rounds} rounds, {replayed.tokens} tokens: same verdicts")
    if recording.fault:
        print(f"The recording could not be read to its end: {recording.fault}.", file=sys.stderr)
    elif recording.finished is None:
        print("The recording ends before the session does.", file=sys.stderr)
    print(NOT_CHECKED, file=sys.stderr)


def timeline(file: Path, output: Path, first: int, rounds: int) -> None:
    """Writes the page.

    Raises:
        UsageError: the output cannot be written there, or has an unknown extension; the recording cannot be read, or
            has fewer rounds.
        CommandFailed: writing fails.
    """
    check_output(output, *PAGES)
    recording = recording_of(file)
    found = spans_of(recording)
    seen = window_of(found, first, rounds)
    write_text(output, page_of(found, title_of(recording), figures_of(found.figures), seen))


def recording_of(file: Path) -> Recording:
    """Raises UsageError if it cannot be read."""
    try:
        return read(file)
    except OSError as error:
        raise UsageError(f"cannot read {file} (a file of `generate --record`): {error.strerror}") from error
    except RecordingError as error:
        raise UsageError(f"{error} (a file of `generate --record` is)") from error


def window_of(found: Timeline, first: int, rounds: int) -> tuple[float, float]:
    """When `rounds` rounds from the `first` begin and end, in seconds. Raises UsageError if there are fewer."""
    if first > len(found.passes):
        raise UsageError(f"the recording has {len(found.passes)} rounds, so it has no round {first} (--first)")
    drafts = [one.begin for one in found.spans if one.what in WORKS and one.begin < found.passes[first - 1]]
    begin = found.passes[first - 1] if first > 1 or not drafts else drafts[0]
    last = first - 1 + rounds
    end = found.passes[last] if last < len(found.passes) else found.end
    return max(0.0, begin - MARGIN * (end - begin)), end


def title_of(recording: Recording) -> str:
    """Models, method and temperature of a recording. Raises CommandFailed if its request cannot be resolved."""
    header = recording.header
    request, temperature = header.request, header.request.options.temperature
    way = {
        Overlap.OFF: f"lock-step, K = {request.num_speculative_tokens}",
        Overlap.ON: "overlapped",
        Overlap.AUTO: "controlled",
    }
    try:
        method = request.method or assignment_of(header).method.name
    except RecordingError as error:
        raise CommandFailed(str(error)) from error
    parts = [f"{header.target.model} without a drafter", method, f"temperature {temperature:g}"]
    if header.drafter is not None:
        parts[0] = f"{header.target.model} with {header.drafter.model}"
        parts.append(way[request.overlap])
    return ", ".join(parts) + ("" if recording.finished else " (the recording ends before the session)")


def figures_of(figures: SessionFigures) -> list[tuple[str, str]]:
    shown = [
        ("tokens/s", f"{figures.tokens_per_second:.1f}"),
        ("tokens per pass", f"{figures.tokens_per_pass:.2f}"),
        ("target idle", f"{figures.idle_share:.0%}"),
        ("target's model at work", f"{figures.model_share:.0%}"),
        ("drafter's model at work", f"{figures.drafter_share:.0%}"),
        ("tokens", str(figures.tokens)),
        ("passes", str(figures.passes)),
        ("row misses", str(figures.row_misses)),
        ("refused", str(figures.refused)),
    ]
    if figures.hits:
        shown.append(("branches adopted", str(figures.hits)))
    if figures.stalls:
        shown.append(("stalls", str(figures.stalls)))
    if figures.bytes and figures.tokens:
        shown.append(("bytes/token", f"{figures.bytes / figures.tokens:,.0f}"))
    return shown
