"""The command as a whole: help, version, wrong usage."""

import subprocess
import sys

import pytest

from crossdraft.console import running
from crossdraft.verification.methods import METHODS
from tests.cli.conftest import Cli

HEAVY = ("torch", "transformers", "grpc", "numpy", "ray", "fastapi", "crossdraft.client")
PROGRAM = f"""
import sys
from crossdraft.cli.app import main
for arguments in (["--help"], ["--version"], ["loadtest", "--help"], ["serve", "drafter", "--help"]):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code in (None, 0)
print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def test_what_runs_no_model_imports_none() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stderr == "\n"


def test_help_lists_the_commands_and_the_methods(cli: Cli) -> None:
    shown = cli("--help")
    assert shown.code == 0
    assert all(f"\n  {name} " in shown.out for name in ("serve", "generate", "demo", "inspect"))
    assert tuple(METHODS) == running.METHODS
    assert ",".join(METHODS) in "".join(cli("generate", "--help").out.split())  # lines are broken at hyphens, too


def test_version(cli: Cli) -> None:
    shown = cli("--version")
    assert (shown.code, shown.out.split()[0]) == (0, "crossdraft")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing"], "No such command"),
        (["generate", "--nothing"], "No such option: --nothing"),
        (["generate", "-k", "many"], "Invalid value for '--num-speculative-tokens' / '-k'"),
        (["serve", "verifier", "--model", "x"], "No such command 'verifier'"),
        (["serve", "target"], "Missing option '--model'"),
        (["inspect", "only-one"], "Missing argument"),
    ],
)
def test_wrong_usage(cli: Cli, arguments: list[str], complaint: str) -> None:
    cli(*arguments).failed(complaint)
