"""The engine: logits for many sessions' token trees in one forward, over slots that keep what was emitted."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdraft.models.batches import Piece, batch_of, grouped, pieces_of
from crossdraft.models.feeds import Held, Work, plan
from crossdraft.models.names import NumberOutOfRangeError
from crossdraft.models.slots import MIB, SlotCache
from crossdraft.models.support import (
    PROBE,
    check_agreement,
    check_configuration,
    embedding_weight,
    keeps_logits,
    layer_shapes,
    length_of,
)

__all__ = ["ContextOverflowError", "Engine", "Work"]

CHUNK = 512  # tokens
BUDGET = 512  # MiB


class ContextOverflowError(ValueError):
    """A context and its tree do not fit into a slot."""


@dataclass
class _Session:
    """A session's slot and what it holds."""

    slot: int
    held: Held = field(default_factory=Held)


class Engine:
    """A causal language model with slots for the keys and values of sessions. For one thread at a time.

    Raises:
        ValueError: the budget does not hold one slot, or `max_length` does not fit the model's context.
        UnsupportedModelError: the model cannot be run correctly this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_length: int | None = None,  # tokens of a session, its tree included; None: the model's context
        budget: int = BUDGET,  # MiB for keys and values
        chunk: int = CHUNK,  # tokens in one forward, padding included
    ) -> None:
        self.max_length = length_of(model, max_length)
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {chunk}")
        self.model = model.eval()
        self.chunk = chunk
        self.fed = 0  # tokens fed so far, padding not counted
        self.device = embedding_weight(model).device
        self.vocabulary_size = len(embedding_weight(model))  # ids that have an embedding
        self._dtype = model.dtype
        self._keeps_logits = keeps_logits(model)
        check_configuration(model, self.max_length)
        self._cache = self._allocate(budget)
        self.slots = len(self._cache.keys[0])
        self._free = list(range(self.slots - 1, -1, -1))
        self._sessions: dict[Hashable, _Session] = {}  # least recently used first
        check_agreement(model, self.forward)
        self.close(PROBE.session)
        self.fed = 0

    @property
    def taken(self) -> int:
        """Slots that sessions hold now. May be asked from any thread."""
        return len(self._sessions)

    def check(self, work: Work) -> None:
        """Raises what `forward` would raise for this request; changes nothing.

        Raises:
            ContextOverflowError: context and tree are longer than `max_length`.
            ValueError: no committed token, an id outside the vocabulary, or a row that does not exist.
        """
        size = len(work.context) + len(work.tree)
        if size > self.max_length:
            raise ContextOverflowError(f"{size} tokens (tree of {len(work.tree)} included) exceed {self.max_length}")
        if not work.context:
            raise ValueError("the context needs at least one token (a BOS where there is no prompt)")
        largest, smallest = self._extremes(work)
        if smallest < 0 or largest >= self.vocabulary_size:
            raise ValueError(
                f"ids must be 0 to {self.vocabulary_size - 1}, got {smallest if smallest < 0 else largest}"
            )
        rows = work.rows()
        if any(not 0 <= row <= len(work.tree) for row in rows) or list(rows) != sorted(set(rows)):
            raise ValueError(f"wanted rows must ascend within 0 to {len(work.tree)}, got {rows}")

    @torch.inference_mode()
    def forward(self, requests: Sequence[Work]) -> list[Tensor]:
        """Logits for each request: float32 (rows, V), by default after the last committed token, then after each node.

        Raises:
            ContextOverflowError, ValueError: as `check`, before anything is changed.
        """
        for work in requests:
            self.check(work)
        results: list[Tensor] = []
        for group in self._rounds(requests):
            results += self._forward(group)
        return results

    def due(self, work: Work) -> int:
        """Tokens that `forward` would feed for this request now, less a text of which the session holds nothing."""
        known = self._sessions.get(work.session)
        if known is None or not known.held.ids:
            return len(work.tree)
        return len(plan(known.held, work).tokens)

    def close(self, session: Hashable) -> None:
        """Frees the session's slot. A session that is not known is one that has none."""
        known = self._sessions.pop(session, None)
        if known is not None:
            self._free.append(known.slot)

    def _extremes(self, work: Work) -> tuple[int, int]:
        """Largest and smallest id among those that the session does not hold, 0 included."""
        known = self._sessions.get(work.session)
        held = known.held.ids if known is not None else ()
        fresh = (0, *work.context[len(held) if work.context[: len(held)] == held else 0 :], *work.tree.tokens)
        return max(fresh), min(fresh)

    def _allocate(self, budget: int) -> SlotCache:
        shapes = layer_shapes(self.model)
        size = SlotCache.slot_bytes(shapes, self.max_length, self._dtype)
        slots = budget * MIB // size
        if slots < 1:
            raise NumberOutOfRangeError(
                f"one session of {self.max_length} tokens needs {-(-size // MIB)} MiB of keys and values, "
                f"and the budget is {budget} MiB: raise it, or lower max_length"
            )
        return SlotCache(shapes, slots, self.max_length, self._dtype, self.device)

    def _rounds(self, requests: Sequence[Work]) -> Iterator[list[Work]]:
        """Requests in order, as many at once as there are slots, each session once."""
        group: dict[Hashable, Work] = {}
        for work in requests:
            if len(group) == self.slots or work.session in group:
                yield list(group.values())
                group = {}
            group[work.session] = work
        if group:
            yield list(group.values())

    def _forward(self, requests: Sequence[Work]) -> list[Tensor]:
        """The same for requests of different sessions, no more than slots."""
        sessions = self._seat(requests)
        queues: list[list[Piece]] = []
        for index, (work, session) in enumerate(zip(requests, sessions, strict=True)):
            feed = plan(session.held, work)
            # A forward that fails leaves the slot in an unknown state: it counts as empty until all is done.
            session.held = Held()
            if feed.moves:
                self._cache.move(session.slot, feed.moves, feed.move_start)
            queues.append(pieces_of(index, session.slot, feed, self.chunk))
        parts: list[list[Tensor]] = [[] for _ in requests]
        for step in range(max(map(len, queues))):
            due = [queue[step] for queue in queues if step < len(queue)]
            for group in grouped(due, self.chunk):
                self._run(group, parts)
        for work, session in zip(requests, sessions, strict=True):
            session.held = Held(work.context, work.tree)
        return [self._joined(part) for part in parts]

    def _seat(self, requests: Sequence[Work]) -> list[_Session]:
        """The requests' sessions, most recently used; slots of others are taken where none is free."""
        for work in requests:
            if work.session in self._sessions:
                self._sessions[work.session] = self._sessions.pop(work.session)
        for work in requests:
            if work.session not in self._sessions:
                if not self._free:
                    self.close(next(iter(self._sessions)))
                self._sessions[work.session] = _Session(self._free.pop())
        return [self._sessions[work.session] for work in requests]

    def _run(self, group: list[Piece], parts: list[list[Tensor]]) -> None:
        """One forward; appends to each request's part what was asked of it."""
        group = sorted(group, key=lambda piece: piece.slot)
        batch = batch_of(group, self._dtype, self.device)
        self._cache.place(batch.placement)
        options = {"logits_to_keep": batch.keep} if self._keeps_logits and batch.keep is not None else {}
        logits = self.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask=batch.mask,
            past_key_values=self._cache,
            use_cache=True,
            **options,
        ).logits
        if batch.keep is not None and not options:
            logits = logits[batch.keep]
        self.fed += sum(map(len, group))
        split = logits.reshape(-1, logits.shape[-1]).float().split([piece.asked for piece in group])
        for piece, rows in zip(group, split, strict=True):
            if piece.asked:
                parts[piece.request].append(rows)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        if not parts:
            return torch.zeros(0, self.vocabulary_size, device=self.device)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
