"""`crossdraft generate` against services that run."""

import os
import re
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from crossdraft.cli import generate as module
from crossdraft.cli.display import RATIOS
from crossdraft.cli.generate import DEFAULT_PROMPT, without_effect
from crossdraft.client import GenerationRequest, Overlap
from crossdraft.config.commands import WhereToGenerate
from crossdraft.types.statistics import Statistics
from tests.cli.conftest import COMMAND, Cli

PROMPT = "The quick brown"
ROUNDS = ("--overlap", "off")
SHORT = ("--max-tokens", "12", "--ignore-eos", PROMPT)
Pair = tuple[str, ...]


def test_json_has_every_token_and_the_whole(cli: Cli, pair: Pair) -> None:
    ended = cli("generate", *pair, "--json", "--method", "seeded", "--seed", "5", "-k", "3", *ROUNDS, *SHORT)
    assert (ended.code, ended.err) == (0, "")
    *tokens, whole = ended.records
    assert [token["id"] for token in tokens] == whole["ids"]
    assert "".join(token["text"] for token in tokens) == whole["text"]
    assert all(set(token) == {"id", "text", "kind", "log_probability"} for token in tokens)
    assert all(token["log_probability"] < 0 for token in tokens)
    figures = whole["statistics"]
    assert (whole["reason"], figures["method"], figures["num_speculative_tokens"]) == ("length", "seeded", 3)
    for kind in ("accepted", "corrected", "bonus"):
        assert figures[kind] == [token["kind"] for token in tokens].count(kind)
    assert set(figures) == {*Statistics.__dataclass_fields__, *RATIOS}


def test_text_goes_to_stdout_and_figures_to_stderr(cli: Cli, pair: Pair) -> None:
    options = ("--seed", "5", *ROUNDS, *SHORT)
    shown = cli("generate", *pair, *options)
    assert shown.out == cli("generate", *pair, "--json", *options).records[-1]["text"] + "\n"
    assert shown.err.startswith("\nseeded, K = 5")  # a line of its own, also where the text comes late through a pipe
    names = ("tokens per pass", "from the draft", "tokens/s", "in the drafter", "on the wire", "idle", "bytes per")
    assert all(name in shown.err for name in names)
    assert re.search(r"ended +│ max tokens", shown.err)
    words = cli("generate", *pair, "--verbose", *options).err
    assert "\ntokens per pass: 1 without a drafter\n" in words
    assert "1 without a drafter" not in shown.err
    assert re.search(r"\nepoch 1:\n  '.*': (accepted|refused: '.*' takes its place)\n", words)
    full = cli("generate", *pair, *ROUNDS, "--max-tokens", "2000", "--ignore-eos", PROMPT)
    assert re.search(r"ended +│ context full", full.err)


def test_an_unknown_method_is_refused_before_anything_is_started(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_services", lambda *_: pytest.fail("a model was loaded"))
    refused(cli, "unknown method 'guess'; choose one of standard, union", "generate", "--method", "guess", PROMPT)


def test_where_the_prompt_comes_from(cli: Cli, target: str) -> None:
    options = ("generate", "--target", target, "--drafter", "none", "--json", "--temperature", "0", "--max-tokens", "4")
    typed, piped = cli(*options, PROMPT), cli(*options, "-", stdin=PROMPT.encode())
    assert typed.records[-1]["ids"] == piped.records[-1]["ids"]
    assert {token["kind"] for token in typed.records[:-1]} == {"bonus"}
    assert "\nnone was judged (" in cli(*(one for one in options if one != "--json"), "--verbose", PROMPT).err
    unnamed = cli(*options)
    assert unnamed.records[-1]["ids"] == cli(*options, DEFAULT_PROMPT).records[-1]["ids"]
    assert 'the prompt is the default one, "def read_lines(' in unnamed.err


def test_a_target_alone_decodes_alone_and_says_so(cli: Cli, target: str) -> None:
    ended = cli("generate", "--target", target, "--json", "--method", "standard", *SHORT)
    assert ended.err == "crossdraft: no --drafter and no --drafter-model, so the target decodes alone\n"


def test_options_reach_the_services(cli: Cli, pair: Pair) -> None:
    options = ("generate", *pair, "--json", "--temperature", "0")
    biased = cli(*options, "--logit-bias", "70:100", "--logit-bias", "71:-3", *SHORT).records[-1]
    assert biased["ids"] == [70] * 12
    assert cli(*options, "--logit-bias", "70:9", "--repetition-penalty", "50", *SHORT).records[-1]["ids"] != [70] * 12
    letter = biased["text"][0]
    stopped = cli(*options, "--logit-bias", "70:100", "--stop", "never", "--stop", 3 * letter, *SHORT).records[-1]
    assert (stopped["text"], stopped["reason"], len(stopped["ids"])) == ("", "stop", 3)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--method", "guess"), "unknown method 'guess'; this pair of models can do union, tli, coupled"),
        (("--method", "standard"), "method 'standard' needs a drafter with the target's vocabulary"),
        (("--logit-bias", "often"), "--logit-bias must be ID:BIAS, such as 42:-100, got 'often'"),
        (("--drafter", "localhost"), "--drafter must be HOST:PORT"),
        (("--target", "localhost:0"), "--target must be HOST:PORT"),
        (("--target", "http://127.0.0.1:7301"), "--target must be HOST:PORT, without http://, got"),
        (("--target", "localhost:1,"), "--target has an empty address"),
        (("--record", "/nowhere/at/all"), "name a file that can be written"),
    ],
)
def test_what_cannot_be_asked_for(cli: Cli, pair: Pair, options: tuple[str, ...], complaint: str) -> None:
    refused(cli, complaint, "generate", *pair, *options, PROMPT)


def test_what_no_models_can_do_is_refused_before_anything_is_started(cli: Cli) -> None:
    nobody = ("--target", "127.0.0.1:1", "--drafter", "127.0.0.1:1")
    timed = ("--method", "tli", "--seed", "1", "--temperature", "1")
    refused(cli, "the output of method 'tli' depends on timing", "generate", *nobody, *timed)
    refused(cli, "--drafter is given without a target", "generate", *nobody[2:], PROMPT)
    both = ("--target-model", "bundled:target", *nobody)
    refused(cli, "--target and --target-model do not go together", "generate", *both, PROMPT)


def test_an_audit_is_in_the_figures(cli: Cli, pair: Pair) -> None:
    audit = ("--audit", "--method", "tli", *ROUNDS)
    figures = cli("generate", *pair, "--json", *audit, *SHORT).records[-1]["statistics"]
    assert figures["audited"] == figures["draft_tokens"] > 0
    shown = cli("generate", *pair, "--audit", "--method", "tokentiming", "--allow-inexact", *ROUNDS, *SHORT)
    assert shown.code == 0
    assert "were drawn from their rows" in shown.err


def test_options_that_change_nothing_are_noted() -> None:
    request = GenerationRequest("x", max_draft_tokens=8, speculation=True, explain=True)
    assert without_effect(request, WhereToGenerate(target="a:1,b:1"), alone=False) == []
    notes = without_effect(request, WhereToGenerate(untrusted_drafter=True), alone=True)
    flags = ["--speculation", "--max-draft-tokens", "--explain", "--untrusted-drafter"]
    assert [line.split()[0] for line in notes] == flags
    request = GenerationRequest("x", num_speculative_tokens=4)
    assert without_effect(request, WhereToGenerate(drafter="none"), alone=True) == [
        "-k has no effect without a drafter"
    ]


def test_draft_tokens_of_a_round_are_noted_also_if_as_many_are_the_default(cli: Cli, pair: Pair) -> None:
    assert "-k has no effect with --overlap auto" in cli("generate", *pair, "-k", "5", *SHORT).err
    assert "-k" not in cli("generate", *pair, *SHORT).err


def test_ctrl_c_ends_a_command_that_loads_models_at_once(tmp_path: Path) -> None:
    """A load that never ends: a template from a pipe that nobody writes to."""
    template = tmp_path / "template"
    os.mkfifo(template)
    models = ("--target-model", "bundled:target", "--chat-template", str(template))
    for command in (("generate", "x"), ("serve", "http", "--port", "0"), ("serve", "target")):
        own = models if command[1] != "target" else ("--model", *models[1:])
        shell = ["env", "--default-signal=INT", *COMMAND, *command, *own]  # a shell in the background ignores it
        process = subprocess.Popen(shell, stderr=subprocess.PIPE, text=True)
        with template.open("w"):  # returns when it is read
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
        assert (process.returncode, "Traceback" in said) == (-signal.SIGINT, False)


@pytest.mark.parametrize(("overlap", "noted"), [("auto", 1), ("on", 0), ("off", 0)])
def test_draft_tokens_of_a_round_are_noted_where_a_controller_decides(overlap: str, noted: int) -> None:
    request = GenerationRequest("x", overlap=Overlap(overlap), num_speculative_tokens=4)
    notes = without_effect(request, WhereToGenerate(server="a:1"), alone=False)
    assert [line[:29] for line in notes] == ["-k has no effect with --overl"] * noted


def test_options_of_services_that_run_already_are_noted() -> None:
    # cache_mib is in the environment
    where = WhereToGenerate(cache_mib=9, device="cpu", threads=1, enable_prefix_caching=False)
    notes = without_effect(GenerationRequest("x"), replace(where, target="a:1"), alone=False)
    assert notes == [
        "no effect with --target, as the services run already: --device, --enable-prefix-caching, --threads"
    ]
    assert without_effect(GenerationRequest("x"), where, alone=False) == []


def test_prompts_that_cannot_be(cli: Cli, pair: Pair) -> None:
    refused(cli, "the prompt has no tokens", "generate", *pair, "")
    refused(cli, "maximum context length is 128 tokens", "generate", *pair, 200 * "The quick ")
    refused(cli, "the prompt is not UTF-8", "generate", *pair, "\udcff")
    assert "the prompt is not UTF-8" in cli("generate", *pair, "-", stdin=b"\xff").err


def refused(cli: Cli, complaint: str, *arguments: str) -> None:
    ended = cli(*arguments)
    ended.failed(complaint)
    assert ended.err.count("\n") == 1


def test_services_that_cannot_be_reached(cli: Cli, target: str) -> None:
    with socket.socket() as taken:  # bound, and nobody listens: a connection is refused
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = cli("generate", "--target", address, "--drafter", "none", PROMPT)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(f"crossdraft: target at {address}: ")
        assert "check that the service runs there" in ended.err
        assert ended.err.count("\n") == 1
        ended = cli("generate", "--target", f"{address},{target}", "--drafter", address, *SHORT)
        assert ended.code == 0
        for name in ("target", "drafter"):
            assert f"crossdraft: {name} at {address}: " in ended.err
        assert "the drafter is not there yet" in ended.err
    mistaken = cli("generate", "--target", target, "--drafter", target, *SHORT)
    assert mistaken.code == 0
    assert mistaken.err.startswith(f"crossdraft: what listens at {target} is no drafter (is it the target? check the")


def test_an_explained_generation_says_what_was_decided(cli: Cli, pair: Pair) -> None:
    whole = cli("generate", *pair, "--explain", "--json", "--seed", "5", *SHORT).records[-1]
    assert sum(decision["epochs"] for decision in whole["decisions"]) >= 1
    assert any("of draft tokens are accepted" in line for line in whole["estimates"])
    shown = cli("generate", *pair, "--explain", "--seed", "5", *SHORT).err
    assert "what the controller decided from last" in shown
    assert re.search(r"^  after \d\S* s, \d+ epochs?: .+; \S.*$", shown, re.MULTILINE)  # decisions depend on time


@pytest.mark.parametrize("form", [[], pytest.param(["--json"], marks=pytest.mark.full)])
def test_a_reader_that_goes_away_ends_it_quietly(target: str, form: list[str]) -> None:
    command = [*COMMAND, "generate", "--target", target, "--drafter", "none", "--max-tokens", "100", *form, PROMPT]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_text_that_the_encoding_of_stdout_lacks(target: str) -> None:
    bias = [option for token in range(128, 256) for option in ("--logit-bias", f"{token}:50")]
    command = [*COMMAND, "generate", "--target", target, "--drafter", "none", "--seed", "1", *bias, *SHORT]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert done.returncode == 0
    assert b"?" in done.stdout


def test_models_of_its_own_process(cli: Cli, target_folder: Path, drafter_folder: Path, pair: Pair) -> None:
    same = ("--json", "--seed", "5", "--overlap", "off", *SHORT)
    wanted = cli("generate", *pair, *same).records[-1]["text"]
    target, drafter = ("--target-model", target_folder), ("--drafter-model", drafter_folder)
    for models in ((*target, *drafter), target, (*target, *pair[2:]), (*pair[:2], *drafter)):
        ended = cli("generate", *models, *same)
        assert (ended.code, ended.records[-1]["text"]) == (0, wanted), ended
        statistics = ended.records[-1]["statistics"]
        assert (statistics["draft_tokens"] > 0) == (models is not target)
    for models, complaint, code in (
        (("bundled:nothing",), "there is no bundled model 'bundled:nothing'", 1),
        ((target_folder, "--max-model-len", "100000"), "--max-model-len", 2),  # as of `serve target`
    ):
        cli("generate", "--target-model", *models, "--drafter", "none", PROMPT).failed(complaint, code)
