"""`crossdraft bench inflate`."""

from pathlib import Path

from crossdraft.engine.loader import load_model
from tests.bench.conftest import Cli


def test_a_larger_model_is_written_and_said_to_be_the_same(cli: Cli, target_folder: Path, tmp_path: Path) -> None:
    ended = cli("bench", "inflate", target_folder, "--layers", 4, "--hidden", 96, "-o", tmp_path / "large")
    assert ended.code == 0
    assert ended.out.startswith("Largest difference between logits on random prompts: ")
    assert "17 tokens" in ended.out
    assert load_model(str(tmp_path / "large")).model.config.hidden_size == 96


def test_what_cannot_be(cli: Cli, target_folder: Path, tmp_path: Path) -> None:
    for code, complaint, arguments in (
        (2, "layers must be at least the model's own 3, got 2", (target_folder, 2, 96, tmp_path / "new")),
        (2, "holds something already", (target_folder, 4, 96, target_folder)),
        (1, "there is no folder ./nowhere", ("./nowhere", 4, 96, tmp_path / "new")),
    ):
        model, layers, hidden, folder = arguments
        ended = cli("bench", "inflate", model, "--layers", layers, "--hidden", hidden, "-o", folder)
        assert (ended.code, ended.out) == (code, "")
        assert complaint in ended.err.splitlines()[-1]
