"""Models made for measurements: inflated ones compute what the originals do, lengthened ones take longer texts, and
random ones know nothing."""

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from crossdraft.bench import models
from crossdraft.bench.models import inflate, largest_difference, lengthened
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import CannotInflateError, load_model
from crossdraft.engine.loader import grown as inflated
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError, Size, source_of
from crossdraft.engine.requests import ForwardRequest
from crossdraft.types.trees import tree_of
from tests.bench.conftest import Cli
from tests.bench.test_transformers_peer import PROMPTS, greedy
from tests.engine.tiny import CONTEXT, tiny_gpt2, tiny_llama
from tests.services.conftest import save
from tests.text.kinds import kind

PROMPT = (5, 17, 3, 88, 41, 2)
ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
WORK = ForwardRequest("a", PROMPT, tree_of([(1, 2, 3), (7, 8)], 9))


def grown(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (Size(3, 48), {}),
        (Size(5, 96), {"attention_bias": True, "mlp_bias": True}),
        (Size(3, 50, 90), {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        (Size(4, 144, 64), {"head_dim": 16, "rope_parameters": ROPE}),
        (Size(5, 96), {"rms_norm_eps": 0.1}),
    ],
)
def test_the_same_function_in_a_larger_shape(size: Size, changes: dict[str, object]) -> None:
    original = tiny_llama(**changes)
    draw = torch.Generator().manual_seed(7)
    for name, parameter in original.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 0.5, generator=draw)
    model = inflated(original, size)
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (size.layers, size.hidden)
    assert len(model.model.layers) == size.layers
    assert largest_difference(original, model) < 1e-4
    for one, other in zip(Engine(model).forward([WORK]), Engine(original).forward([WORK]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_added_layers_compute_and_only_their_outputs_are_zero() -> None:
    added = inflated(tiny_llama(), Size(5, 96)).model.layers[4]
    for name, parameter in added.named_parameters():
        assert bool(parameter.any()) == (name not in ("self_attn.o_proj.weight", "mlp.down_proj.weight")), name


def test_what_differs_is_noticed() -> None:
    original = tiny_llama()
    model = inflated(original, Size(4, 96))
    model.model.norm.weight.data *= 1.01
    assert largest_difference(original, model) > 1e-4


def test_the_folder_is_a_model_like_any_other(tmp_path: Path) -> None:
    folder = save(tmp_path / "small", kind("gpt2"), 128)
    result = inflate(str(folder), Size(4, 96))
    assert result.difference < 1e-4
    result.save(str(folder), tmp_path / "large")
    small, large = load_model(str(folder)), load_model(str(tmp_path / "large"))
    assert grown(large.model) > 2 * grown(small.model)
    assert large.description.fingerprint == small.description.fingerprint
    assert large.description.stops == small.description.stops
    assert large.description.context == small.description.context
    assert largest_difference(small.model, large.model) < 1e-4


def test_half_as_many_bytes_where_nothing_is_lost(tmp_path: Path) -> None:
    folder = save(tmp_path / "small", kind("gpt2"), 128)
    load_model(str(folder)).model.half().save_pretrained(folder)
    for hidden, dtype in ((192, torch.float16), (96, torch.float32)):
        inflate(str(folder), Size(3, hidden)).save(str(folder), tmp_path / str(hidden))
        large = load_model(str(tmp_path / str(hidden)), device="cpu")
        assert large.model.config.dtype == dtype
        assert largest_difference(load_model(str(folder)).model, large.model) < 1e-4


def test_a_smaller_shape_is_refused() -> None:
    for size in (Size(2, 48), Size(3, 47), Size(3, 48, 63)):
        with pytest.raises(NumberOutOfRangeError, match="at least the model's own"):
            inflated(tiny_llama(), size)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "gpt2", kind("gpt2"), 128)
    tiny_gpt2().save_pretrained(folder)
    with pytest.raises(CannotInflateError, match="GPT2LMHeadModel, and only LlamaForCausalLM"):
        inflate(str(folder), Size(4, 96))


def test_a_larger_model_is_written_and_said_to_be_the_same(
    cli: Cli, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "TURNS", 1)
    ended = cli("bench", "inflate", target_folder, "--layers", 4, "--hidden", 96, "-o", tmp_path / "large")
    assert ended.code == 0
    assert ended.out.startswith("Largest difference between logits on random prompts: ")
    assert "17 tokens" in ended.out
    assert load_model(str(tmp_path / "large")).model.config.hidden_size == 96


def test_what_cannot_be(cli: Cli, target_folder: Path, tmp_path: Path) -> None:
    for code, complaint, model, layers, folder in (
        (2, "layers must be at least the model's own 3, got 2", target_folder, 2, tmp_path / "new"),
        (2, "holds something already", target_folder, 4, target_folder),
        (1, "there is no folder ./nowhere", "./nowhere", 4, tmp_path / "new"),
    ):
        cli("bench", "inflate", model, "--layers", layers, "--hidden", 96, "-o", folder).failed(complaint, code)


def test_a_lengthened_model_takes_longer_texts_and_says_the_same_of_short_ones(tmp_path: Path) -> None:
    name = lengthened("bundled:target", 2048, tmp_path)
    model = load_model(name, "float32", max_length=2048).model
    own = load_model("bundled:target", "float32").model
    assert greedy(model, PROMPTS[0], 3) == greedy(own, PROMPTS[0], 3)
    assert json.loads((Path(source_of("bundled:target")) / "config.json").read_text())["max_position_embeddings"] < 2048


def test_a_model_that_is_long_enough_stays_as_it_is_and_learnt_positions_cannot_be_lengthened(tmp_path: Path) -> None:
    assert lengthened("bundled:target", 16, tmp_path) == "bundled:target"
    assert not list(tmp_path.iterdir())
    tiny_gpt2().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="positions are not rotary"):
        lengthened(str(tmp_path), 2 * CONTEXT, tmp_path)
    with pytest.raises(ModelLoadError, match="give a folder"):
        lengthened("some/model", 2 * CONTEXT, tmp_path)


def test_a_name_can_ask_for_a_larger_shape() -> None:
    larger = load_model("inflated:7x512:bundled:target")
    original = load_model("bundled:target").model
    assert (larger.model.config.num_hidden_layers, larger.model.config.hidden_size) == (7, 512)
    assert greedy(larger.model, PROMPTS[0], 3) == greedy(original, PROMPTS[0], 3)
    assert source_of("inflated:7x512:bundled:target") == source_of("bundled:target")


@pytest.mark.parametrize(
    "name", ["inflated:7:bundled:target", "inflated:axb:bundled:target", "inflated:1x512:bundled:target"]
)
def test_shapes_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"give inflated:LAYERSxHIDDEN|must be at least the model's own"):
        load_model(name)
