"""Colours, and what a terminal must not get."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from crossdraft.cli.display import DECISIONS, TextScreen, ending, explanation_of, figures, positions
from crossdraft.client import Kind, Reason, Token
from crossdraft.speculation.choice import PLAIN, Decision
from crossdraft.types.statistics import Counts, Statistics, Times, statistics_of


def screen(terminal: bool) -> tuple[TextScreen, io.StringIO]:
    stream = io.StringIO()
    system = "standard" if terminal else None
    return TextScreen(Console(file=stream, force_terminal=terminal, color_system=system), Console(file=stream)), stream


def token(text: str, kind: Kind) -> Token:
    return Token(1, text, text.encode(), kind, None)


@pytest.mark.parametrize(("kind", "code"), [(Kind.ACCEPTED, 32), (Kind.CORRECTED, 31), (Kind.BONUS, 36)])
def test_each_kind_has_its_colour(kind: Kind, code: int) -> None:
    on_terminal, stream = screen(terminal=True)
    on_terminal.token(token("[b]as it is[/b]\n", kind))
    assert stream.getvalue() == f"\x1b[{code}m[b]as it is[/b]\n\x1b[0m"


def test_control_sequences_of_a_model_do_not_reach_a_terminal() -> None:
    on_terminal, stream = screen(terminal=True)
    on_terminal.token(token("\x1b[2J\x07\x7f\t", Kind.BONUS))
    assert "\u241b[2J\u2407\u2421\t" in stream.getvalue()


def test_elsewhere_the_text_is_untouched() -> None:
    to_file, stream = screen(terminal=False)
    to_file.begin("not shown")
    to_file.token(token("\ta\r\n" + 300 * "long ", Kind.ACCEPTED))
    to_file.token(token("\x1b[2J", Kind.BONUS))
    assert stream.getvalue() == "\ta\r\n" + 300 * "long " + "\x1b[2J"


def counted(counts: Counts) -> Statistics:
    return statistics_of("tli", 3, 1, counts, Times(1.0, 0.5, 0.1, 0.1, 10, 10))


def table(counts: Counts, audit: bool) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(figures(counted(counts), audit))
    return stream.getvalue()


def test_acceptance_is_shown_by_position() -> None:
    counts = Counts(audited=7)
    for accepted, refused in ((3, False), (1, True), (1, True), (0, True)):
        counts.rounds(3, accepted, refused, 1)
    assert positions(counted(counts)) == "75% 33% 100%"
    shown = table(counts, audit=True)
    assert "1.25 per round" in shown
    assert "7 draft tokens were drawn from their rows" in shown
    never = Counts()
    assert positions(counted(never)) == ""
    never.rounds(3, 0, True, 1)
    assert positions(counted(never)) == "0%"
    long = Counts()
    long.rounds(20, 20, False, 1)
    assert positions(counted(long)) == 8 * "100% " + "…"


def test_figures_do_not_contradict_where_draft_tokens_came_late() -> None:
    counts = Counts(draft_tokens=3, bonus=3)
    counts.rounds(3, 1, True, 1)
    shown = table(counts, audit=False)
    assert "none: no draft token came in time" in shown
    assert "draft tokens that agree │ 1.00 per round, late ones included" in shown
    counts = replace(counts, accepted=3, corrected=1)
    assert "75.0% of 4" in table(counts, audit=False)


@pytest.mark.parametrize(
    ("reason", "tokens", "words"),
    [
        (Reason.LENGTH, 12, "max tokens"),
        (Reason.LENGTH, 11, "context full"),
        (Reason.STOP, 12, "end of sequence, or what was to stop it"),
        (None, 3, ""),
    ],
)
def test_why_an_output_ended(reason: Reason | None, tokens: int, words: str) -> None:
    assert ending(reason, replace(counted(Counts(tokens=tokens)), settings={"max_tokens": 12})) == words


def test_what_was_used_for_sampling_is_shown() -> None:
    stream = io.StringIO()
    used = replace(counted(Counts()), settings={"temperature": 0.7, "top_k": 20, "max_tokens": 4096})
    Console(file=stream, width=100).print(figures(used))
    assert "temperature 0.7, top_k 20, max_tokens 4096" in stream.getvalue()


def test_an_audit_is_shown_whenever_it_was_asked_for() -> None:
    assert "0 draft tokens were drawn from their rows" in table(Counts(), audit=True)
    assert "drawn from" not in table(Counts(), audit=False)


def test_an_output_without_draft_tokens_shows_why() -> None:
    assert "drafted nothing: there is no drafter" in table(Counts(undrafted="there is no drafter"), audit=False)
    aside = table(Counts(undrafted="no room", stood_aside=3), audit=False)
    assert "stood aside 3 times, the last time because no room" in aside
    assert "drafted nothing" not in table(Counts(draft_tokens=3), audit=False)


def test_of_many_decisions_the_first_and_the_last_are_explained() -> None:
    def explained(number: int) -> list[str]:
        decisions = [Decision(float(at), 1, PLAIN) for at in range(number)]
        return explanation_of(SimpleNamespace(decisions=decisions, statistics=None, estimates=()))  # type: ignore[arg-type]

    few, many = explained(1), explained(100)
    assert few == ["1 epoch:", "  after 0.000 s, 1 epoch: no drafter; plain decoding"]
    assert many[0] == "100 epochs:"
    assert many[DECISIONS + 1] == f"  … {100 - 2 * DECISIONS} more decisions; --json has all"
    assert [many[1].split()[1], many[-1].split()[1]] == ["0.000", "99.000"]
    assert len(many) == 2 * DECISIONS + 2
