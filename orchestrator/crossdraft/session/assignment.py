"""The assignment of a session: a request resolved against its services."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from crossdraft.speculation.choice import Controller
from crossdraft.text.letters import Letters, from_bytes
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import Drafted, NoiseKey, OpenDrafter, OpenTarget
from crossdraft.types.request import GenerationRequest
from crossdraft.types.rows import DraftToken, Whose
from crossdraft.types.trees import Path
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.noise import KeyedNoise, fault_of_draw
from crossdraft.verification.walk import Method, draft_token_letters


@dataclass(frozen=True)
class Secrets:
    """The random seeds of one generation: with the same secrets, the same events lead to the same output."""

    noise: int  # 64 bits: the target's nonce, unless the request has a seed
    audit: int  # 64 bits: the key of audits that do not use the target's
    chooser: int  # 128 bits: the seed of the walk's random choices

    @staticmethod
    def drawn() -> "Secrets":
        """New secrets, from the system's entropy."""
        return Secrets(secrets.randbits(64), secrets.randbits(64), secrets.randbits(128))


@dataclass(frozen=True, eq=False)
class Audit:
    """Recomputes a drafter's draws."""

    key: NoiseKey
    each_epoch: bool  # the epoch's number replaces the key's choice: drafts of different epochs are independent
    drafter: KeyedNoise  # of the drafter's ids
    target: KeyedNoise  # of the target's ids, for draft tokens that use them

    def fault_of(self, drafted: Drafted, offset: int, pair: Pair) -> str:
        """Why a draw of a draft that begins at `offset` was not drawn from its row, as a text; empty if all were."""
        key = NoiseKey(self.key.seed, drafted.epoch) if self.each_epoch else self.key
        for draft_token in drafted.draft_tokens:
            noise = self.target if draft_token.whose is Whose.TARGET else self.drafter
            fault = fault_of_draw(draft_token, noise, key, offset)
            if fault:
                return fault
            offset += len(draft_token_letters(pair, draft_token))
        return ""


@dataclass(frozen=True)
class Assignment:
    """The fixed facts of one session."""

    pair: Pair
    method: Method
    chooser: Chooser
    encode: Callable[[Letters], Path]  # continuation tokenizing with the target's tokenizer
    request: GenerationRequest  # with the target's own settings for what it leaves out
    open_target: OpenTarget
    open_drafter: OpenDrafter | None  # None: plain decoding
    controller: Controller  # decides how each epoch is run
    context: int  # tokens that the target can hold, prompt included
    no_drafter: str = "there is no drafter"  # why not, where there is none
    draft_seconds: float = 30.0  # a drafter that owes an answer for longer is given up
    target_seconds: float = 30.0  # longest time without any target
    targets: int = 1  # lanes to targets that are kept open
    tree_budget: int = 16  # nodes of one pass at most
    audit: Audit | None = None  # set: every draw of the drafter is recomputed from its row

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids after which the output ends."""
        request = self.request
        return frozenset(request.stop_token_ids).union(() if request.ignore_eos else self.pair.target.stops)

    @cached_property
    def stop(self) -> tuple[Letters, ...]:
        """Stop strings."""
        return tuple(from_bytes(text.encode()) for text in self.request.stop)

    def fault_of(self, drafted: Drafted, offset: int, asked: int) -> str:
        """What is wrong with draft tokens; empty if nothing is.

        `offset`: letters of output where the first of them begins. `asked`: draft tokens that are still due.
        """
        if len(drafted.draft_tokens) > asked:
            return f"it sent {len(drafted.draft_tokens)} draft tokens, asked for {asked}"
        with_rows = self.method.drafter_rows or self.audit is not None  # else nothing uses them
        own, size = Whose.DRAFTER, self.pair.drafter.size
        for draft_token in drafted.draft_tokens:
            if draft_token.whose is own and 0 <= draft_token.token < size and not with_rows:
                continue
            if fault := self._fault_of_token(draft_token) or (self._fault_of_row(draft_token) if with_rows else ""):
                return fault
        return "" if self.audit is None else self.audit.fault_of(drafted, offset, self.pair)

    def _fault_of_token(self, draft_token: DraftToken) -> str:
        if draft_token.whose is Whose.TARGET and not self.method.redistributed:
            return f"it proposed a token of the target's, and {self.method.name!r} asks for tokens of its own"
        size = self._size(draft_token)
        if not 0 <= draft_token.token < size:
            return f"it proposed id {draft_token.token}, and its ids are 0 to {size - 1}"
        return ""

    def _fault_of_row(self, draft_token: DraftToken) -> str:
        row, size = draft_token.row, self._size(draft_token)
        if row is None or not row.whole:
            return f"it proposed id {draft_token.token} without the whole row that it was drawn from"
        if not len(row.ids) or row.ids.view(np.uint64).max() >= size:  # a negative id is huge as an unsigned number
            return f"the row of id {draft_token.token} has ids beyond {size - 1}"
        shared = self.method.shared_only and len(self.pair.shared_drafter_ids) < self.pair.drafter.size
        if shared and draft_token.whose is Whose.DRAFTER and self.pair.to_target_ids(row.ids).min() < 0:
            return f"the row of id {draft_token.token} reaches outside the shared tokens"
        return "" if row.probability(draft_token.token) > 0 else f"the row of id {draft_token.token} cannot give it"

    def _size(self, draft_token: DraftToken) -> int:
        return self.pair.target.size if draft_token.whose is Whose.TARGET else self.pair.drafter.size
