"""The engine: logits for many sessions' token trees in one forward, over a store that keeps what was emitted."""

import logging
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdraft.engine.batch import Piece
from crossdraft.engine.compatibility import (
    PROBE,
    UnsupportedModelError,
    check_agreement,
    check_configuration,
    embedding_weight,
    install,
    layer_shapes,
    length_of,
    plain_logits,
)
from crossdraft.engine.kv_cache import Holding, Holdings
from crossdraft.engine.kv_store import MIB, Store, size_for
from crossdraft.engine.names import NumberOutOfRangeError
from crossdraft.engine.requests import Feed, Held, Share, Work, check_work, plan, portion
from crossdraft.engine.runner import Forwards

log = logging.getLogger(__name__)
CHUNK = 512  # tokens
BUDGET = 512  # MiB


class Engine:
    """A causal language model, and places for the keys and values of sessions. For one thread at a time.

    The model's attention is changed to the engine's own; plain calls of the model go on as before.

    Raises:
        ValueError: the budget does not hold one session, or `max_length` does not fit the model's context.
        UnsupportedModelError: the model cannot be run correctly this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_length: int | None = None,  # tokens of a session, its tree included; None: the model's context
        budget: int = BUDGET,  # MiB for keys and values
        chunk: int = CHUNK,  # tokens of one step of `forward`, where there is more than trees
        reuse: bool = True,  # a session may begin with what another one has fed of the same text
        static: bool | None = None,  # forwards have a few shapes, which CUDA captures as graphs; None: where it can
    ) -> None:
        self.max_length = length_of(model, max_length)
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {chunk}")
        self.model = model.eval()
        self.chunk = chunk
        self.fed = 0  # tokens fed so far
        self.device = embedding_weight(model).device
        self.vocabulary_size = len(embedding_weight(model))  # ids that have an embedding
        self._dtype = model.dtype
        check_configuration(model, self.max_length)
        self._store = self._allocate(budget)
        self._holdings = Holdings(self._store, self._store.places, reuse)
        self.forwards = Forwards(model, self._store)
        expected = plain_logits(model)
        install(model)
        self._agree(expected)
        if static or (static is None and self.device.type == "cuda"):
            self._fix(expected)
        self.fed = 0

    @property
    def taken(self) -> int:
        """Live sessions that hold places now. May be asked from any thread."""
        return len(self._holdings)

    @property
    def places(self) -> int:
        """Tokens that all sessions together can hold."""
        return self._holdings.places

    @property
    def held(self) -> int:
        """Places that live sessions have now, whether or not they are filled yet. May be asked from any thread."""
        return self._holdings.held

    @property
    def captured(self) -> int:
        """Forwards that were captured so far, of different shapes. May be asked from any thread."""
        return 0 if self.forwards.static is None else self.forwards.static.recorded

    def populate(self) -> None:
        """Takes all the memory that it may use, for services: no pass waits for it later. Before the first session."""
        self._store.populate()

    def check(self, work: Work) -> None:
        """Raises what `step` and `forward` would raise for this request; changes nothing.

        Raises:
            ContextOverflowError: context and tree are longer than `max_length`.
            ValueError: no committed token, an id outside the vocabulary, or a row that does not exist.
        """
        known = self._holdings.of(work.session)
        check_work(work, known.held.ids if known is not None else (), self.max_length, self.vocabulary_size)

    def due(self, work: Work) -> int:
        """Tokens that are still to be fed for this request, less those that another session's text has ready for it."""
        known = self._holdings.of(work.session)
        if known is not None:
            return len(_planned(known, work).tokens)
        found = self._holdings.reusable(work.context)
        return len(plan(Held() if found is None else Held(work.context[: found[1]]), work).tokens)

    def admits(self, work: Work) -> bool:
        """Whether the request's session has places for all of it, or can have them without other live sessions'."""
        return self._holdings.admits(work)

    @torch.inference_mode()
    def step(self, shares: Sequence[Share]) -> list[Tensor | None]:
        """One forward for requests of different sessions.

        Returns:
            For each request whose tokens are all fed now: its logits, float32 (rows, V), by default after the last
            committed token, then after each node. None: ask again with the same work. Nothing at all is fed for a
            request that `admits` would deny when its turn comes in this step, or whose session is there already.

        Raises:
            ContextOverflowError, ValueError: as `check`, before anything is changed.
        """
        for share in shares:
            self.check(share.work)
        pieces, holdings = self._pieces(shares)
        results: list[Tensor | None] = [None] * len(shares)
        fed = [piece for piece in pieces if piece.count]
        rows = self.forwards.run(fed) if fed else {}
        self.fed += sum(piece.count for piece in fed)
        for piece, holding in zip(pieces, holdings, strict=True):
            work, feed = shares[piece.share].work, piece.feed
            if piece.count == len(feed.tokens):
                self._holdings.hold(holding, Held(work.context, work.tree), feed.move_start)
                results[piece.share] = rows.get(piece.share, torch.zeros(0, self.vocabulary_size, device=self.device))
            else:
                self._holdings.hold(holding, Held(work.context[: piece.used]), feed.move_start)
        return results

    def forward(self, requests: Sequence[Work]) -> list[Tensor]:
        """What is asked for, in however many steps; takes the places of other live sessions where it must.

        Raises:
            ContextOverflowError, ValueError: as `check`, before anything is changed.
        """
        for work in requests:
            self.check(work)
        results: list[Tensor | None] = [None] * len(requests)
        waiting = list(range(len(requests)))
        while waiting:
            due = [requests[index] for index in waiting]
            if not self._holdings.admits(due[0]):
                self._make_room({work.session for work in due[1:]}, due[0].session)
                continue
            shares = self._shares(due)
            for index, logits in zip(waiting, self.step(shares), strict=False):
                results[index] = logits
            waiting = [index for index in waiting if results[index] is None]
        return [logits for logits in results if logits is not None]

    def close(self, session: Hashable) -> None:
        """The session is over; other sessions may go on from its text until its places are needed.

        A session that is not known is one that has no places.
        """
        self._holdings.close(session)

    def _allocate(self, budget: int) -> Store:
        shapes = layer_shapes(self.model)
        size = Store.place_bytes(shapes, self._dtype)
        places = budget * MIB // size
        least = size_for(self.max_length)
        if places < least:
            raise NumberOutOfRangeError(
                f"a session of up to {least} tokens needs {-(-size * least // MIB)} MiB of keys and values, and the "
                f"budget is {budget} MiB: raise it (--cache-mib), or let sessions have {least // 2} tokens at most"
            )
        return Store(shapes, places, self._dtype, self.device)

    def _agree(self, expected: Sequence[Tensor]) -> None:
        check_agreement(self.model, self.forward, expected)
        self.close(PROBE.session)

    def _fix(self, expected: Sequence[Tensor]) -> None:
        """Changes to forwards of a few shapes, unless they do not compute what the others do."""
        self.forwards.fix(self.max_length)
        try:
            for _ in ("recorded", "replayed"):
                self._agree(expected)
        except UnsupportedModelError as error:
            log.warning("forwards of fixed shapes are not used: %s", error)
            self.forwards.static = None
            self.close(PROBE.session)

    def _shares(self, works: Sequence[Work]) -> list[Share]:
        """The works that share a step: the first, and those after it while their tokens fit into a chunk."""
        left = self.chunk
        shares: list[Share] = []
        for work in works:
            due = self.due(work)
            if shares and left < min(due, 1 + len(work.tree)):
                break
            shares.append(Share(work, max(1, left)))
            left -= min(due, left)
        return shares

    def _make_room(self, wanted: set[Hashable], first: Hashable) -> None:
        """Ends the session that was used least recently; those that wait in the same forward come last."""
        others = [session for session in self._holdings if session != first]
        self.close(next((session for session in others if session not in wanted), others[0]))

    def _pieces(self, shares: Sequence[Share]) -> tuple[list[Piece], list[Holding]]:
        """What to feed for those that have places, and where; moves what their trees left."""
        seats: dict[Hashable, tuple[int, Holding]] = {}
        for index, share in enumerate(shares):
            if share.work.session not in seats:
                holding = self._holdings.seat(share.work)
                if holding is not None:
                    seats[share.work.session] = index, holding
        pieces, moves = [], dict[int, int]()  # from the place of each value to its key
        for index, holding in seats.values():
            feed = _planned(holding, shares[index].work)
            # A forward that fails leaves the places in an unknown state: they count as empty until all is done.
            holding.held, holding.planned = Held(), None
            start = holding.extent.start
            moves |= {start + feed.move_start + number: start + place for number, place in enumerate(feed.moves)}
            pieces.append(Piece(index, holding.extent, feed, portion(feed, shares[index].tokens)))
        if moves:
            self._store.move([*moves.values()], [*moves])
        return pieces, [holding for _, holding in seats.values()]


def _planned(holding: Holding, work: Work) -> Feed:
    """The plan for a work, made once while nothing changes."""
    known = holding.planned
    if known is None or known[0] is not work or known[1] is not holding.held:
        known = holding.planned = work, holding.held, plan(holding.held, work)
    return known[2]
