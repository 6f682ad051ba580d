"""`crossdraft generate` against services that run, and what it shows."""

import io
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from crossdraft.cli import display
from crossdraft.cli import generate as module
from crossdraft.cli.display import DECISIONS, MEANINGS, TextScreen, events_of, explanation_of, figures, positions
from crossdraft.cli.generate import DEFAULT_PROMPT, notes_of
from crossdraft.client import GenerationRequest, Kind, Overlap, Reason, Token
from crossdraft.config.commands import WhereToGenerate
from crossdraft.speculation.choice import PLAIN, Decision
from crossdraft.types.statistics import Counts, Statistics, Times
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
    assert set(figures) == {*Statistics.__dataclass_fields__, *display.RATIOS}


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
    unknown = "unknown method 'guess'; choose one of standard, union"
    cli("generate", "--method", "guess", PROMPT).failed(unknown, lines=1)


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
        (("--logit-bias", "1:101"), "--logit-bias must map token ids, such as 303, to numbers between -100 and 100"),
        (("--drafter", "localhost"), "--drafter must be HOST:PORT"),
        (("--target", "localhost:0"), "--target must be HOST:PORT"),
        (("--target", "http://127.0.0.1:7301"), "--target must be HOST:PORT, without http://, got"),
        (("--target", "localhost:1,"), "--target has an empty address"),
        (("--record", "/nowhere/at/all"), "name a file that can be written"),
    ],
)
def test_what_cannot_be_asked_for(cli: Cli, pair: Pair, options: tuple[str, ...], complaint: str) -> None:
    cli("generate", *pair, *options, PROMPT).failed(complaint, lines=1)


def test_what_no_models_can_do_is_refused_before_anything_is_started(cli: Cli) -> None:
    nobody = ("--target", "127.0.0.1:1", "--drafter", "127.0.0.1:1")
    timed = ("--method", "tli", "--seed", "1", "--temperature", "1")
    cli("generate", *nobody, *timed).failed("the output of method 'tli' depends on timing", lines=1)
    cli("generate", *nobody[2:], PROMPT).failed("--drafter is given without a target", lines=1)
    both = ("--target-model", "bundled:target", *nobody)
    cli("generate", *both, PROMPT).failed("--target and --target-model do not go together", lines=1)
    for elsewhere in (nobody, ("--server", "127.0.0.1:1")):
        cli("generate", *elsewhere, "--device", "cpu", PROMPT).failed("--device is for --target-model and", lines=1)


def test_an_audit_is_in_the_figures(cli: Cli, pair: Pair) -> None:
    audit = ("--audit", "--method", "tli", *ROUNDS)
    figures = cli("generate", *pair, "--json", *audit, *SHORT).records[-1]["statistics"]
    assert figures["audited"] == figures["draft_tokens"] > 0
    inexact = ("--audit", "--method", "tokentiming", "--allow-inexact", *ROUNDS, *SHORT)
    cli("generate", *pair, *inexact).says(err="were drawn from their rows")


def test_ctrl_c_ends_a_command_that_loads_models_at_once(tmp_path: Path) -> None:
    """A load that never ends: a template from a pipe that nobody writes to."""
    started = []
    for command in (("generate", "x"), ("serve", "http", "--port", "0"), ("serve", "target")):
        template = tmp_path / str(len(started))
        os.mkfifo(template)
        model = "--target-model" if command[1] != "target" else "--model"
        own = (model, "bundled:target", "--chat-template", str(template))
        shell = ["env", "--default-signal=INT", *COMMAND, *command, *own]  # a shell in the background ignores it
        started.append((template, subprocess.Popen(shell, stderr=subprocess.PIPE, text=True)))
    ended = []
    for template, process in started:
        with template.open("w"):  # returns when it is read
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
        ended.append((process.returncode, "Traceback" in said))
    assert ended == 3 * [(-signal.SIGINT, False)]


ALONE = {"drafter": ["none"]}


@pytest.mark.parametrize(
    ("asked", "where", "noted"),
    [
        ({"num_speculative_tokens": 4}, {"server": "a:1"}, ["-k"]),
        ({"num_speculative_tokens": 4, "overlap": Overlap.ON}, {"server": "a:1"}, []),
        ({"num_speculative_tokens": 4, "overlap": Overlap.OFF}, {"server": "a:1"}, []),
        ({"num_speculative_tokens": 4, "speculation": True}, ALONE, ["--speculation", "-k"]),
        ({"tree_nodes": 16, "branches": 2, "explain": True}, ALONE, ["--branches", "--tree-nodes", "--explain"]),
        ({"max_draft_tokens": 9}, ALONE | {"untrusted_drafter": True}, ["--max-draft-tokens", "--untrusted-drafter"]),
        ({"speculation": True}, {"target": ["a:1", "b:1"], "drafter": ["c:1"]}, []),
    ],
)
def test_options_that_change_nothing_are_noted(asked, where, noted):
    notes = notes_of(GenerationRequest("x", **asked), WhereToGenerate(**where))
    assert [line.split(" has no effect with")[0] for line in notes] == noted


def test_prompts_that_cannot_be(cli: Cli, pair: Pair) -> None:
    cli("generate", *pair, "").failed("the prompt has no tokens", lines=1)
    cli("generate", *pair, 200 * "The quick ").failed("maximum context length is 128 tokens", lines=1)
    cli("generate", *pair, "\udcff").failed("the prompt is not UTF-8", lines=1)
    assert "the prompt is not UTF-8" in cli("generate", *pair, "-", stdin=b"\xff").err


def test_a_record_that_cannot_be_written_fails_the_command_and_the_output_is_shown(cli: Cli, target: str) -> None:
    options = ("generate", "--target", target, "--temperature", 0, *SHORT)
    text, failed = cli(*options).out, cli(*options, "--record", "/dev/full")
    failed.says(text, err="the output is not recorded: [Errno 28] No space left on device\n", code=1)
    assert "name a file that can be written with --record\n" in failed.err


def test_services_that_cannot_be_reached(cli: Cli, target: str, nowhere: str) -> None:
    ended = cli("generate", "--target", nowhere, "--drafter", "none", PROMPT)
    ended.failed("check that the service runs there", 1, lines=1)
    assert ended.err.startswith(f"crossdraft: target at {nowhere}: ")
    ended = cli("generate", "--target", f"{nowhere},{target}", "--drafter", nowhere, *SHORT)
    for said in (*(f"crossdraft: {name} at {nowhere}: " for name in ("target", "drafter")), "drafter is not there yet"):
        ended.says(err=said)
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


def test_control_sequences_of_a_model_do_not_reach_a_terminal_and_elsewhere_the_text_is_untouched() -> None:
    on_terminal, stream = screen(terminal=True)
    on_terminal.token(token("\x1b[2J\x07\x7f\t", Kind.BONUS))
    assert "\u241b[2J\u2407\u2421\t" in stream.getvalue()
    to_file, stream = screen(terminal=False)
    to_file.begin("not shown")
    to_file.token(token("\ta\r\n" + 300 * "long ", Kind.ACCEPTED))
    to_file.token(token("\x1b[2J", Kind.BONUS))
    assert stream.getvalue() == "\ta\r\n" + 300 * "long " + "\x1b[2J"


def counted(counts: Counts) -> Statistics:
    facts = vars(Times(1.0, 0.5, 0.1, 0.1, 10, 10)) | vars(counts)
    return Statistics(method="tli", num_speculative_tokens=3, prompt_tokens=1, **facts)


def table(counts: Counts, audit: bool = False, **settings: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(figures(replace(counted(counts), settings=settings), audit))
    return stream.getvalue()


def test_what_is_explained_are_the_figures_whose_names_do_not_say_it() -> None:
    names = ("rewinds", "branches", "branches_tried", "stalls", "speculated", "drafters_lost", "targets_lost")
    statistics = counted(Counts(**dict.fromkeys(names, 1)))
    names = [name for name, _ in display.rows_of(statistics) + events_of(statistics)]
    assert [name for name in names if name in MEANINGS] == list(MEANINGS)
    plain = {"tokens/s", "time", "in the drafter", "in the target", "bytes", "bytes per token"}
    assert {*names} - {*MEANINGS} == plain | {"drafters lost", "targets lost"}


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
    shown = table(counts)
    assert "none: no draft token came in time" in shown
    assert "draft tokens that agree │ 1.00 per round, late ones included" in shown
    counts = replace(counts, accepted=3, corrected=1)
    assert "75.0% of 4" in table(counts)


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
    assert display.ending(reason, replace(counted(Counts(tokens=tokens)), settings={"max_tokens": 12})) == words


def test_what_was_used_for_sampling_is_shown_and_an_audit_whenever_it_was_asked_for() -> None:
    assert "temperature 0.7, top_k 20, max_tokens 4096" in table(Counts(), temperature=0.7, top_k=20, max_tokens=4096)
    assert "0 draft tokens were drawn from their rows" in table(Counts(), audit=True)
    assert "drawn from" not in table(Counts())


def test_an_output_without_draft_tokens_shows_why() -> None:
    assert "drafted nothing: there is no drafter" in table(Counts(undrafted="there is no drafter"))
    aside = table(Counts(undrafted="no room", stood_aside=3))
    assert "stood aside 3 times, the last time because no room" in aside
    assert "drafted nothing" not in table(Counts(draft_tokens=3))


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
