"""What the orchestrator and the two services say to each other, as plain values.

`crossdraft.rpc` alone turns these into protobuf messages and back.
"""

from dataclasses import dataclass

from crossdraft.text.chat_template import ChatTemplate
from crossdraft.text.letters import Letters
from crossdraft.types.rows import DraftToken, Ids, Probabilities, Row
from crossdraft.types.trees import TokenTree

MOST_DRAFT_TOKENS = 64  # that one draft is asked for
MOST_RUN = 64  # tokens that a target is asked to draw at once, in a pass or beyond what it was asked for
MOST_LIKELY = 20  # ids whose log-probability can be asked for beside each draw


@dataclass(frozen=True)
class NoiseKey:
    """What keyed noise is derived from, besides letter offset, letters and rank."""

    seed: int  # 64 bits; the request's seed, or the session's nonce
    choice: int = 0  # index among the n outputs of one request


@dataclass(frozen=True)
class SamplingOptions:
    """How a row is made of logits; the order of application is that of transformers.

    Raises:
        ValueError: an option is out of its range; the text says which and what is allowed.
    """

    temperature: float = 1.0  # 0 is greedy: a one-hot row
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as transformers has it
    presence_penalty: float = 0.0  # subtracted from ids that are in the output, as vLLM has it
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit)

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.temperature < float("inf"), f"temperature must be 0 or more, got {self.temperature}"),
            (0 <= self.top_k < 2**31, f"top_k must be 0 (all) or more, below 2**31, got {self.top_k}"),
            (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}"),
            (0 <= self.min_p <= 1, f"min_p must be between 0 and 1, got {self.min_p}"),
            (
                0.01 <= self.repetition_penalty <= 100,
                f"repetition_penalty must be between 0.01 and 100, got {self.repetition_penalty}",
            ),
            (
                -2 <= self.presence_penalty <= 2,
                f"presence_penalty must be between -2 and 2, got {self.presence_penalty}",
            ),
            (all(abs(bias) <= 100 for _, bias in self.logit_bias), "each logit_bias must be between -100 and 100"),
        )
        for holds, complaint in checks:
            if not holds:
                raise ValueError(complaint)


@dataclass(frozen=True)
class Description:
    """What a service says of its model: enough for an orchestrator without model files."""

    model: str  # hub id or folder name
    tokenizer_json: str  # the whole tokenizer.json
    controls: tuple[tuple[int, str], ...]  # (id, role name) of control symbols that have a role
    stops: tuple[int, ...]  # the stop ids of generation_config
    vocabulary_size: int  # length of a row of logits (ids beyond the tokenizer's included)
    context: int  # tokens, prompt and output together
    fingerprint: str  # hex digest of tokenizer, controls and vocabulary size
    affinity: str = ""  # of a drafter: `tokenizer_digest` of the target that its matrix is for; "": it has none
    copies: bool = False  # no model: it copies bytes of the text; methods that need shared tokens refuse it
    chat_template: ChatTemplate | None = None


@dataclass(frozen=True)
class Opened:
    """The session is open."""

    fingerprint: str  # of the model that is served


@dataclass(frozen=True)
class OpenTarget:
    """Begins a target session."""

    prompt: tuple[int, ...]  # target token ids, at least one
    options: SamplingOptions
    noise: NoiseKey | None  # of its own draws; None: it answers by rows only
    head: int = 64  # ids of a row that travel unasked
    likely: int = 0  # most probable ids that are told with each draw, at most MOST_LIKELY
    ignore_stops: bool = False  # a run goes on after a stop id


@dataclass(frozen=True, eq=False)
class Pass:
    """One target forward over a tree of paths; or a run: so many forwards, each of which draws a token."""

    number: int  # counts passes of the session from 1
    committed: tuple[int, ...]  # ids committed since the previous pass left; the tree begins after them
    tree: TokenTree
    # Ids whose probability is wanted besides the head, for each answer: as many as `wanted`; or none at all.
    listed: tuple[Ids, ...] = ()
    wanted: tuple[int, ...] | None = None  # what is answered, ascending: 0 is the root, i + 1 node i; None: everything
    draws: bool = False  # answered by the target's own keyed draws, not by rows
    # Tokens that are drawn one after another from the root on, at most; several only with `draws` and without a tree.
    # A run ends early after a stop id that is not ignored, when a pass or row is asked for, or for its own reason.
    run: int = 1

    @property
    def answered(self) -> tuple[int, ...]:
        """The rows asked for: 0 is the root, i + 1 node i."""
        return tuple(range(1 + len(self.tree))) if self.wanted is None else self.wanted


@dataclass(frozen=True)
class Sample:
    """The target's own keyed draw at a node."""

    token: int
    log_probability: float  # nats, of the model itself: temperature 1, no penalties, no truncation
    likely: tuple[tuple[int, float], ...] = ()  # the most probable ids and their log-probabilities, alike


@dataclass(frozen=True, eq=False)
class PassDone:
    """Rows or samples of what the pass wanted: by default of the root, then of each node of its tree.

    Of a run: the samples drawn since the reply before, each of them after all that came before it.
    """

    number: int
    nodes: tuple[Row | Sample, ...]  # one for each of `Pass.answered`, or for each token of a run
    seconds: float  # in the model
    queued: float = 0.0  # seconds before, in which it waited for the model
    more: bool = False  # the run goes on: another reply will come
    forwards: int = 1  # that brought these answers
    shared: int = 1  # sessions in the latest of them, this one included
    fed: int = 0  # tokens in the latest of them, of all sessions; 0: not known
    first: int = 0  # tokens of the run that were told before


@dataclass(frozen=True)
class RunTo:
    """The run of a pass, if it is under way, is to have so many tokens in all: more or fewer. It has no answer."""

    number: int  # of the pass
    tokens: int  # at most MOST_RUN more than before; 0: it ends with the token that is being drawn


@dataclass(frozen=True)
class FetchRow:
    """Asks for more of the row of one node of the session's latest pass, which may still be under way."""

    number: int  # of the pass
    node: int  # 0 is the root
    listed: Ids | None = None  # ids that the row must list besides the head; None: the whole row


@dataclass(frozen=True, eq=False)
class RowFetched:
    """The row that was asked for."""

    number: int
    node: int
    row: Row


@dataclass(frozen=True, eq=False)
class OpenDrafter:
    """Begins a drafter session."""

    prompt: Letters
    options: SamplingOptions  # the drafter's own; penalties and biases are not used
    noise: NoiseKey | None  # set: draws use keyed noise (`seeded`, audits)
    row_width: int  # most probable ids that are kept before drawing and sent; 0: no truncation, no rows sent
    allowed: Ids | None = None  # the only drafter ids that may be drawn (T∩D); None: all
    redistribute: str = ""  # set (`rdk`): draw target tokens from Mᵀq′; `tokenizer_digest` of the target that M is for
    audited: bool = False  # draws use `noise` with the epoch's number as its `choice`, to be recomputed from their rows
    templated: bool = False  # the prompt is UTF-8, as the drafter's chat template writes it, special tokens by name


@dataclass(frozen=True)
class Draft:
    """Begins an epoch: the text is what it was up to `offset`, then `letters`; draft from there.

    Whatever the drafter still does for an older epoch it drops at once. With `adopt` the epoch begins with what that
    branch holds (its text is the same as `offset` and `letters` say); where rows are sent, the branch's draft tokens
    are sent again, with their rows; else the first reply begins after them.
    """

    epoch: int
    offset: int  # letters since the start of the output
    letters: Letters
    count: int  # draft tokens wanted, adopted ones included, 1 to MOST_DRAFT_TOKENS; `Advance` asks for more
    chunk: int = (
        MOST_DRAFT_TOKENS  # draft tokens in one reply, after the first; the last of those wanted may have fewer
    )
    branch_depth: int = 0  # draft tokens of each branch; 0: no branches
    branch_width: int = 1  # branches for each draft token
    # Number of the branch that the epoch begins with; 0: none. A drafter keeps the branches of the latest epoch that
    # end among its newest MOST_DRAFT_TOKENS draft tokens or after them: no window reaches farther back.
    adopt: int = 0
    first: int = 0  # draft tokens that the first reply ends after, adopted ones included; 0: `chunk` of them


@dataclass(frozen=True)
class Advance:
    """The window moves on: the running epoch may have more draft tokens."""

    epoch: int
    count: int  # draft tokens of the epoch, from its first one on, that are wanted now; never fewer than before


@dataclass(frozen=True)
class Branch:
    """A prepared continuation: what the drafter proposes if the draft token at `offset` is refused and `letters`
    take its place. Drawn without looking at the target, and sent after a fixed number of steps."""

    number: int  # counts the branches of the session from 1
    offset: int  # letters since the start of the output: where the refused draft token begins
    letters: Letters  # what replaces it: a token that the drafter held likely, but did not draw
    tokens: tuple[int, ...]  # the drafter's draft tokens after it, by its own ids


@dataclass(frozen=True, eq=False)
class Drafted:
    """Draft tokens of an epoch, in order. `reason` set: the drafter stands aside, and no more will come."""

    epoch: int
    draft_tokens: tuple[DraftToken, ...]
    seconds: float  # in the model, since the reply before
    reason: str = ""
    first: int = 0  # place of the first of `draft_tokens` in the epoch, from 0
    branches: tuple[Branch, ...] = ()
    queued: float = 0.0  # seconds before, in which the drafting waited for the model


@dataclass(frozen=True)
class Score:
    """Asks how probable strings are as the beginning of the current epoch's draft (`slrs`)."""

    epoch: int  # the latest
    offset: int  # letters since the start of the output: where the draft began
    strings: tuple[Letters, ...]  # none empty
    tokens: int  # of the draft: what counts is the text of its first `tokens` draft tokens


@dataclass(frozen=True, eq=False)
class Scored:
    """For each string the probability that the draft's text starts with it, under the distribution that it was drawn
    from.
    """

    epoch: int
    probabilities: Probabilities  # float64, shape (len(strings),)
    seconds: float  # in the model
