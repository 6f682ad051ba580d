"""How a command fails: one line for the user, and an exit code."""

from typing import ClassVar


class CommandFailed(Exception):  # noqa: N818 - it says what happened
    """What was asked for could not be done; the text says what to change."""

    exit_code: ClassVar[int] = 1


class Misused(CommandFailed):
    """The command line itself is wrong."""

    exit_code = 2


class Interrupted(CommandFailed):
    """A signal ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__("")
        self.number = number
