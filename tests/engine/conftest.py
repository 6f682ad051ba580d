"""Models for the tests of this folder."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from crossdraft.engine import attention, runner
from tests.engine.taped import SIZES, by_marks, taped
from tests.engine.tiny import tiny_llama


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_device() -> Iterator[None]:
    """Torch computes what the kernel does, as Triton's interpreter is slow, and a tape stands for CUDA's graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_by_kernel", by_marks)
        patch.setattr(runner, "capture_for", lambda _: taped)
        patch.setattr(runner, "SIZES", SIZES)
        yield


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_llama()
