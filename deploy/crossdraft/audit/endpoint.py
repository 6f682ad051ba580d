"""A client of an endpoint of OpenAI's API, for audits. It needs httpx2.

It learns what the endpoint lets it ask for, and asks again later where the endpoint says that it is busy.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Self

import httpx2 as httpx

APIS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
TOPS = (20, 5, 1)  # numbers of listed tokens that are tried: limits of vLLM and of OpenAI, and the least
# Servers take defaults from a model's generation_config.json (vLLM, SGLang) or have their own (llama.cpp: top_k 40,
# top_p 0.95, min_p 0.05). Not all know all fields, and not all the same number for "no limit".
NEUTRAL: tuple[dict[str, Any], ...] = (
    {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1},
    {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1},
    {"top_p": 1},
)
BUSY = frozenset({429, 502, 503, 504})
NO_API = frozenset({404, 405, 501})
ATTEMPTS = 6
MAX_WAIT = 120.0  # seconds between two attempts
DRAFTED = re.compile(  # in /metrics of vLLM and of crossdraft
    r"^(?:vllm:|crossdraft_)spec_decode_num_(draft|accepted)_tokens_total(?:\{.*\})? (\d[\d.]*(?:e\+?\d+)?)",
    re.MULTILINE,
)
SAME = 1e-3  # nats: two numbers for one log-probability in one reply


class CannotBeAudited(Exception):  # noqa: N818 - the name says what happened
    """The endpoint does not do what an audit needs; the text says what that is."""


class RequestRefused(CannotBeAudited):
    """A request was answered with an HTTP status from 400 to 499, or with 501."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Place:
    """A generated token, and the most probable ones in its place."""

    token: str
    raw: bytes  # of its text
    log_probability: float  # nats
    top: tuple[tuple[str, float], ...]  # with their log-probabilities, the largest first
    ambiguous: bool  # two of `top` may have the same name, which a completion's list would show as one

    @property
    def rank(self) -> int | None:
        """The token's place in `top`, from 0; None if it is not there."""
        names = (token == self.token and abs(value - self.log_probability) < SAME for token, value in self.top)
        return next((place for place, same in enumerate(names) if same), None)


@dataclass(frozen=True)
class Reply:
    """One output."""

    text: str
    places: tuple[Place, ...]  # empty: the endpoint reports no log-probabilities
    ended: bool  # by the model, not because it was long enough

    @property
    def end_unreported(self) -> bool:
        """Whether the token that ended it is not among its places."""
        return self.ended and (not self.places or self.text.encode().endswith(self.places[-1].raw))


@dataclass(frozen=True)
class Abilities:
    """What an endpoint lets one ask for."""

    api: str
    top: int  # listed tokens of each place; 0: it reports no log-probabilities
    choices: int  # outputs of one request
    neutral: Mapping[str, Any]  # fields that switch off everything but the temperature


@dataclass(kw_only=True, eq=False)
class Endpoint:
    """Use it with `async with`; then it has learnt its `abilities`."""

    url: str  # of the server, without /v1
    prompt: str  # for the requests that learn what it does
    key: str = ""  # of the API; empty: none
    model: str = ""  # its name; empty: the first that the endpoint lists
    api: str = "auto"  # completions, chat, or auto: the first of these that it serves
    choices: int = 1  # outputs of one request, if the endpoint lets one ask for several
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request
    concurrency: int = 4  # requests at once
    timeout: float = 120.0  # seconds for a reply
    transport: httpx.AsyncBaseTransport | None = None  # in place of the network, in tests
    requests: int = 0  # that were sent
    retries: int = 0  # of them, those that were sent again

    def __post_init__(self) -> None:
        self.advance: Callable[[], None] = lambda: None  # called after each answer
        self._slots = asyncio.Semaphore(self.concurrency)
        headers = {"User-Agent": "crossdraft-audit"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        limits = httpx.Limits(max_connections=None)  # the slots limit them
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=self.timeout, limits=limits, transport=self.transport
        )

    async def __aenter__(self) -> Self:
        """Raises CannotBeAudited."""
        try:
            self.model = self.model or await self._first_model()
            self.abilities = await self._learn()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, prompt: str, max_tokens: int, temperature: float, *, choices: int = 1) -> list[Reply]:
        """`choices` outputs of one request. Raises CannotBeAudited, and RequestRefused of its kind."""
        replies = await self._ask(self.abilities, prompt, max_tokens, temperature, choices)
        if len(replies) != choices:
            raise CannotBeAudited(f"{self.url} gave {len(replies)} outputs where {choices} were asked for: --choices 1")
        self.advance()
        return replies

    async def drafted(self) -> tuple[int, int] | None:
        """Draft tokens of the server so far, and how many of them were accepted; None if its metrics do not say."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError:
            return None
        found = DRAFTED.findall(response.text) if response.status_code == 200 else []
        drafted, accepted = (sum(float(n) for name, n in found if name == kind) for kind in ("draft", "accepted"))
        return (int(drafted), int(accepted)) if found else None

    async def _first_model(self) -> str:
        for attempt in range(ATTEMPTS):  # a server that is starting lists none yet
            await asyncio.sleep(2.0**attempt - 1)
            found = await self._send("GET", "/v1/models", None)
            with suppress(LookupError, TypeError):
                return str(found["data"][0]["id"])
        raise CannotBeAudited(f"{self.url} lists no model: is it still starting? Or name it, --served-model-name NAME")

    async def _learn(self) -> Abilities:
        """Tries what would be best first. Raises CannotBeAudited."""
        refusal: RequestRefused | None = None
        apis = list(APIS) if self.api == "auto" else [self.api]
        for tops, api in product((TOPS, (0,)), apis):  # log-probabilities matter more than which API has them
            for neutral, top in product(NEUTRAL, tops):
                tried = Abilities(api, top, 1, neutral)
                try:
                    reply, *_ = await self._ask(tried, self.prompt, 1, 1.0)
                except RequestRefused as error:
                    if error.status in (401, 403):
                        raise
                    refusal = refusal or error
                    if error.status in NO_API:
                        break
                    continue
                listed = len(reply.places[0].top) if reply.places else 0
                if not top or listed:
                    shown = top if listed == top - 1 else listed  # chats are judged by one token less than they list
                    return Abilities(api, top and shown, await self._several(tried), neutral)
                break  # it takes the field and gives no log-probabilities
        if refusal is not None and self.api == "auto":
            raise refusal
        raise CannotBeAudited(f"{self.url} completes no prompt by --api {self.api}: {refusal}")

    async def _several(self, tried: Abilities) -> int:
        try:
            return 1 if self.choices == 1 else len(await self._ask(tried, self.prompt, 1, 1.0, self.choices))
        except RequestRefused:
            return 1

    async def _ask(
        self, how: Abilities, prompt: str, max_tokens: int, temperature: float, choices: int = 1
    ) -> list[Reply]:
        chat = how.api == "chat"
        body = {"model": self.model, "max_tokens": max_tokens, "temperature": temperature, **how.neutral}
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        if how.top:
            body |= {"logprobs": True, "top_logprobs": how.top} if chat else {"logprobs": how.top}
        body |= {} if choices == 1 else {"n": choices}
        found = await self._send("POST", APIS[how.api], body | dict(self.extra))
        try:
            if not found["choices"]:
                raise ValueError("no choices")
            return [reply_of(choice, how.top) for choice in found["choices"]]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            shown = json.dumps(found)[:200]
            raise CannotBeAudited(f"{self.url} sent what is not of OpenAI's API ({error!r}): {shown}") from error

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        fault, wait = "", 0.0
        async with self._slots:  # also while it waits: a busy server is asked less
            for attempt in range(ATTEMPTS):
                await asyncio.sleep(wait)
                self.requests, self.retries, wait = self.requests + 1, self.retries + (attempt > 0), 2.0**attempt
                try:
                    response = await self._http.request(method, path, json=body)
                except httpx.TransportError as error:
                    if self.requests == 1 and isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
                        raise CannotBeAudited(f"cannot connect to {self.url}: {error}") from error
                    fault = f"{type(error).__name__} {error}"
                    continue
                if response.status_code not in BUSY:
                    return self._answer(response)
                fault, said = _shown(response), response.headers.get("Retry-After", "")
                wait = min(float(said), MAX_WAIT) if said.isdecimal() else wait
        raise CannotBeAudited(f"{self.url} cannot be asked, after {ATTEMPTS} attempts: {fault}")

    def _answer(self, response: httpx.Response) -> Any:
        status = response.status_code
        if 400 <= status < 500 or status in NO_API:
            what = "wants an API key" if status in (401, 403) else "refused a request"
            raise RequestRefused(status, f"{self.url} {what}: {_shown(response)}")
        if status != 200:
            raise CannotBeAudited(f"{self.url} failed: {_shown(response)}")
        try:
            return response.json()
        except ValueError as error:
            raise CannotBeAudited(f"{self.url} sent no JSON: {response.text[:200]}") from error


def _shown(response: httpx.Response) -> str:
    """The status, and what OpenAI's form of an error says, or else how the reply begins."""
    try:
        text = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        text = response.text
    return f"HTTP {response.status_code} {str(text)[:300]}"


def reply_of(choice: Mapping[str, Any], top: int) -> Reply:
    """A choice of a reply, as OpenAI's completions or chats have it; llama.cpp's completions have the form of chats.

    Raises LookupError, TypeError, ValueError or AttributeError if it has no such form.
    """
    said = choice.get("logprobs") or {}
    if said.get("content"):
        # vLLM has the drawn token in place of the last one where that would not be listed: it depends on the draw.
        places = [_of_chat(one, max(0, top - 1)) for one in said["content"]]
    else:
        tokens = said.get("tokens") or ()
        columns = tokens, said.get("token_logprobs") or (), said.get("top_logprobs") or [{} for _ in tokens]
        rows = zip(*columns, strict=True)
        places = [_place(token, token.encode(), value, [*(top_of or {}).items()], top) for token, value, top_of in rows]
    content = choice if "text" in choice else choice["message"]
    names = ("text", "content", "reasoning_content", "reasoning")  # of a model that reasons, what it has said so far
    text = next((content[name] for name in names if content.get(name)), "")
    return Reply(str(text), tuple(places), choice.get("finish_reason") == "stop")


def _of_chat(said: Mapping[str, Any], top: int) -> Place:
    raw = said["token"].encode() if said.get("bytes") is None else bytes(said["bytes"])
    listed = [(one["token"], one["logprob"]) for one in said.get("top_logprobs") or ()]
    return _place(said["token"], raw, said["logprob"], listed, top)


def _place(token: str, raw: bytes, value: float, listed: Sequence[tuple[str, float]], top: int) -> Place:
    """vLLM adds the drawn token to the list: what it has beyond the most probable ones depends on the draw.

    So would a drawn token that is as probable as the last one of the list: it comes behind that.
    """
    kept = tuple(sorted(listed, key=lambda one: (-one[1], one[0] == token))[:top])
    twice = len(dict(listed)) < len(listed)
    return Place(token, raw, float(value), kept, twice or any(not name or "\ufffd" in name for name, _ in kept))
