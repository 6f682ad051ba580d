"""What a request may ask for, by the same names in Python, HTTP, gRPC and on the command line.

Lists are not among these: each of the interfaces writes them in a form of its own.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from crossdraft.config import MOST_DRAFT_TOKENS, MOST_LIKELY, MOST_NODES, MOST_PATHS
from crossdraft.config.fields import LeftOutFloat, LeftOutInt, option

# Of `verification.methods`, which imports numpy.
METHODS = ("standard", "union", "tli", "rdk", "coupled", "coupled-shared", "slem", "seeded", "slrs", "tokentiming")
AUTO, NO_DRAFTER = "auto", "none"  # in place of the name of a drafter: the fastest, and none
# Short names of fields, in keyword arguments, JSON and on the command line (-k, --window, --wait).
ALIASES = {"k": "num_speculative_tokens", "window": "max_draft_tokens", "wait": "min_draft_tokens"}


class Overlap(StrEnum):
    """Whether the drafter drafts on while the target verifies."""

    AUTO = "auto"  # the controller decides, from what it measures
    ON = "on"
    OFF = "off"  # the classic lock-step round of num_speculative_tokens draft tokens


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution; the names and the order are vLLM's."""

    temperature: float = option(LeftOutFloat(1.0), "Sampling temperature, 0 is greedy", min=0)
    top_k: int = option(LeftOutInt(0), "Sample from so many likeliest tokens, 0 or -1 is all", min=-1, max=2**31 - 1)
    top_p: float = option(LeftOutFloat(1.0), "Sample from the most probable tokens of this total mass", above=0, max=1)
    min_p: float = option(LeftOutFloat(0.0), "Min probability of a token, as a share of the largest", min=0, max=1)
    repetition_penalty: float = option(LeftOutFloat(1.0), "As in transformers, 1 is none", min=0.01, max=100)
    presence_penalty: float = option(0.0, "As in vLLM; 0 is none.", min=-2, max=2)
    frequency_penalty: float = option(0.0, "As in vLLM; 0 is none.", min=-2, max=2)
    min_tokens: int = option(0, "Tokens before which the output may not end.", min=0, max=2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where an output ends."""

    max_tokens: int = option(LeftOutInt(128), "Max tokens to generate", min=0, max=2**31 - 1)
    seed: int | None = option(None, "Random seed; makes the output repeatable.", min=-(2**63), max=2**64 - 1)
    ignore_eos: bool = option(False, "Go on after the end-of-sequence token.")


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How an output is made; whatever it says, exact methods keep the model's distribution."""

    method: str | None = option(None, f"{', '.join(METHODS)}; by default the best for the models and the temperature.")
    num_speculative_tokens: int = option(
        5, "Draft tokens in a round (overlap off), or that a pass waits for (overlap on).", min=1, max=MOST_DRAFT_TOKENS
    )
    drafter_temperature: float | None = option(None, "Temperature of the drafter; by default the target's.", min=0)
    overlap: Overlap = option(Overlap.AUTO, "Draft while the target verifies; off: rounds of num_speculative_tokens.")
    max_draft_tokens: int | None = option(
        None, "Max draft tokens ahead of what is verified.", min=1, max=MOST_DRAFT_TOKENS
    )
    min_draft_tokens: int | None = option(None, "Draft tokens that a pass waits for.", min=0, max=MOST_DRAFT_TOKENS)
    branches: int | None = option(
        None, "Draft tokens in each continuation prepared for a rejection; 0: none.", min=0, max=MOST_DRAFT_TOKENS
    )
    branch_width: int | None = option(None, "Continuations for each draft token.", min=1, max=MOST_DRAFT_TOKENS)
    tree_nodes: int | None = option(
        None, "Nodes of a draft tree of depth num_speculative_tokens; 0 is a chain.", min=0, max=MOST_NODES
    )
    paths: int = option(2, "Max paths of a token tree in one pass; 1 is a chain.", min=1, max=MOST_PATHS)
    allow_inexact: bool = option(False, "Allow methods whose output does not follow the target's distribution.")
    alignment_band: int = option(
        8,
        "Of tokentiming: how far tokens that are aligned may be apart; more where lengths differ by more.",
        min=0,
        max=2**31 - 1,
    )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the prompt is read, and the output shown; not on the command line."""

    include_stop_str_in_output: bool = option(False, "The text ends with what ended it.")
    truncate_prompt_tokens: int | None = option(
        None, "Only so many of the prompt's last tokens count; -1: all that fit.", min=-1, max=2**31 - 1
    )
    prompt_logprobs: int | None = option(None, "Likeliest ids at each token of the prompt.", min=0, max=MOST_LIKELY)
    cache_salt: str = option("", "Requests of a key with an equal one share the n-gram drafter's memory; empty: none.")


@dataclass(frozen=True, kw_only=True)
class Watching:
    """What is checked and shown of it; not in HTTP."""

    audit: bool = option(False, "Check that the drafter's tokens are drawn from the distributions that it sends.")
    speculation: bool = option(False, "With two targets, start a pass before the one before it has returned.")
    explain: bool = option(False, "Show how far the controller decided to draft, and why.")
    record: Path | None = option(
        None, "Record what services and session did, and when, for ui.perfetto.dev or chrome://tracing.", metavar="FILE"
    )
