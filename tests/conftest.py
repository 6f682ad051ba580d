"""What all tests share: no network, one thread for each model, hypothesis without deadlines."""

import os

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

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
CLUSTER = "tests/cluster/"
FULL = "CROSSDRAFT_FULL_TESTS" in os.environ
# A busy machine is not a failed test. In CI the examples are the same in every run.
settings.register_profile("crossdraft", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("crossdraft")


class Grouped(LoadScopeScheduling):
    """Where tests run in several processes, those of a file stay together, as do all of the one Ray cluster.

    By pytest-xdist's own hook: its `--dist loadgroup` (3.8.0) has no effect with pytest 9.2, which has no `_nodeid`.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return CLUSTER if file.startswith(CLUSTER) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Grouped:
    """However tests are to be distributed."""
    return Grouped(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `full` run with CROSSDRAFT_FULL_TESTS set only, as `make test-full` does."""
    if not FULL:
        items[:] = [item for item in items if item.get_closest_marker("full") is None]
