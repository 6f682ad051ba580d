"""Models for the tests of this folder."""

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.tiny import tiny_llama


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_llama()
