"""What the API answers: OpenAI's objects, with `crossdraft` in them if a trace was asked for."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, TypeAdapter

from crossdraft.client import Reason, Statistics, Token
from crossdraft.rpc.errors import without_addresses
from crossdraft.rpc.event_loop import Beside
from crossdraft.rpc.generation import Committed, OutputEnded, PromptTokens
from crossdraft.serving.backend import OutputItem, TraceSpans
from crossdraft.serving.http.errors import FOREIGN, FieldOf, RefusedError, refusal_of
from crossdraft.serving.http.requests import ChatBody, CompletionBody, GenerationBody
from crossdraft.text.answers import AnswerParser, Said, What
from crossdraft.trace.timeline import Span
from crossdraft.trace.timeline import What as Step
from crossdraft.types.output import Names, PromptToken

Finish = Literal["stop", "length", "tool_calls"]
# Of an output and of its lanes `types.statistics` says what they are.
SHOWN_FIGURES = (
    "method", "tokens", "passes", "epochs", "draft_tokens", "accepted", "corrected", "bonus", "row_misses",
    "tokens_per_pass", "acceptance", "seconds", "first_token_seconds", "tokens_per_second", "drafter_seconds",
    "target_seconds", "wire_seconds", "verification_seconds", "idle_share", "drafted_at", "judged_at", "accepted_at",
    "branches_tried", "branches_hit", "drafter", "undrafted", "drafters_lost", "targets_lost",
)  # fmt: skip
OF_LANES = (
    "role", "bytes_sent", "bytes_received", "model_seconds", "codec_seconds", "open_seconds", "idle_seconds", "lost",
)  # fmt: skip


def figures_of(statistics: Statistics) -> dict[str, Any]:
    """What an output cost, and how often the drafter was right, without the addresses of services."""
    lanes = [
        {name: getattr(lane, name) for name in OF_LANES}
        | {"trip_counts": lane.trips.counts, "trip_seconds": lane.trips.seconds}
        | {"queued_seconds": lane.trips.queued_seconds}
        for lane in statistics.lanes
    ]
    return {name: getattr(statistics, name) for name in SHOWN_FIGURES} | {
        "wire_bytes": statistics.bytes_sent + statistics.bytes_received,
        "drafter_lost": without_addresses(statistics.drafter_lost),
        "lanes": lanes,
    }


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the model's first name
    max_model_len: int  # tokens, as vLLM has it
    drafters: list[str]  # that `speculative` may name
    auto: str | None  # of them, the one that `auto` stands for now; others are tried now and then
    methods: list[str]
    chats: bool  # it has a chat template of its own
    detail: list[str]  # what its targets and drafters cannot do now, and why


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
    detail: list[str]  # which models are not here yet, and why


BodyT = TypeVar("BodyT", bound=GenerationBody)
Shown = PromptTokens | Committed | OutputEnded
IndexedItem = tuple[int, OutputItem]  # the choice's index, and an item of its output
Json = dict[str, Any]  # one of the objects above, or a part of it
JSON = TypeAdapter(Any)  # writes one
BYTES = 8  # of a token in a reply, about
NEVER = -9999.0  # OpenAI's value for log 0: JSON has no infinity
DONE = b"data: [DONE]\n\n"


@dataclass
class PartialOutput:
    """What has come of an output."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    prompt: list[PromptToken] = field(default_factory=list)
    begun: bool = False  # a chunk of it was sent
    ended: OutputEnded | None = None
    answer: AnswerParser | None = None  # reads what its text consists of, if it may have parts
    said: list[Said] = field(default_factory=list)  # those parts
    new: Sequence[Said] = ()  # of them, what the latest item brought

    def hear(self, item: "Shown") -> None:
        """Reads the parts in what comes next."""
        if self.answer is not None:
            tokens, marks = item.tokens if isinstance(item, Committed) else (), self.answer.form.marks
            text = "".join(token.text or _mark(token, marks) for token in tokens)
            self.new = self.answer.end() if isinstance(item, OutputEnded) else self.answer.feed(text)
            self.said += self.new

    def take(self, item: "Shown", echoed: bool) -> None:
        """What comes next; with the prompt's tokens the text begins if they are echoed."""
        match item:
            case PromptTokens():
                self.text += text_of(item.tokens) if echoed else ""
                self.prompt += item.tokens
            case Committed():
                self.text += text_of(item.tokens)
                self.tokens += item.tokens
            case OutputEnded():
                self.ended = item


class Writer(ABC):
    """Writes the reply to one request, of the items of its outputs: whole, or as server-sent events."""

    request_id: str
    field_of: FieldOf  # names fields of the request in errors

    @abstractmethod
    def events(self, index: int, item: OutputItem) -> Iterable[bytes]:
        """Takes the next item of an output; what a stream has of it."""

    @abstractmethod
    async def body(self) -> bytes:
        """The whole reply, as JSON, once everything was taken."""

    @abstractmethod
    def fault(self, refusal: RefusedError) -> bytes:
        """The last events of a stream that an error ends."""

    def end(self) -> bytes:
        """The last events of any other stream."""
        return b""

    async def whole(self, coming: AsyncGenerator[IndexedItem, None]) -> bytes:
        """The reply, once everything has come; raises one of errors.FOREIGN."""
        async with aclosing(coming):
            async for item in coming:
                _ = [*self.events(*item)]
        return await self.body()

    async def stream(self, first: IndexedItem, rest: AsyncGenerator[IndexedItem, None]) -> AsyncGenerator[bytes, None]:
        """All events. An error is an event, too: the status was sent before."""
        async with aclosing(rest):
            try:
                for event in self.events(*first):
                    yield event
                async for item in rest:
                    for event in self.events(*item):
                        yield event
                yield self.end()
            except FOREIGN as error:
                yield self.fault(refusal_of(error, self.request_id, self.field_of))


class Format(Writer, Generic[BodyT]):
    """Writes the reply to one request, whole, or as chunks, each of them a server-sent event."""

    PREFIX: ClassVar[str]  # of ids
    OBJECTS: ClassVar[tuple[str, str]]  # the names of a whole reply and of a chunk
    CHOICES_HAVE_PROMPTS: ClassVar[bool]  # what is told of a prompt stands in choices, or else beside them

    def __init__(
        self, body: BodyT, model: str, request_id: str, beside: Beside, prompts: Sequence[Sequence[int]], measured: bool
    ) -> None:
        self.request_id, self.field_of = request_id, body.field_of
        self._body, self._beside = body, beside
        self._prompts = prompts
        self._measured = measured
        self._head: Json = {"id": f"{self.PREFIX}-{request_id}", "created": int(time.time()), "model": model}
        answers = (None if body.form.plain else AnswerParser(body.form) for _ in range(body.num_outputs))
        self._outputs = [PartialOutput(answer=answer) for answer in answers]
        self._spans: list[list[Span]] = [[] for _ in self._outputs]  # not sent yet
        self._began = time.perf_counter()

    async def body(self) -> bytes:
        values = sum(len(output.tokens) for output in self._outputs) * (1 + (self._body.num_logprobs or 0))
        return await self._beside.run(BYTES * values, lambda: JSON.dump_json(self._whole_reply()))

    def events(self, index: int, item: OutputItem) -> Iterable[bytes]:
        if isinstance(item, TraceSpans):
            self._spans[index] += [
                replace(span, label=without_addresses(span.label)) if span.what is Step.LOST else span
                for span in item.spans
            ]
            return
        output = self._outputs[index]
        output.hear(item)
        if self._body.stream and self._shows(item, output):
            yield event_of(self._chunk(index, output, item))
            output.begun = True
        output.take(item, self._body.echoes_tokens)

    def end(self) -> bytes:
        usage = event_of(self._reply(1, [], **self._totals())) if self._body.include_usage else b""
        return usage + DONE

    def fault(self, refusal: RefusedError) -> bytes:
        return event_of(refusal.body) + DONE

    @abstractmethod
    def _whole(self, index: int, output: PartialOutput) -> Json:
        """Text and log-probabilities of an output that has ended."""

    @abstractmethod
    def _part(self, index: int, before: PartialOutput, item: Shown) -> Json:
        """Likewise, of what comes next; the first part begins with what an answer begins with."""

    def _shows(self, item: Shown, output: PartialOutput) -> bool:
        """A token has no text while its characters are incomplete, or may be the beginning of a stop string or call."""
        if isinstance(item, OutputEnded):
            return True
        if output.new if output.answer is not None else any(token.text for token in item.tokens):
            return True
        return self._body.num_logprobs is not None or self._body.return_token_ids or self._body.speculative.trace

    def _whole_reply(self) -> Json:
        choices = [self._ended(index, one) for index, one in enumerate(self._outputs)]
        return self._reply(0, choices, **self._prompt_fields(0, self._outputs[0]), **self._totals())

    def _chunk(self, index: int, before: PartialOutput, item: Shown) -> Json:
        """Tokens or the end of an output; `before` is the output without them.

        With `include_usage`, chunks before the last one have `usage: null`, or the usage of their choice so far.
        """
        tokens = item.tokens if isinstance(item, Committed) else ()
        choice = self._choice(index, item, before, tokens) | self._part(index, before, item)
        usage = {"usage": None} if self._body.include_usage else {}
        if self._body.continuous_usage:
            usage = _usage(len(self._prompts[index // self._body.n]), len(before.tokens) + len(tokens))
        return self._reply(1, [choice], **self._prompt_fields(index, before), **self._trace(index, item), **usage)

    def _trace(self, index: int, item: Shown) -> Json:
        if not self._body.speculative.trace or isinstance(item, PromptTokens):
            return {}
        fields: Json = {"milliseconds": 1000 * (time.perf_counter() - self._began)}
        if isinstance(item, Committed):
            (token,) = item.tokens  # with a trace each comes by itself
            fields |= {"kind": token.kind, "bytes": list(token.raw)}
        else:
            fields["statistics"] = figures_of(item.statistics)
        if self._spans[index]:
            fields["spans"], self._spans[index] = self._spans[index], []
        return {"crossdraft": fields}

    def _reply(self, kind: int, choices: list[Json], **more: object) -> Json:
        return {**self._head, "object": self.OBJECTS[kind], "choices": choices, **more}

    def _totals(self) -> Json:
        """Usage, and metrics where they are wanted."""
        figures = [output.ended.statistics for output in self._outputs if output.ended is not None]
        measured = self._measured and len(figures) == 1 and figures[0].drafted_at
        metrics = {"metrics": {"speculative_decoding": _speculative_decoding(figures[0])}} if measured else {}
        prompts = sum(one.prompt_tokens for one in figures[:: self._body.n])
        return metrics | _usage(prompts, sum(one.tokens for one in figures))

    def _ended(self, index: int, output: PartialOutput) -> Json:
        assert output.ended is not None
        figures = output.ended.statistics
        trace = {"crossdraft": {"milliseconds": 1000 * figures.seconds, "statistics": figures_of(figures)}}
        choice = self._choice(index, output.ended, output, output.tokens) | self._whole(index, output)
        return choice | (trace if self._body.speculative.trace else {})

    def _choice(self, index: int, item: Shown, output: PartialOutput, tokens: Sequence[Token]) -> Json:
        ids = {"token_ids": [token.id for token in tokens]} if self._body.return_token_ids else {}
        prompt = self._prompt_fields(index, output, of_choice=True)
        stopped = _stopped(item, output, self._body)
        return {"index": index, "finish_reason": _finish(item, output), "stop_reason": stopped, **ids, **prompt}

    def _prompt_fields(self, index: int, output: PartialOutput, of_choice: bool = False) -> Json:
        """What is told of a prompt, once, of a choice or beside it."""
        if output.begun or of_choice is not self.CHOICES_HAVE_PROMPTS:
            return {}
        ids, count = self._body.return_token_ids, self._body.prompt_logprobs
        found: Json = {"prompt_token_ids": self._prompts[index // self._body.n]} if ids else {}
        scores = {} if count is None else {"prompt_logprobs": [_scores(token, count) for token in output.prompt]}
        return found | scores


class CompletionFormat(Format[CompletionBody]):
    """Replies of /v1/completions."""

    PREFIX = "cmpl"
    OBJECTS = ("text_completion", "text_completion")
    CHOICES_HAVE_PROMPTS = True

    def _whole(self, index: int, output: PartialOutput) -> Json:
        tokens = [*(output.prompt if self._body.echoes_tokens else ()), *output.tokens]
        return {"text": self._body.echo_of(index) + output.text, "logprobs": self._logprobs(tokens)}

    def _part(self, index: int, before: PartialOutput, item: Shown) -> Json:
        echo = "" if before.begun else self._body.echo_of(index)
        tokens = () if isinstance(item, OutputEnded) else item.tokens
        logprobs = self._logprobs(tokens, len(before.text)) if tokens else None
        return {"text": echo + text_of(tokens), "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[Token | PromptToken], offset: int = 0) -> Json | None:
        """Of tokens before which are `offset` characters of the text; the first token of a prompt has none."""
        if (count := self._body.num_logprobs) is None:
            return None
        offsets = accumulate((len(token.text) for token in tokens), initial=offset)
        return {
            "tokens": [shown(token.id, token.raw, token.names) for token in tokens],
            "token_logprobs": [None if _first(token) else _finite(token.log_probability) for token in tokens],
            "top_logprobs": [None if _first(token) else _listed(token, count) for token in tokens],
            "text_offset": [*offsets][:-1],
        }


class ChatFormat(Format[ChatBody]):
    """Replies of /v1/chat/completions."""

    PREFIX = "chatcmpl"
    OBJECTS = ("chat.completion", "chat.completion.chunk")
    CHOICES_HAVE_PROMPTS = False

    def _whole(self, index: int, output: PartialOutput) -> Json:
        parts: Json = {"content": output.text} if output.answer is None else self._parts(output.said)
        for call in parts.get("tool_calls", ()):
            del call["index"]
        message = {"role": "assistant", "content": None if parts else "", "refusal": None, **parts}
        return {"message": message, "logprobs": self._logprobs(output.tokens)}

    def _part(self, index: int, before: PartialOutput, item: Shown) -> Json:
        tokens = item.tokens if isinstance(item, Committed) else ()
        delta = self._parts(before.new) if before.answer is not None else {"content": text_of(tokens)} if tokens else {}
        begun = {} if before.begun else {"role": "assistant", "content": ""}
        return {"delta": begun | delta, "logprobs": self._logprobs(tokens) if tokens else None}

    def _parts(self, said: Sequence[Said]) -> Json:
        """Content, reasoning and calls, those that there are."""
        texts, calls = defaultdict[str, str](str), dict[int, Json]()
        reasoning = ("reasoning", "reasoning_content") if self._body.include_reasoning else ()
        for one in said:
            if one.what is What.CALL:
                called = {"name": one.text, "arguments": ""}
                calls[one.call] = {"index": one.call, "id": one.id, "type": "function", "function": called}
            elif one.what is What.ARGUMENTS:
                call = calls.setdefault(one.call, {"index": one.call, "function": {"arguments": ""}})
                call["function"]["arguments"] += one.text
            else:
                for name in reasoning if one.what is What.REASONING else ("content",):
                    texts[name] += one.text
        return texts | ({"tool_calls": [*calls.values()]} if calls else {})

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._body.num_logprobs is None:
            return None
        return {
            "content": [
                _likely(token.id, token.raw, token.log_probability, token.names)
                | {"top_logprobs": [_likely(*candidate, token.names) for candidate in token.top]}
                for token in tokens
            ]
        }


def event_of(value: Json | BaseModel) -> bytes:
    return b"data: " + JSON.dump_json(value) + b"\n\n"


def _usage(prompt: int, completion: int) -> Json:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"usage": counts}


def text_of(tokens: Sequence[Token | PromptToken]) -> str:
    return "".join(token.text for token in tokens)


def _speculative_decoding(figures: Statistics) -> dict[str, Any]:
    """What drafting brought an output, as vLLM has it; a step is a lock-step round, or an epoch with overlap."""
    reached = (figures.drafted_at[0], *figures.accepted_at, 0)
    steps, accepted, drafted = reached[0], sum(figures.accepted_at), sum(figures.drafted_at)
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": [before - after for before, after in pairwise(reached)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(figures.drafted_at),
    }


def _mark(token: Token, marks: Sequence[str]) -> str:
    """The name of a control symbol that is one of these marks."""
    name = dict(token.names).get(token.id, "")
    return name if name in marks else ""


def _scores(token: PromptToken, count: int) -> Json | None:
    """The token itself and the `count` most probable ids."""
    if token.log_probability is None:
        return None
    each = [(token.id, token.raw, token.log_probability, token.rank)]
    each += [(id, raw, value, rank) for rank, (id, raw, value) in enumerate(token.top[:count], 1) if id != token.id]
    return {
        str(id): {"logprob": _finite(value), "rank": rank, "decoded_token": shown(id, raw, token.names)}
        for id, raw, value, rank in each
    }


def _finish(item: Shown, output: PartialOutput) -> Finish | None:
    """OpenAI's word for the end of an output; None for tokens."""
    if not isinstance(item, OutputEnded):
        return None
    if item.reason is not Reason.STOP:
        return "length"
    called = output.answer is not None and output.answer.calls and not output.answer.within
    return "tool_calls" if called else "stop"  # also where a stop string ended a call


def _stopped(item: Shown, output: PartialOutput, body: GenerationBody) -> str | int | None:
    """Which of the request's stop strings and ids ended an output, as vLLM has it; None: something else did."""
    if not isinstance(item, OutputEnded) or item.reason is not Reason.STOP or not output.tokens:
        return None
    last, raw = output.tokens[-1], b"".join([token.raw for token in output.tokens])
    before = len(raw) - len(last.raw)  # bytes; a stop string ends in the last token
    begins = {stop: raw.find(stop.encode(), max(0, before - len(stop.encode()) + 1)) for stop in body.stops}
    found = [stop for stop, begin in begins.items() if begin >= 0]
    if found:
        return min(found, key=lambda stop: (begins[stop], stop))
    return last.id if last.id in body.stop_token_ids else None


def shown(token: int, raw: bytes, names: Names = ()) -> str:
    """A token as text: its characters, else its bytes in OpenAI's spelling, else its name, else its id."""
    if not raw:
        return dict(names).get(token) or f"token_id:{token}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _listed(token: Token | PromptToken, count: int) -> dict[str, float]:
    """The `count` most probable ids, and the token itself, which may be another one."""
    each = (*token.top[:count], (token.id, token.raw, token.log_probability))
    return {shown(id, raw, token.names): _finite(value) for id, raw, value in each}


def _likely(token: int, raw: bytes, value: float | None, names: Names) -> Json:
    return {"token": shown(token, raw, names), "logprob": _finite(value), "bytes": list(raw) or None}


def _first(token: Token | PromptToken) -> bool:
    return isinstance(token, PromptToken) and not token.rank


def _finite(value: float | None) -> float:
    return NEVER if value is None else max(NEVER, value)
