"""What all tests share: no network, one thread for each model, hypothesis without deadlines."""

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Read when torch, tokenizers, huggingface_hub and ray are imported, so they are set before any test module is.
os.environ.update(
    {
        "CROSSDRAFT_CACHE_MIB": "64",  # services take it at start, and there are many of them here
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_INTERPRET": "1",
    }
)
gc.disable()  # until all modules are imported: collections would go through what they make again and again
# A program that is started again and again, and tests in every process, are compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
TOGETHER = ("tests/cluster/", "tests/cli/")  # folders whose tests share processes that take long to start
MODULES = """
endtoend/test_tensor_parallel endtoend/test_grammar endtoend/test_failures engine/test_architectures
engine/test_compilation speculation/test_controller endtoend/test_greedy serving/test_stack deploy/test_gpu
drafter/test_branches verification/test_overlapped_distributions serving/page/test_page client/test_api
verification/test_exact_distributions engine/test_attention text/test_tokenization lab/test_models
endtoend/test_distribution text/test_grammar engine/test_engine engine/test_tensor_parallel endtoend/test_seeded
engine/test_sampler audit/test_statistics lab/test_throughput client/test_discovery
"""  # by the processor time they take
LONGEST = ("tests/soak/test_soak.py", *TOGETHER, *(f"tests/{one}.py" for one in MODULES.split()))
ON_UVLOOP = ("tests/client/", "tests/rpc/", "tests/drafter/", "tests/target/")  # as in servers
FULL = "CROSSDRAFT_FULL_TESTS" in os.environ
EXAMPLES = 100 if FULL else 40  # of a property, where its test says no other number
# A busy machine is not a failed test. In CI the examples are the same in every run.
settings.register_profile(
    "crossdraft", deadline=None, derandomize="CI" in os.environ, max_examples=EXAMPLES, print_blob=True
)
settings.load_profile("crossdraft")


@pytest.fixture
def drafter_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No output begins before its drafter has opened, however slow the machine is: else it may be over by then."""
    for controller in ("choice.Fixed", "controller.OutputController"):
        monkeypatch.setattr(f"crossdraft.speculation.{controller}.waits_for_drafter", True)


class Grouped(LoadScopeScheduling):
    """Where tests run in several processes, those of a file stay together, as do those of some folders.

    What takes longest begins first, then what has most tests, so that all processes end at about the same time.

    By pytest-xdist's own hook: its `--dist loadgroup` (3.8.0) has no effect with pytest 9.2, which has no `_nodeid`.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)

    def _assign_work_unit(self, node: WorkerController) -> None:
        known = (scope for scope in LONGEST if scope in self.workqueue)
        self.workqueue.move_to_end(next(known, next(iter(self.workqueue))), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Grouped:
    """However tests are to be distributed."""
    return Grouped(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `full` run with CROSSDRAFT_FULL_TESTS set only, as `make test-full` does."""
    if not FULL:
        items[:] = [item for item in items if item.get_closest_marker("full") is None]


def pytest_collection_finish() -> None:
    """No collection of garbage goes through what was imported."""
    gc.freeze()
    gc.enable()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of a test, by its folder; a mark may name both. The virtual clock is one of asyncio's loop."""
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    mark = item.get_closest_marker("asyncio")
    if mark is not None and "loop_factories" in mark.kwargs:
        return loops
    virtual = "clock" in getattr(item, "fixturenames", ())
    name = "uvloop" if item.nodeid.startswith(ON_UVLOOP) and not virtual else "asyncio"
    return {name: loops[name]}
