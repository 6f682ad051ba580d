"""Messages between the orchestrator and its target and drafter services, as plain values.

Only `crossdraft.rpc` converts them to protobuf messages and back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

import numpy as np

from crossdraft.config import MOST_DRAFT_TOKENS as MOST_DRAFT_TOKENS
from crossdraft.config import MOST_LIKELY as MOST_LIKELY
from crossdraft.config.fields import LeftOut as LeftOut
from crossdraft.config.fields import OptionError, check, unchecked, written
from crossdraft.config.request import Sampling
from crossdraft.text.chat_template import ChatTemplate
from crossdraft.text.grammar import Grammar
from crossdraft.text.letters import Letters
from crossdraft.types import quick_dataclass
from crossdraft.types.rows import DraftToken, Ids, Probabilities, Row
from crossdraft.types.rows import NoiseKey as NoiseKey
from crossdraft.types.trees import TokenTree

MAX_RUN = 64  # tokens that a pass, or an extension of its run, can request of the target's own draws
MAX_ID = 2**32 - 1  # of a token: what messages can hold
MAX_SCORED = 64  # tokens of a prompt that are scored together: as many rows of logits are held
# Of SamplingOptions: for what a request leaves out, a model may have settings of its own.
MODEL_SETTINGS = tuple(one.name for one in fields(Sampling) if isinstance(one.default, LeftOut))
# Fields of SamplingOptions that drafters do not apply to their own logits.
ONLY_TARGETS = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "logit_bias", "allowed_token_ids",
    "bad_word_ids", "end_ids",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingOptions(Sampling):
    """How logits become a row; options are applied in vLLM's order (`engine.sampling.distributions`).

    What a request leaves out of MODEL_SETTINGS are the model's own settings; given numbers count, also if they are
    those below. Raises ValueError: an option has a wrong type, or is out of its range; the message says which, and what
    it may be.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit); a mapping is taken, too
    allowed_token_ids: tuple[int, ...] = ()  # the only ids that may be drawn; none: all
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # of each the last id is not drawn after the others, in the output
    end_ids: tuple[int, ...] = ()  # filled in by the session: all ids that may end an output, if there is a min_tokens
    grammar: Grammar | None = None  # of the output (structured outputs)

    def __post_init__(self) -> None:
        check(self)
        if not isinstance(self.grammar, Grammar | None):
            raise ValueError(f"grammar must be a Grammar, got {self.grammar!r}")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        for name, fault_of in LISTS.items():
            if fault := fault_of(value := getattr(self, name)):
                raise OptionError(name, fault)
            if isinstance(value, list) or (fault_of != fault_of_ids and any(isinstance(one, list) for one in value)):
                object.__setattr__(self, name, tuple([tuple(one) if isinstance(one, list) else one for one in value]))

    @property
    def looks_back(self) -> bool:
        """Whether tokens before a row change it."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties) or bool(self.bad_word_ids or self.min_tokens)

    @property
    def of_drafter(self) -> "SamplingOptions":
        """Without what is for the target's logits only."""
        return unchecked(self, **{name: getattr(SamplingOptions, name) for name in ONLY_TARGETS})


def shown(value: object) -> str:
    """In an error's text: the beginning of what may be very long."""
    return repr(value)[:60]


def fault_of_ids(ids: object) -> str:
    """What is wrong with token ids, to be said after their name; empty: nothing."""
    if not isinstance(ids, tuple | list):
        return f"must be a tuple of token ids, got {shown(ids)}"
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) <= MAX_ID)):
        return ""  # a million of them take long one by one
    wrong = [token for token in ids if not _is_id(token)]
    return f"must be token ids, whole numbers from 0 to {written(MAX_ID)}, and has {shown(wrong[0])}" if wrong else ""


def _is_id(token: object) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool) and 0 <= int(token) <= MAX_ID


def _fault_of_words(words: object) -> str:
    """The same of `bad_word_ids`."""
    wanted = "must be a tuple of tuples of token ids, each with one at least"
    if not isinstance(words, tuple | list):
        return f"{wanted}, got {shown(words)}"
    return next((f"{wanted}, and has {shown(word)}" for word in words if not word or fault_of_ids(word)), "")


def _fault_of_biases(biases: object) -> str:
    """The same of `logit_bias`, as pairs."""
    wanted = "must map token ids, such as 303, to numbers between -100 and 100"
    pairs: Sequence[Any] = biases if isinstance(biases, tuple | list) else ()
    if pairs is not biases or not all(isinstance(one, tuple | list) and len(one) == 2 for one in pairs):
        return f"{wanted}, got {shown(biases)}"
    for token, bias in pairs:
        number = isinstance(bias, int | float | np.floating) and not isinstance(bias, bool) and abs(float(bias)) <= 100
        if not (_is_id(token) and number):
            return f"{wanted}, and has {shown(token)}: {shown(bias)}"
    return ""


LISTS: Mapping[str, Callable[[object], str]] = {  # of SamplingOptions, with what says their faults
    "logit_bias": _fault_of_biases,
    "allowed_token_ids": fault_of_ids,
    "bad_word_ids": _fault_of_words,
    "end_ids": fault_of_ids,
}


@dataclass(frozen=True)
class SamplingDefaults:
    """A model's own settings, for requests that leave them out; None: it has none.

    Raises ValueError: one of them is no number, or out of its range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    most_tokens: int | None = None  # of any output, whatever its request asks for

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            least, whole = name.endswith("_tokens"), name == "top_k" or name.endswith("_tokens")
            if type(value) is not int and (whole or type(value) is not float):
                raise ValueError(f"{name} must be a {'whole ' * whole}number, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be {int(least)} or more, got {value}")
        named: dict[str, Any] = {name: value for name, value in self.given.items() if name in MODEL_SETTINGS}
        SamplingOptions(**named)

    @staticmethod
    def of(config: Mapping[str, Any], most_tokens: Any = None) -> "SamplingDefaults":
        """Those of a generation_config.json; raises ValueError."""
        named = {name: config.get(name) for name in MODEL_SETTINGS}
        named |= {"top_k": 0} if named["top_k"] == -1 else {}
        return SamplingDefaults(**named, max_tokens=config.get("max_new_tokens"), most_tokens=most_tokens)

    @property
    def given(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def fill(self, options: SamplingOptions) -> SamplingOptions:
        """The options with these settings, and else plain numbers, in place of what was left out."""
        left = [name for name in MODEL_SETTINGS if isinstance(getattr(options, name), LeftOut)]
        filled = {name: _settled(getattr(options, name), getattr(self, name)) for name in left}
        return unchecked(options, **filled) if filled else options

    def tokens(self, asked: int) -> int:
        """`max_tokens` of a request for so many."""
        tokens: int = _settled(asked, self.max_tokens)
        return min(tokens, self.most_tokens or tokens)


def _settled(number: Any, own: Any) -> Any:
    """The number, if a request names it; else the model's own, if there is one, or the same number as a plain one."""
    left_out = isinstance(number, LeftOut)
    return number if not left_out else +number if own is None else own


def checked_settings(given: Any) -> dict[str, Any]:
    """What overrides settings of a generation_config.json, by its names; raises ValueError."""
    names = (*MODEL_SETTINGS, "max_new_tokens")
    if not (isinstance(given, dict) and {*given} <= {*names}):
        raise ValueError(f"it must be an object with some of {', '.join(names)}")
    SamplingDefaults.of(given)
    return given


@dataclass(frozen=True)
class Description:
    """A service's description of its model; with it an orchestrator needs no model files."""

    model: str  # hub id or folder name
    tokenizer_json: str  # the whole tokenizer.json
    controls: tuple[tuple[int, str], ...]  # (id, role name) of the control symbols with a role
    stops: tuple[int, ...]  # the stop ids of generation_config
    vocabulary_size: int  # length of a row of logits (ids beyond the tokenizer's included)
    context: int  # tokens, prompt and output together
    fingerprint: str  # hex digest of tokenizer, controls and vocabulary size, and of a target's weights
    affinity: str = ""  # of a drafter: `tokenizer_digest` of the target that its matrix is for; "": it has none
    copies: bool = False  # an n-gram drafter, which copies bytes of the text; methods that need shared tokens refuse it
    chat_template: ChatTemplate | None = None
    defaults: SamplingDefaults = SamplingDefaults()  # of a target
    hidden_size: int = 0  # numbers of a hidden state: of a target, which it can send, of a drafter, which it reads


@quick_dataclass(frozen=True)
class HiddenStates:
    """What the target's head makes logits of, after some tokens: for drafters that read it."""

    places: tuple[int, ...] = ()  # where these are, ascending
    states: bytes = b""  # as many, of equal size: bfloat16, little-endian

    def by_place(self) -> dict[int, bytes]:
        size = len(self.states) // max(1, len(self.places))
        return {place: self.states[size * at : size * (at + 1)] for at, place in enumerate(self.places)}


@quick_dataclass(frozen=True)
class Opened:
    """The session is open. Sent again while the service works on what it owes, and that takes long."""

    fingerprint: str  # of the model that is served


@quick_dataclass(frozen=True)
class OpenTarget:
    """Opens a target session."""

    prompt: tuple[int, ...]  # target token ids, at least one
    options: SamplingOptions
    noise: NoiseKey | None  # of the target's own draws; None: it replies with rows only
    head: int = 64  # most probable ids of a row, which are sent without being listed
    # Most probable ids that are sent with each draw and row, at most MOST_LIKELY; None: none, and rows come without
    # log-probabilities.
    likely: int | None = None
    ignore_stops: bool = False  # a run continues after a stop id of the model
    stop_ids: tuple[int, ...] = ()  # further ids that end a run
    hidden: bool = False  # replies to passes have hidden states
    impossible: bool = False  # answers behind the root may say that nothing can be drawn; else such a pass fails
    request_id: str = ""  # of the client's request, for log lines; the link sets it; empty: none


@quick_dataclass(frozen=True, eq=False)
class Pass:
    """One target forward over a token tree; or a run: up to `run` forwards, each of which draws the next token."""

    number: int  # counts passes of the session from 1
    committed: tuple[int, ...]  # ids committed since the previous pass was sent; the tree begins after them
    tree: TokenTree
    # For each node of `answered`, the ids that its row must list besides the head; or empty: none.
    listed: tuple[Ids, ...] = ()
    wanted: tuple[int, ...] | None = None  # nodes to reply for, ascending: 0 is the root, i + 1 node i; None: all
    draws: bool = False  # reply with the target's own keyed draws, not with rows
    # Max tokens drawn one after another from the root on; above 1 only with `draws` and without a tree. A run ends
    # early after a stop id that is not ignored, when another request arrives, or when the target decides so.
    run: int = 1

    @property
    def answered(self) -> tuple[int, ...]:
        """The nodes to reply for: 0 is the root, i + 1 node i."""
        return tuple(range(1 + len(self.tree))) if self.wanted is None else self.wanted


# As the log-probability of a sample: the request's limits leave nothing to draw there. Of a row all is tail then.
IMPOSSIBLE = -inf


@quick_dataclass(frozen=True)
class Sample:
    """The target's own keyed draw of the token after a node."""

    token: int
    log_probability: float  # nats, of the model itself: temperature 1, no penalties, no truncation; or IMPOSSIBLE
    likely: tuple[tuple[int, float], ...] = ()  # the most probable ids and their log-probabilities, of the same kind
    rank: int = 0  # ids that are at least as probable; of a token of the prompt, else 0


@quick_dataclass(frozen=True, eq=False)
class PassDone:
    """Reply to a pass: a row or sample for each of `Pass.answered`; of a run the samples since the previous reply."""

    number: int
    nodes: tuple[Row | Sample, ...]
    seconds: float  # from its first step to its end, sampling included; of a run, from the token before
    queued: float = 0.0  # until its first step
    more: bool = False  # the run continues: another reply will follow
    forwards: int = 1  # that made these nodes
    shared: int = 1  # sessions in the batch of the latest forward, this one included
    fed: int = 0  # tokens in that batch, of all sessions; 0: not known
    first: int = 0  # tokens of the run in previous replies
    # By node (0: the root), where they were asked for: with samples those on the path that these follow, else all that
    # are answered; of a run that after all but the last of its tokens so far, with its last reply.
    hidden: HiddenStates = HiddenStates()


@quick_dataclass(frozen=True)
class ScorePrompt:
    """Requests the log-probabilities of the prompt's tokens from one on, each after those before it."""

    first: int  # index, from 1: nothing comes before token 0
    likely: int  # most probable ids that are sent with each, at most MOST_LIKELY


@quick_dataclass(frozen=True, eq=False)
class PromptScored:
    """One of the replies to `ScorePrompt`: the next tokens, at most MAX_SCORED."""

    first: int  # index of the first of them
    tokens: tuple[Sample, ...]
    seconds: float  # in the model
    more: bool = False  # another reply will follow


@quick_dataclass(frozen=True)
class RunTo:
    """Changes how many tokens a run still under way will have in all. There is no reply."""

    number: int  # of the pass
    tokens: int  # at most MAX_RUN more than before; 0: end with the token that is being drawn


@quick_dataclass(frozen=True)
class FetchRow:
    """Requests more of one node's row, of the session's latest pass, which may still be under way."""

    number: int  # of the pass
    node: int  # 0 is the root
    listed: Ids | None = None  # ids that the row must list besides the head; None: the whole row


@quick_dataclass(frozen=True, eq=False)
class RowFetched:
    """Reply to `FetchRow`."""

    number: int
    node: int
    row: Row


@quick_dataclass(frozen=True, eq=False)
class OpenDrafter:
    """Opens a drafter session."""

    prompt: Letters
    options: SamplingOptions  # the drafter's own; penalties and biases are ignored
    noise: NoiseKey | None  # set: draws use keyed noise (`seeded`, audits)
    row_width: int  # rows are truncated to so many most probable ids before drawing; 0: not truncated, and not sent
    allowed: Ids | None = None  # the only drafter ids that may be drawn (T∩D); None: all
    redistribute: str = ""  # set (`rdk`): draw target tokens from Mᵀq′; `tokenizer_digest` of the target that M is for
    audited: bool = False  # draws use `noise` with the epoch's number as its `choice`, to be recomputed from their rows
    templated: bool = False  # the prompt is UTF-8 text of the drafter's chat template, special tokens by name
    scope: str = ""  # opaque; drafts may copy earlier texts of sessions with the same one; "": no text is shared
    request_id: str = ""  # as of `OpenTarget`


@quick_dataclass(frozen=True)
class Draft:
    """Begins an epoch: keep the text up to `offset`, append `letters`, draft from there. Older epochs are dropped.

    With `adopt` the epoch begins with the draft tokens of that branch, whose text is the one of `offset` and `letters`.
    If rows are sent, they are sent again with their rows; else the first reply begins after them.
    """

    epoch: int
    offset: int  # letters since the start of the output
    letters: Letters
    count: int  # draft tokens wanted, adopted ones included, 1 to MOST_DRAFT_TOKENS; `Advance` requests more
    chunk: int = MOST_DRAFT_TOKENS  # draft tokens of each reply but the first and the last
    branch_depth: int = 0  # draft tokens of each branch; 0: no branches
    branch_width: int = 1  # branches for each draft token
    # Number of the branch to adopt; 0: none. A drafter keeps those branches of the latest epoch that end among its
    # newest MOST_DRAFT_TOKENS draft tokens or later.
    adopt: int = 0
    first: int = 0  # draft tokens of the first reply, adopted ones included; 0: `chunk`
    # Set: the draft and its branches are a tree of so many nodes, those likeliest to be reached, on paths of at most
    # `count` draft tokens; `branch_depth` and `branch_width` are not used. For drafts without rows.
    tree_nodes: int = 0
    # A tree ends where the output reaches a node that would be expanded with a smaller probability, as estimated.
    least_likely: float = 0.0
    # For a drafter that reads them: by letters of output, the target's states after these, if there are new ones.
    hidden: HiddenStates = HiddenStates()


@quick_dataclass(frozen=True)
class Advance:
    """Requests more draft tokens in the running epoch, or ends it."""

    epoch: int
    count: int  # draft tokens of the whole epoch wanted now, never fewer than before; 0: no more


@quick_dataclass(frozen=True)
class Branch:
    """A prepared continuation: draft tokens in case that the token at `offset` is refused and replaced by `letters`.

    It is drawn without looking at the target, and sent after a fixed number of steps. In a tree it is the path from the
    draft to a leaf, so that several may begin alike.
    """

    number: int  # counts the branches of the session from 1
    offset: int  # letters since the start of the output: where the refused draft token begins
    letters: Letters  # of a token that was likely there but not drawn
    tokens: tuple[int, ...]  # draft tokens after these letters, drafter ids


@quick_dataclass(frozen=True, eq=False)
class Drafted:
    """Draft tokens of an epoch, in order."""

    epoch: int
    draft_tokens: tuple[DraftToken, ...]
    seconds: float  # from the first step on, or since the previous reply
    reason: str = ""  # set: why the drafter drafts no more in this epoch
    first: int = 0  # index of the first of `draft_tokens` in the epoch
    branches: tuple[Branch, ...] = ()
    queued: float = 0.0  # until the first step, if nothing was being drafted before


@quick_dataclass(frozen=True)
class Score:
    """Requests the probability that the text of the current epoch's draft starts with each string (`slrs`)."""

    epoch: int  # the latest
    offset: int  # letters since the start of the output: where the draft began
    strings: tuple[Letters, ...]  # none empty
    tokens: int  # the text is that of the first so many draft tokens


@quick_dataclass(frozen=True, eq=False)
class Scored:
    """Reply to `Score`: probabilities under the distribution that the draft was drawn from."""

    epoch: int
    probabilities: Probabilities  # float64, shape (len(strings),)
    seconds: float  # in the model


Request = Draft | Advance | Score | Pass | FetchRow | RunTo | ScorePrompt  # what an open session is asked
Reply = Drafted | Scored | PassDone | RowFetched | PromptScored
