"""Which rows a pass fetches: guesses at the tokens that the walk will emit. They affect cost, never the output."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from crossdraft.text.letters import Letters
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import encode_beginning
from crossdraft.types import quick_dataclass
from crossdraft.types.rows import NO_IDS, DraftToken, Ids, Whose
from crossdraft.types.trees import Path, TokenTree, tree_of
from crossdraft.verification.walk import Guess, Method, draft_token_letters, letters_of, target_support

SIBLINGS = 16  # tokens of a row that may be beside the draft token


@quick_dataclass(frozen=True)
class Plan:
    """A token tree, and the ids that the rows at its root and at each node must list besides the head."""

    tree: TokenTree
    listed: tuple[Ids, ...]  # 1 + len(tree) arrays; empty if the target replies with samples
    own: Path = ()  # the draft's own tokens, as far as the tree has them; only if no other path has precedence


@quick_dataclass(frozen=True)
class Planner:
    """Plans the passes of one session."""

    pair: Pair
    method: Method
    encode: Callable[[Letters], Path]  # the target's tokenizer, for text in mid-output
    budget: int  # max nodes of a tree
    most_paths: int = 2  # of a tree; 1: a chain

    def plan(
        self,
        draft_tokens: Sequence[DraftToken],
        skip: int,
        room: int,
        alternatives: Sequence[Letters] = (),
        nodes: int = 0,
    ) -> Plan:
        """The tree of a pass at the frontier.

        Args:
            draft_tokens: the draft as far as it has arrived, revealed or not.
            skip: letters from the start of the first draft token to the frontier.
            room: max nodes that the target's context leaves.
            alternatives: other texts that may follow the frontier, the likeliest first; used while paths are left.
            nodes: of a draft tree, whose leaves the alternatives are: all are used. A method that judges rows drafts a
                chain, and has other tokens of each row beside it. 0: the draft is a chain.
        """
        starts, text = self._layout(draft_tokens, skip)
        paths = [self._guessed(guess, starts, text) for guess in self.method.guesses[: self.most_paths]]
        own = paths[0] if self.method.guesses[0] is Guess.OWN else ()
        others = alternatives if nodes else alternatives[: self.most_paths - len(paths)]
        paths += [encode_beginning(self.encode, other) for other in others]
        if nodes and not (self.method.samples or self.method.whole_draft):  # each draft token is judged by its row
            paths += self._siblings(starts, self._own_path(starts))
        budget = max(0, min(nodes or self.budget, room))
        tree = tree_of(paths, budget)
        return Plan(tree, self._listed(tree, starts), own[:budget])

    def _guessed(self, guess: Guess, starts: dict[int, DraftToken], text: Letters) -> Path:
        if guess is Guess.OWN:
            return self._own_path(starts)
        return encode_beginning(self.encode, text) if guess is Guess.CANONICAL else self._longest(text)

    def listed(self, tree: TokenTree, draft_tokens: Sequence[DraftToken], skip: int) -> tuple[Ids, ...]:
        """The ids that the walk may need at the root and at each node of a tree at the frontier; see `plan`."""
        return self._listed(tree, self._layout(draft_tokens, skip)[0])

    def _siblings(self, starts: dict[int, DraftToken], own: Path) -> list[Path]:
        """The draft's own tokens up to a place, and there another one that the drafter's row gives: what may replace a
        refused one, by the chance of that, if a draft token is accepted with the square root of its probability."""
        found: list[tuple[float, Path]] = []
        place, reached = 0, 1.0
        for count, token in enumerate(own):
            draft_token, row = starts[place], starts[place].row
            if row is None:
                break
            ids = row.ids if draft_token.whose is Whose.TARGET else self.pair.to_target_ids(row.ids)
            chances = np.where((ids >= 0) & (ids != token), row.probabilities, 0.0)
            for likeliest in np.argsort(-chances)[:SIBLINGS].tolist():
                if chances[likeliest] > 0:
                    found.append((reached * float(chances[likeliest]), (*own[:count], int(ids[likeliest]))))
            reached *= max(0.0, 1.0 - float(chances.sum())) ** 0.5
            place += len(draft_token_letters(self.pair, draft_token))
        return [path for _, path in sorted(found, reverse=True)]

    def _listed(self, tree: TokenTree, starts: dict[int, DraftToken]) -> tuple[Ids, ...]:
        if self.method.samples:
            return ()
        if self.method.whole_draft:
            return self._next_tokens(tree)
        # At the root and at each node those that the row of the draft token beginning there can stand for.
        supports = {place: target_support(self.pair, draft_token) for place, draft_token in starts.items()}
        return tuple([supports.get(end, NO_IDS) for end in tree.ends(self.pair.target.letters)])

    def _layout(self, draft_tokens: Sequence[DraftToken], skip: int) -> tuple[dict[int, DraftToken], Letters]:
        """The draft tokens from the frontier on, by where they begin after it, and the draft's text from it on."""
        letters = letters_of(self.pair, draft_tokens)
        starts = dict(zip(accumulate(map(len, letters), initial=-skip), draft_tokens, strict=False))
        ahead = {place: draft_token for place, draft_token in starts.items() if place >= 0} if skip else starts
        return ahead, Letters("".join(letters)[skip:])

    def _longest(self, text: Letters) -> Path:
        """The text cut greedily into longest target tokens, up to the first place where no token fits."""
        path: list[int] = []
        while letters := self.pair.target.trie.longest(text):
            path.append(self.pair.target.ids_of(letters)[0])
            text = Letters(text[len(letters) :])
        return tuple(path)

    def _own_path(self, starts: dict[int, DraftToken]) -> Path:
        """The draft's own tokens from the frontier on, up to the first that is no target token."""
        path: list[int] = []
        of_drafter, theirs = self.pair.target_id, Whose.TARGET
        for one in starts.values() if 0 in starts else ():
            token = one.token if one.whose is theirs else of_drafter(one.token)
            if token is None:
                break
            path.append(token)
        return tuple(path)

    def _next_tokens(self, tree: TokenTree) -> tuple[Ids, ...]:
        """At the root and at each node the ids of its children, with all others of the same letters."""
        vocabulary = self.pair.target
        found: list[set[int]] = [set() for _ in range(1 + len(tree))]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            found[1 + parent].update(vocabulary.ids_of(vocabulary.letters[token]))
        return tuple(np.array(sorted(ids), dtype=np.int64) for ids in found)
