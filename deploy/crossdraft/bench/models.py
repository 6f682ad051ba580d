"""Models made for measurements: a costlier one with the same function (`crossdraft bench inflate`), a longer context
than was trained, or one that costs next to nothing."""

import copy
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from crossdraft.bench.harness import MILLISECONDS, print_table
from crossdraft.console.running import CommandFailed, UsageError
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import CannotInflateError, grown, load_model
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError, Size, source_of
from crossdraft.engine.packed_linear import pack
from crossdraft.engine.requests import ForwardRequest
from crossdraft.types.trees import ROOT, TokenTree

# Inflated models.

TOKENS = (1, 2, 5, 9, 17)  # of a pass: one that was committed, and 0, 1, 4, 8, 16 nodes
TURNS = 15
TOLERANCE = 1e-4  # between two logits, in float32
PROBES, LENGTH = 4, 24  # random prompts that both models are compared on, and their tokens
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
PROMPT = 64  # tokens before a pass that is measured
COLUMNS = ("model", "parameters", *(f"{count} token{'s'[: count - 1]}" for count in TOKENS))


def make(name: str, size: Size, folder: Path) -> None:
    """Writes the larger model, and says how much it may differ and what its passes cost.

    Raises:
        UsageError: the folder holds something, or the shape is smaller than the model.
        CommandFailed: the model cannot be loaded, inflated or written.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{folder} holds something already: give a folder that is empty or new")
    with _failures():
        inflated = inflate(name, size)
        inflated.save(name, folder)
        rows = []
        for shown, model in (("original", inflated.original), ("larger", inflated.model)):
            parameters = sum(parameter.numel() for parameter in model.parameters())
            pack(model)  # as a service runs it
            times = pass_times(model, [count - 1 for count in TOKENS], TURNS)
            rows.append((shown, f"{parameters / 1e6:.1f}M", *(f"{MILLISECONDS * time:.1f}" for time in times)))
    print(f"Largest difference between logits on random prompts: {inflated.difference:.1e}")
    print_table("Processor milliseconds of a pass, one thread", COLUMNS, rows)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except NumberOutOfRangeError as error:
        raise UsageError(str(error)) from error
    except (ModelLoadError, CannotInflateError) as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"the larger model cannot be written: {error}") from error


@dataclass(frozen=True, eq=False)
class Inflated:
    """A model and the larger one that computes the same."""

    original: PreTrainedModel
    model: PreTrainedModel
    difference: float  # largest, between logits on random prompts

    def save(self, name: str, folder: Path) -> None:
        """Writes a folder as transformers does, with the tokenizer and the generation settings of `name`.

        In float16 where that loses nothing, as when `hidden` is 4 or 16 times what it was; else in float32.
        """
        exact = all(bool((tensor.half() == tensor).all()) for tensor in self.model.parameters())
        (copy.deepcopy(self.model).half() if exact else self.model).save_pretrained(folder)
        for file in TOKENIZER_FILES:
            found = cached_file(source_of(name), file, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                shutil.copyfile(found, folder / file)


def inflate(name: str, size: Size) -> Inflated:
    """The model `name` (a folder, a hub id or `bundled:NAME`) in a larger shape, both in float32.

    Raises:
        ModelLoadError: it cannot be loaded.
        NumberOutOfRangeError: the shape is smaller than the model.
        CannotInflateError: its architecture is not Llama, or the larger model's logits are not the same.
    """
    original = load_model(name, "float32").model
    model = grown(original, size)
    difference = largest_difference(original, model)
    if not difference <= TOLERANCE:
        raise CannotInflateError(
            f"the larger model's logits differ from those of {name} by up to {difference:.2g}, and only {TOLERANCE:g} "
            "is allowed: something in its configuration is not known here"
        )
    return Inflated(original, model, difference)


@torch.inference_mode()
def largest_difference(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """Between the logits of two models on the same random prompts."""
    return max(
        float((one(ids, use_cache=False).logits - other(ids, use_cache=False).logits).abs().max())
        for ids in _prompts(one.config.vocab_size)
    )


def _prompts(vocabulary: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(PROBES):
        yield torch.randint(vocabulary, (1, LENGTH), generator=generator)


def pass_times(model: PreTrainedModel, nodes: Sequence[int], turns: int) -> list[float]:
    """Median processor seconds of a pass of one committed token and a chain of so many nodes, for each number.

    All numbers take their turn, so that whatever else the machine does meets all of them. Torch has one thread from
    here on.

    Raises:
        ValueError: the engine cannot run this model.
    """
    torch.set_num_threads(1)
    engine = Engine(model, PROMPT + max(nodes) + 1)
    prompt = tuple(range(1, PROMPT + 1))
    engine.forward([ForwardRequest("pass", prompt)])
    found: list[list[float]] = [[] for _ in nodes]
    for turn in range(1 + turns):
        for count, times in zip(nodes, found, strict=True):
            tree = TokenTree((0,) * count, tuple(range(ROOT, count - 1)))
            began = time.thread_time()
            engine.forward([ForwardRequest("pass", (*prompt, turn % 2), tree)])
            times += [time.thread_time() - began] if turn else []  # the first turn warms up
            engine.forward([ForwardRequest("pass", prompt, wanted=())])
    return [median(times) for times in found]


# A longer context.

CONFIGURATION = "config.json"
CONTEXT = "max_position_embeddings"
KEPT = ("*.json", "*.safetensors", "*.jinja")


def lengthened(name: str, context: int, folder: Path) -> str:
    """The name of the same model with a context of at least `context` tokens: its own, or a copy in `folder`.

    Its text after the trained context means little; rotary positions are defined for any length.

    Raises:
        ModelLoadError: there is no such model, or its positions are learnt.
    """
    files = Path(source_of(name))
    if not (files / CONFIGURATION).is_file():
        raise ModelLoadError(f"the context of {name} cannot be lengthened: give a folder, or bundled:NAME")
    configuration = json.loads((files / CONFIGURATION).read_text(encoding="utf-8"))
    own = configuration.get(CONTEXT)
    if own is None or not {"rope_theta", "rope_parameters", "rope_scaling"} & configuration.keys():
        raise ModelLoadError(f"the context of {name} cannot be lengthened: its positions are not rotary")
    if own >= context:
        return name
    for pattern in KEPT:
        for file in files.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    changed = json.dumps(configuration | {CONTEXT: context}, indent=2)
    (folder / CONFIGURATION).write_text(changed, encoding="utf-8")
    return str(folder)


def write_free(folder: Path) -> None:
    """Writes a model that costs next to nothing: one layer of width 64 with random weights, over bytes.

    Its logits are far apart, so that it agrees with itself under a little noise. It samples printable ASCII only: its
    text is never cut inside of a character, with which a drafter could not go on.

    Raises:
        OSError: the folder cannot be written.
    """
    loaded = load_model("bundled:drafter-c", "float32")
    size = loaded.description.vocabulary_size
    texts = Tokenizer.from_str(loaded.description.tokenizer_json).decode_batch([[place] for place in range(size)])
    printable = [place for place, text in enumerate(texts) if text and text.isprintable() and text.isascii()]
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        # The first hidden dimension is nearly the same everywhere, and counts against what is not to be sampled.
        model.model.embed_tokens.weight[:, 0] = 0.2
        model.lm_head.weight.mul_(22)
        model.lm_head.weight[:, 0] = -10.0
        model.lm_head.weight[printable, 0] = 0.0
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(loaded.description.tokenizer_json, encoding="utf-8")
