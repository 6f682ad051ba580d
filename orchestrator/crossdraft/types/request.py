"""A generation request as a user writes it, validated as far as possible before the models are known."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from types import UnionType
from typing import Any, Self

from crossdraft.config import MOST_DRAFT_TOKENS, MOST_LIKELY, MOST_NODES
from crossdraft.config import MOST_PATHS as MOST_PATHS
from crossdraft.config.fields import OptionError, check, option, unchecked
from crossdraft.config.request import ALIASES, Output, Reading, Speculation, Watching
from crossdraft.config.request import Overlap as Overlap
from crossdraft.text.chat_template import ChatTemplate, ChatTemplateError
from crossdraft.text.grammar import Grammar as Grammar
from crossdraft.types.messages import LeftOut, SamplingOptions, fault_of_ids


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str  # system, user, assistant, tool, or another that the model's template knows
    content: str
    fields: str = ""  # a JSON object: what else the template reads, such as tool_calls or tool_call_id; empty: nothing

    @property
    def more(self) -> dict[str, Any]:
        """Those fields; raises ValueError."""
        return _object(self.fields)


@dataclass(frozen=True)
class Chat:
    """A conversation to continue, as a prompt."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True  # the text ends with what begins an answer
    continue_final_message: bool = False  # the text ends within the last message, which the output goes on with
    template_kwargs: str = ""  # a JSON object: further variables of the template, such as tools; empty: none

    @property
    def settings(self) -> dict[str, Any]:
        """For the template; raises ValueError."""
        return {"add_generation_prompt": self.add_generation_prompt, **_object(self.template_kwargs)}

    @property
    def fault(self) -> str:
        """What is wrong with it for any model; empty if nothing is."""
        if not isinstance(self.messages, tuple) or not all(isinstance(one, Message) for one in self.messages):
            return f"the messages of a chat must be a tuple of Message, got {self.messages!r}"
        if not self.messages:
            return "the chat has no messages; give at least one"
        if self.continue_final_message and self.add_generation_prompt:
            return "continue_final_message and add_generation_prompt cannot both be true; set the latter to false"
        fields = {f"fields of message {place} of the chat": one.fields for place, one in enumerate(self.messages)}
        for name, text in {"template_kwargs": self.template_kwargs, **fields}.items():
            try:
                _object(text)
            except (ValueError, TypeError, RecursionError) as error:
                return f"{name} must be a JSON object: {error}"
        for place, message in enumerate(self.messages):
            if not (isinstance(message.role, str) and message.role and isinstance(message.content, str)):
                return f"message {place} of the chat needs a role and a content, both texts"
            if not writable(message.role + message.content):
                return f"message {place} of the chat has half of a surrogate pair, which is not a character"
        return ""


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text or "{}")
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


Prompt = str | tuple[int, ...] | Chat  # ids are the target's
TOOLS = (  # as `text.answers` reads calls of models without a format of their own
    "You may call these functions:\n{}\nTo call some, answer with a JSON list and nothing else: "
    '[{{"name": "...", "arguments": {{...}}}}]\n\n'
)
RESULT = "Result of a function call: "
OVERLAPPED = ("max_draft_tokens", "min_draft_tokens", "branches", "branch_width")
WIDEST = 4096  # ids of a row on the wire; wider ones cannot be rounded to a grid of 2^-24 without bias

KINDS: tuple[tuple[str, type | UnionType, str], ...] = (
    ("prompt", str | tuple | Chat, "a text, a tuple of token ids, or a Chat"),
    ("committed", tuple, "a tuple of token ids"),
    ("stop_token_ids", tuple, "a tuple of token ids"),
    ("bad_words", tuple | list, "a tuple of texts"),
    ("options", SamplingOptions, "SamplingOptions"),
    ("stop", tuple | list, "a tuple of texts"),
)
# Most entries of lists, those of the options included.
MAX_ENTRIES = {
    "stop": 64, "stop_token_ids": 1024, "bad_words": 1024, "logit_bias": 1024, "bad_word_ids": 2048,
    "allowed_token_ids": 2**20,
}  # fmt: skip
COMPILING = 2048  # bytes of text that take as long as compiling a small grammar
MAX_TEXT = 2**16  # characters of all stop strings and bad words, or ids of all bad_word_ids


class RequestError(ValueError):
    """The request cannot be served; the message says what to change."""

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field  # of GenerationRequest, if one of its fields is at fault


class PromptTooLongError(RequestError):
    """The prompt leaves no room in the target's context."""


@dataclass(frozen=True)
class GenerationRequest(Watching, Speculation, Reading, Output):
    """One output for one prompt; `None` in what says how far to draft: the controller decides.

    With overlap on they are 2 K, K, none and 1 (K: num_speculative_tokens).

    Raises:
        RequestError: a field has a wrong type or is out of its range.
    """

    prompt: Prompt
    options: SamplingOptions = field(default_factory=SamplingOptions)
    row_width: int = option(64, "Ids of a draft token's row; the drafter draws among them.", min=1, max=WIDEST)
    head: int = option(64, "Ids of a target row that are sent without being asked for.", min=1, max=WIDEST)
    choice: int = option(0, "Index among the n outputs of one prompt.", min=0, max=2**32 - 1)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the output ends after one of these, too
    bad_words: tuple[str, ...] = ()  # not written: the last of a word's tokens is not drawn after the others
    add_special_tokens: bool = option(True, "A text begins with the special tokens that every prompt begins with.")
    # Ids that an earlier, lost session had already emitted; the output continues after them. They count for max_tokens
    # and stop strings and are not emitted again. A seeded or greedy output continues as it would have. Any other has
    # the target's distribution after them; but a session lost at a given moment has lost some tokens rather than
    # others, because with methods that draw from rows the time to decide a token depends on the token.
    committed: tuple[int, ...] = ()
    logprobs: int | None = option(
        None, "Log-probabilities of so many most probable ids at each token.", min=0, max=MOST_LIKELY
    )

    def __post_init__(self) -> None:
        self._check_types()
        self._check_sizes()
        least = self.options.min_tokens
        checks = (
            (self.prompt != (), "prompt", "the prompt is empty; give at least one token id"),
            (
                least <= self.max_tokens or isinstance(self.max_tokens, LeftOut),
                "min_tokens",
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {least}",
            ),
            (self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", "truncate_prompt_tokens must not be 0"),
            (all(self.stop), "stop", "a stop string must not be empty"),
            (all(self.bad_words), "bad_words", "a bad word must not be empty"),
        )
        for holds, name, complaint in checks:
            if not holds:
                raise RequestError(complaint, name)
        if self.seed is not None and self.seed < 0:
            object.__setattr__(self, "seed", self.seed % 2**64)
        self._check_prompt()
        self._check_overlap()

    @classmethod
    def of(cls, prompt: Prompt, **settings: Any) -> Self:
        """A request for these settings; the names of `ALIASES` stand for fields, too.

        Raises RequestError as the request itself; TypeError: there is no such setting, or one is given by two names.
        """
        for short, name in ALIASES.items():
            if short in settings and name in settings:
                raise TypeError(f"{short} is a short name of {name}: give one of them")
        settings = {ALIASES.get(name, name): value for name, value in settings.items()}
        known = [one.name for one in fields(cls)]
        if unknown := [name for name in settings if name not in known]:
            raise TypeError(f"a request has no setting {unknown[0]!r}{_meant(unknown[0], known)}")
        return cls(prompt, **settings)

    def unchecked(self, **changed: Any) -> Self:
        """As `config.fields.unchecked`."""
        return unchecked(self, **changed)

    @property
    def greedy(self) -> bool:
        return self.options.temperature == 0

    def _check_types(self) -> None:
        for name, kind, what in KINDS:
            if not isinstance(value := getattr(self, name), kind):
                raise RequestError(f"{name} must be {what}, got {value!r}", name)
        if self.overlap not in [*Overlap]:
            raise RequestError(f"overlap must be auto, on or off, got {self.overlap!r}", "overlap")
        object.__setattr__(self, "overlap", Overlap(self.overlap))  # accepts the plain text, too
        try:
            check(self)
        except OptionError as error:
            raise RequestError(str(error), error.name) from error

    def _check_sizes(self) -> None:
        lists = vars(self.options) | vars(self)
        ids = sum(map(len, self.options.bad_word_ids))
        stop, words = (sum(len(one) for one in texts if isinstance(one, str)) for texts in (self.stop, self.bad_words))
        largest = "stop" if stop >= words else "bad_words"
        for name, most, got, what in (
            *((name, most, len(lists[name]), "entries") for name, most in MAX_ENTRIES.items()),
            ("bad_word_ids", MAX_TEXT, ids, "ids"),
            (largest, MAX_TEXT, stop + words, "characters, those of stop and bad_words together"),
        ):
            if got > most:
                raise RequestError(f"{name} must have at most {most} {what}, not {got}", name)

    def _check_prompt(self) -> None:
        if isinstance(self.prompt, Chat) and self.prompt.fault:
            raise RequestError(self.prompt.fault)
        check_text("cache_salt", self.cache_salt)
        for name in ("committed", "stop_token_ids", "prompt"):
            if isinstance(ids := getattr(self, name), tuple) and (fault := fault_of_ids(ids)):
                raise RequestError(f"{name} {fault}", name)
        if isinstance(self.prompt, str):
            check_text("the prompt", self.prompt)
        for name, texts in (("a stop string", self.stop), ("a bad word", self.bad_words)):
            for text in texts:
                check_text(name, text)

    def _check_overlap(self) -> None:
        for name in OVERLAPPED:
            if self.overlap is Overlap.OFF and getattr(self, name) is not None:
                complaint = f"{name} has no effect with overlap off: leave it out, or turn overlap on"
                raise RequestError(complaint, name)
        if self.tree_nodes:
            self._check_tree(self.tree_nodes)
        if self.min_draft_tokens is not None and self.min_draft_tokens > (self.max_draft_tokens or MOST_DRAFT_TOKENS):
            most, got = self.max_draft_tokens, self.min_draft_tokens
            complaint = f"min_draft_tokens must be at most max_draft_tokens, which is {most}, got {got}"
            raise RequestError(complaint, "min_draft_tokens")

    def _check_tree(self, nodes: int) -> None:
        depth = self.num_speculative_tokens
        small = self.overlap is Overlap.OFF and nodes <= depth
        deep = f"more than the depth of the tree (num_speculative_tokens, {depth}), at most {MOST_NODES}"
        for wrong, complaint in (
            (self.overlap is Overlap.ON, "tree_nodes has no effect with overlap on: leave it out, or turn overlap off"),
            (self.audit, "an audit recomputes the draws of chains: leave out tree_nodes, or audit"),
            (
                small and depth >= MOST_NODES,
                f"a tree is at most {MOST_NODES} nodes: lower num_speculative_tokens ({depth})",
            ),
            (small, f"tree_nodes must be {deep}, or 0 for a chain, got {nodes}"),
        ):
            if wrong:
                raise RequestError(complaint, "tree_nodes")


def check_text(name: str, text: object) -> None:
    """Raises RequestError unless it is text that UTF-8 can encode."""
    if not isinstance(text, str):
        raise RequestError(f"{name} must be a text, got {text!r}")
    if not writable(text):
        raise RequestError(f"{name} has half of a surrogate pair, which is no character: escape both halves, or none")


def _meant(name: str, known: Sequence[str]) -> str:
    """Where a setting belongs that a request has not, or which one was meant, to be said behind its name."""
    if name in {one.name for one in fields(SamplingOptions)}:
        return f": give options=SamplingOptions({name}=...)"
    if name in ("target", "drafter"):
        return ": it is said where the connection is made"
    close = get_close_matches(name, (*known, *ALIASES), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}"


Asked = Prompt | GenerationRequest  # of a request: as much of its prompt as it asks to be read


def size_of(asked: Asked) -> int:
    """About how many bytes the prompt has as text."""
    prompt = asked.prompt if isinstance(asked, GenerationRequest) else asked
    if isinstance(prompt, Chat):
        return len(prompt.template_kwargs) + sum(sum(map(len, vars(one).values())) for one in prompt.messages)
    return len(prompt)


def sampling_size(request: GenerationRequest) -> int:
    """About how many bytes of text take as long as what depends on the lists of a request."""
    options = request.options
    ids = len(options.allowed_token_ids) + len(options.logit_bias) + len(options.bad_word_ids)
    ids += 0 if options.grammar is None else COMPILING + len(options.grammar.text)
    return ids + sum(64 + len(word) for word in request.bad_words)


def writable(text: str) -> bool:
    """Whether UTF-8 can encode it; JSON can contain halves of surrogate pairs, which it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def rendered(chat: Chat, template: ChatTemplate) -> str:
    """The chat as a model's own template writes it.

    Raises:
        ChatTemplateError: the template is damaged, or refuses the chat.
    """
    settings = chat.settings
    messages = [{"role": one.role, "content": one.content, **one.more} for one in chat.messages]
    if settings.get("tools") and "tools" not in template.source:
        try:
            messages = _without_tools(messages, settings["tools"])
        except (TypeError, LookupError, AttributeError) as error:
            raise ChatTemplateError(f"tool_calls are not as OpenAI has them: {error!r}") from error
    text = template.render(messages, settings)
    if not writable(text):
        raise ChatTemplateError("half of a surrogate pair, which is not a character, is in it")
    return _open_ended(text, chat.messages[-1].content) if chat.continue_final_message else text


def _without_tools(messages: Sequence[Mapping[str, Any]], tools: object) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: the first one describes them, calls and results are content."""
    shown = []
    for one in messages:
        calls = [call["function"] for call in one.get("tool_calls") or ()]
        content = "\n".join(filter(None, (one["content"], json.dumps(calls, ensure_ascii=False) if calls else "")))
        result = one["role"] == "tool"
        shown.append({"role": "user" if result else one["role"], "content": RESULT + content if result else content})
    described = TOOLS.format(json.dumps(tools, ensure_ascii=False))
    return [{**shown[0], "content": described + shown[0]["content"]}, *shown[1:]]


def _open_ended(text: str, last: str) -> str:
    """A rendered chat up to the end of its last message; as transformers does it, a template may strip blanks."""
    at = text.rfind(last.strip())
    if at < 0:
        raise ChatTemplateError("it does not show the last message as it is, so that the output cannot continue it")
    kept = last.lstrip()
    return text[: at + len(kept if text.startswith(kept, at) else last.strip())]


def plain(chat: Chat) -> str:
    """The chat for a drafter without a template: paragraphs "User: …" and "Assistant: …", and an open "Assistant:"."""
    paragraphs = [f"{one.role.capitalize()}: {one.content}" for one in chat.messages]
    return "\n\n".join([*paragraphs, "Assistant:"] if chat.add_generation_prompt else paragraphs)
