"""Random lives of sessions: whatever services do, what was emitted stays, and the end comes."""

import os
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.session.events import Reason
from crossdraft.session.session import Session
from crossdraft.speculation.choice import LONG_RUN, PLAIN, Choice
from crossdraft.text.letters import NOTHING
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import COUPLED, COUPLED_SHARED, RDK, SLEM, SLRS, TLI, UNION, Method
from tests.clock import Stage
from tests.ports import LETTERS, assignment
from tests.session.interleavings import Interleaving
from tests.tables import ToyDrafter, ToyTarget, autoregressive_distribution, open_drafter
from tests.verification.scheduling import InTurn
from tests.verification.toys import drafter_of
from tests.vocabularies import pair_of

EXAMPLES = 10_000 if "CROSSDRAFT_FULL_TESTS" in os.environ else 300
LENGTH = 16  # tokens
PAIR = pair_of(LETTERS, ("a", "b", "ba"))
WINDOWS = st.integers(1, 5)
CHOICES = st.one_of(
    st.builds(lambda run: replace(PLAIN, run=run), st.sampled_from([1, 2, 3, 5, LONG_RUN])),  # short ones go on
    st.builds(lambda k: Choice(k, k, overlap=False), WINDOWS),
    st.builds(
        lambda window, wait, patience, depth, width, chunk, speculate: Choice(
            window,
            min(window, wait),
            patience=patience,
            branch_depth=depth,
            branch_width=width,
            chunk=chunk,
            speculate=speculate,
        ),
        WINDOWS,
        st.integers(0, 2),
        st.sampled_from([0.0, 0.5, 30.0]),
        st.integers(0, 2),
        st.integers(1, 2),
        st.integers(1, 3),
        st.booleans(),
    ),
)
LOCK_STEP = st.builds(lambda k: Choice(k, k, overlap=False), WINDOWS)
METHODS = st.sampled_from([SLEM, TLI, COUPLED, COUPLED_SHARED, UNION, RDK, SLRS])


def life(
    method: Method, choices: list[Choice], numbers: list[int], targets: int, temperature: float, seed: int
) -> Interleaving:
    chooser = RandomChooser(np.random.default_rng(seed))
    allowed = PAIR.shared_drafter_ids if method.shared_only else None
    plan = assignment(
        method,
        pair=PAIR,
        chooser=chooser,
        open_drafter=open_drafter(NOTHING, allowed),
        controller=InTurn(tuple(choices), waits_for_drafter=not choices[0].overlap).fresh(),
        max_tokens=LENGTH,
        targets=targets,
    )
    plan = replace(plan, open_target=replace(plan.open_target, head=1))
    target = ToyTarget(len(LETTERS), 1, chooser, temperature)

    def drafter() -> ToyDrafter:
        return drafter_of(method, PAIR, chooser)

    return Interleaving(Stage(Session(plan), target, drafter, method.drafter_rows), numbers, PAIR.drafter.size)


@settings(max_examples=EXAMPLES)
@given(
    method=METHODS,
    data=st.data(),
    numbers=st.lists(st.integers(0, 2**12), max_size=150),
    targets=st.integers(1, 2),
    temperature=st.sampled_from([0.0, 1.0]),
    mute=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_the_output_is_whole(
    method: Method, data: st.DataObject, numbers: list[int], targets: int, temperature: float, mute: bool, seed: int
) -> None:
    choices = data.draw(st.lists(LOCK_STEP if method.whole_draft else CHOICES, min_size=1, max_size=4))
    lived = life(method, choices, numbers, targets, temperature, seed)
    lived.run(mute)
    stage = lived.stage
    finish, tokens = stage.finished, tuple(one.token for one in stage.emitted)
    assert finish is not None
    assert finish.counts.tokens == len(tokens) == sum(finish.counts.kinds.values())
    if finish.reason is Reason.LENGTH:
        assert len(tokens) == LENGTH
    else:
        assert finish.reason in (Reason.CANCELLED, Reason.FAILED)
    if temperature == 0:
        (wanted,) = autoregressive_distribution(ToyTarget(len(LETTERS), 99, temperature=0), frozenset(), LENGTH)
        assert tokens == wanted[: len(tokens)]


def test_some_of_what_services_say_is_illegal() -> None:
    """Else the test above would not say that it changes nothing."""
    numbers = [int(number) for number in np.random.default_rng(1).integers(0, 2**12, 400)]
    illegal = 0
    for place in range(20):
        lived = life(COUPLED, [Choice(3, 1)], numbers[place : place + 100], 1, 1.0, place)
        lived.run(mute=False)
        illegal += lived.illegal
    assert illegal > 20
