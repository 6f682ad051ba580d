"""A client of an endpoint of OpenAI's API, for audits. It needs httpx2.

It learns what the endpoint lets it ask for, sends no more requests at once and per second than it is told to, and asks
again later where the endpoint says that it is busy.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
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
LONGEST_WAIT = 120.0  # seconds; an endpoint that wants a longer pause is given up
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
        for place, (token, value) in enumerate(self.top):
            if token == self.token and abs(value - self.log_probability) < SAME:
                return place
        return None


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
class Pace:
    """How fast requests are sent."""

    concurrency: int = 4  # requests at once
    per_second: float = 0.0  # 0: no limit
    timeout: float = 120.0  # seconds for a reply


@dataclass(frozen=True)
class Abilities:
    """What an endpoint lets one ask for."""

    api: str
    top: int  # listed tokens of each place; 0: it reports no log-probabilities
    choices: int  # outputs of one request
    neutral: Mapping[str, Any]  # fields that switch off everything but the temperature


class Endpoint:
    """Use it with `async with`; then it has learnt its `abilities`.

    Args:
        url: of the server, without /v1.
        key: of the API; empty: none.
        model: its name; empty: the first that the endpoint lists.
        api: completions, chat, or auto: the first of these that it serves.
        choices: outputs of one request, if the endpoint lets one ask for several.
        extra: further fields of every request.
        prompt: for the requests that learn what it does.
        transport: in place of the network, in tests.
    """

    abilities: Abilities
    advance: Callable[[], None] = staticmethod(lambda: None)  # called after each answer

    def __init__(
        self,
        url: str,
        *,
        prompt: str,
        key: str = "",
        model: str = "",
        api: str = "auto",
        choices: int = 1,
        extra: Mapping[str, Any] | None = None,
        pace: Pace = Pace(),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url, self.model = url, model
        self.requests, self.retries = 0, 0  # sent; of them, those that were sent again
        self._prompt, self._api, self._choices, self._extra = prompt, api, choices, dict(extra or {})
        self._slots, self._next, self._paused = asyncio.Semaphore(pace.concurrency), 0.0, 0.0
        self._answered = False  # at least once
        self._interval = 1 / pace.per_second if pace.per_second else 0.0
        headers = {"User-Agent": "crossdraft-audit"} | ({"Authorization": f"Bearer {key}"} if key else {})
        limits = httpx.Limits(max_connections=None)  # the slots limit them
        self._http = httpx.AsyncClient(headers=headers, timeout=pace.timeout, limits=limits, transport=transport)

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
            response = await self._http.get(self.url + "/metrics")
        except httpx.HTTPError:
            return None
        found = DRAFTED.findall(response.text) if response.status_code == 200 else []
        if not found:
            return None
        drafted, accepted = (sum(float(n) for name, n in found if name == kind) for kind in ("draft", "accepted"))
        return int(drafted), int(accepted)

    async def _first_model(self) -> str:
        found: Any = None
        for attempt in range(ATTEMPTS):  # a server that is starting lists none yet
            found = await self._send("GET", "/v1/models", None)
            if not (isinstance(found, dict) and found.get("data") == []):
                break
            self._pause(2.0**attempt)
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise CannotBeAudited(
                f"{self.url} lists no model: is it still starting? If it never does, name it, --served-model-name NAME"
            ) from error

    async def _learn(self) -> Abilities:
        """Tries what would be best first. Raises CannotBeAudited."""
        refusal: RequestRefused | None = None
        apis = list(APIS) if self._api == "auto" else [self._api]
        for tops, api in product((TOPS, (0,)), apis):  # log-probabilities matter more than which API has them
            for neutral, top in product(NEUTRAL, tops):
                tried = Abilities(api, top, 1, neutral)
                try:
                    reply, *_ = await self._ask(tried, self._prompt, 1, 1.0)
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
        if refusal is not None and self._api == "auto":
            raise refusal
        raise CannotBeAudited(f"{self.url} completes no prompt by --api {self._api}: {refusal}")

    async def _several(self, tried: Abilities) -> int:
        if self._choices == 1:
            return 1
        try:
            return len(await self._ask(tried, self._prompt, 1, 1.0, self._choices))
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
        found = await self._send("POST", APIS[how.api], body | self._extra)
        try:
            if not found["choices"]:
                raise ValueError("no choices")
            return [reply_of(choice, how.top) for choice in found["choices"]]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            shown = json.dumps(found)[:200]
            raise CannotBeAudited(
                f"{self.url} sent a reply that is not of OpenAI's API ({error!r}): {shown}"
            ) from error

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        fault = ""
        for attempt in range(ATTEMPTS):
            async with self._slots:
                await self._turn()
                self.requests, self.retries = self.requests + 1, self.retries + (attempt > 0)
                try:
                    response = await self._http.request(method, self.url + path, json=body)
                except httpx.TransportError as error:
                    if not self._answered and isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
                        raise CannotBeAudited(f"cannot connect to {self.url}: {error}") from error
                    fault, wait = f"{type(error).__name__} {error}".strip(), 2.0**attempt
                else:
                    self._answered = True
                    if response.status_code not in BUSY:
                        return self._answer(response)
                    fault, wait = _shown(response), _retry_after(response, 2.0**attempt)
            if wait > LONGEST_WAIT:
                raise CannotBeAudited(f"{self.url} wants a pause of {wait:.0f} s: come back later ({fault})")
            self._pause(wait)
        raise CannotBeAudited(f"{self.url} cannot be asked, after {ATTEMPTS} attempts: {fault}")

    def _pause(self, seconds: float) -> None:
        """No request is sent for so long."""
        self._paused = max(self._paused, asyncio.get_running_loop().time() + seconds)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        at = max(loop.time(), self._paused, self._next)
        self._next = at + self._interval
        await asyncio.sleep(at - loop.time())
        while self._paused > at:  # it began meanwhile
            at = self._paused
            await asyncio.sleep(at - loop.time())

    def _answer(self, response: httpx.Response) -> Any:
        if response.status_code in (401, 403):
            raise RequestRefused(response.status_code, f"{self.url} wants an API key: {_shown(response)}")
        if 400 <= response.status_code < 500 or response.status_code in NO_API:
            raise RequestRefused(response.status_code, f"{self.url} refused a request: {_shown(response)}")
        if response.status_code != 200:
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


def _retry_after(response: httpx.Response, otherwise: float) -> float:
    """Seconds, or the time of day, as RFC 9110 has it."""
    said = response.headers.get("Retry-After", "")
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(said) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return otherwise


def reply_of(choice: Mapping[str, Any], top: int) -> Reply:
    """A choice of a reply, as OpenAI's completions or chats have it; llama.cpp's completions have the form of chats.

    Raises LookupError, TypeError, ValueError or AttributeError if it has no such form.
    """
    text = choice["text"] if "text" in choice else _content(choice["message"])
    said = choice.get("logprobs") or {}
    if said.get("content"):
        # vLLM has the drawn token in place of the last one where that would not be listed: it depends on the draw.
        places = [_of_chat(one, max(0, top - 1)) for one in said["content"]]
    else:
        tokens = said.get("tokens") or ()
        columns = tokens, said.get("token_logprobs") or (), said.get("top_logprobs") or [{} for _ in tokens]
        places = [_of_completion(*column, top) for column in zip(*columns, strict=True)]
    return Reply(str(text), tuple(places), choice.get("finish_reason") == "stop")


def _content(message: Mapping[str, Any]) -> str:
    """Of a model that reasons, what it has said so far of its reasons."""
    return next((str(message[one]) for one in ("content", "reasoning_content", "reasoning") if message.get(one)), "")


def _of_chat(said: Mapping[str, Any], top: int) -> Place:
    raw = bytes(said["bytes"]) if said.get("bytes") is not None else _raw(said["token"])
    listed = [(str(one["token"]), float(one["logprob"])) for one in said.get("top_logprobs") or ()]
    return _place(str(said["token"]), raw, said["logprob"], listed, top, twice=len(dict(listed)) < len(listed))


def _of_completion(token: str, value: float, listed: Mapping[str, float], top: int) -> Place:
    shown = [(str(one), float(number)) for one, number in (listed or {}).items()]
    return _place(token, _raw(token), value, shown, top, twice=False)


def _place(token: str, raw: bytes, value: float, listed: Sequence[tuple[str, float]], top: int, twice: bool) -> Place:
    """vLLM adds the drawn token to the list: what it has beyond the most probable ones depends on the draw.

    So would a drawn token that is as probable as the last one of the list: it comes behind that.
    """
    kept = tuple(sorted(listed, key=lambda one: (-one[1], one[0] == token))[:top])
    return Place(token, raw, float(value), kept, twice or any(not name or "\ufffd" in name for name, _ in kept))


def _raw(token: str) -> bytes:
    """OpenAI writes bytes that are no text as `bytes:\\xe2\\x80`."""
    if token.startswith("bytes:\\x"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()
