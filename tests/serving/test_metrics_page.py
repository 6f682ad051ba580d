"""docs/metrics.md names what there is."""

import re
from pathlib import Path

from crossdraft.cluster.failover import LossMetrics
from crossdraft.cluster.orchestrators import OrchestratorMetrics
from crossdraft.rpc.handlers import Activity
from crossdraft.rpc.metrics import PREFIX, Registry, ServiceMetrics, exposition
from crossdraft.serving.metrics import Metrics
from tests.serving.exposed import names
from tests.serving.test_dashboard import USED

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_metric_is_on_the_page_and_nothing_else() -> None:
    registry = Registry()
    registry.register(ServiceMetrics("target", "toy", Activity("target"), lambda: USED))
    fronts, orchestrator = Metrics(), OrchestratorMetrics("toy")
    LossMetrics(fronts.registry)
    texts = [fronts.text()[0], exposition(registry)[0], exposition(orchestrator.registry)[0]]
    there = {name for text in texts for name in names(text.decode())}
    families = {re.sub(r"_(bucket|sum|count)$", "", name).removeprefix(PREFIX) for name in there}
    table = "\n".join(line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    told = {name.split("{")[0] for name in re.findall(r"`([^`]+)`", table)}
    told = {name.replace("…", "spec_decode_num_accepted_tokens") for name in told}
    assert told == families
