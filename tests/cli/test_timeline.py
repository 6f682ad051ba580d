"""`crossdraft timeline`: pages that need nothing else."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from crossdraft.cli.trace import title_of, window_of
from crossdraft.speculation.choice import Choice, Fixed
from crossdraft.trace import page as pages
from crossdraft.trace.recording import Recording
from crossdraft.trace.timeline import Timeline, spans_of
from crossdraft.types.request import Overlap
from tests.cli.conftest import Cli
from tests.clock import World
from tests.trace.recordings import header_of, save, virtual_recording

WORLD = World(0.8, token=0.05, round_trip=0.4, tokens=60)
LONE = {"meta"}  # may be without an end


@pytest.fixture(scope="module")
def recording() -> Recording:
    return virtual_recording(WORLD, Fixed(Choice(12, min_draft_tokens=1, patience=0.3, branch_depth=2)))


@pytest.fixture(scope="module")
def timeline(recording: Recording) -> Timeline:
    return spans_of(recording)


class Page(HTMLParser):
    """Checks that what opens is closed, and keeps what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.classes: set[str] = set()
        self.data = ""  # what the script draws

    def handle_data(self, data: str) -> None:
        self.data = self.data or (data if data.strip().startswith('{"spans"') else "")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.loads += [str(named[name]) for name in ("src", "href", "data") if name in named]
        self.classes |= set((named.get("class") or "").split())
        if tag not in LONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in LONE:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in LONE:
            assert self.open.pop() == tag


def test_a_page_is_whole_and_loads_nothing(cli: Cli, recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    outcome = cli("timeline", save(recording, tmp_path / "record"), "-o", path)
    assert (outcome.code, outcome.err) == (0, "")
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.loads == []
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)|@import|url\(", text)  # that one is a name
    for name in ("drafter", "verification", "target", "tokens per pass", "refused"):
        assert name in text
    assert {"accepted", "corrected", "refused", "hit", "session"} <= page.classes
    shown = json.loads(page.data)
    assert [one["what"] for one in shown["spans"]] == [one.what for one in spans_of(recording).spans]
    assert {one["number"] for one in shown["spans"] if one["what"] == "pass"} >= {"+1", "+3"}


def test_names_are_escaped(cli: Cli, recording: Recording, tmp_path: Path) -> None:
    header = recording.header
    named = replace(header, target=replace(header.target, model="</title><script>alert(1)</script>"))
    path = tmp_path / "page.html"
    assert cli("timeline", save(replace(recording, header=named), tmp_path / "record"), "-o", path).code == 0
    assert "<script>alert" not in path.read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_script_can_be_parsed(timeline: Timeline, tmp_path: Path) -> None:
    script = tmp_path / "page.mjs"
    page = pages.page_of(timeline, "", (), (0.0, 1.0))
    script.write_text(page.rpartition('<script type="module">')[2].partition("</script>")[0], encoding="utf-8")
    subprocess.run(["node", "--check", script], check=True)


def test_what_cannot_be_drawn_is_said(cli: Cli, recording: Recording, tmp_path: Path) -> None:
    command = ("timeline", save(recording, tmp_path / "record"), "-o")
    cli(*command, tmp_path / "page.txt").failed("its name must end with .html")
    cli(*command, tmp_path / "page.html", "--first", 999).failed("has no round 999")


@pytest.mark.parametrize(
    ("drafts", "overlap", "title"),
    [
        (True, Overlap.AUTO, "gpt2 with llama2, seeded, temperature 1, controlled (the"),
        (False, Overlap.AUTO, "gpt2 without a drafter, seeded, temperature 1 (the"),
    ],
)
def test_a_title_names_the_method_that_was_chosen(drafts: bool, overlap: Overlap, title: str) -> None:
    header = header_of("slem", overlap, drafts)
    chosen = replace(header, request=replace(header.request, method=None))
    assert title_of(Recording(chosen, ())).startswith(title)


def test_what_is_seen_first_is_so_many_rounds(timeline: Timeline) -> None:
    begin, end = window_of(timeline, 4, 5)
    assert sum(begin <= at < end for at in timeline.passes) == 5
    assert begin < timeline.passes[3]
    begin, end = window_of(timeline, 1, 10_000)
    assert (begin, end) == (0.0, timeline.end)
