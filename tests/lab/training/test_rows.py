"""Training rows of the target's texts: what is a label in them."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from crossdraft.engine.names import BUNDLED
from crossdraft.lab.training.corpus import Document
from crossdraft.lab.training.data import IGNORED, document_rows, tokenize

PROMPT = "def f(x):\n"
WRITTEN = (Document("written", PROMPT + "    pass", len(PROMPT)),) * 3


def test_labels_are_the_tokens_that_the_target_wrote(tmp_path: Path) -> None:
    for name in ("drafter-a", "drafter-b"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED / name)
        pool = tokenize(WRITTEN, tokenizer, tmp_path / f"{name}.npz")
        ids, labels = document_rows(pool, np.random.default_rng(0), 2, 64)
        assert ids.shape == labels.shape == (2, len(tokenizer(WRITTEN[0].text).input_ids))
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == WRITTEN[0].text
        learned = labels[0] != IGNORED
        assert (labels[0][learned] == ids[0][learned]).all()
        assert "pass" in tokenizer.decode(ids[0][learned])
        assert "def" not in tokenizer.decode(ids[0][learned])


def test_of_a_text_that_is_too_long_the_end_is_taken(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED / "drafter-b")
    pool = tokenize(WRITTEN, tokenizer, tmp_path / "pool.npz")
    ids, labels = document_rows(pool, np.random.default_rng(0), 2, 2)
    assert ids.shape == (2, 2)
    assert tokenizer.decode(ids[0]).endswith("pass")
    assert (labels[0][-1] == ids[0][-1]).all()
