"""Outputs of one kind that are under way: one tries what is not known, the others are told."""

import gc
from dataclasses import replace

import pytest

from crossdraft.speculation.choice import DrafterSeen, Estimates, PassSeen, Told, Workload
from crossdraft.speculation.controller import FOLLOWED, TRIAL_PASSES, Adaptive
from crossdraft.speculation.shared import Member, SharedEstimates
from crossdraft.types.request import GenerationRequest
from tests.speculation.controlled import GOOD, PASS, run

REQUEST = GenerationRequest("x", "slem")
USELESS = replace(GOOD, acceptance=(0.0,), match=0.0)


class Heard:
    """A generation that is told something."""

    def __init__(self) -> None:
        self.told: list[Told] = []

    def tell(self, told: Told) -> None:
        self.told.append(told)


def learnt(given: Workload = GOOD, tokens: int = 400) -> Adaptive:
    controller = Adaptive()
    run(given, controller, tokens)
    assert controller.knows
    assert controller.drafts == (given is GOOD)
    return controller


def entered(experience: SharedEstimates, controller: Adaptive, begins: bool = True) -> tuple[Member, Heard]:
    member, heard = experience.keep(REQUEST, controller), Heard()
    assert member is not None
    member.attach(heard.tell)
    if begins:
        member.begin()
    return member, heard


def test_the_others_are_told_when_enough_is_known_and_when_it_changes() -> None:
    experience, controller = SharedEstimates(), Adaptive()
    assert not experience.led(REQUEST)
    first, own = entered(experience, controller)
    assert experience.led(REQUEST)
    other, heard = entered(experience, Adaptive(follows=True))
    _, further = entered(experience, Adaptive(follows=True))
    first.look()
    other.look()
    assert not heard.told
    run(GOOD, controller, 400)
    first.look()
    first.look()
    assert heard.told == [Told(controller.estimates)]
    assert further.told[0] is heard.told[0]  # to say what is believed takes a tenth of a millisecond
    controller.observe(Told(learnt(USELESS).estimates), 99.0)  # it drafts, and sees for itself
    first.look()
    assert len(heard.told) == 1
    assert not own.told


def test_another_one_leads_when_the_first_is_over() -> None:
    experience, controller = SharedEstimates(), learnt(USELESS)
    controllers = (controller, *(Adaptive(follows=True) for _ in range(3)))
    members, heard = zip(*(entered(experience, one) for one in controllers), strict=True)
    members[1].close()
    assert not any(one.told for one in heard)
    members[0].close()
    members[0].close()
    assert heard[2].told == [Told(controller.estimates, leads=True)]
    assert not heard[3].told
    assert experience.led(REQUEST)
    members[2].close()
    assert heard[3].told[0].leads
    members[3].close()
    assert not experience.led(REQUEST)


def test_an_output_that_has_not_begun_leads_nobody() -> None:
    experience = SharedEstimates()
    waiting, unheard = entered(experience, Adaptive(), begins=False)
    members, heard = zip(*(entered(experience, Adaptive(follows=True)) for _ in range(2)), strict=True)
    assert [one.told for one in heard] == [[Told(Estimates(), leads=True)], []]
    members[0].close()
    assert len(heard[1].told) == 1
    waiting.begin()
    members[1].close()
    assert not unheard.told


def test_what_is_known_is_known_to_those_that_come_later() -> None:
    """Whoever began last may have heard of the drafter only."""
    experience, controller = SharedEstimates(), Adaptive()
    first, _ = entered(experience, controller)
    early, _ = entered(experience, Adaptive(follows=True))
    early.close()
    run(GOOD, controller, 400)
    first.look()
    assert experience.of(REQUEST) == controller.estimates
    assert Adaptive(experience.of(REQUEST), follows=True).choose(0.0).drafts
    first.close()
    assert experience.of(REQUEST) == controller.estimates
    later = Adaptive(experience.of(REQUEST))
    experience.keep(REQUEST, later)
    assert experience.of(REQUEST) == later.estimates


def test_an_output_that_was_dropped_leads_nobody() -> None:
    experience = SharedEstimates()
    member, _ = entered(experience, Adaptive())
    del member
    gc.collect()
    assert not experience.led(REQUEST)


def test_one_that_follows_decodes_plainly_until_it_is_told() -> None:
    controller = Adaptive(follows=True)
    assert "another output" in controller.choose(0.0).reason
    before = learnt().estimates
    controller.observe(Told(before), 1.0)
    assert controller.choose(1.0) == Adaptive(before).choose(1.0)
    assert controller.choose(1.0).drafts


def test_one_that_follows_begins_with_what_is_known() -> None:
    before = learnt().estimates
    assert Adaptive(before, follows=True).choose(0.0) == Adaptive(before).choose(0.0)


def test_the_one_that_is_to_lead_gets_to_know_the_drafter_itself() -> None:
    controller = Adaptive(follows=True)
    assert not controller.choose(0.0).drafts
    controller.observe(Told(Estimates(), leads=True), 1.0)
    assert controller.choose(1.0) == Adaptive().choose(1.0)


def test_news_are_not_waited_for_for_ever() -> None:
    controller = Adaptive(follows=True)
    for token in range(1, FOLLOWED + 1):
        assert not controller.choose(float(token)).drafts
        controller.observe(PassSeen(1, PASS, PASS, 0.0), float(token))
    assert controller.choose(1.0 + FOLLOWED).drafts


def test_who_drafts_sees_for_itself_what_the_drafter_is_worth() -> None:
    controller = learnt()
    before = controller.estimates
    controller.observe(Told(learnt(USELESS).estimates), 99.0)
    assert controller.estimates.acceptance == before.acceptance
    assert controller.drafts


def test_who_decodes_plainly_is_told_that_the_drafter_is_good_now() -> None:
    controller = Adaptive(learnt(USELESS).estimates, follows=True)
    assert not controller.choose(50.0).drafts
    controller.observe(Told(learnt().estimates), 51.0)
    assert controller.choose(51.0).drafts


@pytest.mark.parametrize("follows", [True, False])
def test_one_of_all_tries_a_drafter_again_that_was_put_aside(follows: bool) -> None:
    before = learnt(USELESS, 700).estimates
    assert before.trial_at > 0
    controller = Adaptive(before, follows=follows)
    early = before.trial_at - TRIAL_PASSES * PASS
    assert not controller.choose(early).drafts
    assert controller.choose(before.trial_at + 1e-6).drafts == (not follows)
    assert controller.choose(before.trial_at + 1000.0).drafts == (not follows)


def test_who_is_told_while_it_drafts_takes_no_pass_for_a_plain_one() -> None:
    controller, told = Adaptive(follows=True), Told(learnt().estimates)
    for token in range(1, FOLLOWED + 1):
        controller.choose(float(token))
        controller.observe(PassSeen(1, PASS, PASS, 0.0), float(token))
    assert controller.choose(1.0 + FOLLOWED).drafts
    controller.observe(told, 2.0 + FOLLOWED)
    controller.observe(PassSeen(1, 50 * PASS, PASS, 0.0), 3.0 + FOLLOWED)
    assert controller.estimates.plain_passes == told.estimates.plain_passes


def test_without_a_drafter_who_follows_decodes_plainly_as_well() -> None:
    controller = Adaptive(learnt().estimates, follows=True)
    controller.observe(DrafterSeen(False), 0.0)
    assert not controller.choose(0.0).drafts
