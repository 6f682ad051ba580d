"""What clients have of a cluster."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing, suppress

import httpx2 as httpx
import pytest

from crossdraft.client import SamplingOptions, connect
from crossdraft.cluster.orchestrators import ABANDONED
from crossdraft.cluster.status import Role
from crossdraft.serving.grpc_client import Client
from tests.cluster.running import HEAD, KEY, MODEL, PROMPT, TARGETS, RunningCluster, eventually, opened_stream
from tests.serving.exposed import faults, samples

GREEDY = SamplingOptions(temperature=0)
TOKENS = 40
ENDLESS = 900  # tokens: several such outputs take longer than any machine stands still
SECONDS = 600.0


@pytest.fixture(scope="module")
def greedy(cluster: RunningCluster) -> str:
    """What the pipeline makes with the cluster's services, in this process."""

    async def made() -> str:
        targets = [one.address for one in cluster.entries(Role.TARGET)]
        drafters = [one.address for one in cluster.entries(Role.DRAFTER)]
        async with connect(targets, drafters) as pipeline:
            return "".join([one.text async for one in pipeline.generate(PROMPT, max_tokens=TOKENS, options=GREEDY)])

    return asyncio.run(made())


async def test_openais_client_has_the_pipelines_text(cluster: RunningCluster, greedy: str) -> None:
    async with cluster.client() as client:
        whole = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, temperature=0)
        assert whole.choices[0].text == greedy
        stream = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True
        )
        chunks = [chunk.choices[0].text async for chunk in stream]
        assert len(chunks) > 1
        assert "".join(chunks) == greedy
        (model,) = (await client.models.list()).data
        assert model.id == MODEL


async def test_a_client_of_grpc_has_the_same_text(cluster: RunningCluster, greedy: str) -> None:
    (front,) = cluster.entries(Role.GRPC)
    async with Client(front.address, key=KEY) as client:
        made = client.generate(PROMPT, max_tokens=TOKENS, options=GREEDY)
        assert "".join([token.text async for token in made]) == greedy


async def test_a_client_that_leaves_ends_what_is_made_for_it(cluster: RunningCluster) -> None:
    await eventually(lambda: cluster.busy() == 0)  # all that others asked for has been counted
    before = await asyncio.to_thread(ended, cluster)
    async with cluster.client() as client:
        stream = await opened_stream(client, 1, ENDLESS, outputs=8)
        async with aclosing(aiter(stream)) as chunks:
            await anext(chunks)
        await stream.close()
        await eventually(lambda: cluster.busy() == 0)
    assert await asyncio.to_thread(ended, cluster) > before


def ended(cluster: RunningCluster) -> float:
    """Outputs that were ended before their time, so far."""
    return cluster.metric(Role.ORCHESTRATOR, "orchestrator_outputs_total", outcome=ABANDONED)


async def test_a_requests_id_is_in_the_reply_and_in_the_logs_of_all_who_worked_for_it(cluster: RunningCluster) -> None:
    async with cluster.client() as client:
        reply = await client.completions.with_raw_response.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=5,
            extra_headers={"x-request-id": "marked-1"},
            extra_body={"speculative": {"overlap": "off"}},  # in lock-step the output waits for its drafter
        )
    assert reply.headers.get_list("x-request-id", split_commas=True)[0] == "marked-1"
    for role in (Role.HTTP, Role.ORCHESTRATOR, Role.TARGET, Role.DRAFTER):
        await eventually(lambda role=role: "marked-1" in _requests(cluster, role))


async def test_prometheus_reads_every_process_itself_or_on_one_port_of_its_node(cluster: RunningCluster) -> None:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=SECONDS) as client:
        for one in cluster.entries():
            assert faults((await client.get(f"http://{one.metrics}/metrics")).text) == []
        for node in (HEAD, TARGETS):
            await eventually(lambda node=node: _answers(cluster, node))
        through_serve = (await client.get(f"{cluster.url}/metrics")).text
    assert samples(through_serve, "generation_tokens_total")
    assert sum(count for _, count in samples(through_serve, "output_resume_seconds_count")) >= 0


def _answers(cluster: RunningCluster, node: str) -> bool:
    """Whether the node's own port has metrics; of which processes: `test_directory`."""
    with suppress(httpx.HTTPError):
        return faults(httpx.get(f"http://{node}:{cluster.metrics}/metrics", timeout=SECONDS).text) == []
    return False


def _requests(cluster: RunningCluster, role: Role) -> set[object]:
    """Ids in the logs of a role's processes."""
    return {line.get("request_id") for one in cluster.entries(role) for line in _lines(cluster.log_of(one.process))}


def _lines(log: str) -> Iterator[dict[str, object]]:
    for line in log.splitlines():
        if line.startswith("{") and line.endswith("}"):  # and not one that is being written
            yield json.loads(line)
