"""An engine for a drafter that reads the target's own hidden states: one layer over them (EAGLE, arXiv 2401.15077).

A *state* is what the head of the target makes logits of. The layer reads each token together with the state before it,
and what it computes is a guess at the state after it, of which a head, the target's own or a cut one, makes the
drafter's logits. So it drafts on from its own guesses, and the next reply of the target replaces those that held. A
token whose state never came (of a prompt, of a pass that was lost) is read with one that stands for none: the drafts
are worse then, and nothing else.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from crossdraft.engine.batch import visible
from crossdraft.engine.engine import CHUNK, Engine
from crossdraft.engine.kv_cache import MemoryShare
from crossdraft.engine.loader import FUSION
from crossdraft.engine.requests import NO_TREE, Extent, ForwardRequest, InputTokens, common_prefix, emitted
from crossdraft.types.trees import TokenTree

ROOM = 128  # tokens: sessions take memory for multiples of so many
OWN = (Extent(0, 0),)  # that memory is a session's own
# Queries, keys and values, (…, tokens, heads, width of a head), to what each token attends to.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class StateLayer:
    """The layer: of tokens, and of the states before them, the states after them."""

    model: PreTrainedModel  # a Llama of one layer, with the embedding of the target
    fusion: Tensor  # (width, 2 * width): of a token's embedding, then of the state before it
    absent: Tensor  # (width,): in place of a state that is not known

    @staticmethod
    def of(model: PreTrainedModel, folder: Path) -> "StateLayer":
        """The layer of a model that was loaded from this folder; ValueError: it is not what `FUSION` is for."""
        found = {name: tensor.to(model.device, model.dtype) for name, tensor in load_file(folder / FUSION).items()}
        width, layers = model.config.hidden_size, model.config.num_hidden_layers
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        if shapes != {"fusion": (width, 2 * width), "absent": (width,)} or layers != 1:
            raise ValueError(f"{folder / FUSION} with {shapes} does not fit a model of {layers} layers, {width} wide")
        return StateLayer(model, **found)

    def __call__(self, ids: Tensor, before: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The states after tokens, (texts, tokens, width), of those before them; ids and positions are int64."""
        decoder = self.model.model
        (layer,) = decoder.layers
        attention = layer.self_attn
        parts = [rms_norm(part, part.shape[-1:]) for part in (decoder.embed_tokens(ids), before)]
        inputs = linear(torch.cat(parts, -1), self.fusion)
        normed, head = layer.input_layernorm(inputs), (-1, attention.head_dim)
        queries, keys, values = (
            project(normed).unflatten(-1, head) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cosines, sines = decoder.rotary_emb(inputs, positions)
        queries, keys = apply_rotary_pos_emb(queries, keys, cosines, sines, unsqueeze_dim=2)
        inputs = inputs + attention.o_proj(attend(queries, keys, values).flatten(-2))
        after: Tensor = decoder.norm(inputs + layer.mlp(layer.post_attention_layernorm(inputs)))
        return after

    @property
    def width(self) -> int:
        """Numbers of a state."""
        return len(self.absent)

    @property
    def heads(self) -> tuple[int, int]:
        """Of keys and values: how many, and how wide each is."""
        config = self.model.config
        return config.num_key_value_heads, self.model.model.layers[0].self_attn.head_dim

    def logits(self, states: Tensor) -> Tensor:
        """Of each state, float32 (…, columns)."""
        found: Tensor = self.model.lm_head(states).float()
        return found


class Text:
    """What is kept of one session: of each token its key and value, and the state after it.

    States are counted by the tokens before them: the first is that of none, and stands for all that are not there.
    """

    def __init__(self, layer: StateLayer) -> None:
        self.ids: tuple[int, ...] = ()
        self.tree = NO_TREE  # nodes that are computed after `ids`: that of node i is at `len(ids) + i`
        self.computed = 0  # tokens of `ids` whose keys and values are there
        self._ready = 0  # states that are there, computed with the tokens before them or drafted before
        self._given: set[int] = set()  # states that are the target's own
        heads, width = layer.heads
        zeros = layer.absent.new_zeros
        self.keys, self.values, self.states = zeros(heads, 0, width), zeros(heads, 0, width), layer.absent[None]

    @property
    def room(self) -> int:
        """Tokens that it has memory for."""
        return self.keys.shape[1]

    def make_room(self, size: int) -> None:
        more = room_for(size) - self.room
        if more > 0:
            self.keys, self.values = pad(self.keys, (0, 0, 0, more)), pad(self.values, (0, 0, 0, more))
            self.states = pad(self.states, (0, 0, 0, more))

    def change(self, ids: tuple[int, ...]) -> None:
        """The text is this one now; states that were drafted for what it goes on with are kept."""
        if ids == self.ids:
            return
        kept, path = common_prefix(self.ids, ids), list[int]()
        if kept == len(self.ids) == self.computed:
            path = emitted(self.tree, ids[kept:])
            self.make_room(len(ids))
            self.states[1 + kept : 1 + kept + len(path)] = self.states[[1 + kept + node for node in path]]
        self._given = {count for count in self._given if count <= kept}
        self.ids, self.tree, self.computed = ids, NO_TREE, min(self.computed, kept)
        self._ready = min(self._ready, kept) + len(path)

    def give(self, count: int, state: Tensor) -> None:
        """The target's own state after so many tokens, at least one."""
        self.make_room(count)
        self.states[count] = state
        self._given.add(count)
        self.tree, self.computed = NO_TREE, min(self.computed, count)

    def due(self, request: ForwardRequest) -> tuple[int, int]:
        """Tokens of the request's text, and nodes of its tree, that are there."""
        kept = min(self.computed, common_prefix(self.ids, request.context))
        if kept < len(request.context) or len(self.ids) != kept:
            return kept, 0
        pairs = zip(self.tree.tokens, self.tree.parents, request.tree.tokens, request.tree.parents, strict=False)
        return kept, sum(1 for _ in takewhile(lambda node: node[:2] == node[2:], pairs))

    def read(self, end: int) -> "Piece":
        """The next tokens of the text, up to so many."""
        places = range(self.computed, end)
        before = [place if place <= self._ready or place in self._given else 0 for place in places]
        written = [number for number, place in enumerate(places) if 1 + place not in self._given]
        inputs = InputTokens([*self.ids[self.computed : end]], places, places, (), end, NO_TREE, extents=OWN)
        self.computed, self._ready = end, max(end, self._ready)
        return Piece(self, inputs, before, written)

    def grow(self, tree: TokenTree) -> "Piece":
        """The next nodes of a tree whose first ones are there: those whose parents are."""
        size, first = len(self.ids), len(self.tree)
        end = next((node for node in range(first, len(tree)) if tree.parents[node] >= first), len(tree))
        self.tree = TokenTree(tree.tokens[:end], tree.parents[:end])
        places, tokens = range(size + first, size + end), [*tree.tokens[first:end]]
        inputs = InputTokens(tokens, places, places, (), size, self.tree, extents=OWN)
        inputs.positions = [size + depth for depth in inputs.depths[first:]]
        before = [1 + size + parent for parent in tree.parents[first:end]]
        return Piece(self, inputs, before, [*range(end - first)])


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens of one session that are read in one forward."""

    text: Text
    inputs: InputTokens  # behind their places, where keys and values go, are their states
    before: Sequence[int]  # of each token the state before it
    written: Sequence[int]  # of the tokens, those whose states are not the target's own


class EagleEngine(Engine):
    """Runs a `StateLayer` for many sessions; sessions share no prefixes. Raises as `Engine`."""

    follows = False

    def __init__(self, layer: StateLayer, max_length: int | None, budget: int | MemoryShare) -> None:
        self._layer, model = layer, layer.model
        self._begin(model, max_length, budget, CHUNK)
        heads, width = layer.heads
        self.hidden_size = layer.width
        self.token_bytes, self.session_bytes = (2 * heads * width + layer.width) * model.dtype.itemsize, 0
        self._slots = self._fit(self.token_bytes).slots
        self._texts: dict[Hashable, Text] = {}
        self._log_size(f"keys, values and states of {self._slots} tokens on {self.device}")

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def slots_in_use(self) -> int:
        return sum(text.room for text in [*self._texts.values()])

    def populate(self) -> None:
        """Nothing: sessions take memory as they grow."""

    def due(self, request: ForwardRequest) -> Sequence[int]:
        text = self._texts.get(request.session)
        kept, nodes = (0, 0) if text is None else text.due(request)
        return [*request.context[kept:], *request.tree.tokens[nodes:]]

    def admits(self, request: ForwardRequest) -> bool:
        own = self._texts.get(request.session)
        others = self.slots_in_use - (0 if own is None else own.room)
        return others + room_for(request.size) <= self._slots

    @torch.inference_mode()
    def give(self, session: Hashable, context: tuple[int, ...], states: Mapping[int, bytes]) -> None:
        """The target's own states of a session, perhaps a new one, whose text is this one now.

        They are those after so many of its tokens, at least one: `hidden_size` numbers, bfloat16, little-endian.
        """
        text = self._texts.setdefault(session, Text(self._layer))
        text.change(context)
        for count, state in states.items():
            text.give(count, torch.frombuffer(bytearray(state), dtype=torch.bfloat16).to(text.states))

    @torch.inference_mode()
    def step(self, requests: Sequence[ForwardRequest]) -> list[Tensor | None]:
        """As of `Engine`; a tree that is new takes a forward for each of its levels."""
        begun: dict[Hashable, tuple[int, Text, ForwardRequest]] = {}
        for number, one in enumerate(requests):
            if one.session not in begun and self.admits(one):
                text = self._texts.setdefault(one.session, Text(self._layer))
                text.make_room(one.size)
                text.change(one.context)
                text.tree = text.tree if text.due(one)[1] == len(text.tree) else NO_TREE
                begun[one.session] = number, text, one
        lacking = [(text, one.tokens) for _, text, one in begun.values() if text.computed < len(text.ids)]
        read = [text.read(min(len(text.ids), text.computed + tokens)) for text, tokens in lacking]
        done = [each for each in begun.values() if each[1].computed == len(each[1].ids)]
        while read or (read := [text.grow(one.tree) for _, text, one in done if len(text.tree) < len(one.tree)]):
            self._compute(read)
            read = []
        results: list[Tensor | None] = [None] * len(requests)
        rows = [text.states[[len(text.ids) + row for row in one.rows()]] for _, text, one in done]
        logits = self._layer.logits(torch.cat(rows)).split([len(some) for some in rows]) if rows else ()
        for (number, *_), own in zip(done, logits, strict=True):
            results[number] = own
        return results

    def close(self, session: Hashable) -> None:
        self._texts.pop(session, None)

    def _compute(self, pieces: Sequence[Piece]) -> None:
        """One forward; keys, values and states are written to the sessions."""
        sizes = [piece.inputs.count for piece in pieces]
        self.computed += sum(sizes)
        before = [piece.text.states[piece.before] for piece in pieces]

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            """One after another: each to its own text."""
            parts = []
            split = (each[0].transpose(0, 1).split(sizes, 1) for each in (queries, keys, values))
            for piece, query, key, value in zip(pieces, *split, strict=True):
                text, count, used = piece.text, piece.inputs.count, piece.inputs.used()
                text.keys[:, used - count : used], text.values[:, used - count : used] = key, value
                seen = torch.from_numpy(visible([piece.inputs], count, used)[0]).to(self.device)
                own = text.keys[None, :, :used], text.values[None, :, :used], seen
                parts.append(scaled_dot_product_attention(query[None], *own, enable_gqa=True)[0])
            return torch.cat(parts, 1).transpose(0, 1)[None]

        ids, positions = (
            torch.tensor([[number for each in lists for number in each]], device=self.device)
            for lists in ([piece.inputs.tokens for piece in pieces], [piece.inputs.positions for piece in pieces])
        )
        after = self._layer(ids, torch.cat(before)[None], positions, attend)[0].split(sizes)
        for piece, states in zip(pieces, after, strict=True):
            places = [1 + piece.inputs.places[number] for number in piece.written]
            piece.text.states[places] = states[piece.written]


def room_for(size: int) -> int:
    """Tokens for which a session of so many takes memory."""
    return -(-size // ROOM) * ROOM
