"""`crossdraft bench speculation`: what is asked for, how it is summed up, what is refused."""

from crossdraft.bench.services import Served
from crossdraft.bench.speculation import CONFIGURATIONS, Configuration, Run, SpeculationParallelism, measured
from crossdraft.client import Overlap
from tests.bench.conftest import PROMPTS, figures
from tests.cli.conftest import Cli

PLAN = SpeculationParallelism(Served("t"), Served("d"), (0.0,), (0.0,), ("one", "two"), 32, 16, 4)


def run(text: str, seconds: float, *busy: float) -> Run:
    return Run(30, seconds, text, figures(tokens=30, passes=10, speculated=3), busy)


def test_targets_are_compared_with_one_that_runs_in_the_same_way() -> None:
    runs = {configuration: [run("a", 4.0, 3.0), run("b", 4.0, 2.0)] for configuration in CONFIGURATIONS}
    both = Configuration(2, speculation=True, controlled=True)
    runs[both] = [run("a", 2.0, 1.0, 1.5), run("x", 2.0, 1.0, 0.5)]
    found = measured(0.5, 5.0, both, runs)
    assert (found.ratio.value, found.idle) == (2.0, (0.5, 0.5))
    assert (found.equal, found.texts, found.speculated, found.passes) == (1, 2, 6, 20)


def test_each_configuration_is_asked_for_what_it_says() -> None:
    asked = {configuration: PLAN.request(configuration, 1) for configuration in CONFIGURATIONS}
    assert {(configuration.controlled, request.overlap) for configuration, request in asked.items()} == {
        (True, Overlap.AUTO),
        (False, Overlap.ON),
    }
    for configuration, request in asked.items():
        assert (request.prompt, request.choice, request.speculation) == ("two", 1, configuration.speculation)
        assert (request.max_draft_tokens, request.min_draft_tokens) == (
            (None, None) if configuration.controlled else (16, 4)
        )


def test_what_means_nothing_is_refused(cli: Cli) -> None:
    outcome = cli("bench", "speculation", "--wait", 9, "--window", 4, "--prompts", PROMPTS)
    assert outcome.code == 2
    assert "must be at most" in outcome.err
