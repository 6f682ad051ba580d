"""One Ray cluster for all tests of a session; it starts with the first test that wants it."""

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster.running import RunningCluster

with warnings.catch_warnings():  # Ray's own modules use what pydantic will drop
    warnings.simplefilter("ignore")
    pytest.importorskip("ray.serve", reason="the extra `cluster` is not installed")
SECONDS = 3600  # for a test, with the start of the cluster, which may be tried several times


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()) and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session")
def cluster() -> "Iterator[RunningCluster]":
    """Two nodes with loopback addresses, and the usual configuration on them."""
    from tests.cluster.running import running
    from tests.serving.ports import free_port

    # Not below pytest's folder: paths of sockets in it would be too long.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        running(Path(folder), [free_port(), free_port(), free_port()]) as found,
    ):
        done = found.command("deploy", found.file(found.configuration()))
        assert done.returncode == 0, done.stderr
        yield found
