"""A proposer for tests of vLLM's sampler: drafts are fixed beforehand, and a third of the steps has none."""

import json
import os
from collections.abc import Sequence
from typing import Any

from crossdraft.integrations.vllm import RemoteDrafter

DRAFTS = "CROSSDRAFT_TEST_DRAFTS"  # JSON: token ids that are proposed by turns, a list for each draft


class FixedDrafter(RemoteDrafter):
    """Checks and mends vLLM's sampler as its base does, and asks no drafter."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self._fixed: list[list[int]] = json.loads(os.environ[DRAFTS])
        self._proposed = 0

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        drafts: list[list[int]] = []
        for _ in sampled_token_ids:
            self._proposed += 1
            turn, left_out = divmod(self._proposed, 3)
            drafts.append([] if not left_out else self._fixed[turn % len(self._fixed)])
        return drafts
