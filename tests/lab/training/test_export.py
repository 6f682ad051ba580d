"""Exporting a trained model: its card."""

import re
import shutil
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.engine.names import BUNDLED
from crossdraft.lab.training.train import DRAFTER_B, Progressed, export


def test_a_model_that_is_exported_again_has_been_trained_once(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(BUNDLED / "drafter-b", folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    (before,) = re.findall(r"\| training \| (.*) \|", (folder / "README.md").read_text())
    for _ in range(2):
        export(DRAFTER_B, model, tokenizer, folder, Progressed(7, 8.0, 9, [(7, 1.0, 0.5)]))
        (training,) = re.findall(r"\| training \| (.*) \|", (folder / "README.md").read_text())
        assert training.startswith(f"{before}; then 7 steps, 9 tokens, 8 s on ")
        assert training.count("then 7 steps") == 1
