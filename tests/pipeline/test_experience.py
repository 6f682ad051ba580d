"""Outputs that begin together: one gets to know the drafter, the others are told."""

import gc

from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.experience import Experience, News
from crossdraft.pipeline.governing import PassSeen, Told
from crossdraft.pipeline.governor import FOLLOWED, Adaptive
from crossdraft.pipeline.recording import Step
from crossdraft.pipeline.request import GenerationRequest
from tests.pipeline.governed import GOOD, PASS, run

REQUEST = GenerationRequest("x", "slem")
STEP = Step(0.0, None, (), 0.0, 0, 0, 0)
PLAIN_TOKEN = PassSeen(1, PASS, PASS, 0.0)


class Heard:
    """A generation that is told something."""

    def __init__(self) -> None:
        self.told: list[Told] = []

    def tell(self, told: Told) -> None:
        self.told.append(told)


def learnt() -> Adaptive:
    governor = Adaptive()
    run(GOOD, governor, 400)
    assert governor.knows
    return governor


def led(governor: Adaptive) -> tuple[Experience, News, Heard]:
    """A leading output with this governor, and one that follows it."""
    experience, follower = Experience(), Heard()
    experience.keep(REQUEST, governor)
    news = experience.news(REQUEST)
    assert news is not None
    experience.keep(REQUEST, Adaptive(follows=True))
    assert experience.led(REQUEST)
    assert experience.news(REQUEST) is None
    experience.follow(REQUEST, follower)
    return experience, news, follower


def test_those_that_follow_are_told_once_when_enough_is_known() -> None:
    governor = Adaptive()
    experience, news, follower = led(governor)
    news.record(STEP)
    assert not follower.told
    run(GOOD, governor, 400)
    news.record(STEP)
    news.record(STEP)
    assert follower.told == [Told(governor.estimates)]
    news.close()
    assert len(follower.told) == 1
    assert not experience.led(REQUEST)


def test_when_the_leading_output_ends_early_somebody_else_leads() -> None:
    experience, news, follower = led(Adaptive())
    news.close()
    assert follower.told == [Told(None)]
    assert not experience.led(REQUEST)
    assert experience.news(REQUEST) is not None


def test_an_output_that_was_dropped_leads_nobody() -> None:
    experience, news, _ = led(Adaptive())
    del news
    gc.collect()
    assert not experience.led(REQUEST)


def test_nobody_leads_where_the_services_are_known_or_nobody_learns() -> None:
    experience = Experience()
    assert experience.news(REQUEST) is None
    experience.keep(REQUEST, learnt())
    assert experience.news(REQUEST) is None
    assert not experience.led(REQUEST)


def test_one_that_follows_decodes_plainly_until_it_is_told() -> None:
    governor = Adaptive(follows=True)
    assert "another output" in governor.choose(0.0).reason
    before = learnt().estimates
    governor.observe(Told(before), 1.0)
    assert governor.choose(1.0).drafts
    assert governor.choose(1.0) == Adaptive(before).choose(1.0)


def test_one_that_is_told_that_nothing_comes_gets_to_know_the_drafter_itself() -> None:
    governor = Adaptive(follows=True)
    assert not governor.choose(0.0).drafts
    governor.observe(Told(None), 1.0)
    assert governor.choose(1.0) == Adaptive().choose(1.0)


def test_news_are_not_waited_for_for_ever() -> None:
    governor = Adaptive(follows=True)
    for token in range(1, FOLLOWED + 1):
        assert not governor.choose(float(token)).drafts
        governor.observe(PLAIN_TOKEN, float(token))
    assert governor.choose(1.0 + FOLLOWED).drafts


def test_what_others_say_does_not_replace_what_is_known() -> None:
    governor = learnt()
    before = governor.estimates
    governor.observe(Told(Estimates(judged=99.0, replies=9, passes=9, token=9.0, pass_base=1.0)), 99.0)
    assert governor.estimates == before


def test_what_others_have_lost_is_not_lost_again() -> None:
    governor = Adaptive(follows=True)
    before = learnt().estimates
    governor.observe(Told(before), 0.0)
    assert governor.estimates.allowance <= before.allowance
