"""The command as a whole: help, version, wrong usage."""

import ast
import inspect
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from crossdraft.cli import app
from crossdraft.config import request
from crossdraft.config.fields import COMMAS
from crossdraft.serving.limits import MIN_LENGTH
from crossdraft.verification.methods import METHODS
from tests.cli.conftest import COMMAND, Cli, lacking

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "grpc", "numpy", "ray", "fastapi", "crossdraft.client", "huggingface_hub")
PROGRAM = f"""
import sys
from crossdraft.cli.app import main

def ended(*commands):
    codes = []
    for words in commands:
        try:
            main(words.split())
        except SystemExit as ended:
            codes.append(ended.code or 0)
    return codes

print(ended("--help", "--version", "loadtest --help", "serve drafter --help"), file=sys.stderr)
print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
servers = ("target --model x", "drafter --model x", "http --target-model bundled:target")
print(ended(*(f"serve {{server}} --port {{sys.argv[1]}}" for server in servers)), file=sys.stderr)
wrong = ("target --model ./nowhere", "drafter --model bundled:nothing", "target --model x --chat-template /nowhere")
print(ended(*(f"serve {{server}} --port 0" for server in wrong)), file=sys.stderr)
print(*[name for name in ("torch", "fastapi") if name in sys.modules], file=sys.stderr)
"""


def test_what_runs_no_model_imports_none_and_what_is_wrong_is_said_before_anything_heavy_is_imported() -> None:
    """A port that is taken, a model or a template that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([sys.executable, "-c", PROGRAM, port], capture_output=True, text=True, check=True)
    first, second, *said, none = done.stderr.split("\n")[:-1]
    assert (first, second, none) == ("[0, 0, 0, 0]", "", "")
    begins = [
        *3 * [f"crossdraft: cannot listen on 127.0.0.1:{port}"],
        "[1, 1, 1]",
        "crossdraft: there is no folder ./nowhere",
        "crossdraft: there is no bundled model 'bundled:nothing'",
        "crossdraft: cannot read --chat-template /nowhere",
        "[1, 1, 2]",
    ]
    assert [line[: len(begin)] for line, begin in zip(said, begins, strict=True)] == begins


# Its root is a folder on the path in a checkout; a wheel does not have it.
WITHOUT_LABORATORY = f"sys.path.remove({str(REPOSITORY / 'lab')!r})"


def test_without_the_laboratory_its_commands_say_where_it_is_and_help_does_not_list_them() -> None:
    done = lacking(WITHOUT_LABORATORY, "bench controller --json x", "bench --help", "loadtest -k 2")
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.split("`")[1] for line in done.stderr.splitlines() if "` is of the laboratory" in line] == [
        "crossdraft bench", "crossdraft bench", "crossdraft loadtest"
    ]  # fmt: skip
    shown = lacking(WITHOUT_LABORATORY, "--help").stdout
    assert ("generate" in shown, "bench" in shown) == (True, False)


def test_what_only_the_laboratory_emulates_is_refused_without_it() -> None:
    models = ("--model inflated:7x512:bundled:target", "--model random:llama", "--model bundled:target --pace 1,0")
    done = lacking(WITHOUT_LABORATORY, *(f"serve drafter {words}" for words in models))
    assert done.returncode in (1, 2)
    for what in ("inflated:7x512:bundled:target", "random:llama", "--pace or --logit-noise"):
        assert f"{what} is of the laboratory" in done.stderr


def test_help_lists_the_commands_and_the_methods_and_says_how_long_a_key_must_be(cli: Cli) -> None:
    shown = cli("--help")
    shown.says(*(f"\n  {name} " for name in ("serve", "generate", "demo", "inspect")))
    assert tuple(METHODS) == request.METHODS
    assert ",".join(METHODS) in "".join(cli("generate", "--help").out.split())  # lines are broken at hyphens, too
    for front in ("http", "grpc"):
        shown = " ".join(cli("serve", front, "--help").out.split())
        assert shown.count(f"at least {MIN_LENGTH} characters") == 2


def test_version(cli: Cli) -> None:
    cli("--version").says("crossdraft ")
    started = [sys.executable, "-m", "crossdraft", "--version"]
    assert subprocess.run(started, capture_output=True, text=True).stdout == cli("--version").out


def test_a_full_disk_is_said_in_one_line_and_closed_files_end_nothing() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "--version"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "crossdraft: cannot write: No space left on device\n"
    assert done.returncode == 1
    shell = '"$@" >&- 2>&- <&-', "sh", *COMMAND, "inspect", "bundled:target", "bundled:drafter-a"
    assert subprocess.run(["sh", "-c", *shell]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing"], "No such command"),
        (["generate", "--nothing"], "No such option: --nothing"),
        (["generate", "-k", "many"], "--num-speculative-tokens must be a whole number, got many"),
        (["generate", "--dtype", "foo"], "--dtype must be auto, float32, bfloat16 or float16, got foo"),
        (["bench", "throughput", "--dtype", "foo"], "--dtype must be auto, float32, bfloat16 or float16, got foo"),
        (["bench", "throughput", "--cache-mib", "0"], "--cache-mib must be at least 1, got 0"),
        (["generate", "--stop-token-id", "1,x"], "--stop-token-id must be a whole number, got x"),
        (["generate", "--stop-token-id", "-1"], "--stop-token-id must be token ids, whole numbers from 0"),
        (["generate", "--overlap", "perhaps"], "--overlap must be auto, on or off, got perhaps"),
        (["generate", "--method", "tokentiming"], "choose an exact method, or allow it with --allow-inexact"),
        (
            ["generate", "--overlap", "off", "--tree-nodes", "1"],
            "--tree-nodes must be more than the depth of the tree (--num-speculative-tokens, 5), at most 63, or 0",
        ),
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


def commands_in(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands_in(one, (*path, name))
        else:
            yield (*path, name), one


COMMANDS = dict(commands_in(typer.main.get_command(app.app)))
# Each value may have commas itself: a text, a key, a path, the addresses behind a name.
WHOLE = {"--stop", "--bad-word", "--api-key", "--lora-modules", "--host", "--drafter", "--model"}


def parsed(*words: str) -> dict[str, Any]:
    path = next(path for path in COMMANDS if words[: len(path)] == path)
    options: dict[str, Any] = COMMANDS[path].make_context("", list(words[len(path) :])).params
    return options


def test_every_list_takes_commas_or_says_that_it_is_repeatable() -> None:
    found = 0
    for path, command in COMMANDS.items():
        for one in command.params:
            if getattr(one, "multiple", False) and COMMAS not in one.help:
                assert one.opts[0] in WHOLE, (path, one.opts)
            found += COMMAS in (getattr(one, "help", None) or "")
    assert found > 20


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("generate", "--stop-token-id", "1,3", "--stop-token-id", "4"), "stop_token_ids", [1, 3, 4]),
        (("select", "--drafter", "bundled:drafter-a,127.0.0.1:1"), "drafter", ["bundled:drafter-a", "127.0.0.1:1"]),
        (("demo", "--temperature=0,1"), "temperature", [0.0, 1.0]),
        (("demo",), "temperature", [0.0, 0.8]),
        (("generate", "--stop", "a,b"), "stop", ["a,b"]),
        (("generate", "--target", "a:1", "--target", "b:2, c:3"), "target", ["a:1", "b:2", "c:3"]),
        (("generate", "--target", "[::1]:1,[fe80::1]:2"), "target", ["[::1]:1", "[fe80::1]:2"]),
        (("generate", "--logit-bias", "1:2,3:4"), "logit_bias", ["1:2", "3:4"]),
        (("generate", "--stop-token-id", "1,2"), "stop_token_ids", [1, 2]),
        (("bench", "throughput", "--configuration", "plain,assisted"), "configuration", ["plain", "assisted"]),
    ],
)
def test_lists_are_separated_by_commas(words: tuple[str, ...], name: str, value: object) -> None:
    assert parsed(*words)[name] == value


def commands_of(path: Path) -> list[list[str]]:
    """The words of each command of ours in a document's blocks of shell."""
    blocks = re.findall(r"^```sh\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line.replace("$'", "'"), comments=True) for line in lines]
    ours = [words for words in found if "crossdraft" in words[:1] and not {"…", "&&", "|"} & {*words}]
    return [words[1:] for words in ours if words[1:2] != ["COMMAND"]]


@pytest.mark.parametrize("path", [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))], ids=str)
def test_commands_in_documents_can_be_typed(path: Path) -> None:
    for words in commands_of(path):
        parsed(*words)


def test_the_readme_begins_with_a_few_figures_and_who_should_take_something_else() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", readme, re.MULTILINE)
    assert headings[:3] == ["When to use it", "When not to use it", "What it gains"]
    parts = dict(zip(headings, re.split(r"^## .*$", readme, flags=re.MULTILINE)[1:], strict=True))
    assert len(re.findall(r"^\| ", parts["What it gains"], re.MULTILINE)) == 1 + 5
    before = readme.partition("## Methods")[0]
    assert [name for name in METHODS if f"`{name}`" in before] == []  # no method before it is explained
    assert "inflated:" in parts["Your first own run"]
