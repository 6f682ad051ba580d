"""With what a service runs its model. Where vLLM has an option of the same meaning, it has vLLM's name and default."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from crossdraft.config.fields import COMMAS, Checked, option, part_of

MAX_CAPTURED = 8192  # tokens of a forward that is captured as a CUDA graph
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
NGRAM = "ngram"  # in a cluster's file, in place of a drafter's model: prompt lookup


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What all models have."""

    dtype: Dtype = option("auto", "auto, float32, bfloat16 or float16.")
    quantization: Literal["int8"] | None = option(None, "int8: 8-bit weights (needs torchao).", metavar="METHOD")
    device: str = option("auto", "auto (CUDA if there is one, else cpu), or a torch device, such as cuda:0.")
    cache_mib: int | None = option(
        None,
        "Size of the KV cache in MiB, allocated at start. By default what --gpu-memory-utilization leaves, on a CPU "
        "half of the free memory, but no more than all sessions can use.",
        min=1,
        env=True,
    )
    gpu_memory_utilization: float = option(0.9, "Without --cache-mib: max share of a GPU's memory.", above=0, max=1)
    enable_prefix_caching: bool = option(True, "Sessions that begin with the same text share its KV cache.")
    enforce_eager: bool = option(False, "Do not compile the model, nor use CUDA graphs.")
    cuda_graph_sizes: tuple[int, ...] = option(
        (),
        "Tokens of the forwards that are captured as CUDA graphs at start, to which others are rounded up; "
        f"{COMMAS}. By default 1, 2, 4, 8, 16, 24, … up to what a step computes, as memory allows.",
        metavar="TOKENS",
        min=1,
        max=MAX_CAPTURED,
    )
    max_model_len: int | None = option(
        None, "Max tokens of a session; by default the model's context length, or what the KV cache holds.", min=2
    )
    threads: int | None = option(None, "Threads of torch; by default torch decides.", min=1)
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those that are not the default, as they would be typed."""
        changed = [(one.name, getattr(self, one.name)) for one in fields(EngineOptions)]
        changed = [(name, value) for name, value in changed if value != getattr(EngineOptions, name)]
        return tuple(text for name, value in changed for text in _typed(name.replace("_", "-"), value))


def _typed(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (f"--{'' if value else 'no-'}{name}",)
    return f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(EngineOptions):
    """And what a model of a server's own has."""

    chat_template: Path | None = option(None, "Jinja template of chats; by default the model's own.", metavar="FILE")
    lora_modules: tuple[str, ...] = option((), "A LoRA adapter, merged at start (needs peft).", metavar="NAME=PATH")


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What only targets have."""

    generation_config: str = option(
        "auto",
        "Sampling settings of requests that leave them out: auto are those of the model's generation_config.json, vllm "
        "none, FOLDER those of another one.",
        metavar="auto|vllm|FOLDER",
    )
    override_generation_config: str = option("{}", 'In place of these, as {"temperature": 0.5}.', metavar="JSON")
    tensor_parallel_size: int = option(1, "Devices, and processes, that share it.", metavar="N", min=1, max=1024)


@dataclass(frozen=True, kw_only=True)
class DrafterOptions(Checked):
    """What only drafters with a model have."""

    vocab_keep: int | None = option(None, "Keep only the N most frequent tokens in the LM head.", metavar="N", min=1)
    vocab_follow: int = option(0, "N more, for the tokens that texts have used last.", metavar="N", min=0)
    frequencies: Path | None = option(None, "For --vocab-keep: written by `crossdraft frequencies`.", metavar="FILE")
    affinity: Path | None = option(None, "For the method rdk: written by `crossdraft affinity`.", metavar="FILE")

    def _fault(self) -> str:
        if self.vocab_follow and self.vocab_keep is None:
            return "--vocab-follow (vocab_follow), columns beside those that are kept, needs --vocab-keep"
        together = (self.vocab_keep is None) == (self.frequencies is None)
        return "" if together else "--vocab-keep N (vocab_keep) and the --frequencies FILE that ranks them go together"


@dataclass(frozen=True, kw_only=True)
class NgramOptions(Checked):
    """What a drafter without a model has (prompt lookup)."""

    max_ngram: int = option(32, "Max length of a match, in bytes.", min=1)
    min_ngram: int = option(4, "Min length of a match, in bytes.", min=1)
    memory_mib: int = option(32, "Memory for earlier outputs, from which the same client's drafts are copied.", min=0)

    def _fault(self) -> str:
        above = self.min_ngram > self.max_ngram
        return f"min_ngram, {self.min_ngram}, must not be above max_ngram, {self.max_ngram}" if above else ""


@dataclass(frozen=True, kw_only=True)
class OwnModels(ModelSettings, TargetOptions):
    """Models that run in a command's own process. Engine options are of both, where the drafter has none of its own;
    a chat template, an adapter and what only targets have are the target's."""

    target_model: str | None = option(None, "Run this target here: a folder, hub id, or bundled:NAME.", metavar="MODEL")
    drafter_model: str | None = option(None, "Run this drafter here; it is the default one.", metavar="MODEL")
    target_port: int | None = option(None, "Serve --target-model to others, too; 0 picks one.", min=0, max=65535)
    drafter_port: int | None = option(None, "Serve --drafter-model to others, too.", min=0, max=65535)
    drafter_device: str | None = option(None, "--device of the drafter.")
    drafter_dtype: Dtype | None = option(None, "--dtype of the drafter.")
    drafter_quantization: Literal["int8"] | None = option(None, "--quantization of the drafter; by default none.")
    drafter_cache_mib: int | None = option(
        None, "--cache-mib of the drafter; without either both caches of a device hold about as many tokens.", min=1
    )

    @property
    def engine(self) -> EngineOptions:
        """Of both models."""
        return part_of(EngineOptions, self)

    @property
    def of_drafter(self) -> EngineOptions:
        """With what the drafter runs; the length of a session is the target's."""
        given = {name: getattr(self, f"drafter_{name}") for name in ("device", "dtype", "cache_mib")}
        given = {name: value for name, value in given.items() if value is not None}
        return replace(self.engine, **given, max_model_len=None, quantization=self.drafter_quantization)


STARTED = EngineOptions(cache_mib=512)  # of services that a command starts for itself
