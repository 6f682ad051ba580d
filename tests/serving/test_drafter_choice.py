"""Which of several drafters outputs get: in a closed world, and with the controllers of simulated pipelines."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean

import pytest

from crossdraft.serving.backend import DrafterChoice
from crossdraft.speculation.choice import DraftSeen, Judged, Lifecycle, PassSeen
from crossdraft.speculation.controller import TargetController
from crossdraft.speculation.selection import CREDIT, EARNED
from tests.speculation.simulator import CHAINS, KIND, Simulation, World

TOKENS = 100  # of an output
Speeds = Mapping[str, float]


class Outputs:
    """Outputs one after another; a drafter's gain is what its latest output has shown."""

    def __init__(self, *names: str) -> None:
        self.choice, self.gains = DrafterChoice(), dict.fromkeys(names, 0.0)
        self.used: list[str] = []

    def run(self, speeds: Callable[[int], Speeds], outputs: int) -> float:
        """Tokens that no drafter would have made in the same time."""
        seconds = 0.0
        for number in range(outputs):
            name, trial = self.choice.begun(self.gains)
            speed = speeds(number)[name]
            self.gains[name] = speed
            self.choice.ended(name, trial)
            self.used.append(name)
            seconds += TOKENS / speed
        return seconds


@pytest.mark.parametrize("speeds", [{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0}, {"a": 1.5, "b": 1.0, "c": 3.0}])
def test_the_fastest_is_used_whichever_comes_first(speeds: Speeds) -> None:
    outputs = Outputs(*speeds)
    best = max(speeds, key=lambda name: speeds[name])
    seconds = outputs.run(lambda _: speeds, 200)
    assert outputs.used.count(best) >= 185
    assert set(outputs.used) == set(speeds)  # each was tried
    lost = seconds - 200 * TOKENS / speeds[best]  # ... the default one until another is known
    assert lost <= EARNED * 200 * TOKENS + CREDIT + len(speeds) * TOKENS


def test_one_that_turns_good_is_found_and_one_that_turns_useless_is_left() -> None:
    outputs = Outputs("a", "b")
    outputs.run(lambda _: {"a": 2.0, "b": 1.0}, 60)
    outputs.run(lambda _: {"a": 2.0, "b": 4.0}, 60)
    assert outputs.used[-5:] == ["b"] * 5
    outputs.run(lambda _: {"a": 2.0, "b": 1.0}, 3)
    assert outputs.used[-2:] == ["a"] * 2


def test_nothing_is_tried_before_the_usual_one_was_seen_and_one_output_tries_at_a_time() -> None:
    choice, unseen = DrafterChoice(), {"a": 0.0, "b": 0.0}
    assert {choice.begun(unseen) for _ in range(5)} == {("a", False)}
    seen = unseen | {"a": 1.5}
    assert [choice.begun(seen) for _ in range(3)] == [("b", True), ("a", False), ("a", False)]
    choice.ended("b", True)
    assert choice.begun(seen) == ("b", True)  # it has shown nothing


def test_one_that_cannot_serve_an_output_is_not_used_for_it_and_one_that_is_as_fast_changes_nothing() -> None:
    choice = DrafterChoice()
    assert [choice.usual({"a": fast, "b": 1.51}) for fast in (1.5, 1.1, 1.5)] == ["a", "b", "b"]
    assert (choice.begun({"a": 1.1}), choice.usual({"a": 1.1, "b": 1.51})) == (("a", False), "b")


GOOD, USELESS = World(0.9, pass_base=0.02), World(0.02, pass_base=0.02)


class Pipelines:
    """Outputs one after another, each on the simulated pipeline of its drafter."""

    def __init__(self, **worlds: World) -> None:
        self.worlds, self.choice = worlds, DrafterChoice()
        self.controllers = {name: TargetController() for name in worlds}
        self.seed = 0

    def gains(self) -> dict[str, float]:
        return {name: one.output(KIND, CHAINS).gain(1.0) for name, one in self.controllers.items()}

    def seconds(self, name: str, tokens: int) -> float:
        self.seed += 1
        shared = self.controllers[name]
        simulation = Simulation(self.worlds[name], lambda: shared.output(KIND, CHAINS), tokens, 1, self.seed)
        simulation.resize(0)  # it is the only one
        return simulation.until_ended(1)

    def run(self, outputs: int, tokens: int = 128) -> list[tuple[str, float]]:
        """The drafter and the seconds of each."""
        found = []
        for _ in range(outputs):
            name, trial = self.choice.begun(self.gains())
            found.append((name, self.seconds(name, tokens)))
            self.choice.ended(name, trial)
        return found


@pytest.mark.parametrize("worlds", [{"a": USELESS, "b": GOOD}, {"a": GOOD, "b": USELESS}])
def test_controllers_show_which_drafter_is_the_fastest(worlds: Mapping[str, World]) -> None:
    best = next(name for name, world in worlds.items() if world == GOOD)
    found = Pipelines(**worlds).run(12)
    assert {name for name, _ in found} == {"a", "b"}
    assert sum(name == best for name, _ in found) >= 10
    assert found[-1][1] < 0.7 * max(seconds for _, seconds in found)


def test_controllers_show_that_a_drafter_has_turned() -> None:
    pipelines = Pipelines(a=GOOD, b=USELESS)
    pipelines.run(8)
    pipelines.worlds = {"a": USELESS, "b": GOOD}
    assert [name for name, _ in pipelines.run(12)][-4:] == ["b"] * 4


@pytest.mark.parametrize("seed", [0, 100, 200])
def test_a_drafter_shows_what_whole_outputs_gained_not_what_its_best_arm_brings_in_one_text(seed: int) -> None:
    pipelines, shown, seconds = Pipelines(a=GOOD), list[float](), 0.0
    pipelines.seed = seed
    for number in range(24):
        chance = 0.02 if number % 3 else 0.9  # two texts in three are none for it
        pipelines.worlds = {"a": World(chance, pass_base=0.02, drafter_trip=0.01)}
        seconds += pipelines.seconds("a", 96)
        shown.append(pipelines.gains()["a"])
    gained = 24 * 96 * 0.0205 / seconds  # each token without a drafter takes a pass and a round trip
    assert 1 < gained < 1.3
    assert abs(fmean(shown[12:]) - gained) < 0.15
    assert max(shown[12:]) < 2  # in the text that suits it it is two to three times as fast


def test_a_drafter_that_cannot_go_on_with_such_texts_is_as_fast_as_none() -> None:
    output = TargetController().output(KIND, CHAINS)
    for seen in (Lifecycle.STARTED, PassSeen(0.02), Judged(0, False, 1, 0)):
        output.observe(seen, 0.02)
    assert not output.gain(1.0)
    output.observe(DraftSeen(0, 0.001, 0.0, aside="nothing to copy"), 0.03)
    output.observe(Judged(0, False, 8, 0), 0.2)
    assert output.gain(1.0) == 1


def test_a_stall_keeps_no_drafter_away() -> None:
    pipelines = Pipelines(a=GOOD, b=World(0.55, pass_base=0.02))
    assert {name for name, _ in pipelines.run(8)[2:]} == {"a"}
    pipelines.worlds = {"a": replace(GOOD, stall=30.0), "b": pipelines.worlds["b"]}
    assert pipelines.seconds("a", 128) > 60
    pipelines.worlds = {"a": GOOD, "b": pipelines.worlds["b"]}
    assert [name for name, _ in pipelines.run(6)] == ["a"] * 6


def test_of_two_that_are_nearly_as_fast_each_is_used() -> None:
    outputs = Outputs("a", "b")
    outputs.run(lambda _: {"a": 1.1, "b": 1.06}, 100)
    assert outputs.used.count("a") >= 50


def test_what_another_load_has_shown_says_something() -> None:
    controller, far = TargetController(), replace(GOOD, drafter_trip=0.001)
    assert not controller.output(KIND, CHAINS).gain(1.0)
    Simulation(far, lambda: controller.output(KIND, CHAINS), 256, 1).speed(5.0)
    one, many = (controller.output(KIND, CHAINS).gain(load) for load in (1.0, 8.0))
    assert one > 1.5
    assert many > 1
