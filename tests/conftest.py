"""What all tests share: no network, one thread for each model, hypothesis without deadlines."""

import os

import pytest
from hypothesis import settings

# Read when torch, tokenizers, huggingface_hub and ray are imported, so they are set before any test module is.
os.environ.update(
    {
        "CROSSDRAFT_CACHE_MIB": "64",  # services take it at start, and there are many of them here
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
FULL = "CROSSDRAFT_FULL_TESTS" in os.environ
# A busy machine is not a failed test. In CI the examples are the same in every run.
settings.register_profile("crossdraft", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("crossdraft")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes a file's tests stay together, as do all that bring a Ray cluster up.

    Tests marked `full` run with CROSSDRAFT_FULL_TESTS set only, as `make test-full` does.
    """
    if not FULL:
        items[:] = [item for item in items if item.get_closest_marker("full") is None]
    for item in items:
        group = "clusters" if "cluster" in item.path.parts else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
