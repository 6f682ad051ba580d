"""vLLM's interface for proposers of a user's own: `RemoteDrafter`, its options, and the ranks that share its drafts."""

import atexit
import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crossdraft.client.api import addresses_of
from crossdraft.config.fields import fault_of_address
from crossdraft.integrations.vllm.proposals import Proposals
from crossdraft.rpc.security import RenewedCredentials, TlsFiles
from crossdraft.text.letters import Side
from crossdraft.text.tokenizer_file import load_tokenizer_json

log = logging.getLogger(__name__)

SUPPORTED = ("0.32", "0.33")  # releases of vLLM that call proposers as this one expects: major and minor number
START_SECONDS = 10.0  # that vLLM's start waits for drafters
PREFIX = "CROSSDRAFT_"  # of all variables
FILES, FLAGS = ("TLS_CA", "TLS_CERT", "TLS_KEY"), ("ASSUME_GREEDY", "ANY_VLLM", "ALWAYS_DRAFT")
VARIABLES = ("DRAFTER", *FILES, "MAX_WAIT_MS", *FLAGS)
Drafts = list[list[int]]
# What the law of sampled outputs rests on in vLLM: it divides the logits at each draft position by its request's
# temperature, which this function spreads over positions. Where a kernel writes to a copy of its output, as that of the
# CPU build does for floats, the temperatures are whatever the memory held before. Greedy requests do not use it.
NAME = "expand_batch_to_tokens"
Expand = Callable[..., torch.Tensor]
# Values of requests, and how many draft tokens each has: an empty draft, several, and values to be replaced.
CASES: tuple[tuple[tuple[float, ...], tuple[int, ...]], ...] = (
    ((0.7,), (1,)),
    ((0.5, 0.0, 1.25), (2, 3, 1)),
    ((0.0, 0.9, 0.3, 2.0), (0, 4, 0, 2)),
)


class NotSupportedError(RuntimeError):
    """This vLLM, or its configuration, cannot be served; the text says what to change."""


@dataclass(frozen=True)
class Options:
    """What the environment says. Raises ValueError: a variable is missing or cannot be used; the text names it."""

    drafters: tuple[str, ...]  # host:port
    tls: TlsFiles | None = None
    longest_wait: float = 0.02  # seconds that a step is held up for draft tokens at most
    only_greedy: bool = False  # no request has a temperature above 0, as the user says
    any_version: bool = False  # of vLLM
    always: bool = False  # requests draft whether that pays or not

    @staticmethod
    def read(environment: Mapping[str, str]) -> "Options":
        given = {name: environment.get(f"{PREFIX}{name}", "").strip() for name in VARIABLES}
        drafters = addresses_of(given["DRAFTER"])
        if not drafters or any(map(fault_of_address, drafters)):
            raise ValueError(
                "set CROSSDRAFT_DRAFTER to the address of a drafter service, HOST:PORT, or to several with commas "
                f"between them, without http:// and without a name; it is {given['DRAFTER']!r}"
            )
        files = [Path(given[name]) for name in FILES if given[name]]
        if files and len(files) < len(FILES):
            names = ", ".join(f"{PREFIX}{name}" for name in FILES)
            raise ValueError(f"set all of {names}, or none: without them connections are plaintext")
        if wrong := [name for name in FLAGS if given[name] not in ("", "0", "1")]:
            raise ValueError(f"{PREFIX}{wrong[0]} must be 0 or 1, got {given[wrong[0]]!r}")
        wait = _milliseconds(given["MAX_WAIT_MS"] or "20") / 1000
        return Options(drafters, TlsFiles(*files) if files else None, wait, *(given[name] == "1" for name in FLAGS))


def show(log: logging.Logger) -> None:
    """Let the lines of a logger, such as that of the whole package, say where they come from, unless handlers do."""
    if log.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s crossdraft: %(message)s", "%m-%d %H:%M:%S"))
    log.addHandler(handler)


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """Of each variable whose name is nearly that of one of ours, both names."""
    others = [name for name in environment if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in VARIABLES]
    nearest = [(name, get_close_matches(name.removeprefix(PREFIX), VARIABLES, 1, 0.8)) for name in others]
    return [f"{name} (is {PREFIX}{found[0]} meant?)" for name, found in nearest if found]


def _milliseconds(given: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(given)) <= 1000:
            return value
    raise ValueError(f"CROSSDRAFT_MAX_WAIT_MS must be a number of milliseconds from 0 to 1000, got {given!r}")


def check_version(installed: str, any_version: bool) -> None:
    """Raises NotSupportedError for a vLLM whose interface was not looked at, unless any is allowed."""
    if any_version or ".".join(installed.split(".")[:2]) in SUPPORTED:
        return
    raise NotSupportedError(
        f"crossdraft's RemoteDrafter knows the interface of vLLM {', '.join(SUPPORTED)}, and this is {installed}: "
        "install one of these, or set CROSSDRAFT_ANY_VLLM=1 to try it all the same"
    )


def share(group: Any, drafts: Drafts | None) -> Drafts:
    """Rank 0's drafts, on every rank of a group (vLLM's `GroupCoordinator`), of which all must propose the same."""
    if group.world_size == 1:
        assert drafts is not None
        return drafts
    shared: Drafts = group.broadcast_object(drafts, src=0)
    return shared


class RemoteDrafter:
    """A proposer for `speculative_config={"method": "custom_class", "model": ...}` of vLLM.

    Its options are environment variables, see `docs/vllm.md`. Raises NotSupportedError: this vLLM is not supported;
    ValueError: a variable, a certificate, or the model's tokenizer cannot be used.
    """

    def __init__(self, vllm_config: Any) -> None:
        show(logging.getLogger("crossdraft"))
        options = Options.read(os.environ)
        for names in misspelt(os.environ):
            log.warning("a variable that nothing here reads: %s", names)
        check_version(_installed(), options.any_version)
        self._context: int = vllm_config.model_config.max_model_len
        call_to_the_end(vllm_config.speculative_config, self._context)
        self._failed = False
        self._group: Any = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
        sampler = importlib.import_module("vllm.v1.sample.rejection_sampler")
        # Every rank verifies, so that every rank is checked.
        exact = ensure_exact(sampler, torch.device(vllm_config.device_config.device))
        self._proposals = self._made(vllm_config, options) if may_draft(exact, options.only_greedy) else None
        if self._proposals is not None and self._group.rank_in_group == 0:
            self._proposals.start(START_SECONDS)
            atexit.register(self._proposals.stop)

    def load_model(self, *_: object, **__: object) -> None:
        """Nothing is loaded here."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> Drafts:
        """Draft token ids of each request for the next step, at most `num_speculative_tokens`, perhaps none.

        `sampled_token_ids` are those that this step has emitted, none while a prompt is being read; a request has
        `num_tokens_no_spec` (requests or more,) ids in `token_ids_cpu` (requests or more, max_model_len).
        """
        if self._proposals is None:
            return [[] for _ in sampled_token_ids]
        drafts = None
        if self._group.rank_in_group == 0:
            drafts = self._proposed(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        return share(self._group, drafts)

    def _proposed(self, sampled: Sequence[Sequence[int]], counts: NDArray[np.int32], ids: NDArray[np.int32]) -> Drafts:
        """As `propose`; after a fault nothing any more: vLLM serves without drafts, and no other rank waits for any."""
        if self._proposals is None or self._failed:
            return [[] for _ in sampled]
        try:
            return propose(self._proposals, sampled, counts, ids, self._context)
        except Exception:
            self._failed = True
            log.exception("crossdraft proposes no more drafts: this is a fault of its own; vLLM serves without them")
            return [[] for _ in sampled]

    def _made(self, vllm_config: Any, options: Options) -> Proposals:
        model = vllm_config.model_config
        most = vllm_config.speculative_config.num_speculative_tokens
        tls = None if options.tls is None else RenewedCredentials(options.tls)
        target = load_tokenizer_json(model.tokenizer).tokenization(Side.TARGET, model.get_vocab_size())
        return Proposals(options.drafters, target, most, options.longest_wait, tls, options.always)


def propose(
    proposals: Proposals,
    sampled: Sequence[Sequence[int]],
    counts: NDArray[np.int32],
    ids: NDArray[np.int32],
    context: int,
) -> Drafts:
    """`RemoteDrafter.propose` where the drafters are asked; `context` is the most tokens that a request may have."""
    rows = [row for row, emitted in enumerate(sampled) if len(emitted) and counts[row] < context]
    drafts: Drafts = [[] for _ in sampled]
    if not rows:
        proposals.idle()
        return drafts
    alone = len(rows) == len(sampled)
    found = proposals.step([ids[row, : counts[row]] for row in rows], [sampled[row] for row in rows], alone)
    for row, draft in zip(rows, found, strict=True):
        drafts[row] = draft[: context - int(counts[row]) - 1]
    return drafts


def call_to_the_end(speculative_config: Any, context: int) -> None:
    """Let vLLM call the proposer however near a request is to `max_model_len`.

    vLLM calls it for no request of a batch, and verifies zeros for all, while one of them is nearer to the end of a
    draft model's context than `num_speculative_tokens`. Here the target's configuration stands for that model's.
    """
    drafter = copy(speculative_config.draft_model_config)
    drafter.max_model_len = context + speculative_config.num_speculative_tokens
    speculative_config.draft_model_config = drafter


def may_draft(exact: bool, only_greedy: bool) -> bool:
    """Whether outputs stay exact: if sampled requests do, or there are none. Which requests are sampled is not said to
    proposers, so that it is all or none."""
    if exact or only_greedy:
        return True
    log.warning(
        "this vLLM samples wrongly with drafts, and crossdraft does not know how to mend it: no drafts are proposed. "
        "Greedy requests would be right: set CROSSDRAFT_ASSUME_GREEDY=1 if there are no others"
    )
    return False


def _installed() -> str:
    return str(importlib.import_module("vllm").__version__)


def expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """What `expand_batch_to_tokens` is to do: each request's value in x (requests,) as often as it has draft tokens,
    with `replace_to` in place of `replace_from`: (num_tokens,), of the dtype of x.

    `cu_num_tokens`: shape (requests,), integers: draft tokens up to each request, it included.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def is_right(function: Expand, device: torch.device) -> bool:
    """Whether a function does what `expand` does, for temperatures (float32) and top-k (int32) on this device."""
    for dtype, (values, counts) in product((torch.float32, torch.int32), CASES):
        x = (torch.tensor(values, device=device) * (1 if dtype.is_floating_point else 100)).to(dtype)
        ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
        total = sum(counts)
        # Memory that was just freed is used again: what is not written must not look right by chance.
        poison = torch.full((total,), float("nan"), device=device)
        del poison
        found = function(x, ends, total, replace_from=0, replace_to=1)
        wanted = [value or 1 for value, count in zip(x.tolist(), counts, strict=True) for _ in range(count)]
        if found.shape != (total,) or found.tolist() != wanted:
            return False
    return True


def ensure_exact(rejection_sampler: ModuleType | Any, device: torch.device) -> bool:
    """Check the function in vLLM's module of the rejection sampler, and replace it there if it is wrong; whether
    sampled requests are exact with drafts now."""
    function: Expand | None = getattr(rejection_sampler, NAME, None)
    if function is not None and is_right(function, device):
        return True
    if function is None or not is_right(expand, device):
        return False
    setattr(rejection_sampler, NAME, expand)
    log.warning(
        "vLLM's %s does not write its result for floats on %s, so that requests with a temperature above 0 would not "
        "follow the model's distribution with drafts of any kind; crossdraft has replaced it in this process",
        NAME,
        device,
    )
    return True
