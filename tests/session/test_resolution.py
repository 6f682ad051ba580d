"""What a request may ask for, alone and of a pair; prompts of all forms, as target and drafter read them."""

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import fields, replace
from pickle import dumps, loads
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crossdraft.client import Chat, GenerationRequest, Message, Pipeline, RequestError
from crossdraft.config.fields import typed
from crossdraft.session import models as known
from crossdraft.session.assignment import Secrets
from crossdraft.session.resolution import Prompts, prompts_of, resolve
from crossdraft.speculation.choice import TREES, Choice, arms_for
from crossdraft.speculation.controller import TargetController
from crossdraft.text.chat_template import ChatTemplate, ChatTemplateError
from crossdraft.text.letters import ControlRole, Letters, Side, from_bytes
from crossdraft.text.tokenization import Tokenization
from crossdraft.types.messages import MODEL_SETTINGS, Description, OpenTarget, SamplingDefaults, SamplingOptions
from crossdraft.types.request import KINDS, Overlap, Prompt, PromptTooLongError, plain, rendered
from crossdraft.verification.methods import METHODS, method_named
from tests.text.kinds import PANICS, kind

GREEDY = SamplingOptions(temperature=0)
SHARED = [name for name, method in METHODS.items() if method.shared_only or method.same_vocabulary]
INEXACT = [name for name, method in METHODS.items() if not method.exact]
ALLOWED = {"allow_inexact": True}
UNSEEDABLE = [name for name, method in METHODS.items() if method.exact and not method.samples]
OWN = SamplingDefaults(0.0, 20, 0.8, 0.1, 1.05, 700, 900)


def models(target: str = "gpt2", drafter: str = "llama2", **changes: object) -> known.Models:
    about, other = kind(target).described(controls=()), kind(drafter).described(controls=(), **changes)
    return known.Models.of(about, other)


def alone() -> known.Models:
    """The same target without a drafter."""
    return known.Models(models().target, models().tokenization)


@pytest.mark.parametrize(
    ("method", "asked", "complaint", "change"),
    [(one, {}, "not have the target's distribution.*allow it with allow_inexact", ALLOWED) for one in INEXACT]
    + [(one, {"options": GREEDY}, "not have the target's distribution", ALLOWED) for one in INEXACT]
    + [(one, {"seed": 1}, "depends on timing.*use the method 'seeded'", {"options": GREEDY}) for one in UNSEEDABLE],
)
def test_an_inexact_method_must_be_allowed_and_a_seed_needs_one_that_takes_it(method, asked, complaint, change):
    request = GenerationRequest("x", method=method, **asked)
    with pytest.raises(RequestError, match=complaint):
        resolve(request, models())
    assert known.requested_method(replace(request, **change)) is METHODS[method]


def owning(own: SamplingDefaults = OWN) -> known.Models:
    """Models whose target has settings of its own."""
    pair = models()
    return replace(pair, target=replace(pair.target, defaults=own, context=4096))


def test_what_a_request_leaves_out_is_the_models_own_and_what_it_names_counts_also_if_it_is_the_usual_default() -> None:
    assigned = resolve(GenerationRequest("x"), owning())
    assert assigned.open_target.options == SamplingOptions(0.0, 20, 0.8, 0.1, 1.05)
    assert (assigned.request.max_tokens, assigned.method.name) == (700, "slem")  # greedy
    assert assigned.open_drafter.options == SamplingOptions(0.0, 20, 0.8, 0.1)
    plain = resolve(GenerationRequest("x"), models())
    assert (plain.open_target.options, plain.request.max_tokens) == (SamplingOptions(), 128)
    asked = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0)
    assigned = resolve(GenerationRequest("x", options=asked, max_tokens=128), owning())
    assert assigned.open_target.options == SamplingOptions(1.0, 0, 1.0, 0.1, 1.05)
    assert (assigned.request.max_tokens, assigned.method.name) == (128, "seeded")


def test_no_request_gets_more_tokens_than_the_limit() -> None:
    for asked, given in ((100, 100), (901, 900)):
        assert resolve(GenerationRequest("x", max_tokens=asked), owning()).request.max_tokens == given
    with pytest.raises(RequestError, match="min_tokens must be less than or equal to max_tokens=700, got 800"):
        resolve(GenerationRequest("x", options=SamplingOptions(min_tokens=800)), owning())
    assert resolve(GenerationRequest("x", options=SamplingOptions(min_tokens=600)), owning()).request.max_tokens == 700


def test_a_seed_with_any_method_where_the_model_is_greedy_by_itself() -> None:
    assert resolve(GenerationRequest("x", method="coupled", seed=1), owning()).method.name == "coupled"
    with pytest.raises(RequestError, match="depends on timing"):
        resolve(GenerationRequest("x", method="coupled", seed=1), owning(SamplingDefaults(temperature=0.5)))


@pytest.mark.parametrize("moved", [copy, deepcopy, lambda one: replace(one, choice=1), lambda one: loads(dumps(one))])  # noqa: S301
def test_what_is_left_out_is_so_in_copies_and_between_processes(moved: Callable[..., GenerationRequest]) -> None:
    assert known.with_defaults(moved(GenerationRequest("x")), OWN).options == SamplingOptions(0.0, 20, 0.8, 0.1, 1.05)
    asked = GenerationRequest("x", options=SamplingOptions(1.0, 0, 1.0, 0.0, 1.0), max_tokens=128)
    assert known.with_defaults(moved(asked), OWN) == moved(asked)


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"model": {"type": "BPE"}}', *PANICS])
def test_a_tokenizer_that_nothing_can_read_is_an_error_with_a_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        known.tokenization_of(replace(kind("gpt2").described(controls=()), tokenizer_json=text), Side.DRAFTER)


def test_numbers_that_are_left_out_are_plain_once_they_are_settled() -> None:
    settled = known.with_defaults(GenerationRequest("x"), SamplingDefaults())
    numbers = [*(getattr(settled.options, name) for name in MODEL_SETTINGS), settled.max_tokens]
    assert {type(one) for one in numbers} == {int, float}
    assert known.with_defaults(settled, OWN).options == settled.options


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_copies_takes_methods_that_need_nothing_shared(method: str) -> None:
    fault = known.fault_of_pair(method_named(method), models(copies=True))
    assert ("copies bytes of the text" in fault) == (method in SHARED)


def test_one_vocabulary_for_standard() -> None:
    assert "needs a drafter with the target's vocabulary" in known.fault_of_pair(method_named("standard"), models())
    assert known.fault_of_pair(method_named("standard"), models(drafter="gpt2")) == ""


def test_rdk_needs_an_affinity_for_this_target() -> None:
    method, pair = method_named("rdk"), models()
    assert "the drafter has none; make one with `crossdraft affinity`" in known.fault_of_pair(method, pair)
    other = known.fault_of_pair(method, models(affinity="0" * 32))
    assert "has one for another target" in other
    assert "`serve drafter --affinity FILE`" in other
    assert known.fault_of_pair(method, models(affinity=pair.digest)) == ""


def test_rdk_is_opened_with_the_targets_digest_and_no_other_method_is() -> None:
    pair = models(affinity=models().digest)
    for name in ("rdk", "tli", "coupled"):
        opened = resolve(GenerationRequest("x", method=name), pair).open_drafter
        assert opened.redistribute == (pair.digest if name == "rdk" else "")
        assert (opened.allowed is None) == (name == "coupled")


def test_a_drafter_that_reads_hidden_states_needs_the_target_that_they_are_of() -> None:
    pair = models(drafter="gpt2", hidden_size=8)
    sending = replace(pair, target=replace(pair.target, hidden_size=8))
    assert resolve(GenerationRequest("x"), sending).open_target.hidden
    for others in (replace(sending, drafter=replace(pair.target, hidden_size=0)), models(drafter="gpt2")):
        assert not resolve(GenerationRequest("x"), others).open_target.hidden
    for wrong, why in (
        (pair, "hidden states of 8 numbers, and this target sends none"),
        (replace(pair, target=replace(pair.target, hidden_size=16)), "and this target has such of 16"),
        (models(hidden_size=8), "of a target with its own vocabulary, and this target has another one"),
    ):
        with pytest.raises(RequestError, match=why):
            resolve(GenerationRequest("x"), wrong)
        pipeline = SimpleNamespace(models=wrong, _connected=SimpleNamespace(services=SimpleNamespace(drafters="d")))
        assert Pipeline.gain(pipeline, GenerationRequest("x"), 1.0) is None  # no automatic choice takes it


def test_without_a_drafter_nothing_is_drafted_any_method_is_taken_and_only_an_audit_refused() -> None:
    for name in METHODS:
        assert resolve(GenerationRequest("x", method=name, allow_inexact=True), alone()).open_drafter is None
    for overlap in Overlap:
        assert resolve(GenerationRequest("x", overlap=overlap), alone()).controller.choose(0.0).max_draft_tokens == 0
    assert resolve(GenerationRequest("x"), alone()).audit is None
    with pytest.raises(RequestError, match="audit needs a drafter"):
        resolve(GenerationRequest("x", audit=True), alone())


@pytest.mark.parametrize(
    ("settings", "drafter", "method"),
    [
        ({}, "llama2", "seeded"),
        ({}, "gpt2", "standard"),
        ({"seed": 1}, "llama2", "seeded"),
        ({"seed": 1}, "gpt2", "seeded"),
        ({"tree_nodes": 16}, "gpt2", "seeded"),  # which drafts trees
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
        request = GenerationRequest("x", method=name, row_width=7, allow_inexact=True)
        plain, audited = resolve(request, pair), resolve(replace(request, audit=True), pair)
        assert plain.audit is None
        assert (plain.open_drafter.noise is not None) == method.keyed
        assert plain.open_drafter.row_width == (7 if method.drafter_rows else 0)
        assert not plain.open_drafter.audited
        assert (audited.open_drafter.row_width, audited.audit.key) == (7, audited.open_drafter.noise)
        assert audited.open_drafter.audited == audited.audit.each_epoch == (not method.keyed)
        # Shared with the target only where the method wants it so.
        assert (audited.open_drafter.noise == audited.open_target.noise) == method.keyed


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"overlap": "often"}, "overlap must be auto, on or off, got 'often'"),
        ({"max_draft_tokens": 65}, "max_draft_tokens must be between 1 and 64, got 65"),
        (
            {"max_draft_tokens": 3, "min_draft_tokens": 4},
            "min_draft_tokens must be at most max_draft_tokens, which is 3, got 4",
        ),
        ({"overlap": "off", "max_draft_tokens": 4}, "max_draft_tokens has no effect with overlap off"),
        ({"overlap": "off", "branches": 0}, "branches has no effect with overlap off"),
        ({"overlap": "on", "tree_nodes": 16}, "tree_nodes has no effect with overlap on"),
        ({"overlap": "off", "tree_nodes": 5}, "more than the depth of the tree .*, 5., at most 63"),
        ({"overlap": "off", "num_speculative_tokens": 64, "tree_nodes": 63}, "at most 63 nodes: lower .* .64.$"),
        ({"audit": True, "tree_nodes": 16}, "an audit recomputes the draws of chains"),
        ({"overlap": "on", "method": "slrs"}, "method 'slrs' judges a whole draft at once"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"stop": ("",)}, "stop string"),
        # Wrong types: the text begins with the field.
        ({"seed": "x"}, "^seed must be a whole number, got 'x'"),
        ({"num_speculative_tokens": None}, "^num_speculative_tokens must be a whole number, got None"),
        ({"audit": 1}, "^audit must be True or False, got 1"),
        ({"prompt": b"x"}, "^prompt must be a text, a tuple of token ids, or a Chat, got b'x'"),
        ({"method": 3}, "^method must be a text, got 3"),
        ({"drafter_temperature": "warm"}, "^drafter_temperature must be a number"),
        ({"options": {"temperature": 0}}, "^options must be SamplingOptions"),
        ({"stop": "end"}, "^stop must be a tuple of texts, got 'end'"),
        ({"record": "file"}, "^record must be a Path, got 'file'"),
        # Prompts that are none.
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": Chat((Message("user", "x"),), template_kwargs="[]")}, "template_kwargs must be a JSON object"),
        ({"prompt": (1, -1)}, r"prompt must be token ids, whole numbers from 0 to 2\*\*32 - 1, and has -1"),
        ({"stop_token_ids": (2**32,)}, "^stop_token_ids must be token ids, .* has 4294967296"),
        ({"max_tokens": 2**31}, r"^max_tokens must be between 0 and 2\*\*31 - 1, got 2147483648"),
        ({"prompt": (1, True)}, "has True"),
        ({"prompt": ("a",)}, "has 'a'"),
        ({"prompt": "a\ud800"}, "the prompt has half of a surrogate pair"),
        ({"prompt": Chat(())}, "the chat has no messages"),
        ({"prompt": Chat([Message("user", "x")])}, "must be a tuple of Message"),  # type: ignore[arg-type]
        ({"prompt": Chat((Message("", "x"),))}, "message 0 of the chat needs a role"),
        ({"prompt": Chat((Message("user", "\udc00"),))}, "message 0 of the chat has half of a surrogate pair"),
    ],
)
def test_requests_that_cannot_be(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        known.requested_method(GenerationRequest(**{"prompt": "x"} | settings))


@pytest.mark.parametrize(("drafter", "possible"), [("gpt2", ["standard", "union"]), ("llama2", ["union", "tli"])])
def test_an_unknown_method_is_refused_with_those_that_the_pair_can_do(drafter: str, possible: list[str]) -> None:
    with pytest.raises(RequestError, match=r"^unknown method 'magic'; this pair of models can do ") as raised:
        resolve(GenerationRequest("x", method="magic"), models(drafter=drafter))
    names = str(raised.value).partition(" can do ")[2].split(", ")
    assert names[:2] == possible
    assert not {"rdk", "tokentiming"} & {*names}  # there is no affinity matrix; and it is not exact
    assert raised.value.field == "method"


def test_a_bias_is_for_an_id_that_the_target_has() -> None:
    options = SamplingOptions(logit_bias={7: -2.0, 10**6: 1.0})  # type: ignore[arg-type]
    assert options == SamplingOptions(logit_bias=((7, -2.0), (10**6, 1.0)))
    last = models().target.vocabulary_size - 1
    with pytest.raises(RequestError, match=rf"logit_bias names id 1000000, and the target's ids are 0 to {last}$"):
        resolve(GenerationRequest("x", options=options), models())


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"logit_bias": {"303": 1.0}}, "must map token ids, such as 303, to numbers .*, and has '303': 1.0"),
        ({"logit_bias": {303: "1"}}, "and has 303: '1'"),
        ({"logit_bias": {True: 1}}, "and has True: 1"),
        ({"logit_bias": {303: float("nan")}}, "between -100 and 100, and has 303: nan"),
        ({"logit_bias": [303]}, r"to numbers between -100 and 100, got \[303\]"),
        ({"logit_bias": "303"}, "to numbers between -100 and 100, got '303'"),
        ({"allowed_token_ids": "abc"}, "^allowed_token_ids must be a tuple of token ids, got 'abc'"),
        ({"allowed_token_ids": ["7"]}, "^allowed_token_ids must be token ids, .*, and has '7'"),
        ({"bad_word_ids": 7}, "^bad_word_ids must be a tuple of tuples of token ids, each with one at least, got 7"),
        ({"bad_word_ids": [7]}, r"^bad_word_ids must be a tuple of tuples of token ids, .*, and has 7$"),
        ({"bad_word_ids": [[7.5]]}, r"^bad_word_ids must be a tuple of tuples of token ids, .*, and has \[7\.5\]$"),
        ({"bad_word_ids": [[]]}, r"each with one at least, and has \[\]$"),
        ({"end_ids": (-1,)}, "^end_ids must be token ids, .*, and has -1"),
        ({"grammar": "[a-z]+"}, "^grammar must be a Grammar, got"),
        ({"temperature": "0"}, "^temperature must be a number, got '0'"),
    ],
)
def test_sampling_options_of_wrong_types_are_refused_at_once(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SamplingOptions(**settings)


def test_lists_of_sampling_options_may_be_lists() -> None:
    given: dict[str, Any] = {"allowed_token_ids": [7], "logit_bias": [[3, 1]], "bad_word_ids": [[4, np.int64(5)]]}
    same = SamplingOptions(allowed_token_ids=(7,), logit_bias=((3, 1),), bad_word_ids=((4, 5),))
    assert (SamplingOptions(**given), hash(SamplingOptions(**given))) == (same, hash(same))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"k": 3, "num_speculative_tokens": 3}, "k is a short name of num_speculative_tokens: give one of them"),
        ({"temperature": 0}, r"no setting 'temperature': give options=SamplingOptions\(temperature=...\)"),
        ({"drafter": "small"}, "no setting 'drafter': it is said where the connection is made"),
        ({"max_token": 3}, "no setting 'max_token'; did you mean 'max_tokens'?"),
        ({"nothing": 3}, "no setting 'nothing'; it has .*, stop, "),
    ],
)
def test_settings_that_a_request_has_not_are_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        GenerationRequest.of("x", **settings)


def chosen(**settings: object) -> Choice:
    request = GenerationRequest("x", method="coupled", **settings)  # type: ignore[arg-type]
    return resolve(request, models()).controller.choose(0.0)


def test_rounds_have_k_draft_tokens_and_overlap_by_itself_waits_for_k_and_drafts_as_many_ahead() -> None:
    choice = chosen(overlap="off", num_speculative_tokens=3)
    assert (choice.max_draft_tokens, choice.min_draft_tokens, choice.overlap) == (3, 3, False)
    choice = chosen(overlap="on", num_speculative_tokens=3)
    assert (choice.max_draft_tokens, choice.min_draft_tokens, choice.overlap, choice.branch_depth) == (6, 3, True, 0)
    assert chosen(overlap="on", num_speculative_tokens=64).max_draft_tokens == 64
    assert chosen(overlap="on", max_draft_tokens=2).min_draft_tokens == 2
    assert chosen(overlap="on", min_draft_tokens=40).max_draft_tokens == 40
    given = chosen(overlap="on", max_draft_tokens=9, min_draft_tokens=1, branches=4, branch_width=2)
    assert (given.max_draft_tokens, given.min_draft_tokens, given.branch_depth, given.branch_width) == (9, 1, 4, 2)


def test_the_controller_decides_by_itself_within_what_is_allowed() -> None:
    settings = {"max_draft_tokens": 7, "min_draft_tokens": 2, "branches": 3, "branch_width": 1}
    request = GenerationRequest("x", method="coupled", speculation=True, **settings)  # type: ignore[arg-type]
    controller = resolve(request, models(), targets=2).controller
    assert (controller.arms, controller.targets) == (arms_for(7, 2, branches=(3, 1), targets=2), 2)
    whole = resolve(GenerationRequest("x", method="slrs"), models()).controller
    assert not any(arm.drafts and arm.overlap for arm in whole.arms)


def test_the_salt_is_the_scope_of_the_drafter_and_bytes_may_be_more() -> None:
    trees = tuple(nodes for _, nodes in TREES)
    for copies in (False, True):
        found = resolve(GenerationRequest("Hello", cache_salt="mine", method="slem"), models(copies=copies))
        assert found.open_drafter.scope == "mine"
        due = arms_for(64, rounds_only=True, copies=True) if copies else arms_for(trees=trees)
        assert found.controller.arms == due


def test_outputs_share_the_controller_of_their_target() -> None:
    shared = TargetController()
    one, other = (resolve(GenerationRequest("x"), models(), shared=shared).controller for _ in range(2))
    assert one.target is other.target is shared


def test_two_targets_are_held_only_for_speculation() -> None:
    for speculation, addresses, lanes in ((False, 2, 1), (True, 0, 1), (True, 1, 1), (True, 2, 2), (True, 5, 2)):
        request = GenerationRequest("x", speculation=speculation)
        assert resolve(request, models(), targets=addresses).targets == lanes


def test_the_same_secrets_give_the_same_session() -> None:
    request, drawn = GenerationRequest("x", method="coupled", audit=True), Secrets.drawn()
    one, other = (resolve(request, models(), drawn) for _ in range(2))
    assert (one.open_target, one.audit.key) == (other.open_target, other.audit.key)
    weights = np.full(1000, 1e-3)
    assert one.chooser.categorical(weights) == other.chooser.categorical(weights)
    assert Secrets.drawn() != drawn


@pytest.mark.parametrize(
    ("method", "temperature", "taken"),
    [
        (None, 0, "slem"),
        (None, 1, "seeded"),
        ("slem", 1, "slem"),
        ("seeded", 0, "seeded"),
        *((method, 1, "") for method in sorted(METHODS.keys() - set(known.SAFE))),
        ("guess", 1, ""),
    ],
)
def test_methods_whose_tokens_are_the_targets_own_need_no_trust(method: str | None, temperature: float, taken: str):
    request = GenerationRequest("a", method=method, options=SamplingOptions(temperature), allow_inexact=True)
    if taken:
        assert known.without_trust(request).method == taken
        assert METHODS[taken].samples
        return
    with pytest.raises(RequestError, match=r"unknown method 'guess'|is not trusted; use 'slem' or 'seeded'"):
        known.without_trust(request)


def opened_with(target: str = "gpt2", **settings: object) -> OpenTarget:
    settings = {"prompt": "def main(argument):", **settings}
    return resolve(GenerationRequest(**settings), models(target)).open_target  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["gpt2", "llama2"])
def test_a_bad_word_is_written_at_the_beginning_and_in_the_middle(target: str) -> None:
    tokenization = models(target).tokenization
    found = opened_with(target, bad_words=(" the",), options=SamplingOptions(bad_word_ids=((1, 2),)))
    first, *words = found.options.bad_word_ids
    assert first == (1, 2)
    assert words[0] == tokenization.encode_prompt("the", special=False)
    assert words[1:] in ([], [tokenization.encode_prompt(" the", special=False)])
    assert (len(words) == 2) == (target == "gpt2")  # with a prefix space both are the same


def test_ends_are_kept_back_only_if_the_output_has_a_least_length() -> None:
    assert opened_with(stop_token_ids=(7,)).options.end_ids == ()
    options = SamplingOptions(min_tokens=2)
    opening = opened_with(stop_token_ids=(7, 5), ignore_eos=True, options=options)
    assert (opening.options.end_ids, opening.stop_ids) == ((5, 7), (7, 5))


@pytest.mark.parametrize(
    "settings",
    [
        {"options": SamplingOptions(allowed_token_ids=(7,), bad_word_ids=((7,),))},
        {"options": SamplingOptions(allowed_token_ids=(7,), bad_word_ids=((7, 7),))},
        {"options": SamplingOptions(allowed_token_ids=(7,), min_tokens=1), "stop_token_ids": (7,)},
    ],
)
def test_what_may_leave_nothing_to_draw_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="may leave no id to draw"):
        opened_with(**settings)
    assert opened_with(**{**settings, "options": replace(settings["options"], allowed_token_ids=(7, 8))})  # type: ignore[type-var]


def test_an_id_that_is_allowed_twice_is_sent_once_and_options_are_checked_once(monkeypatch) -> None:
    given = SamplingOptions(allowed_token_ids=(9, 7, 8)), SamplingOptions(allowed_token_ids=(9, 7, 8) * 1000)
    monkeypatch.setattr(SamplingOptions, "__init__", None)  # none is made: checks take as long as lists are long
    once, often = (opened_with(options=one, drafter_temperature=0.5).options.allowed_token_ids for one in given)
    assert once == (9, 7, 8) == often


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("stop", ("a",) * 65, "64 entries"),
        ("stop_token_ids", (1,) * 1025, "1024 entries"),
        ("bad_words", ("a",) * 1025, "1024 entries"),
        ("logit_bias", ((1, 0.5),) * 1025, "1024 entries"),
        ("bad_word_ids", ((1,),) * 2049, "2048 entries"),
        ("allowed_token_ids", (1,) * (2**20 + 1), "1048576 entries"),
        ("bad_word_ids", ((1,) * 1000,) * 66, "65536 ids"),
        ("bad_words", ("a" * 1000,) * 66, "65536 characters, those of stop and bad_words together"),
        ("stop", ("a" * 2000,) * 33, "65536 characters, those of stop and bad_words together"),
    ],
)
def test_lists_have_a_limit_whoever_asks(name: str, value: tuple[object, ...], most: str) -> None:
    options = {name: value} if name in vars(SamplingOptions()) else {}
    given = {} if options else {name: value}
    with pytest.raises(RequestError, match=f"must have at most {most}, not"):
        GenerationRequest("a", options=SamplingOptions(**options), **given)


@pytest.mark.parametrize("target", ["gpt2", "llama2"])
def test_a_prompt_is_cut_at_its_beginning(target: str) -> None:
    whole, begin = opened_with(target).prompt, models(target).tokenization.begin
    for count in (1, 4, len(whole), 100):
        kept = max(0, count - len(begin))
        due = whole if count >= len(whole) else (*begin[:count], *whole[len(whole) - kept :])
        assert opened_with(target, truncate_prompt_tokens=count).prompt == due
        assert opened_with(target, prompt=whole, truncate_prompt_tokens=count).prompt == whole[-count:]
    for most, left in ((100, 28), (1000, 127)):
        found = opened_with(target, prompt=whole * 40, max_tokens=most, truncate_prompt_tokens=-1).prompt
        assert found == (whole * 40)[-left:]
    with pytest.raises(RequestError, match=r"value \(129\) is greater than max_model_len \(128\)"):
        opened_with(target, truncate_prompt_tokens=129)


CHAT = Chat((Message("system", "Be brief."), Message("user", "How  are you? 🦄")))
CHATML = ChatTemplate(
    "{% for m in messages %}{{ bos_token if loop.first }}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    (("bos_token", "<s>"), ("eos_token", "</s>")),
)
WHOLE = ChatTemplate("{{ messages[0].content }}")
REFUSING = ChatTemplate("{{ raise_exception('no system message') }}")


def described(name: str = "llama2", template: ChatTemplate | None = None) -> Description:
    return kind(name).described(chat_template=template)


def of(about: Description) -> Tokenization:
    return known.tokenization_of(about, Side.TARGET)


def prompts(prompt: Prompt, target: Description, drafter: Description | None = None) -> Prompts:
    return prompts_of(GenerationRequest(prompt), known.Models(target, of(target), drafter))


@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3"])
@pytest.mark.parametrize("text", ["Hello there", " two  spaces", "naïve 🦄"])
def test_the_drafter_gets_the_letters_of_the_ids_without_what_begins_every_prompt(name: str, text: str) -> None:
    about = described(name)
    ids = of(about).encode_prompt(text)
    made = prompts(ids, about)
    assert (made.target, made.drafter) == (ids, from_bytes(text.encode()))


def test_ids_that_are_no_text_are_letters_all_the_same() -> None:
    about = described()
    end = kind("llama2").id_of("</s>")
    assert prompts((end,), about).drafter == ControlRole.END_OF_SEQUENCE.letter


def test_an_empty_prompt_is_the_symbol_that_prompts_begin_with_if_there_is_one() -> None:
    begin = kind("llama2").id_of("<s>")
    assert prompts("", described()) == Prompts((begin,), Letters(""))
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        prompts("", described("gpt2"))


@pytest.mark.parametrize("truncate", [None, 2])
def test_special_tokens_may_be_left_out_before_a_text(truncate: int | None) -> None:
    about, text = described(), "<s>the dog"
    request = GenerationRequest(text, add_special_tokens=False, truncate_prompt_tokens=truncate)
    ids = prompts_of(request, known.Models(about, of(about))).target
    assert ids == of(about).encode_prompt(text)[1:][-truncate if truncate else 0 :]
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        prompts_of(GenerationRequest("", add_special_tokens=False), known.Models(about, of(about)))


def test_a_token_beyond_the_rows_is_refused_in_prompts_chats_and_bad_words() -> None:
    narrow = replace(described("llama2", CHATML), vocabulary_size=kind("llama2").id_of("<tool_call>"))
    models, needs = known.Models(narrow, of(narrow)), "the text has '<tool_call>', which is id"
    chat = Chat((Message("user", "the <tool_call>"),))
    for request, name in (
        (GenerationRequest("the <tool_call>"), "prompt"),
        (GenerationRequest(chat), "prompt"),
        (GenerationRequest("the", bad_words=("<tool_call>",)), "bad_words"),
    ):
        with pytest.raises(RequestError, match=needs) as refused:
            resolve(request, models)
        assert refused.value.field == name


def test_an_id_that_the_target_has_not() -> None:
    about = described()
    with pytest.raises(RequestError, match=rf"no token with the id {about.vocabulary_size}; the target's ids are 0 to"):
        prompts((1, about.vocabulary_size), about)


def test_each_model_renders_with_its_own_template() -> None:
    target, drafter = described("llama2", CHATML), described("gpt2", ChatTemplate("D:{{ messages[0].content }}"))
    made = prompts(CHAT, target, drafter)
    begin, end = (kind("llama2").id_of(name) for name in ("<s>", "</s>"))
    assert [token for token in made.target if token in (begin, end)] == [begin, end, end]
    assert made.target[0] == begin
    assert (made.drafter, made.templated) == (Letters("D:Be brief."), True)


def test_without_a_template_a_chat_is_refused_but_a_drafter_reads_plain_text() -> None:
    with pytest.raises(RequestError, match=r"'llama2' has no chat template: .* \(--chat-template FILE\)"):
        prompts(CHAT, described())
    made = prompts(CHAT, described("llama2", CHATML), described("gpt2"))
    text = "System: Be brief.\n\nUser: How  are you? 🦄"
    assert (made.drafter, made.templated) == (from_bytes(f"{text}\n\nAssistant:".encode()), False)
    assert plain(replace(CHAT, add_generation_prompt=False)) == text


@pytest.mark.parametrize(
    ("chat", "end"),
    [
        (replace(CHAT, add_generation_prompt=False), "<|user|>\nHow  are you? 🦄</s>\n"),
        (replace(CHAT, add_generation_prompt=False, continue_final_message=True), "<|user|>\nHow  are you? 🦄"),
        (replace(CHAT, template_kwargs='{"eos_token": "<end>"}'), "🦄<end>\n<|assistant|>\n"),
    ],
)
def test_how_a_chat_ends_is_the_requests_to_say(chat: Chat, end: str) -> None:
    assert rendered(chat, CHATML).endswith(end)


def test_a_message_that_a_template_changes_cannot_be_continued() -> None:
    chat = replace(CHAT, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="does not show the last message as it is"):
        rendered(chat, ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}"))
    stripped = ChatTemplate("{% for m in messages %}{{ m.content | trim }}.{% endfor %}")
    assert rendered(replace(chat, messages=(Message("user", " so "),)), stripped) == "so"


def test_a_template_that_refuses_costs_the_request_if_it_is_the_targets() -> None:
    target = described("llama2", REFUSING)
    with pytest.raises(RequestError, match="the chat template of 'llama2' cannot write this chat: no system message"):
        prompts(CHAT, target)
    drafter = replace(described("gpt2"), chat_template=REFUSING)
    target = described("llama2", CHATML)
    assert not prompts(CHAT, target, drafter).templated


class Refusing(Tokenization):
    """Must not be asked to tokenize."""

    def __init__(self, longest: int) -> None:
        self.longest = longest


@pytest.mark.parametrize(
    ("prompt", "size"),
    [
        ("x" * 1281, "1281 bytes of text, and a token has at most 10"),
        (Chat((Message("user", "é" * 700),)), "1400 bytes of text"),
        ((1,) * 128, "128 input tokens"),
    ],
    ids=["text", "chat", "ids"],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenized(prompt: Prompt, size: str) -> None:
    beginning = r"This model's maximum context length is 128 tokens. However, your request has "
    with pytest.raises(PromptTooLongError, match=beginning + size):
        prompts_of(GenerationRequest(prompt), known.Models(described("llama2", WHOLE), Refusing(10)))


def test_a_text_of_the_longest_tokens_is_not_refused_before_it_is_tokenized() -> None:
    about = described("llama2")
    longest = max((letters for letters in of(about).vocabulary.letters), key=len)
    assert of(about).longest >= len(longest)
    with pytest.raises(PromptTooLongError, match=r"your request has \d+ input tokens"):
        prompts("<s>" * 128, about)
    assert len(prompts("<s>" * 100, about).target) == 101


def test_every_field_has_a_kind_that_its_default_is_of() -> None:
    stated = {option.name for option, *_ in typed(GenerationRequest)}
    assert {field.name for field in fields(GenerationRequest)} == {name for name, *_ in KINDS} | stated
    GenerationRequest("x", drafter_temperature=1)
