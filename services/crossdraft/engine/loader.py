"""A causal language model by folder, hub id or bundled name, with the description that its service gives of it."""

import hashlib
import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from crossdraft.config.engine import DrafterOptions, ModelSettings, TargetOptions
from crossdraft.engine.compatibility import FAILURES, embedding_weight, length_of
from crossdraft.engine.device import device_of, leave_out_cudnn
from crossdraft.engine.names import (
    INFLATED_PREFIX,
    RANDOM_PREFIX,
    ModelLoadError,
    NumberOutOfRangeError,
    laboratory,
    source_of,
)
from crossdraft.text.frequencies import read_frequencies
from crossdraft.text.tokenizer_file import NEUTRAL, OWN, TokenizerMissing, load_tokenizer_json
from crossdraft.types.messages import Description, SamplingDefaults, checked_settings
from crossdraft.types.rows import Ids

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Tensors of old checkpoints that a model makes by itself: causal masks, and angles of positions.
MADE = re.compile(r"(attn|attention)\.(masked_)?bias$|rotary_emb\.\w+$|position_ids$")
NAMED = 4  # tensors in an error text
FUSION = "eagle.safetensors"  # beside the weights of a drafter that reads hidden states (`eagle.engine`)
SAMPLED = 64  # values of each tensor that tell weights apart
STRIDE = 2_654_435_761  # values between two of these: a prime, so that all rows and columns are among them
RUNTIME = ("dtype", "transformers_version", "_name_or_path")  # of a configuration: how it was loaded, and by what
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run, and what its service says of it."""

    model: PreTrainedModel  # in evaluation mode, on its device
    description: Description  # of the whole vocabulary, also where the head is cut; without its fingerprint
    kept: Ids | None = None  # the id of each column of its logits; None: every id has one
    weights: str = ""  # digest of what it computes with: tensors, configuration, quantization, adapter
    fusion: Path | None = None  # folder of a drafter that reads hidden states (`eagle.engine`); None: it is none


@dataclass(frozen=True)
class LoadOptions(ModelSettings, TargetOptions, DrafterOptions):
    """Which model is loaded, and how: with the options of targets and drafters; most are checked when that is done.

    Raises ValueError: an option cannot be used; the text says which.
    """

    name: str  # a folder, a hub id, or `bundled:` and the name of a bundled model
    generation_config: str = field(default=NEUTRAL, kw_only=True)  # as of a drafter

    def _fault(self) -> str:
        try:
            _ = self.adapter, self.settings
        except ValueError as error:
            return str(error)
        return ""

    @property
    def adapter(self) -> tuple[str, Path] | None:
        """What `lora_modules` says: the model's name with it, and the folder that PEFT's save_pretrained wrote."""
        if not (given := self.lora_modules):
            return None
        name, _, path = given[0].partition("=")
        if len(given) > 1 or not name or not path:
            raise ValueError(f"lora_modules takes one adapter, as NAME=PATH, got {' '.join(given)}")
        return name, Path(path)

    @property
    def settings(self) -> dict[str, Any]:
        """What `override_generation_config` says."""
        try:
            return checked_settings(json.loads(self.override_generation_config))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--override-generation-config {self.override_generation_config[:60]}: {error}") from error

    def kept(self, about: Description) -> Ids | None:
        """The ids that a drafter's LM head keeps, shape (vocab_keep + vocab_follow,); None: all.

        Its stop ids, as no corpus has any but every output ends with one, and those that a corpus uses most (FR-Spec,
        arXiv 2502.14856, Eq. 3-4), ascending; then those of the columns that follow the text, ascending, too. Raises
        FrequenciesError: the file cannot be used for this model, or a number is out of its range.
        """
        if self.vocab_keep is None or self.frequencies is None:
            return None
        ranking = read_frequencies(self.frequencies, about.tokenizer_json, about.model)
        counts = self.vocab_keep, min(about.vocabulary_size, self.vocab_keep + self.vocab_follow)
        kept, more = (ranking.most_frequent(count, about.vocabulary_size, about.stops) for count in counts)
        return np.concatenate([kept, np.setdiff1d(more, kept)])


def load_model(options: LoadOptions) -> LoadedModel:
    """Loads weights (safetensors only) and tokenizer. Raises ModelLoadError: an option or a file does not fit this
    model or machine, or the head cannot be cut; FrequenciesError: the frequencies or the number of ids to keep do not
    fit."""
    name, quantization, adapter = options.name, options.quantization, options.adapter
    if options.dtype not in ("auto", *DTYPES):
        raise ModelLoadError(f"dtype {options.dtype!r} is unknown: use auto, {', '.join(DTYPES)}")
    if quantization not in (None, "int8"):
        raise ModelLoadError(f"quantization {quantization!r} is unknown: use int8, or leave it out")
    device = device_of(options.device)
    source = _source(name)
    larger = laboratory("models", name).Larger.of(name) if name.startswith(INFLATED_PREFIX) else None  # a shape for it
    try:
        tokenizer = load_tokenizer_json(source, options.chat_template, options.generation_config)
        defaults = sampling_defaults(tokenizer.generation, options)
    except (TokenizerMissing, ValueError, OSError) as error:
        raise ModelLoadError(str(error)) from error
    leave_out_cudnn(device)
    model = _model(options, source, device, larger)
    model.name_or_path = name  # as log lines call it
    move_attributes(model, embedding_weight(model).device)
    # Before adapter and quantization are applied, whose results differ in their last bits from device to device.
    setting = re.sub(rf'"({"|".join(RUNTIME)})": [^\n]*\n', "", model.config.to_json_string())  # not how it was loaded
    weights = [sampled(model.state_dict()), setting, quantization]
    if adapter is not None:
        name, folder = adapter
        model = merged(model, folder)
        weights += [sampled(load_file(folder / "adapter_model.safetensors"))]
        weights += [(folder / "adapter_config.json").read_text()]
    if quantization is not None:
        quantize(model)
    head = model.get_output_embeddings()
    description = Description(
        model=name,
        tokenizer_json=tokenizer.tokenizer_json if larger is None else larger.spelled(tokenizer.tokenizer_json),
        controls=tokenizer.controls,
        stops=tokenizer.stops,
        vocabulary_size=len(embedding_weight(model) if head is None else head.weight),
        context=length_of(model, options.max_model_len),
        fingerprint="",
        chat_template=tokenizer.chat_template,
        defaults=defaults,
    )
    if (kept := options.kept(description)) is not None:
        if options.vocab_follow and embedding_weight(model).device.type != "cpu":
            raise ModelLoadError("the head follows the text on a CPU only, so far: leave out --vocab-follow")
        cut_head(model, kept, len(kept) - (options.vocab_keep or 0))
    fusion = Path(source) if (Path(source) / FUSION).is_file() else None
    return LoadedModel(model, description, kept, _digest(weights), fusion)


def sampling_defaults(own: Mapping[str, Any], options: LoadOptions) -> SamplingDefaults:
    """The defaults of requests, by what was read of a generation_config.json.

    As in vLLM `max_new_tokens` is a limit of all outputs, too, unless it is from the model's own file. Raises
    ValueError: a value is of a wrong type or out of its range.
    """
    override = options.settings
    settings = {**own, **override}
    limited = override if options.generation_config in (OWN, NEUTRAL) else settings
    try:
        return SamplingDefaults.of(settings, limited.get("max_new_tokens"))
    except ValueError as error:
        raise ValueError(f"generation_config.json, or what overrides it: {error}; mend it, or leave it out") from error


def fingerprint(description: Description, weights: str) -> str:
    """What identifies a model to those who use its service, in hex: equal for services that may replace each other.

    A digest of tokenizer, controls, vocabulary size and, of a target, `weights`: another one goes on with its text.
    Each draft token is judged by its own row: `weights` of a drafter are "".
    """
    return _digest((description.tokenizer_json, description.controls, description.vocabulary_size, weights))


def _digest(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@torch.no_grad()
def sampled(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, kinds and shapes of tensors, and of some values of each; takes milliseconds.

    It is the same on any device and for any number of ranks, which must all call it. A model of which only values that
    are not looked at were changed has the same one.
    """
    digest, values = hashlib.sha256(), list[Tensor]()
    for name, tensor in (part for key in sorted(tensors) for part in stored(tensors[key], key)):
        digest.update(f"{name} {tensor.dtype} {[*tensor.shape]}\n".encode())
        if count := tensor.numel():
            places = torch.arange(SAMPLED, device=tensor.device) * STRIDE % count
            rows = tensor.contiguous().view(-1).view(torch.uint8).view(count, -1)  # not all kinds can be indexed
            values.append(rows[places].flatten())
    return digest.hexdigest() + hashlib.sha256(torch.cat(values).cpu().numpy().tobytes()).hexdigest()


def stored(tensor: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """A tensor, whole where ranks share it, with its name; or those that it consists of, as quantized ones do."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        parts = {part: getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]}
        for part, inner in parts.items():
            if inner is not None:
                yield from stored(inner, f"{name}.{part}")
    elif isinstance(tensor, Tensor):
        yield name, tensor


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


def check_divisible(name: str, ranks: int, trust_remote_code: bool) -> None:
    """Raises ModelLoadError for a model that so many ranks cannot share, by its configuration."""
    if name.startswith((RANDOM_PREFIX, INFLATED_PREFIX)):
        raise ModelLoadError(f"{name} is made in one process: leave out --tensor-parallel-size, or give a folder")
    source = _source(name)
    with _said_of(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    if not config.base_model_tp_plan:
        raise ModelLoadError(f"transformers has no tensor-parallel plan for {config.model_type}: use one device")
    for what in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, what, None) or 0
        if count % ranks:
            raise NumberOutOfRangeError(f"--tensor-parallel-size must divide {what}, {count}, got {ranks}")


def _model(options: LoadOptions, source: str, device: torch.device, larger: Any) -> PreTrainedModel:
    """The model, or a rank's share; in a larger shape if its name says so: that one is made on its device."""
    name, dtype, trusted = options.name, options.dtype, options.trust_remote_code
    if options.tensor_parallel_size > 1:
        # transformers wants `accelerate` to place what is shared, also on a CPU, where it is anyway.
        on_cpu = patch("transformers.modeling_utils.check_and_set_device_map", lambda _: None)
        with on_cpu if device.type == "cpu" else nullcontext():
            return _weights(source, dtype, device, trusted, DistributedConfig(tp_size=options.tensor_parallel_size))
    if name.startswith(RANDOM_PREFIX):
        vocabulary = load_tokenizer_json(source).vocabulary_size
        made: PreTrainedModel = laboratory("models", name).random_model(name.removeprefix(RANDOM_PREFIX), vocabulary)
        made.to(device, DTYPES.get(dtype, made.dtype))  # type: ignore[arg-type]  # transformers wraps torch's signature
        return made
    if larger is None:
        return _weights(source, dtype, device, trusted)
    grown: PreTrainedModel = larger.grown(_weights(source, dtype, torch.device("cpu"), trusted), device)
    return grown


@contextmanager
def _said_of(source: str) -> Iterator[None]:
    """What transformers and safetensors raise becomes a ModelLoadError."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"{source} cannot be loaded as a causal language model: {error}") from error


def _weights(
    source: str, dtype: str, device: torch.device, trust_remote_code: bool, shared: DistributedConfig | None = None
) -> PreTrainedModel:
    with _said_of(source):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=DTYPES.get(dtype, "auto"),
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            distributed_config=shared,
            ignore_mismatched_sizes=True,  # they are refused with their names
            output_loading_info=True,
        )
        model: PreTrainedModel = loaded[0]
        _check_whole(loaded[1], quantized=getattr(model.config, "quantization_config", None) is not None)
    if dtype == "auto" and model.dtype == torch.float16 and device.type == "cpu":
        model = model.float()
    model.to(device)  # type: ignore[arg-type]  # transformers wraps torch's own signature
    model.eval()
    return model


def move_attributes(model: nn.Module, device: torch.device) -> None:
    """Moves tensors that are attributes of modules, also in lists and the like, but neither parameters nor buffers.

    `Module.to` leaves them where they are, and each forward would copy them: no CUDA graph can have that.
    """

    def move(tensor: Tensor) -> Tensor:
        return moved.setdefault(id(tensor), tensor.to(device))

    moved: dict[int, Tensor] = {}
    for attributes in (vars(module) for module in model.modules()):
        for name, value in attributes.items():
            if any(isinstance(leaf, Tensor) and leaf.device != device for leaf in tree_leaves(value)):
                attributes[name] = tree_map_only(Tensor, move, value)


def _check_whole(found: Mapping[str, Collection[Any]], quantized: bool) -> None:
    """Raises ValueError for a checkpoint whose tensors are not those of its model: transformers fills in random ones.

    `found` is transformers' account, which lists no tied tensors, and none that its models ignore. A quantized
    checkpoint has scales and the like beside the tensors of the model.
    """
    missing, odd = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    odd = [] if quantized else [name for name in odd if MADE.search(name) is None]
    shapes = [f"{name} {[*there]} in place of {[*due]}" for name, there, due in sorted(found["mismatched_keys"])]
    lists = {"lacks": missing, "has tensors that its model has not:": odd, "has tensors of other shapes:": shapes}
    more = {what: f" and {len(names) - NAMED} more" if len(names) > NAMED else "" for what, names in lists.items()}
    faults = [f"{what} {', '.join(names[:NAMED])}{more[what]}" for what, names in lists.items() if names]
    if faults:
        raise ValueError(f"the checkpoint {'; it '.join(faults)}")


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with a LoRA adapter added to its weights; it is changed. Raises ModelLoadError: PEFT is not installed,
    or there is no adapter for this model, as .safetensors."""
    try:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ModuleNotFoundError as error:
        how = "in the checkout, run pip install -c constraints.txt -e '.[lora]'"
        raise ModelLoadError(f"adapters need peft: {how}") from error
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelLoadError(f"{folder} has no adapter_model.safetensors: give what PEFT's save_pretrained wrote")
    ends = (model.get_input_embeddings, model.get_output_embeddings)
    tied = len({id(getattr(end(), "weight", None)) for end in ends}) == 1
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapter = PeftModel.from_pretrained(model, str(folder))
        shared = tied and any(isinstance(end(), BaseTunerLayer) for end in ends)
        adapted: PreTrainedModel = adapter.merge_and_unload(safe_merge=True)
    except (*FAILURES, OSError, SafetensorError, UserWarning) as error:
        raise ModelLoadError(f"{folder} is no LoRA adapter of this model: {error}") from error
    if shared:
        raise ModelLoadError(f"{folder} changes the embedding or the head, and in this model they are one matrix")
    adapted.eval()
    return adapted


def quantize(model: PreTrainedModel) -> None:
    """Makes the weights of a model's linear layers 8-bit integers with a scale for each row, those of its head apart.
    Raises ModelLoadError: torchao is not installed."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            "quantization needs torchao: in the checkout, run pip install -c constraints.txt -e '.[quantization]'"
        ) from error
    head = model.get_output_embeddings()
    quantize_(model, Int8WeightOnlyConfig(), lambda module, _: type(module) is nn.Linear and module is not head)


class FollowingHead(nn.Module):
    """A head that is cut to some ids, the last columns of which can be given to others."""

    def __init__(self, whole: nn.Linear, kept: Ids, room: int) -> None:
        super().__init__()
        self.static, self.room = _cut(whole, kept[:-room]), room
        self._hidden = _cut(whole, kept[-room:]), whole  # no parts of this module: these are not packed

    @torch.inference_mode()
    def give(self, places: list[int], ids: list[int]) -> None:
        """Columns of the room, counted within it, become those of these ids."""
        room, whole = self._hidden
        for name, numbers in room.named_parameters():
            numbers[places] = getattr(whole, name)[ids]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.static(states), self._hidden[0](states)], -1)


def _cut(head: nn.Linear, kept: Ids) -> nn.Linear:
    rows = torch.as_tensor(kept, device=head.weight.device)
    cut = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device="meta", dtype=head.weight.dtype)
    for name, whole in head.named_parameters():
        setattr(cut, name, nn.Parameter(whole.detach()[rows], requires_grad=False))
    return cut


def cut_head(model: PreTrainedModel, kept: Ids, room: int = 0) -> None:
    """Replaces the LM head by one whose column i is that of id kept[i]; softmax is then over those only.

    With room for so many of the last ids to be replaced it is a FollowingHead.

    Input embeddings stay whole, also where they were tied to the head. Raises ModelLoadError: the head is not a plain
    linear layer, or cannot be replaced.
    """
    head: nn.Module | None = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelLoadError(
            f"the head of this model is {'missing' if head is None else 'a ' + type(head).__name__}, and only a plain "
            "linear layer can be cut: leave out --vocab-keep"
        )
    cut = FollowingHead(head, kept, room) if room else _cut(head, kept)
    model.set_output_embeddings(cut)
    if model.get_output_embeddings() is not cut:
        raise ModelLoadError("this model does not let its head be replaced: leave out --vocab-keep")
