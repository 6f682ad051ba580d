"""What a request may ask for, alone and of a pair."""

from dataclasses import replace

import pytest

from crossdraft.pipeline.connection import tokenization_of
from crossdraft.pipeline.request import GenerationRequest, RequestError
from crossdraft.pipeline.resolution import Models, fault_of_pair, resolve
from crossdraft.text.letters import Side
from crossdraft.text.pairing import Pair
from crossdraft.verification.exchange import Description, SamplingOptions
from crossdraft.verification.methods import METHODS, method_named
from tests.text.kinds import kind

GREEDY = SamplingOptions(temperature=0)
SHARED = [name for name, method in METHODS.items() if method.shared_only or method.same_vocabulary]
INEXACT = [name for name, method in METHODS.items() if not method.exact]
UNSEEDABLE = [name for name, method in METHODS.items() if method.exact and not method.seedable]


def description(name: str) -> Description:
    some = kind(name)
    return Description(name, some.json, (), (), some.size, 128, "")


def models(target: str = "gpt2", drafter: str = "llama2", **changes: object) -> Models:
    about, other = description(target), replace(description(drafter), **changes)  # type: ignore[arg-type]
    tokenization = tokenization_of(about, Side.TARGET)
    return Models(
        about, tokenization, other, Pair(tokenization.vocabulary, tokenization_of(other, Side.DRAFTER).vocabulary)
    )


def test_there_are_methods_of_each_kind() -> None:
    assert "tokentiming" in INEXACT
    assert {"tli", "standard", "rdk", "coupled-shared"} <= {*SHARED}
    assert {"coupled", "slrs", "union"}.isdisjoint(SHARED)


@pytest.mark.parametrize("method", INEXACT)
@pytest.mark.parametrize("options", [GREEDY, SamplingOptions()])
def test_an_inexact_method_must_be_allowed(method: str, options: SamplingOptions) -> None:
    with pytest.raises(RequestError, match=r"has not the target's distribution.*allow_inexact \(--allow-inexact\)"):
        GenerationRequest("x", method, options=options)
    assert GenerationRequest("x", method, options=options, allow_inexact=True).method == method


@pytest.mark.parametrize("method", UNSEEDABLE)
def test_a_seed_needs_a_method_that_takes_one_unless_greedy(method: str) -> None:
    with pytest.raises(RequestError, match=r"depends on timing.*--method seeded"):
        GenerationRequest("x", method, seed=1)
    assert GenerationRequest("x", method, seed=1, options=GREEDY).greedy


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_copies_takes_methods_that_need_nothing_shared(method: str) -> None:
    fault = fault_of_pair(method_named(method), models(copies=True))
    assert ("copies bytes of the text" in fault) == (method in SHARED)


def test_one_vocabulary_for_standard() -> None:
    assert "needs a drafter with the target's vocabulary" in fault_of_pair(method_named("standard"), models())
    assert fault_of_pair(method_named("standard"), models(drafter="gpt2")) == ""


def test_rdk_needs_an_affinity_for_this_target() -> None:
    method, pair = method_named("rdk"), models()
    assert "the drafter has none; make one with `crossdraft affinity`" in fault_of_pair(method, pair)
    other = fault_of_pair(method, models(affinity="0" * 32))
    assert "has one for another target" in other
    assert "`serve drafter --affinity FILE`" in other
    assert fault_of_pair(method, models(affinity=pair.digest)) == ""


def test_rdk_is_opened_with_the_targets_digest_and_no_other_method_is() -> None:
    pair = models(affinity=models().digest)
    for name in ("rdk", "tli", "coupled"):
        opened = resolve(GenerationRequest("x", name), pair).open_drafter
        assert opened is not None
        assert opened.redistribute == (pair.digest if name == "rdk" else "")
        assert (opened.allowed is None) == (name == "coupled")


def test_no_method_is_refused_where_there_is_no_drafter() -> None:
    about = description("gpt2")
    alone = Models(about, tokenization_of(about, Side.TARGET))
    for name in METHODS:
        request = GenerationRequest("x", name, allow_inexact=True)
        assert resolve(request, alone).open_drafter is None


@pytest.mark.parametrize(
    ("settings", "drafter", "method"),
    [
        ({}, "llama2", "coupled"),
        ({}, "gpt2", "standard"),
        ({"seed": 1}, "llama2", "seeded"),
        ({"seed": 1}, "gpt2", "seeded"),
        ({"options": GREEDY}, "llama2", "slem"),
        ({"options": GREEDY, "seed": 1}, "gpt2", "slem"),
    ],
)
def test_the_method_that_is_used_unasked(settings: dict[str, object], drafter: str, method: str) -> None:
    request = GenerationRequest("x", **settings)  # type: ignore[arg-type]
    assert resolve(request, models(drafter=drafter)).method.name == method


def test_an_audit_keys_the_draws_and_asks_for_rows() -> None:
    for name, method in METHODS.items():
        pair = models(drafter="gpt2" if method.same_vocabulary else "llama2", affinity=models().digest)
        request = GenerationRequest("x", name, row_width=7, allow_inexact=True)
        plain, audited = resolve(request, pair), resolve(replace(request, audit=True), pair)
        assert plain.open_drafter is not None
        assert audited.open_drafter is not None
        assert plain.audit is None
        assert (plain.open_drafter.noise is not None) == method.keyed
        assert plain.open_drafter.row_width == (7 if method.drafter_rows else 0)
        assert not plain.open_drafter.audited
        assert audited.open_drafter.row_width == 7
        assert audited.audit is not None
        assert audited.audit.key == audited.open_drafter.noise
        assert audited.open_drafter.audited == audited.audit.each_epoch == (not method.keyed)
        # Shared with the target only where the method wants it so.
        assert (audited.open_drafter.noise == audited.open_target.noise) == method.keyed


def test_an_audit_needs_a_drafter() -> None:
    alone = Models(models().target, models().tokenization)
    assert resolve(GenerationRequest("x"), alone).audit is None
    with pytest.raises(RequestError, match="no drafter whose draws could be audited"):
        resolve(GenerationRequest("x", audit=True), alone)
