"""A request as a user writes it, checked as far as it can be before the models are known."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import UnionType

from crossdraft.text.chat_template import ChatTemplate
from crossdraft.types.messages import MOST_DRAFT_TOKENS, MOST_LIKELY, SamplingOptions

# A chat as a prompt, and how it is written for a model.


@dataclass(frozen=True)
class Message:
    """What one side has said."""

    role: str  # system, user, assistant, or what else the model's template knows
    content: str


@dataclass(frozen=True)
class Chat:
    """A conversation that the model is to go on with."""

    messages: tuple[Message, ...]

    @property
    def fault(self) -> str:
        """What is wrong with it, whatever the model; empty if nothing is."""
        if not isinstance(self.messages, tuple) or not all(isinstance(one, Message) for one in self.messages):
            return f"the messages of a chat must be a tuple of Message, got {self.messages!r}"
        if not self.messages:
            return "the chat has no messages; give at least one"
        for place, message in enumerate(self.messages):
            if not (isinstance(message.role, str) and message.role and isinstance(message.content, str)):
                return f"message {place} of the chat needs a role and a content, both texts"
            if not writable(message.role + message.content):
                return f"message {place} of the chat has half of a surrogate pair, which is no character"
        return ""


Prompt = str | tuple[int, ...] | Chat  # ids are the target's
MOST_PATHS = 16
WIDEST = 4096  # ids of a row on the wire; wider ones cannot be rounded to a grid of 2^-24 without bias

NUMBERS = (
    "k",
    "max_tokens",
    "row_width",
    "head",
    "seed",
    "choice",
    "window",
    "wait",
    "branches",
    "branch_width",
    "paths",
    "logprobs",
)
SWITCHES = ("ignore_eos", "allow_inexact", "audit", "speculation", "explain")
MAY_BE_LEFT_OUT = frozenset(
    {"method", "drafter_temperature", "seed", "window", "wait", "branches", "branch_width", "record", "logprobs"}
)
# Fields, what they must be instances of, and how that is said.
KINDS: tuple[tuple[str, type | UnionType, str], ...] = (
    *((name, int, "a whole number") for name in NUMBERS),
    *((name, bool, "True or False") for name in SWITCHES),
    ("prompt", str | tuple | Chat, "a text, a tuple of token ids, or a Chat"),
    ("committed", tuple, "a tuple of token ids"),
    ("method", str, "the name of a method"),
    ("options", SamplingOptions, "SamplingOptions"),
    ("drafter_temperature", int | float, "a number"),
    ("stop", tuple | list, "a tuple of texts"),
    ("record", Path, "a Path"),
)


class RequestError(ValueError):
    """The request cannot be served; the text says what to change."""

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field  # of GenerationRequest, where it is that one's fault


class PromptTooLongError(RequestError):
    """The prompt leaves no room in the target's context."""


class Overlap(StrEnum):
    """Whether the drafter drafts on while the target verifies."""

    AUTO = "auto"  # the controller decides, from what it measures
    ON = "on"
    OFF = "off"  # the classic lock-step round of k draft tokens


@dataclass(frozen=True)
class GenerationRequest:
    """One output for one prompt."""

    prompt: Prompt
    method: str | None = None  # None: the default for temperature, seed and pair
    k: int = 5  # draft tokens in a lock-step round
    max_tokens: int = 128
    options: SamplingOptions = field(default_factory=SamplingOptions)
    drafter_temperature: float | None = None  # None: the target's
    row_width: int = 64  # ids of a draft token's row; the drafter draws among them
    head: int = 64  # ids of a target row that travel unasked
    seed: int | None = None
    choice: int = 0  # index among the n outputs of one prompt
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    allow_inexact: bool = False  # a method whose output has not the target's distribution may be used
    audit: bool = False  # every draw of the drafter is recomputed from its row; a wrong one costs it the session
    overlap: Overlap = Overlap.AUTO
    window: int | None = (
        None  # most draft tokens ahead of the walk; None: 2 k with overlap on, the controller's with auto
    )
    wait: int | None = (
        None  # unrevealed draft tokens that a pass waits for; None: k with overlap on, the controller's with auto
    )
    branches: int | None = (
        None  # draft tokens of each prepared continuation, 0: none; None: the controller's, else none
    )
    branch_width: int | None = None  # prepared continuations for each draft token; None: the controller's, else 1
    paths: int = 2  # most guessed paths in the tree of a pass; 1: a chain
    speculation: bool = False  # with two targets, a pass may begin on one before that of the other has returned
    explain: bool = False  # the controller's choices are kept, to be shown
    record: Path | None = None  # file for the flight recorder
    # The output's first ids, where an earlier session was lost: it goes on after them. They count for max_tokens and
    # for stop strings, and are not given out again. A seeded or greedy output goes on as it would have. Of others the
    # rest has the target's distribution after them; but with methods that draw from rows, how long a token takes to
    # decide depends on the token, so that a session that is lost at some moment has lost some tokens rather than
    # others.
    committed: tuple[int, ...] = ()
    # Set: every token comes with its log-probability, and with so many of the most probable ones in its place.
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        checks = (
            (bool(self.prompt), "prompt", "the prompt is empty; give at least one character, or one token id"),
            (1 <= self.k <= MOST_DRAFT_TOKENS, "k", f"k must be between 1 and {MOST_DRAFT_TOKENS}, got {self.k}"),
            (self.max_tokens >= 1, "max_tokens", f"max_tokens must be at least 1, got {self.max_tokens}"),
            (
                1 <= self.row_width <= WIDEST,
                "row_width",
                f"row_width must be between 1 and {WIDEST}, got {self.row_width}",
            ),
            (1 <= self.head <= WIDEST, "head", f"head must be between 1 and {WIDEST}, got {self.head}"),
            (0 <= self.choice < 2**32, "choice", f"choice must be between 0 and 2**32 - 1, got {self.choice}"),
            (
                self.drafter_temperature is None or 0 <= self.drafter_temperature < float("inf"),
                "drafter_temperature",
                f"drafter_temperature must be 0 or more, got {self.drafter_temperature}",
            ),
            (
                self.seed is None or 0 <= self.seed < 2**64,
                "seed",
                f"seed must be between 0 and 2**64 - 1, got {self.seed}",
            ),
            (all(self.stop), "stop", "a stop string must not be empty"),
            (
                self.logprobs is None or 0 <= self.logprobs <= MOST_LIKELY,
                "logprobs",
                f"logprobs must be between 0 and {MOST_LIKELY}, got {self.logprobs}",
            ),
            (1 <= self.paths <= MOST_PATHS, "paths", f"paths must be between 1 and {MOST_PATHS}, got {self.paths}"),
        )
        for holds, name, complaint in checks:
            if not holds:
                raise RequestError(complaint, name)
        self._check_prompt()
        self._check_overlap()

    @property
    def greedy(self) -> bool:
        """Whether the target's most probable token is wanted, always."""
        return self.options.temperature == 0

    def _check_prompt(self) -> None:
        if isinstance(self.prompt, Chat) and self.prompt.fault:
            raise RequestError(self.prompt.fault)
        check_ids("committed", self.committed)
        if isinstance(self.prompt, tuple):
            check_ids("prompt", self.prompt)
        elif isinstance(self.prompt, str):
            check_text("the prompt", self.prompt)
        for text in self.stop:
            check_text("a stop string", text)

    def _check_types(self) -> None:
        for name, kind, what in KINDS:
            value = getattr(self, name)
            # A bool is an int for Python, and none here.
            wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
            if wrong and not (value is None and name in MAY_BE_LEFT_OUT):
                raise RequestError(f"{name} must be {what}, got {value!r}", name)

    def _check_overlap(self) -> None:
        if self.overlap not in [*Overlap]:
            raise RequestError(f"overlap must be auto, on or off, got {self.overlap!r}", "overlap")
        object.__setattr__(self, "overlap", Overlap(self.overlap))  # its plain text is taken, too
        for name, value, least in (
            ("window", self.window, 1),
            ("wait", self.wait, 0),
            ("branches", self.branches, 0),
            ("branch_width", self.branch_width, 1),
        ):
            if value is None:
                continue
            if not least <= value <= MOST_DRAFT_TOKENS:
                raise RequestError(f"{name} must be between {least} and {MOST_DRAFT_TOKENS}, got {value}", name)
            if self.overlap is Overlap.OFF:
                complaint = f"{name} means nothing with overlap off: leave it out, or overlap (--overlap on)"
                raise RequestError(complaint, name)
        if self.wait is not None and self.wait > (self.window or MOST_DRAFT_TOKENS):
            raise RequestError(f"wait must be at most window, which is {self.window}, got {self.wait}", "wait")


def check_text(name: str, text: object) -> None:
    """Raises RequestError unless it is text that UTF-8 can write."""
    if not isinstance(text, str):
        raise RequestError(f"{name} must be a text, got {text!r}")
    if not writable(text):
        raise RequestError(f"{name} has half of a surrogate pair, which is no character: escape both halves, or none")


def check_ids(name: str, ids: tuple[int, ...]) -> None:
    """Raises RequestError unless all of them could be token ids."""
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise RequestError(f"{name} must be token ids, whole numbers from 0 on, and has {token!r}")


def writable(text: str) -> bool:
    """Whether UTF-8 can write it: JSON can bring halves of surrogate pairs, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def rendered(chat: Chat, template: ChatTemplate) -> str:
    """The chat as a model's own template writes it, up to where the answer begins.

    Raises:
        ChatTemplateError: the template is damaged, or refuses the chat.
    """
    return template.render([{"role": one.role, "content": one.content} for one in chat.messages])


def plain(chat: Chat) -> str:
    """The chat for a model without a template: paragraphs that begin with who speaks, the last one left open.

    User: How are you?

    Assistant:
    """
    paragraphs = [f"{one.role.capitalize()}: {one.content}" for one in chat.messages]
    return "\n\n".join([*paragraphs, "Assistant:"])
