"""An endpoint in memory: a table-driven model behind OpenAI's API, and the faults that an audit should find."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import httpx2 as httpx
import numpy as np

from crossdraft.audit.endpoint import Endpoint

TOKENS = tuple(f" {letter}" for letter in "abcdefghijkl")
PROMPT = "Once"


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
            if self.starting >= 0:
                return httpx.Response(200, json={"data": []})
            return httpx.Response(200, json={"data": [{"id": "toy"}]})
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
