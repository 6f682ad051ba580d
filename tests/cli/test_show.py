"""Colours, and what a terminal must not get."""

import io

import pytest
from rich.console import Console

from crossdraft.cli.show import TextScreen
from crossdraft.pipeline import Kind, Token


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
