"""Audits of an endpoint in memory, with and without faults that are put in on purpose."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from crossdraft.audit import endpoint as endpoints
from crossdraft.audit.checks import NOT_CHECKED, OK, AuditPlan, Result, audit, compared, draw_of
from crossdraft.audit.endpoint import Abilities, CannotBeAudited, Endpoint, Place, Reply, RequestRefused

TOKENS = tuple(f" {letter}" for letter in "abcdefghijkl")
PROMPT = "Once"


@lru_cache(maxsize=2**14)
def logits(context: str, sharpness: float = 1.5) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of the token after a text, shape (len(TOKENS),)."""
    return np.random.default_rng(zlib.crc32(context.encode())).normal(0.0, sharpness, len(TOKENS))


@dataclass
class Toy:
    """What it does as it should, unless told otherwise."""

    scale: float = 1.0  # of the temperature: a fault
    second: float = 1.0  # of the temperature, further, of second tokens only: a fault
    forbidden: str = ""  # a token that is never drawn: a fault
    least: bool = False  # greedy texts have the least probable second token: a fault
    noise: float = 0.0  # of logits, in nats, as of other kernels
    logprobs: bool = True
    apis: tuple[str, ...] = ("/v1/completions", "/v1/chat/completions")
    strict: bool = False  # fields that OpenAI does not know are refused
    most_listed: int = 20
    several: bool = True  # outputs of a request
    end: str = ""  # a token that ends a text, and is not reported
    unlisted: float = 0.0  # share of drawn tokens without a list, as accepted draft tokens of llama.cpp
    extra_listed: bool = False  # the drawn token is added to the list, as in vLLM
    starting: int = 0  # how often it lists no model before it does
    busy: list[httpx.Response] = field(default_factory=list)  # the first replies
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of requests

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.kernels = np.random.default_rng(11)

    def endpoint(self, **options: Any) -> Endpoint:
        return Endpoint(url="http://toy", prompt=PROMPT, transport=httpx.MockTransport(self.answer), **options)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            self.starting -= 1
            return httpx.Response(200, json={"data": [] if self.starting >= 0 else [{"id": "toy"}]})
        if self.busy:
            return self.busy.pop(0)
        body = json.loads(request.content)
        self.bodies.append(body)
        fault = self.fault_of(request.url.path, body)
        if fault:
            return httpx.Response(fault, json={"error": {"message": "refused"}})
        chat = request.url.path.endswith("chat/completions")
        choices = [self.choice(body, chat, self.rng) for _ in range(body.get("n", 1))]
        return httpx.Response(200, json={"choices": choices})

    def fault_of(self, path: str, body: dict[str, Any]) -> int:
        """An HTTP status; 0: there is none."""
        if path not in self.apis:
            return 404
        listed = body.get("top_logprobs", body.get("logprobs", 0))
        unknown = self.strict and "top_k" in body
        return 400 * (unknown or listed > self.most_listed or (not self.several and "n" in body))

    def choice(self, body: dict[str, Any], chat: bool, rng: np.random.Generator) -> dict[str, Any]:
        text, prompt = "", body["messages"][0]["content"] if chat else body["prompt"]
        count = body.get("top_logprobs", 0) if chat else body.get("logprobs", 0)
        places = list(self.places(prompt, body, rng))
        ended = bool(self.end) and any(TOKENS[drawn] == self.end for drawn, _ in places)
        if ended:
            places = list(takewhile(lambda place: TOKENS[place[0]] != self.end, places))
        text = "".join(TOKENS[drawn] for drawn, _ in places)
        said = [self.said(drawn, values, count) for drawn, values in places]
        if not (count and self.logprobs):
            shown = None
        elif chat:
            # vLLM's chats have the drawn token first and as many in all as were asked for, its completions one more.
            said = [(*own, (top[-1:] + top)[:count] if len(top) > count else top) for *own, top in said]
            shown = {"content": [_chat(*one) for one in said]}
        else:
            columns = [token for token, _, _ in said], [value for _, value, _ in said], [dict(top) for *_, top in said]
            shown = dict(zip(("tokens", "token_logprobs", "top_logprobs"), columns, strict=True))
        content = {"message": {"content": text}} if chat else {"text": text}
        return {"index": 0, "finish_reason": "stop" if ended else "length", "logprobs": shown} | content

    def places(self, prompt: str, body: dict[str, Any], rng: np.random.Generator) -> Iterator[tuple[int, Any]]:
        """Drawn tokens with reported log-probabilities."""
        text, temperature = prompt, body["temperature"]
        for number in range(body["max_tokens"]):
            values = logits(text) + self.noise * self.kernels.normal(size=len(TOKENS))
            if temperature:
                scale = self.scale * (self.second if number == 1 else 1.0)
                weights = np.exp(values / (temperature * scale))
                weights[[token == self.forbidden for token in TOKENS]] = 0
                drawn = int(rng.choice(len(TOKENS), p=weights / weights.sum()))
            else:
                drawn = int(values.argmin() if self.least and number == 1 else values.argmax())
            yield drawn, values - np.log(np.exp(values).sum())
            text += TOKENS[drawn]

    def said(self, drawn: int, values: Any, count: int) -> tuple[str, float, list[tuple[str, float]]]:
        top = [(TOKENS[one], float(values[one])) for one in np.argsort(-values)[:count]]
        own = TOKENS[drawn], float(values[drawn])
        if drawn == int(values.argmax()) and self.kernels.random() < self.unlisted:
            return own[0], 0.0, []
        return *own, top + ([own] if self.extra_listed and own not in top else [])


def _chat(token: str, value: float, top: list[tuple[str, float]]) -> dict[str, Any]:
    listed = [{"token": one, "logprob": number, "bytes": list(one.encode())} for one, number in top]
    return {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": listed}


LAWS = AuditPlan(
    (PROMPT, "Twice", "Never"), greedy=0, greedy_tokens=8, sampled=2, samples=150, tokens=3, tolerance=0.05, level=0.001
)
PLAN = replace(LAWS, greedy=3)
BRIEF = replace(PLAN, sampled=0)  # no distributions


async def audited(plan: AuditPlan, toy: Toy, reference: Toy | None = None, **options: Any) -> Result:
    options = {"choices": 50} | options
    async with toy.endpoint(**options) as endpoint:
        if reference is None:
            return await audit(plan, endpoint, None)
        async with reference.endpoint() as other:
            return await audit(plan, endpoint, other)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which an endpoint would have waited: no time passes."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr("crossdraft.audit.endpoint.asyncio.sleep", sleep)
    return found


def verdicts(result: Result) -> dict[str, str]:
    return {check.name: check.verdict for check in result.checks}


def found(result: Result, name: str) -> str:
    (finding,) = [check.finding for check in result.checks if check.name == name]
    return finding


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_nothing_is_found_where_nothing_is_wrong(api: str) -> None:
    result = await audited(PLAN, Toy(), Toy(), api=api)
    assert result.faults == ()
    beside = (f"{what}, against the reference" for what in ("greedy text", "log-probabilities"))
    laws = ("first token", "second token", "temperature", "missing token")
    assert verdicts(result) == dict.fromkeys(("greedy by its own log-probabilities", *beside, *laws), OK)
    assert result.power.temperature < 0.4


async def test_a_wrong_temperature_is_found() -> None:
    result = await audited(LAWS, Toy(scale=1.35))
    assert result.power.temperature < 0.35
    assert "temperature" in result.faults
    assert "a temperature of +" in found(result, "temperature")


async def test_a_forbidden_token_is_found() -> None:
    result = await audited(LAWS, Toy(forbidden=TOKENS[3]))
    assert "missing token" in result.faults
    assert repr(TOKENS[3]) in found(result, "missing token")


async def test_a_corrected_second_token_is_found() -> None:
    """The first one is as it should be; the second one has another distribution, as after a wrong correction."""
    result = await audited(replace(LAWS, samples=400), Toy(second=2.5))
    assert "second token" in result.faults
    assert "first token" not in result.faults


@pytest.mark.parametrize("logprobs", [True, False])
async def test_a_wrong_greedy_text_is_found_and_a_tie_is_none(logprobs: bool) -> None:
    wrong = await audited(BRIEF, Toy(least=True, logprobs=logprobs), Toy())
    assert "greedy text, against the reference" in wrong.faults
    assert max(one.gap for one in wrong.differences) > 1
    assert all(one.token == 2 for one in wrong.differences)
    assert ("greedy by its own log-probabilities" in wrong.faults) == logprobs

    noisy = replace(BRIEF, greedy_tokens=60, tolerance=0.3)
    tied = await audited(noisy, Toy(noise=0.03, logprobs=logprobs), Toy())
    assert verdicts(tied)["greedy text, against the reference"] == OK
    assert any(0 < one.gap < 0.3 for one in tied.differences)
    strict = await audited(replace(noisy, tolerance=0.0), Toy(noise=0.03, logprobs=logprobs), Toy())
    assert "greedy text, against the reference" in strict.faults


async def test_other_log_probabilities_than_the_references_are_found() -> None:
    assert "log-probabilities, against the reference" in (await audited(BRIEF, Toy(noise=0.5), Toy())).faults


async def test_an_endpoint_without_log_probabilities_needs_a_reference_that_has_them() -> None:
    silent = Toy(logprobs=False)
    with pytest.raises(CannotBeAudited, match=r"reports no log-probabilities .*--reference-url URL, or --model"):
        await audited(PLAN, silent)
    with pytest.raises(CannotBeAudited, match=r"the reference http://toy reports no"):
        await audited(PLAN, Toy(), silent)
    result = await audited(PLAN, silent, Toy())
    assert verdicts(result) == {"greedy text, against the reference": OK, "distributions": NOT_CHECKED}


async def test_what_an_endpoint_lets_one_ask_for_is_learnt() -> None:
    poor = Toy(apis=("/v1/chat/completions",), strict=True, most_listed=5, several=False)
    async with poor.endpoint(choices=16) as one:
        assert (one.model, one.abilities) == ("toy", Abilities("chat", 5, 1, {"top_p": 1}))
        assert (PLAN.requests(one, None), LAWS.requests(one, one)) == (2 * 150 + 3, 2 * 150)
    toy = Toy()
    async with toy.endpoint(choices=16, extra={"user": "me"}) as one:
        assert (one.abilities.api, one.abilities.top, one.abilities.choices) == ("completions", 12, 16)
        sent = one.requests
        assert (await audit(PLAN, one, None)).faults == ()
        assert one.requests - sent == PLAN.requests(one, None)
    assert all(body["user"] == "me" for body in toy.bodies)
    with pytest.raises(CannotBeAudited, match=r"completes no prompt by --api completions: .*HTTP 404"):
        await audited(PLAN, Toy(apis=("/v1/chat/completions",)), api="completions")
    with pytest.raises(RequestRefused, match=r"^http://toy refused a request: HTTP 404 refused$"):
        await audited(PLAN, Toy(apis=()))


async def test_a_busy_endpoint_is_asked_again_when_it_wants(pauses: list[float]) -> None:
    def busy(status: int, after: str) -> httpx.Response:
        return httpx.Response(status, headers={"Retry-After": after})

    async with Toy(busy=[busy(429, "0"), busy(503, "7"), busy(429, "3600")]).endpoint() as endpoint:
        assert endpoint.retries == 3
    assert [pause for pause in pauses if pause] == [7, endpoints.MAX_WAIT]
    with pytest.raises(CannotBeAudited, match=r"cannot be asked, after 6 attempts: HTTP 429"):
        await audited(PLAN, Toy(busy=[busy(429, "soon")] * 6))


@pytest.mark.parametrize(
    ("reply", "kind", "complaint"),
    [
        (httpx.Response(401, text="no"), RequestRefused, "wants an API key: HTTP 401 no"),
        (httpx.Response(500, text="oh"), CannotBeAudited, "failed: HTTP 500 oh"),
        (httpx.Response(200, text="<html>"), CannotBeAudited, "sent no JSON: <html>"),
        (httpx.Response(200, json={"choices": 1}), CannotBeAudited, "not of OpenAI's API"),
        (httpx.Response(200, json={"choices": []}), CannotBeAudited, "not of OpenAI's API"),
    ],
)
async def test_other_replies_are_errors(reply: httpx.Response, kind: type[Exception], complaint: str) -> None:
    with pytest.raises(kind, match=complaint):
        await audited(PLAN, Toy(busy=[reply]))


async def test_a_server_that_is_starting_is_waited_for(pauses: list[float]) -> None:
    async with Toy(starting=3).endpoint() as endpoint:
        assert endpoint.model == "toy"
    assert sum(pauses) > 3
    with pytest.raises(CannotBeAudited, match="lists no model: is it still starting"):
        await audited(PLAN, Toy(starting=100))


async def test_a_reply_that_breaks_off_is_no_refused_connection(pauses: list[float]) -> None:
    toy, failures = Toy(), [httpx.ConnectError("down"), httpx.ReadTimeout("too late"), httpx.ReadError("reset")]

    def answer(request: httpx.Request) -> httpx.Response:
        if failures:
            raise failures.pop()
        return toy.answer(request)

    async with Endpoint(url="http://toy", prompt=PROMPT, transport=httpx.MockTransport(answer)) as endpoint:
        assert endpoint.retries == 3


def test_tokens_that_a_list_cannot_tell_apart_are_not_judged() -> None:
    def place(token: str, value: float, listed: dict[str, float]) -> Any:
        columns = {"tokens": [token], "token_logprobs": [value], "top_logprobs": [listed]}
        return endpoints.reply_of({"text": token, "logprobs": columns, "finish_reason": "length"}, 2).places[0]

    assert place("\ufffd", -1.0, {"\ufffd": -1.0, " a": -2.0}).ambiguous
    added = place(" c", -3.0, {" a": -1.0, " b": -2.0, " c": -3.0})  # vLLM adds the drawn token
    assert (added.top, added.rank, added.ambiguous) == (((" a", -1.0), (" b", -2.0)), None, False)
    tied = place(" c", -2.0, {" c": -2.0, " a": -1.0, " b": -2.0})  # it is drawn, and as probable as the last
    assert (tied.top, tied.rank) == (((" a", -1.0), (" b", -2.0)), None)
    other = place(" a", -4.0, {" a": -1.0, " b": -2.0})  # another token with the same text
    assert (other.rank, draw_of(other).cell) == (None, 2)


async def test_an_end_that_is_not_reported_is_no_bias() -> None:
    """Draws beside it would look too frequent: no token is tested at the depth of the first such end, or behind."""
    result = await audited(replace(LAWS, tokens=8, samples=400), Toy(end=TOKENS[0]))
    assert result.faults == ()
    assert any("only the first" in check.finding for check in result.checks if check.verdict == NOT_CHECKED)


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_what_vllm_adds_to_its_lists_and_accepted_draft_tokens_without_a_list_are_no_bias(api: str) -> None:
    """llama.cpp says nothing of these, which are the more probable ones; its first token is never one of them."""
    assert (await audited(LAWS, Toy(extra_listed=True, most_listed=5), api=api)).faults == ()
    result = await audited(PLAN, Toy(unlisted=0.7), api=api)
    assert result.faults == ()
    assert NOT_CHECKED in verdicts(result).values()


def test_what_the_reference_does_not_list_is_judged_only_if_it_is_far_off() -> None:
    """The end of its list is all that is known of a token: far below the best one, or perhaps just below."""

    def reply(token: str, *listed: float) -> Reply:
        top = tuple((f" {letter}", value) for letter, value in zip("abc", listed, strict=False))
        return Reply(token, (Place(token, token.encode(), top[0][1], top, False),), False)

    def judged(ours: Reply, theirs: Reply) -> tuple[float, bool]:
        found = compared(1, ours, theirs)
        return found.gap, found.at_least

    assert judged(reply(" x", -0.1), reply(" a", -0.1)) == (0.0, True)
    assert judged(reply(" x", -0.1), reply(" a", -0.1, -4.0)) == (pytest.approx(3.9), True)
    # The endpoint's own token counts, and not a listed one with which its name begins.
    assert judged(reply(" bar", -0.1), reply(" a", -0.1, -0.2)) == (pytest.approx(0.1), True)


METRICS = (
    "# TYPE {0}draft_tokens_total counter\n"
    '{0}draft_tokens_total{{engine="0",model_name="a b}} c"}} 2345.0\n'
    '{0}draft_tokens_total{{engine="1"}} 1e+06\n'
    '{0}draft_tokens_created{{engine="1"}} 1.7e+09\n'
    "{0}accepted_tokens_total 7.0\n"
    '{0}accepted_tokens_per_pos_total{{position="0"}} 5.0\n'
)


@pytest.mark.parametrize(
    ("status", "text", "found"),
    [
        (200, METRICS.format("vllm:spec_decode_num_"), (1_002_345, 7)),
        (200, METRICS.format("crossdraft_spec_decode_num_"), (1_002_345, 7)),
        (404, METRICS.format("vllm:spec_decode_num_"), None),
        (200, "vllm:spec_decode_num_draft_tokens_created 1.0\n", None),
    ],
)
async def test_draft_tokens_are_read_from_metrics(status: int, text: str, found: tuple[int, int] | None) -> None:
    http = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    assert await Endpoint(url="http://a", prompt=PROMPT, transport=http).drafted() == found
