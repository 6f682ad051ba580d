"""Hosts that fall silent while streams run through fronts of their own and of others."""

from pathlib import Path

import pytest

from crossdraft.lab.emulation.network import NoEmulationError
from tests.cluster.machines.host_losses import OFFERS, measure


@pytest.mark.full
async def test_a_silent_host_costs_no_stream_of_other_fronts_its_text(tmp_path: Path) -> None:
    """One host of each role after the other. Outputs that its fronts ask for end on orchestrators of other hosts, which
    makes these stop nothing else."""
    try:
        losses = await measure(list(OFFERS), clients=4, tokens=64, folder=tmp_path)
    except NoEmulationError as error:
        pytest.skip(str(error))
    assert [(one.host, one.faults) for one in losses] == [(host, []) for host in OFFERS]
    assert all(stream.ended for one in losses for streams in one.streams.values() for stream in streams)
