"""Registers of the default configurations, compiled for an H200: needs the CUDA plugin, no GPU."""

import pathlib

import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels import ptxas

pytestmark = pytest.mark.gpu_schedule
TARGET = pathlib.Path(__file__).parents[1] / "helpers" / "h200.txtpb"


@pytest.fixture(scope="module")
def sharding():
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    )
    return SingleDeviceSharding(topology.devices[0])


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", ["forward", "continue", "backward"])
def test_no_registers_are_spilled(kernel, head_dim, group, sharding):
    if kernel == "backward" and group == 8:
        pytest.skip("the same program")
    found = ptxas.report(kernel, head_dim, group, sharding=sharding)
    assert not found["serialized"]
    assert found["spilled"] <= ptxas.SPILLS_ALLOWED.get((kernel, head_dim), 0)
