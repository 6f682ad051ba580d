"""`crossdraft loadtest`: what is asked, of whom, in which words; a real test of started services; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from crossdraft.cli.prompts import NO_CATEGORY, Prompt, prompts_of, read, texts_of
from crossdraft.cli.running import CommandFailed, UsageError
from crossdraft.lab.commands import LoadPlan
from crossdraft.lab.loadtest.benchmark import LoadTest, Stages
from crossdraft.lab.loadtest.clients import Body, Pieces, RequestFailedError, Stream
from crossdraft.types.request import Chat, Message
from tests.cli.conftest import Cli
from tests.lab.loadtest.values import FIGURES

DELAY = 3  # ms, one way
LATENCIES = ("first_token_ms", "between_chunks_ms", "per_token_ms", "end_to_end_ms", "front_ms")


@pytest.mark.full
def test_started_services_behind_a_delay(cli: Cli, tmp_path: Path, target_folder: Path, drafter_folder: Path) -> None:
    models = "--target-model", target_folder, "--drafter-model", drafter_folder, "--delay-ms", DELAY
    load = "--clients", 2, "--requests", 3, "--warm-up", 1, "--max-tokens", 8, "--ignore-eos"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "def f("}\n{"turns": ["Say"]}\n')
    report = tmp_path / "report.json"
    done = cli("loadtest", *models, *load, "--prompts", prompts, "--json", report)
    assert done.code == 0, done.err
    (found,) = json.loads(report.read_text())["results"]
    assert_measured(found)
    assert "orchestrator and target" in done.out


async def instant(_: Body) -> Pieces:
    """A server that answers at once, with two chunks of four tokens in all."""
    yield 0.0
    yield 0.0
    yield FIGURES


def refusing(answered: int) -> Stream:
    """A server that refuses all requests but the first so many."""
    left = iter(range(answered))

    async def stream(_: Body) -> Pieces:
        if next(left, None) is None:
            raise RequestFailedError("HTTP 429", "no room")
        yield 0.0
        yield FIGURES

    return stream


def run(monkeypatch: pytest.MonkeyPatch, stream: Stream, file: Path | None = None, **plan: Any) -> None:
    """Two stages of a server."""

    async def stages(_: LoadTest) -> Stages:
        for delay in (0.0, 5.0):
            yield delay, stream

    monkeypatch.setattr(LoadTest, "stages", stages)
    LoadTest(LoadPlan(clients=2, requests=3, **plan)).run(file)


def test_stages_are_measured_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    run(monkeypatch, instant, report, api_key="secret", url="http://there")
    assert "secret" not in report.read_text()
    assert "there" not in report.read_text()
    found = json.loads(report.read_text())["results"]
    assert [(one["delay_ms"], one["requests"]) for one in found] == [(0, 3), (5, 3)]
    shown = capsys.readouterr().out
    for wanted in (
        *("| 0 ms | 5 ms |", "Failed requests", "TTFT (ms)", "E2EL (ms)", "Output token throughput (tok/s)", "66.7%"),
        *("100% 0%", "orchestrator and target", "orchestrator and drafter"),
        "| 4.00 / 4.88 / 4.97 / 5.00 |",  # round trip
    ):
        assert wanted in shown, wanted


def test_what_fails_is_counted_and_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, refusing(3), warm_up=0)
    assert "\n0 ms: " not in (shown := capsys.readouterr().out)
    assert "5 ms: 3 of 3 requests failed: 3 HTTP 429. HTTP 429: no room" in shown


@pytest.mark.parametrize(
    ("warm_up", "complaint"), [(2, "the first requests failed .HTTP 429.: no room"), (0, "no request was answered")]
)
def test_a_test_without_an_answer_fails(warm_up: int, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandFailed, match=complaint):
        run(monkeypatch, refusing(0), warm_up=warm_up)


def assert_measured(summary: dict[str, Any]) -> None:
    """Every figure is there, and a drafter, which short outputs may not want, is as far away as was asked for."""
    assert (summary["requests"], summary["errors"], summary["tokens"]) == (3, {}, 24)
    assert all(summary[name]["count"] > 0 for name in LATENCIES)
    assert summary["tokens_per_pass"] >= 1
    assert summary["between_chunks_ms"]["count"] == 3 * 7
    target, *drafters = summary["hops"]
    assert [target["role"], *(one["role"] for one in drafters)] in (["target"], ["target", "drafter"])
    assert target["questions"] >= 3
    assert [one for one in drafters if one["questions"] and one["wire_ms"] < 2 * DELAY] == []  # it may not be asked
    assert target["bytes_per_token"] > 0
    assert 0 < target["model_share"] <= 1
    assert 0 <= target["idle_share"] < 1
    assert target["serialization_ms_per_token"] > 0


def test_a_server_that_is_not_there(cli: Cli) -> None:
    cli("loadtest", "--url", "http://127.0.0.1:9", "--requests", 1).failed("the first requests failed", 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--method", "nonsense"], "nonsense"),
        (["--temperature", "-1"], "temperature"),
        (["--delay-ms", "a"], "--delay-ms must be a number"),
        (["--pace-target", "fast"], "a pace is A,B"),
        (["--prompts", "/nowhere"], "cannot read the prompts"),
        (["--json", "/nowhere/report.json"], "cannot write /nowhere/report.json"),
        (["--url", "nowhere"], "--url must be such as"),
        (["--url", "http://a", "--delay-ms", "0"], "--delay-ms needs services that this command starts"),
    ],
)
def test_wrong_options(cli: Cli, options: list[str], complaint: str) -> None:
    cli("loadtest", *options).failed(complaint)


def asked(count: int, prompts: tuple[str, ...] = ("def f(",), **given: Any) -> list[dict[str, Any]]:
    test = LoadTest(LoadPlan(**given))
    test.prompts = tuple({"prompt": one} for one in prompts)
    return list(test.requests(count))


def test_what_is_asked_for() -> None:
    same = {"max_tokens": 32, "temperature": 0.7, "model": "big", "ignore_eos": True}
    speculative = {"method": "seeded", "drafter": "small", "trace": True}
    assert asked(4, method="seeded", use_drafter="small", seed=100, **same)[3] == same | {
        **{"stream": True, "prompt": "def f(", "seed": 103, "speculative": speculative}
    }


def test_drafting_can_be_forced() -> None:
    (forced,) = asked(1, num_speculative_tokens=4)
    assert forced["speculative"] == {"trace": True, "overlap": "off", "num_speculative_tokens": 4}
    with pytest.raises(UsageError, match="num-speculative-tokens"):
        asked(1, num_speculative_tokens=0)
    assert asked(1, use_drafter="none")[0]["speculative"] == {"trace": True, "drafter": "none"}


@pytest.mark.parametrize(("method", "seed"), [("slem", 5), ("coupled", None), (None, None)])
def test_outputs_are_seeded_where_their_method_is_named_and_takes_a_seed(method: str | None, seed: int | None) -> None:
    assert asked(3, method=method, temperature=1.0, seed=3)[2].get("seed") == seed


def test_prompts_take_turns() -> None:
    assert [one["prompt"] for one in asked(5, ("a", "b"))] == ["a", "b", "a", "b", "a"]


def test_chats_go_to_the_chat_endpoint_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"text": "Hi"}\n{"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]}'
    )
    hi, both = LoadTest(LoadPlan(prompts=file, chat=True)).requests(2)
    assert hi["messages"] == [{"role": "user", "content": "Hi"}]
    assert both["messages"] == [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    assert "prompt" not in hi
    assert [one["prompt"] for one in LoadTest(LoadPlan(prompts=file)).requests(2)] == ["Hi", "A\n\nB"]


def test_the_bundled_prompts_have_six_categories_by_turns() -> None:
    """The first six are one of each."""
    found = read()
    assert len({one.content for one in found}) == 36
    assert all(isinstance(one.content, Chat) and one.content.messages[-1].role == "user" for one in found)
    assert len({one.category for one in found[:6]}) == 6


def test_files_of_three_forms(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"file": "a.py", "text": "def f("}\n\n'
        '{"question_id": 81, "category": "qa", "turns": ["Why?", "And then?"]}\n'
        '{"category": "qa", "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "W"}]}'
    )
    why, short = Message("user", "Why?"), (Message("system", "Be short."), Message("user", "W"))
    assert read(file) == (Prompt(NO_CATEGORY, "def f("), Prompt("qa", Chat((why,))), Prompt("qa", Chat(short)))
    assert texts_of(file) == ("def f(", "Why?", "Be short.\n\nW")
    with pytest.raises(UsageError, match="has chats"):
        prompts_of(file, None)
    file.write_text('{"text": "a", "file": "f"}\n\n{"text": "b"}\n{"text": "c"}\n')
    assert [one.content for one in prompts_of(file, 2)] == ["a", "b"]
    assert [one.content for one in prompts_of(file, None)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "there are no prompts"),
        ('{"text": "a"}\n{"txt": "b"}', "line 2 is no prompt"),
        ('{"turns": []}', "line 1 is no prompt"),
        ('{"text": ""}', "its text is empty, or there is none"),
        ("text", "line 1 is no prompt"),
        ('{"messages": []}', "the chat has no messages"),
        ("[1]", "line 1 is no prompt"),
    ],
)
def test_what_is_no_prompt(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read(file)
    file.write_bytes(b"\xff")
    for unreadable in (file, tmp_path / "elsewhere"):
        with pytest.raises(UsageError, match="cannot read the prompts"):
            prompts_of(unreadable, None)
