"""What is logged beside vLLM: with its source, and not too often."""

import io
import logging
from itertools import pairwise

import pytest

from crossdraft.integrations.vllm.interface import show
from crossdraft.integrations.vllm.pacing import FIRST_PAUSE, MAX_PAUSE, Seldom


def test_lines_say_where_they_come_from_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    log = logging.Logger("alone")
    show(log)
    show(log)
    log.warning("it is so")
    assert shown.getvalue().startswith("WARNING ")
    assert shown.getvalue().count("crossdraft: it is so\n") == 1


def test_what_comes_again_and_again_is_told_once_a_minute_and_then_less_often(caplog: pytest.LogCaptureFixture) -> None:
    now, told = 1000.0, []
    seldom = Seldom(logging.getLogger("seldom"), lambda: now)
    for _ in range(20 * 3600):
        seldom.warning("the %s", "same")
        if caplog.records:
            told.append(now)
        caplog.clear()
        now += 1.0
    gaps = [later - one for one, later in pairwise(told)]
    assert gaps[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert gaps[-1] == MAX_PAUSE
