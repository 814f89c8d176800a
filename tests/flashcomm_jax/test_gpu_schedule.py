"""Schedules for 8 H200s, compiled without a GPU: transfers start before products, end after."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flashcomm_jax import hlo
from flashcomm_jax.collective_matmul import (
    GPU_COMPILER_OPTIONS,
    all_gather_matmul,
    matmul_reduce_scatter,
)
from flashcomm_jax.products import Quantized, quantize

pytestmark = pytest.mark.gpu_schedule

RANKS, TOKENS, HIDDEN, FEATURES = 8, 8192, 8192, 28672
# What XLA:GPU needs to know about an H200.
H200 = """
gpu_device_info {
 threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
 registers_per_core_limit: 65536 registers_per_block_limit: 65536
 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
 device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
 device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true name: "NVIDIA H200"
 driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
 dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


@pytest.fixture(scope="module")
def mesh():
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=H200, topology=f"1x1x{RANKS}"
        )
    except Exception as error:
        pytest.skip(f"no CUDA plugin: {str(error)[:80]}")
    return Mesh(np.array(topology.devices), ("tp",))


def schedule(mesh, row_parallel, backend, int8):
    def local(x, kernel):
        x = quantize(x) if int8 else x
        options = dict(backend=backend, out_dtype=jnp.bfloat16)
        if row_parallel:
            return matmul_reduce_scatter(x, kernel, "tp", RANKS, **options)
        return all_gather_matmul(x, [kernel], "tp", RANKS, **options)[0]

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    features, hidden = ("tp", None) if row_parallel else (None, "tp")
    size = (FEATURES, HIDDEN) if row_parallel else (HIDDEN, FEATURES)
    if int8:
        values = array(size[::-1], jnp.int8, hidden, features)
        kernel = Quantized(values, array(size[1:], jnp.float32, hidden))
    else:
        kernel = array(size, jnp.bfloat16, features, hidden)
    x = array((TOKENS, size[0]), jnp.bfloat16, *((None, "tp") if row_parallel else ("tp", None)))
    program = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(x.sharding.spec, jax.tree.map(lambda k: k.sharding.spec, kernel)),
        out_specs=P("tp", None) if row_parallel else P(None, "tp"),
        check_vma=False,
    )
    lowered = jax.jit(program).trace(x, kernel).lower(lowering_platforms=("cuda",))
    return hlo.schedule(lowered.compile(compiler_options=GPU_COMPILER_OPTIONS).as_text())


@pytest.mark.parametrize("int8", [False, True])
def test_matmul_reduce_scatter(mesh, int8):
    assert re.fullmatch("K+C", schedule(mesh, True, "none", int8))
    # Three of four reductions behind a product; seven of seven permutes, both directions.
    assert schedule(mesh, True, "pallas", int8) == "K" + "SKD" * 3 + "C"
    assert schedule(mesh, True, "ring", int8) == "K" + "SSKDD" * 7


@pytest.mark.parametrize("int8", [False, True])
def test_all_gather_matmul(mesh, int8):
    pieces = schedule(mesh, False, "pallas", int8)
    assert pieces.count("K") == 4
    assert len(re.findall("S[SCD]*KD", pieces)) >= 3  # gathers behind the product before theirs
    assert pieces.endswith("KDK") or pieces.endswith("DK")
    ring = schedule(mesh, False, "ring", int8)
    assert len(re.findall("S+K+D+", ring)) == 4
