"""The command as a whole: help, version, wrong usage."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module

import pytest

from crossdraft.cli import app
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


def test_a_command_has_the_parameters_of_what_it_runs() -> None:
    """What a command names as a text is checked by nothing else."""
    commands = [one for one in ast.walk(ast.parse(inspect.getsource(app))) if isinstance(one, ast.FunctionDef)]
    named = [
        (option.value.value, {one.arg for one in (*command.args.args, *command.args.kwonlyargs)})
        for command in commands
        for decorator in command.decorator_list
        for option in getattr(decorator, "keywords", ())
        if option.arg == "runs"
    ]
    assert len(named) > 10
    for work, declared in named:
        module, _, function = work.partition(":")
        assert {*inspect.signature(getattr(import_module(module), function)).parameters} == declared, work
