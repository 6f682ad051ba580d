"""What a drafter's branches must be, by plain forwards, and requests for them."""

from dataclasses import replace

import numpy as np
import torch

from crossdraft.engine.distributions import drafting_distributions
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.clients import DrafterClient
from crossdraft.text.letters import Letters, from_bytes, is_plain
from crossdraft.types.messages import Branch, Draft, NoiseKey, OpenDrafter, SamplingOptions
from tests.services.streaming import Epoch

PROMPT = from_bytes(b"The quick brown fox")
NOTHING = Letters("")
KEY = NoiseKey(77)
GREEDY = OpenDrafter(PROMPT, SamplingOptions(temperature=0), None, 0)
KEYED = OpenDrafter(PROMPT, SamplingOptions(temperature=0.8), KEY, 0)
DRAWN = OpenDrafter(PROMPT, SamplingOptions(temperature=0.8), None, 8)
WITH_ROWS = replace(KEYED, row_width=8)


class Reference:
    """A session's drafting by plain forwards over ids, without cache, tree and service."""

    def __init__(self, running: RunningModel, opening: OpenDrafter) -> None:
        self._running = running
        self._opening = opening
        self.prompt = running.tokenization.encode_prompt_letters(opening.prompt)

    def length(self, ids: tuple[int, ...]) -> int:
        return len(self._running.tokenization.letters_of(ids))

    @torch.inference_mode()
    def logits(self, output: tuple[int, ...]) -> torch.Tensor:
        """Of the token after the prompt and these, (1, V)."""
        return self._running.thread.engine.model(torch.tensor([self.prompt + output])).logits[:, -1].float()

    def ranking(self, output: tuple[int, ...]) -> list[int]:
        """Ids by how near they are to being drawn; the first one is."""
        logits = self.logits(output)
        if self._opening.options.temperature == 0:
            return logits[0].argsort(descending=True).tolist()
        ((ids, weights),) = drafting_distributions(logits, self._opening.options, self._opening.row_width)
        arrivals = self._running.noise.exponentials(KEY, self.length(output), ids) / weights
        return ids[np.argsort(arrivals)].tolist()

    def drafted(self, output: tuple[int, ...], count: int) -> tuple[int, ...]:
        for _ in range(count):
            output = (*output, self.ranking(output)[0])
        return output[-count:]

    def keys(self, output: tuple[int, ...], width: int) -> list[int]:
        """The likeliest other tokens than the one drawn that are text."""
        letters = self._running.tokenization.vocabulary.letters
        drawn, *others = self.ranking(output)
        found: list[int] = []
        for token in others:
            if is_plain(letters[token]) and letters[token] not in {letters[one] for one in (drawn, *found)}:
                found.append(token)
        return found[:width]


async def epoch_of(client: DrafterClient, opening: OpenDrafter, draft: Draft) -> Epoch:
    async with client.session(opening) as session:
        await session.send(draft)
        return await Epoch(draft.epoch).complete(session, draft.count, draft.count * draft.branch_width)


def corrected(branch: Branch, epoch: int, count: int, chunk: int = 64, depth: int = 0) -> Draft:
    return Draft(epoch, branch.offset, branch.letters, count, chunk, depth, adopt=branch.number)
