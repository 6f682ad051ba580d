"""Where an output ends; and outputs that go on where an earlier session was lost: nothing is lost or changed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from crossdraft.client import Generation, Token
from crossdraft.client.roster import Services
from crossdraft.session.assignment import Assignment
from crossdraft.session.events import Finished, Reason
from crossdraft.session.models import tokenization_of
from crossdraft.session.output import Output, ShownText, fault_of_committed
from crossdraft.session.resolution import resolve
from crossdraft.session.session import Session
from crossdraft.speculation.choice import PLAIN, Choice, Controller, Fixed, lock_step
from crossdraft.text.letters import Letters, Side
from crossdraft.types.messages import OpenTarget, SamplingOptions
from crossdraft.types.request import GenerationRequest, RequestError
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import COUPLED, SEEDED, SLEM, SLRS, STANDARD, TLI, Method
from tests.clock import Stage
from tests.conftest import FULL
from tests.ports import OPEN_TARGET, MemoryDrafter, MemoryTarget, asking, assignment, services_of, toys
from tests.session.test_resolution import models
from tests.tables import ToyTarget, autoregressive_distribution, pair_of
from tests.verification.enumerating import EnumeratingChooser, distance, distribution_of, full
from tests.verification.test_overlapped_distributions import LENGTH, Runs
from tests.verification.toys import EXACT, NESTED, SAME, TOYS, Act, Overlapped, Schedule, Toy

PAIR = pair_of(("a", "b", "ab", "c"), ("a",), stops=(3,))
STOP = {"stop": (Letters("ba"),)}


def written(ids: tuple[int, ...], min_tokens: int = 0, **settings: object) -> tuple[int, str]:
    """How many of the ids are committed when the output ends, and the text that is shown."""
    opening = OpenTarget((0,), SamplingOptions(min_tokens=min_tokens), None)
    given = assignment(pair=PAIR, max_tokens=len(ids), open_target=opening, **settings)
    output, shown, text = Output(given), ShownText(given), ""
    for count, token in enumerate(ids, 1):
        ending = output.commit(token)
        text += shown.add(PAIR.target.letters[token], ending and ending.kept)
        if ending is not None:
            resumed = asking(given, committed=ids[:count])
            assert fault_of_committed(resumed) == ""
            assert Output(resumed).ended == ending
            if count < len(ids):
                assert "where the output had ended" in fault_of_committed(asking(given, committed=ids[: count + 1]))
            return count, text
    raise AssertionError("it has no end")


@pytest.mark.parametrize(
    ("ids", "settings", "due"),
    [
        ((2, 2, 2), STOP, (2, "a")),
        ((2, 2, 2), STOP | {"include_stop_str_in_output": True}, (2, "aba")),
        ((2, 2, 2, 2), STOP | {"min_tokens": 2}, (3, "aba")),  # the second one is the first that counts
        ((2, 2, 2, 2), STOP | {"min_tokens": 2, "include_stop_str_in_output": True}, (3, "ababa")),
        ((0, 1, 2, 0), {"stop_token_ids": (2,)}, (3, "ab")),
        ((0, 1, 2, 0), {"stop_token_ids": (2,), "include_stop_str_in_output": True}, (3, "abab")),
        ((0, 3, 0), {}, (2, "a")),
        ((0, 3, 0), {"ignore_eos": True}, (3, "aca")),
        ((0, 3, 1, 0), {"ignore_eos": True, "stop_token_ids": (1,)}, (3, "ac")),
        ((0, 1, 1), {"stop": (Letters("abb"), Letters("bb")), "include_stop_str_in_output": True}, (3, "abb")),
    ],
)
def test_the_end_and_the_text(ids: tuple[int, ...], settings: dict[str, object], due: tuple[int, str]) -> None:
    assert written(ids, **settings) == due


CONTROLLERS: dict[str, Controller] = {
    "lock-step": lock_step(3),
    "overlapped": Fixed(Choice(max_draft_tokens=6, min_draft_tokens=2)),
    "plain": Fixed(PLAIN),
}
controlled = pytest.mark.parametrize("controller", CONTROLLERS.values(), ids=CONTROLLERS)


async def generate(given: Assignment, services: Services) -> tuple[Generation, list[Token]]:
    running = Generation(given, services)
    return running, [token async for token in running]


@controlled
@pytest.mark.parametrize("stop", [(), ("aab", "ba")])
async def test_after_every_cut_the_rest_is_the_same(controller: Controller, stop: tuple[str, ...]) -> None:
    target, drafter = toys(SLEM)  # the target draws the same whenever it is asked the same
    services = services_of(MemoryTarget(toy=target), MemoryDrafter(toy=drafter))
    given = assignment(max_tokens=25, controller=controller, stop=stop)
    whole, tokens = await generate(given, services)
    for cut in range(len(tokens) + 1):
        rest, others = await generate(asking(given, committed=tuple(whole.ids[:cut])), services)
        assert rest.ids == [token.id for token in others] == whole.ids[cut:]
        assert "".join(token.text for token in tokens[:cut]) + rest.text == whole.text
        assert rest.reason == whole.reason
        assert rest.statistics.tokens == len(whole.ids) - cut


async def test_what_follows_an_unfinished_character_is_shown_whole() -> None:
    """The tokens are the bytes of a character, and of another one that a stop string may begin with."""
    pair = pair_of(tuple(map(chr, "🦄é".encode())), ("a",))
    given = assignment(pair=pair, max_tokens=40, stop=("éé",), drafts=False)
    services = services_of(MemoryTarget(toy=ToyTarget(6, 99, RandomChooser(np.random.default_rng(5)))))
    whole, tokens = await generate(given, services)
    for cut in range(len(tokens) + 1):
        rest, _ = await generate(asking(given, committed=tuple(whole.ids[:cut])), services)
        assert "".join(token.text for token in tokens[:cut]) + rest.text == whole.text


def test_a_character_that_the_prompt_began_is_shown_with_what_ends_it() -> None:
    first, last = map(chr, "é".encode())
    given = assignment(pair=pair_of((first, last, "a"), ("a",)), open_target=replace(OPEN_TARGET, prompt=(2, 0)))
    shown = ShownText(given)
    assert (shown.add(Letters(last)), shown.add(Letters("a"), 2)) == ("é", "a")


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
@pytest.mark.parametrize("choice", [Choice(3, 1), Choice(2, 0, patience=0), PLAIN], ids=str)
def test_a_seeded_output_goes_on_as_it_would_have(toy: Toy, choice: Choice) -> None:
    runs = Runs(toy)
    for seed in range(4):
        wanted = runs.output(seed, 0)
        for cut in range(len(wanted) + 1):
            given = Overlapped(toy, SEEDED, (choice,), Schedule("DTD"), LENGTH, committed=wanted[:cut])
            stage = runs.play(given, seed)
            assert tuple(one.token for one in stage.emitted) == wanted[cut:]
            offsets = [len(runs.pair.target.letters_of(wanted[:place])) for place in range(cut, len(wanted))]
            assert [one.offset for one in stage.emitted] == offsets


@pytest.mark.parametrize("method", [COUPLED, TLI, STANDARD, SLEM, SLRS], ids=lambda method: method.name)
@pytest.mark.parametrize("pattern", ["TDS", full("DT")])
def test_the_distribution_of_the_rest_is_the_targets(method: Method, pattern: str) -> None:
    """Exactly, whatever was committed."""
    toy = SAME if method.same_vocabulary else NESTED
    choice = Choice(2, 2, overlap=False) if method is SLRS else Choice(2, 1)
    for committed in ((0,), (2,), (1, 2)) if FULL else ((1, 2),):
        given = Overlapped(toy, method, (choice,), Schedule(pattern), 2 + len(committed), 1, committed=committed)
        whole = autoregressive_distribution(given.target(None), toy.stops, given.length)
        begun = {ids[len(committed) :]: chance for ids, chance in whole.items() if ids[: len(committed)] == committed}
        distribution = {rest: chance / sum(begun.values()) for rest, chance in begun.items()}
        assert distance(distribution_of(given.run), distribution) < EXACT


@pytest.mark.parametrize("method", [COUPLED, SLEM], ids=lambda method: method.name)
@pytest.mark.parametrize("cut", [1, 2])
def test_an_output_that_was_cut_after_some_tokens_has_the_targets_distribution(method: Method, cut: int) -> None:
    """From the first session's first token to the second one's last."""
    first = Overlapped(NESTED, method, (Choice(2, 1),), Schedule("DT"), cut, 1)

    def run(chooser: EnumeratingChooser) -> tuple[int, ...]:
        committed = first.run(chooser)
        return committed + replace(first, length=3, committed=committed).run(chooser)

    assert distance(distribution_of(run), autoregressive_distribution(first.target(None), NESTED.stops, 3)) < EXACT


def lost_after(steps: int) -> Callable[[Schedule, Stage], None]:
    """A session that is lost at a moment that has nothing to do with what was drawn."""

    def play(schedule: Schedule, stage: Stage) -> None:
        stage.start()
        for step in range(steps):
            for lane in list(stage.opening):
                stage.open(lane)
            if stage.finished is None:
                schedule.step(stage, Act(schedule.pattern[step % len(schedule.pattern)]))

    return play


@pytest.mark.parametrize(
    ("method", "exact"), [(SLEM, True), (TLI, True), (COUPLED, False)], ids=["slem", "tli", "coupled"]
)
def test_a_moment_at_which_a_session_is_lost(method: Method, exact: bool) -> None:
    """`coupled` decides a token letter by letter: one that takes longer is more often lost, and drawn anew."""
    found = []
    for steps in range(1, 5):
        second = Overlapped(NESTED, method, (Choice(2, 1),), Schedule("DT"), 2)
        first = replace(second, play=lost_after(steps))

        def run(chooser: EnumeratingChooser) -> tuple[int, ...]:
            committed = first.run(chooser)  # noqa: B023 - used at once
            return committed + replace(second, committed=committed).run(chooser)  # noqa: B023

        found.append(distance(distribution_of(run), autoregressive_distribution(second.target(None), NESTED.stops, 2)))
    assert (max(found) < EXACT) is exact


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"max_tokens": 3}, Reason.LENGTH), ({"context": 5}, Reason.LENGTH), ({"stop": (Letters("ba"),)}, Reason.STOP)],
)
def test_an_output_that_had_ended_ends_at_once(changes: dict[str, object], reason: Reason) -> None:
    session = Session(assignment(committed=(2, 1, 0), **changes))
    (finished,) = session.start(0.0)
    assert (type(finished), finished.reason, finished.counts.tokens) == (Finished, reason, 0)


def test_what_cannot_have_been_committed_is_said() -> None:
    about = models()
    stop = about.tokenization.vocabulary.size - 1
    stopping = replace(about, target=replace(about.target, stops=(stop,)))
    stopping = replace(stopping, tokenization=tokenization_of(stopping.target, Side.TARGET), drafter=None, pair=None)
    ids = about.tokenization.encode_continuation(Letters("ab the end"))
    for request, complaint in (
        (GenerationRequest("x", committed=ids, max_tokens=len(ids) - 1), "max_tokens, which counts them"),
        (GenerationRequest("x", committed=ids * 200, max_tokens=4096), "the target's context holds 128"),
        (GenerationRequest("x", committed=(*ids, *ids), stop=("end",)), "goes on after a stop string"),
        (GenerationRequest("x", committed=(stop, *ids)), "goes on after a stop symbol"),
        (GenerationRequest("x", committed=(stop + 1,)), f"committed names id {stop + 1}"),
    ):
        with pytest.raises(RequestError, match=complaint):
            resolve(request, stopping)
    for request in (
        GenerationRequest("x", committed=(*ids, stop)),
        GenerationRequest("x", committed=(stop, *ids), ignore_eos=True),
    ):
        assert resolve(request, stopping).request.committed == request.committed
    for wrong in ((-1,), (1.5,), [1]):
        with pytest.raises(RequestError, match="committed must be"):
            GenerationRequest("x", committed=wrong)  # type: ignore[arg-type]
