"""Models for the tests of this folder."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from crossdraft.engine import attention
from tests.engine.taped import by_marks
from tests.engine.tiny import tiny_llama


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_kernel() -> Iterator[None]:
    """Triton's interpreter is slow: where no test asks for it torch computes what the kernel does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_by_kernel", by_marks)
        yield


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_llama()
