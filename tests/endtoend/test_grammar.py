"""Structured outputs through gRPC: the target's own law by a grammar, whatever drafts, and what ends is valid."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from jsonschema import validate

from crossdraft.audit.statistics import fit_of
from crossdraft.client import Generation, GenerationRequest, Grammar, Reason
from crossdraft.rpc.errors import BadRequest
from crossdraft.text.grammar import GrammarError, of_letters
from crossdraft.types.messages import NoiseKey, SamplingOptions
from crossdraft.types.request import RequestError
from tests.conftest import FULL
from tests.endtoend.reference import Case, Noise, Reference
from tests.endtoend.stack import AHEAD, NGRAM, ROUNDS, Stack, statistics
from tests.prompts import PROMPTS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["alpha", "alphabet", 'bé"ta']},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["kind", "count", "tags", "ok"],
    "additionalProperties": False,
}
DENSE = Grammar.json(SCHEMA, whitespace_flexible=False)
TEXTS = PROMPTS[::10][:3]
TOKENS, SEED = 48, 11
TREES = {"overlap": "off", "tree_nodes": 12}
SERVED = ("drafter-a", "drafter-b", "drafter-c", NGRAM)
CASES: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}), ("drafter-b", TREES), ("drafter-b", AHEAD), (NGRAM, ROUNDS), ("drafter-c", ROUNDS),
]  # fmt: skip
pytestmark = pytest.mark.asyncio(loop_scope="module")


def requests(options: SamplingOptions, **settings: Any) -> list[GenerationRequest]:
    return [GenerationRequest(text, options=options, max_tokens=TOKENS, **settings) for text in TEXTS]


def checked(generations: list[Generation], schema: Any = SCHEMA) -> int:
    """How many have ended; each of these is valid, and the others begin something that is."""
    ended = [one for one in generations if one.reason is Reason.STOP]
    for one in ended:
        validate(json.loads(one.text), schema)
    assert all(one.reason is Reason.LENGTH for one in generations if one not in ended)
    return len(ended)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def noise(stack: Stack) -> Noise:
    return Noise((await stack.pipeline(None)).models.tokenization.vocabulary, NoiseKey(SEED))


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(("drafter", "settings"), CASES)
@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "seeded"])
async def test_it_is_what_the_target_writes_by_itself(stack, reference, noise, drafter, settings, temperature):
    """transformers' `generate`, with each token tried by itself: the same ids, penalties and all."""
    options = SamplingOptions(temperature, presence_penalty=0.3, grammar=DENSE)
    seeded = {"method": "seeded", "seed": SEED} if temperature else {"method": "slem"}
    found = await stack.run(drafter, requests(options, **seeded, **settings))
    cases = [Case(text, TOKENS, options, noise=noise if temperature else None) for text in TEXTS]
    assert reference.same(cases, found).count(False) <= 1
    assert checked(found)
    if drafter is None:  # what must follow is drawn together
        assert all(0 < statistics(one).passes < len(one.ids) for one in found)
    else:
        assert sum(statistics(one).accepted for one in found)


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(
    ("method", "drafter", "settings"),
    [
        ("coupled", "drafter-b", AHEAD), ("tli", "drafter-a", ROUNDS), ("union", "drafter-b", ROUNDS),
        ("slrs", "drafter-c", ROUNDS), ("coupled-shared", "drafter-a", AHEAD), ("coupled", NGRAM, ROUNDS),
        ("slem", "drafter-b", TREES),
    ],
)  # fmt: skip
async def test_what_is_sampled_with_any_method_is_valid(stack, method, drafter, settings):
    options = SamplingOptions(top_p=0.95, grammar=DENSE)
    found = await stack.run(drafter, (8 if FULL else 2) * requests(options, method=method, **settings))
    assert checked(found)
    assert sum(statistics(one).accepted for one in found)
    assert not any(statistics(one).drafter_lost for one in found)


def some_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    """Of few letters, mostly, so that outputs come to their end."""
    low, few = random.randint(-20, 20), random.randint(0, 3)
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 900)},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        {"type": "string", "minLength": few, "maxLength": few + 3},
        {"type": "string", "pattern": random.choice(["^[a-c]{1,3}$", "^\\d+(é|ü)?$", '^"?x+$'])},
        {"type": "string", "format": random.choice(["date", "uuid", "ipv4"])},
        {"enum": random.sample(["a", "ab", "abc", 1, 12, None, True, ["é"], {"k": 1}], 4)},
        {"const": random.choice(["x\\y", 'a"b', "🦄", 0.5, [], {}])},
        {"type": ["boolean", "null"]},
    ]
    if depth:
        inner = [some_schema(random, depth - 1) for _ in range(3)]
        names = random.sample(["a", "ab", "b c", "é", '"', "z"], 3)
        needed = random.sample(names, random.randint(0, 3))
        kinds += 2 * [
            {"type": "array", "items": inner[0], "minItems": few, "maxItems": few + 2},
            {"type": "array", "prefixItems": inner, "items": False, "minItems": random.randint(0, 3)},
            {
                "type": "object",
                "properties": dict(zip(names, inner, strict=True)),
                "required": needed,
                "additionalProperties": False,
            },
            {"type": "object", "additionalProperties": inner[1], "maxProperties": 2, "propertyNames": {"maxLength": 3}},
            {"anyOf": inner},
        ]
    return random.choice(kinds)


SCHEMAS = 100 if FULL else 6  # for each way to draft


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(
    ("method", "drafter", "settings"),
    [("seeded", None, {}), ("coupled", "drafter-b", AHEAD), ("slem", "drafter-a", TREES), ("slem", NGRAM, ROUNDS)],
)
async def test_random_schemas(stack: Stack, method: str, drafter: str | None, settings: dict[str, Any]) -> None:
    """All that ends is valid: five outputs of each, 2,000 in a full run."""
    random, given = Random(f"{method} {drafter}"), list[tuple[dict[str, Any], GenerationRequest]]()
    for _ in range(SCHEMAS):
        schema = some_schema(random)
        grammar = Grammar.json(schema, whitespace_flexible=random.random() < 0.5)
        options = SamplingOptions(random.choice([0.7, 1.0, 1.5]), grammar=grammar)
        try:
            of_letters().matcher(grammar)
        except GrammarError:  # what the library does not know is refused
            continue
        asked = GenerationRequest(random.choice(TEXTS), options=options, method=method, max_tokens=64, **settings)
        given.append((schema, asked))
    found = await stack.run(drafter, [asked for _, asked in given for _ in range(5)])
    ended = [checked(found[5 * place :][:5], schema) for place, (schema, _) in enumerate(given)]
    assert sum(ended) >= SCHEMAS


WORDS = ("true", "tru", "truth", "false", "t")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def law(stack: Stack, reference: Reference) -> Counter[str]:
    """Each text's probability: the product of the model's masked and normalized rows."""
    vocabulary = (await stack.pipeline(None)).models.tokenization.vocabulary
    words = [one.encode().decode("latin-1") for one in WORDS]
    law: Counter[str] = Counter()
    prompt = reference.encode(TEXTS[0])
    (end,) = vocabulary.stops

    def spread(ids: list[int], text: str, weight: float) -> None:
        probabilities = reference.log_probabilities(prompt + ids)[-1].exp().double().numpy()
        allowed = [
            at for at, one in enumerate(vocabulary.letters) if any(word.startswith(text + one) for word in words)
        ]
        allowed += [end] if text in words else []
        total = probabilities[allowed].sum()
        for at in allowed:
            share = weight * probabilities[at] / total
            if at == end:
                law[text] += share
            elif share > 1e-9:
                spread([*ids, at], text + vocabulary.letters[at], share)

    spread([], "", 1.0)
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
    return law


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(("method", "settings"), [("coupled", AHEAD), ("slem", ROUNDS), ("union", ROUNDS)])
async def test_the_law_is_that_of_the_model_masked_and_normalized(stack, law, method, settings):
    """All texts of a grammar, by chi-square."""
    count = 2000 if FULL else 400
    request = GenerationRequest(
        TEXTS[0], options=SamplingOptions(1.0, grammar=Grammar.choice(WORDS)), method=method, max_tokens=8, **settings
    )
    for last in (False, True):
        found = Counter(one.text for one in await stack.run("drafter-b", count * [request]))
        assert found.keys() <= set(WORDS)
        fit = fit_of({place: found[word] for place, word in enumerate(WORDS)}, np.array([law[one] for one in WORDS]))
        assert fit is not None
        if fit.p > 5e-5:
            return
        assert not last, (found, law)


async def test_where_it_is_cut_it_is_the_beginning_of_something_valid(stack: Stack) -> None:
    options = SamplingOptions(0, grammar=DENSE)
    for request in requests(options):
        (whole,) = await stack.run(None, [request])
        (cut,) = await stack.run("drafter-b", [replace(request, max_tokens=9)])
        assert (cut.reason, cut.ids) == (Reason.LENGTH, whole.ids[:9])
        (stopped,) = await stack.run(None, [replace(request, stop=('"count',))])  # within the name of a field
        assert (stopped.reason, stopped.text) == (Reason.STOP, whole.text[: whole.text.index('"count')])


async def test_an_output_goes_on_in_mid_object_where_another_session_was_lost(stack: Stack) -> None:
    options = SamplingOptions(grammar=DENSE)
    for request in requests(options, method="seeded", seed=SEED):
        (whole,) = await stack.run(None, [request])
        for at in (1, 5, len(whole.ids) - 1):
            (rest,) = await stack.run("drafter-b", [replace(request, committed=tuple(whole.ids[:at]))])
            assert (*whole.ids[:at], *rest.ids) == tuple(whole.ids)


async def test_what_cannot_be_served_is_said(stack: Stack) -> None:
    pipeline = await stack.pipeline("drafter-b")
    bad = SamplingOptions(grammar=Grammar.json({"type": "obj"}))
    with pytest.raises(RequestError, match=r"Grammar error: .*Invalid type: obj"):
        pipeline.run(GenerationRequest("a", options=bad))
    stray = SamplingOptions(0, grammar=Grammar.choice(["yes", "no"]))
    (yes,) = await stack.run(None, [GenerationRequest("a", options=stray)])
    wrong = tuple(pipeline.models.tokenization.encode_continuation(" maybe"))
    with pytest.raises(BadRequest, match="the grammar allows no token of this vocabulary after ' maybe'"):
        await stack.run(None, [GenerationRequest("a", options=stray, committed=wrong)])
    for limits in ({"allowed_token_ids": (5,)}, {"min_tokens": 20}):  # said at once: no other target is tried
        for drafter in (None, "drafter-b"):
            with pytest.raises(BadRequest, match="leave no id to draw"):
                await stack.run(drafter, [GenerationRequest("a", options=replace(stray, **limits))])
    assert yes.text in ("yes", "no")


async def test_a_slow_grammar_holds_nobody_up(stack: Stack) -> None:
    """It ends by an error of its own, or by itself; beside it another output comes to its end."""
    ambiguous = Grammar.ebnf('start: a\na: "x" a "x" a | "x" | a "y" | a a a a | ')
    slow = GenerationRequest("x", options=SamplingOptions(grammar=ambiguous), max_tokens=64)
    plain = GenerationRequest(TEXTS[0], options=SamplingOptions(0), max_tokens=32)
    found, other = await asyncio.gather(stack.run(None, [slow]), stack.run(None, [plain]), return_exceptions=True)
    assert isinstance(found, BadRequest) or all(set(one.text) <= {"x", "y"} for one in found)
    assert len(other[0].ids) == 32
