"""A causal language model by folder, hub id or bundled name, with the description that its service gives of it."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from crossdraft.models.growing import CannotInflateError, grown
from crossdraft.models.names import ModelLoadError, NumberOutOfRangeError, bundled_names, size_of, source_of
from crossdraft.models.pruning import CannotPruneError, Pruning, cut_head
from crossdraft.models.support import embedding_weight, length_of
from crossdraft.text.loading import TokenizerMissing, load_tokenizer_json
from crossdraft.verification.exchange import Description
from crossdraft.verification.rows import Ids

__all__ = ["DTYPES", "LoadedModel", "ModelLoadError", "bundled_names", "fingerprint", "load_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run, and what its service says of it."""

    model: PreTrainedModel  # in evaluation mode, on its device
    description: Description  # of the whole vocabulary, also where the head is cut
    kept: Ids | None = None  # the id of each column of its logits, ascending; None: every id has one


def load_model(
    name: str,
    dtype: str = "auto",
    device: str = "cpu",
    max_length: int | None = None,
    trust_remote_code: bool = False,
    pruning: Pruning | None = None,
) -> LoadedModel:
    """Loads weights (safetensors only) and tokenizer.

    Args:
        name: a folder, a hub id, or `bundled:` and the name of a bundled model; `inflated:LAYERSxHIDDEN:` before one
            of them is the same function in a larger shape (`growing`), for benchmarks.
        dtype: "auto" (that of the weights, but float16 weights run in float32 on a CPU) or a key of DTYPES.
        device: as torch names it.
        max_length: tokens of a session; None: the model's own context, which it may not exceed.
        trust_remote_code: whether code that comes with the model may run.
        pruning: the ids that its head keeps; None: all.

    Raises:
        ModelLoadError: folder, weights, tokenizer, dtype, device or max_length do not fit, or the head cannot be cut.
        RankingError: the frequencies or the number of ids of `pruning` do not fit.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is unknown: use auto, {', '.join(DTYPES)}")
    place = device_of(device)
    source = _source(name)
    try:
        tokenizer = load_tokenizer_json(source)
    except (TokenizerMissing, ValueError) as error:
        raise ModelLoadError(str(error)) from error
    model = _model(name, source, dtype, place, trust_remote_code)
    try:
        context = length_of(model, max_length)
    except NumberOutOfRangeError:
        raise
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
    description = Description(
        model=name,
        tokenizer_json=tokenizer.tokenizer_json,
        controls=tokenizer.controls,
        stops=tokenizer.stops,
        vocabulary_size=_row_length(model),
        context=context,
        fingerprint="",
        chat_template=tokenizer.chat_template,
    )
    kept = None if pruning is None else _pruned(model, description, pruning)
    return LoadedModel(model, replace(description, fingerprint=fingerprint(description)), kept)


def fingerprint(description: Description) -> str:
    """SHA-256 of tokenizer, controls and vocabulary size, in hex: equal for models whose ids mean the same."""
    parts = (description.tokenizer_json, description.controls, description.vocabulary_size)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _source(name: str) -> str:
    """The folder or hub id. A folder must have weights; a hub id is left to the hub."""
    source = source_of(name)
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{folder} has no config.json: give the folder that save_pretrained wrote")
        if not any(folder.glob("*.safetensors")):
            raise ModelLoadError(_no_weights(folder))
    return source


def _no_weights(folder: Path) -> str:
    pickled = next((path.name for pattern in PICKLED for path in sorted(folder.glob(pattern))), None)
    if pickled is None:
        return f"{folder} has no .safetensors weights: save the model with save_pretrained"
    return (
        f"{folder} has its weights in {pickled}, a pickle, which could run any code when it is read, and is never "
        "loaded: where you trust it, load it with transformers and save it with save_pretrained, as .safetensors"
    )


def device_of(device: str) -> torch.device:
    """As torch names it; raises ModelLoadError."""
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    # An unknown name, a build without that device, one that cannot hold a tensor, one that needs a package.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ModelLoadError(
            f"device {device!r} cannot be used here, use cpu or one that torch sees: {error}".splitlines()[0]
        ) from error
    return place


def leave_out_cudnn(device: torch.device) -> None:
    """Attention on CUDA without cuDNN, in the whole process, whatever model calls it.

    Torch prefers cuDNN's on Hopper and Blackwell in 16 bits, which plans anew for all sizes and strides that a thread
    has not had yet, in some tenths of a second each time; those of a prompt hardly ever come again.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def _model(name: str, source: str, dtype: str, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    """The model of a name, in a larger shape if the name says so: that one is made on its device."""
    leave_out_cudnn(device)
    size = size_of(name)
    if size is None:
        return _weights(source, dtype, device, trust_remote_code)
    try:
        return grown(_weights(source, dtype, torch.device("cpu"), trust_remote_code), size, device)
    except CannotInflateError as error:
        raise ModelLoadError(str(error)) from error


def _weights(source: str, dtype: str, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=DTYPES.get(dtype, "auto"),
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"{source} cannot be loaded as a causal language model: {error}") from error
    if dtype == "auto" and model.dtype == torch.float16 and device.type == "cpu":
        model = model.float()
    model.to(device)  # type: ignore[arg-type]  # transformers wraps torch's own signature
    model.eval()
    return model


def _pruned(model: PreTrainedModel, description: Description, pruning: Pruning) -> Ids:
    """Cuts the head; returns the ids that are left."""
    try:
        kept = pruning.ids_of(description)
        cut_head(model, kept)
    except CannotPruneError as error:
        raise ModelLoadError(str(error)) from error
    return kept


def _row_length(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    return len(head.weight) if head is not None else len(embedding_weight(model))
