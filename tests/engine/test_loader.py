"""Loading models from folders and cutting their heads, and what is said when that fails."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import PhiConfig, PhiForCausalLM, PreTrainedModel

from crossdraft.engine.device import leave_out_cudnn
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import LoadOptions, cut_head, load_model, move_attributes
from crossdraft.engine.names import ModelLoadError
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.text.letters import Side
from crossdraft.types.trees import ROOT, TokenTree
from tests.engine.tiny import CONTEXT, VOCABULARY, seeded, tiny_llama, tiny_qwen2

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
DOWN = "model.layers.1.mlp.down_proj.weight"
KEPT = np.array([0, 1, 5, 17, 18, 60, 96])
REQUEST = Request("a", (1, 2, 3), TokenTree((5, 90, 6), (ROOT, 0, ROOT)))  # ids outside KEPT can be read


def folder_of(path: Path, **changes: object) -> Path:
    """A tiny Llama with a byte-level tokenizer, as save_pretrained writes it."""
    letters = sorted(ByteLevel.alphabet())[: VOCABULARY - 1]
    tokenizer = Tokenizer(BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    tiny_llama(eos_token_id=VOCABULARY - 1, **changes).save_pretrained(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path)


def test_a_folder_gives_a_model_and_its_description(folder: Path) -> None:
    loaded = load_model(LoadOptions(str(folder)))
    described = loaded.description
    assert described.model == str(folder)
    assert described.stops == (VOCABULARY - 1,)
    assert described.controls == ((VOCABULARY - 1, "END_OF_SEQUENCE"),)
    assert (described.vocabulary_size, described.context) == (VOCABULARY, 128)
    assert json.loads(described.tokenizer_json)["model"]["type"] == "BPE"
    (logits,) = Engine(loaded.model).forward([Request("a", (1, 2, 3))])
    with torch.no_grad():
        torch.testing.assert_close(logits[0], tiny_llama()(torch.tensor([[1, 2, 3]])).logits[0, -1], atol=1e-5, rtol=0)


def test_sampling_settings_are_described(folder: Path) -> None:
    """`max_new_tokens` limits every output unless it is from the model's own file, as in vLLM."""
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": None, "max_new_tokens": 100, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(own))

    def given(source: str, **override: float) -> dict[str, float]:
        settings = {"generation_config": source, "override_generation_config": json.dumps(override)}
        return load_model(LoadOptions(str(folder), **settings)).description.defaults.given

    usual = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_tokens": 100}
    assert given("auto") == usual
    assert given("vllm") == {}
    assert given("vllm", repetition_penalty=1.1) == {"repetition_penalty": 1.1}
    assert given("auto", top_k=-1, max_new_tokens=50) == usual | {"top_k": 0, "max_tokens": 50, "most_tokens": 50}
    assert given(str(folder)) == usual | {"most_tokens": 100}
    for wrong, complaint in (
        ({"top_p": 1.5}, "top_p must be above 0"),
        ({"top_k": "3"}, "top_k must be a whole number"),
    ):
        (folder / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ModelLoadError, match=f"generation_config.json.*{complaint}"):
            given("auto")


def identity(name: Path | str, side: Side = Side.TARGET, **options: Any) -> str:
    """What a service of the model says of it."""
    running = RunningModel.of(load_model(LoadOptions(str(name), **options)), side, ModelOptions("", cache_mib=1))
    running.close()
    return running.description.fingerprint


@pytest.mark.parametrize("tensor", ["model.embed_tokens", "model.layers.2.mlp.up_proj", "model.norm", "lm_head"])
def test_the_weights_identify_a_target_but_no_drafter(folder: Path, tensor: str) -> None:
    before, drafter = identity(folder), identity(folder, Side.DRAFTER)
    assert identity(folder) == before
    rewritten(folder, lambda tensors: tensors | {f"{tensor}.weight": tensors[f"{tensor}.weight"] * 1.01})
    assert identity(folder) != before
    assert identity(folder, Side.DRAFTER) == drafter


def test_what_else_identifies_a_target(folder: Path) -> None:
    """Another type, norm or larger shape computes other logits; another context or place does not."""
    config = folder / "config.json"
    found = {identity(folder), identity(folder, dtype="bfloat16"), identity(f"inflated:4x96:{folder}")}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.1}))
    found.add(identity(folder))
    assert len(found) == 4
    assert identity(folder, max_model_len=20) in found
    assert identity(folder.rename(folder.with_name("moved"))) in found
    assert identity("random:qwen2") == identity("random:qwen2") != identity("random:llama")


def test_of_a_drafter_the_vocabulary_does(folder: Path) -> None:
    first = identity(folder, Side.DRAFTER)
    tiny_llama(num_hidden_layers=1, eos_token_id=VOCABULARY - 1).save_pretrained(folder)
    assert identity(folder, Side.DRAFTER, max_model_len=20) == first
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert identity(folder, Side.DRAFTER) != first


@pytest.mark.parametrize(
    ("stored", "asked", "run"),
    [
        (torch.float16, "auto", torch.float32),
        (torch.float16, "float16", torch.float16),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_dtypes(folder: Path, stored: torch.dtype, asked: str, run: torch.dtype) -> None:
    tiny_llama().to(stored).save_pretrained(folder)
    loaded = load_model(LoadOptions(str(folder), dtype=asked))
    assert loaded.model.dtype == run
    (logits,) = Engine(loaded.model).forward([Request("a", (1, 2, 3))])
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


def test_a_lower_max_length_is_the_context(folder: Path) -> None:
    assert load_model(LoadOptions(str(folder), max_model_len=64)).description.context == 64
    with pytest.raises(ModelLoadError, match="between 7 and the model's context, 128, got 129"):
        load_model(LoadOptions(str(folder), max_model_len=129))


@pytest.mark.parametrize(
    ("missing", "lacks"),
    [(name, name) for name in ("tokenizer.json", "config.json")] + [("model.safetensors", ".safetensors weights")],
)
def test_folders_that_lack_something(folder: Path, missing: str, lacks: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelLoadError, match=f"has no {lacks}"):
        load_model(LoadOptions(str(folder)))


def rewritten(folder: Path, change: Change, name: str = "model") -> None:
    file = folder / f"{name}.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def without(name: str) -> Change:
    return lambda tensors: {one: tensor for one, tensor in tensors.items() if one != name}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"][:-1]},
            r"has tensors of other shapes: lm_head.weight \[96, 48\] in place of \[97, 48\]$",
        ),
        (without("lm_head.weight"), "lacks lm_head.weight$"),
        (without(DOWN), f"lacks {DOWN}$"),
        (
            lambda tensors: {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()},
            "lacks lm_head.weight, model.embed_tokens.weight.* more; it has tensors that its model has not: _orig_mod",
        ),
        (
            lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)},
            "has tensors that its model has not: model.layers.0.self_attn.q_proj.bias$",
        ),
    ],
)
def test_a_checkpoint_that_is_not_its_model_is_refused(folder: Path, change, complaint: str) -> None:
    rewritten(folder, change)
    with pytest.raises(ModelLoadError, match=complaint):
        load_model(LoadOptions(str(folder)))


def test_tensors_that_need_not_be_there(folder: Path) -> None:
    """Tied ones, and those that the model makes by itself."""
    tiny_llama(eos_token_id=VOCABULARY - 1, tie_word_embeddings=True).save_pretrained(folder)
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    rewritten(folder, lambda tensors: tensors | frequencies)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    load_model(LoadOptions(str(folder)))


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00002.bin", "weights.pth"])
def test_pickled_weights_are_never_read(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"nothing that could be unpickled")
    assert load_model(LoadOptions(str(folder))).description.vocabulary_size == VOCABULARY
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=f"has its weights in {name}, a pickle, which could run any code"):
        load_model(LoadOptions(str(folder)))


def test_names_dtypes_devices_and_architectures_that_do_not_exist(folder: Path) -> None:
    for options, complaint in (
        (LoadOptions("./nowhere"), "there is no folder"),
        (LoadOptions("bundled:nothing"), "there is no bundled model 'bundled:nothing'"),
        (
            LoadOptions(str(folder), device="abacus"),
            "--device must be auto, cpu or a device that torch sees here, got abacus",
        ),
    ):
        with pytest.raises(ModelLoadError, match=complaint):
            load_model(options)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no-such-model"}))
    with pytest.raises(ModelLoadError, match="cannot be loaded as a causal language model"):
        load_model(LoadOptions(str(folder)))


def test_attention_that_plans_for_each_size_is_left_out_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    leave_out_cudnn(torch.device("cpu"))
    assert asked == []
    leave_out_cudnn(torch.device("cuda:1"))
    assert asked == [False]


def biased_phi() -> PreTrainedModel:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = seeded(PhiForCausalLM, PhiConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, **sizes))
    nn.init.normal_(model.get_output_embeddings().bias, generator=torch.Generator().manual_seed(3))
    return model


@pytest.mark.parametrize(
    ("make", "kept"),
    [(tiny_llama, KEPT[:1]), (partial(tiny_qwen2, tie_word_embeddings=True), KEPT), (biased_phi, KEPT)],
)
def test_logits_are_the_full_models_at_kept_ids(make, kept: np.ndarray) -> None:
    model = make()
    (full,) = Engine(model).forward([REQUEST])
    embeddings = model.get_input_embeddings().weight
    before = embeddings.clone()
    cut_head(model, kept)
    (cut,) = Engine(model).forward([REQUEST])  # which compares tree and paths, too
    assert cut.shape == (4, len(kept))
    torch.testing.assert_close(cut, full[:, kept], atol=1e-5, rtol=0)
    assert model.get_input_embeddings().weight is embeddings
    assert torch.equal(embeddings, before)


class Doubled(nn.Linear):
    """A head that does more than multiply."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


def test_heads_of_other_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    model.set_output_embeddings(Doubled(48, VOCABULARY, bias=False))
    with pytest.raises(ModelLoadError, match="is a Doubled, and only a plain linear layer can be cut"):
        cut_head(model, KEPT)
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda _: None)
    with pytest.raises(ModelLoadError, match="is missing"):
        cut_head(model, KEPT)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what PEFT still uses
def test_an_adapter_is_merged_and_names_the_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        usual = load_model(LoadOptions("random:llama")).model(ids).logits
        settings = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
        adapted = peft.get_peft_model(load_model(LoadOptions("random:llama")).model, settings)
        adapted.save_pretrained(tmp_path)
        expected = adapted.eval()(ids).logits
        loaded = load_model(LoadOptions("random:llama", lora_modules=(f"mine={tmp_path}",)))
        torch.testing.assert_close(loaded.model(ids).logits, expected, atol=1e-4, rtol=0)
    assert float((expected - usual).abs().max()) > 0.1
    assert loaded.description.model == "mine"
    Engine(loaded.model)
    stored = (tmp_path / "adapter_model.safetensors").read_bytes()
    rewritten(tmp_path, lambda tensors: {name: tensor * 2 for name, tensor in tensors.items()}, "adapter_model")
    assert load_model(LoadOptions("random:llama", lora_modules=(f"mine={tmp_path}",))).weights != loaded.weights
    (tmp_path / "adapter_model.safetensors").write_bytes(stored)
    assert load_model(LoadOptions("random:llama", lora_modules=(f"mine={tmp_path}",))).weights == loaded.weights
    assert load_model(LoadOptions("random:llama")).weights != loaded.weights
    with pytest.raises(ModelLoadError, match="is no LoRA adapter of this model"):
        load_model(LoadOptions("random:gpt2", lora_modules=(f"mine={tmp_path}",)))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"has no adapter_model\.safetensors"):
        load_model(LoadOptions("random:llama", lora_modules=(f"mine={tmp_path}",)))


def test_adapters_without_peft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelLoadError, match=r"adapters need peft: .* pip install"):
        load_model(LoadOptions("random:llama", lora_modules=(f"mine={tmp_path}",)))


def test_tensors_that_are_attributes_are_moved_once_wherever_they_are() -> None:
    model, shared, here = nn.Sequential(nn.Linear(2, 2), nn.Identity()), torch.ones(2), {"kept": [1, "a"]}
    model.to("meta")
    model[0].scales, model[1].sinks, model[1].plain = {"one": [shared]}, (shared, torch.ones(3)), here
    move_attributes(model, torch.device("meta"))
    assert {model[0].scales["one"][0].device.type, model[1].sinks[1].device.type} == {"meta"}
    assert model[0].scales["one"][0] is model[1].sinks[0]
    assert model[1].plain is here
