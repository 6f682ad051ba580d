"""Models for the tests of this folder."""

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.tiny import tiny_gemma2, tiny_gpt2, tiny_llama, tiny_qwen2


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(
    scope="session", params=[tiny_llama, tiny_gpt2, tiny_qwen2, tiny_gemma2], ids=["llama", "gpt2", "qwen2", "gemma2"]
)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return request.param()


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_llama()
