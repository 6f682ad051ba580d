"""Loading models from folders, and what is said when that fails."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from crossdraft.engine.device import leave_out_cudnn
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import load_model
from crossdraft.engine.names import ModelLoadError
from crossdraft.engine.requests import ForwardRequest as Request
from tests.engine.tiny import VOCABULARY, tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with a byte-level tokenizer, as save_pretrained writes it."""
    letters = sorted(ByteLevel.alphabet())[: VOCABULARY - 1]
    tokenizer = Tokenizer(BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    tiny_llama(eos_token_id=VOCABULARY - 1).save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_gives_a_model_and_its_description(folder: Path) -> None:
    loaded = load_model(str(folder))
    described = loaded.description
    assert described.model == str(folder)
    assert described.stops == (VOCABULARY - 1,)
    assert described.controls == ((VOCABULARY - 1, "END_OF_SEQUENCE"),)
    assert (described.vocabulary_size, described.context) == (VOCABULARY, 128)
    assert json.loads(described.tokenizer_json)["model"]["type"] == "BPE"
    (logits,) = Engine(loaded.model).forward([Request("a", (1, 2, 3))])
    with torch.no_grad():
        torch.testing.assert_close(logits[0], tiny_llama()(torch.tensor([[1, 2, 3]])).logits[0, -1], atol=1e-5, rtol=0)


def test_the_fingerprint_is_of_the_vocabulary_only(folder: Path) -> None:
    first = load_model(str(folder)).description
    tiny_llama(num_hidden_layers=1, eos_token_id=VOCABULARY - 1).save_pretrained(folder)
    assert load_model(str(folder), max_length=20).description.fingerprint == first.fingerprint
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load_model(str(folder)).description.fingerprint != first.fingerprint


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
    loaded = load_model(str(folder), dtype=asked)
    assert loaded.model.dtype == run
    (logits,) = Engine(loaded.model).forward([Request("a", (1, 2, 3))])
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


def test_a_lower_max_length_is_the_context(folder: Path) -> None:
    assert load_model(str(folder), max_length=64).description.context == 64
    with pytest.raises(ModelLoadError, match="between 7 and the model's context 128, got 129"):
        load_model(str(folder), max_length=129)


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "has no .safetensors weights"),
        ("config.json", "has no config.json"),
    ],
)
def test_folders_that_lack_something(folder: Path, missing: str, complaint: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelLoadError, match=complaint):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_never_read(folder: Path, name: str) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / name)
    with pytest.raises(ModelLoadError, match=f"has its weights in {name}, a pickle, which could run any code"):
        load_model(str(folder))


def test_safe_weights_are_read_beside_pickled_ones(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"nothing that could be unpickled")
    assert load_model(str(folder)).description.vocabulary_size == VOCABULARY


def test_names_dtypes_and_devices_that_do_not_exist(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no folder"):
        load_model("./nowhere")
    with pytest.raises(ModelLoadError, match="there is no bundled model 'bundled:nothing'"):
        load_model("bundled:nothing")
    with pytest.raises(ModelLoadError, match="dtype 'int8' is unknown: use auto, float32"):
        load_model(str(folder), dtype="int8")
    with pytest.raises(ModelLoadError, match="device 'abacus' cannot be used here"):
        load_model(str(folder), device="abacus")


def test_weights_that_do_not_fit_their_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no-such-model"}))
    with pytest.raises(ModelLoadError, match="cannot be loaded as a causal language model"):
        load_model(str(folder))


def test_attention_that_plans_for_each_size_is_left_out_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    leave_out_cudnn(torch.device("cpu"))
    assert asked == []
    leave_out_cudnn(torch.device("cuda:1"))
    assert asked == [False]
