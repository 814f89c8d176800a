"""One process of a multi-process attention run: worker.py PORT NUM_PROCESSES PROCESS_ID MODE."""

import os
import sys

port, num_processes, process_id, mode = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // num_processes}"

import jax  # noqa: E402
import numpy as np  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{port}",
    num_processes,
    process_id,
    heartbeat_timeout_seconds=10,
    initialization_timeout=60,
)

from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from parity import operands  # noqa: E402
from reference import dense_attention, relative_error, segment_ids_of  # noqa: E402

import fcp_jax as fcp  # noqa: E402

ROWS = [[200, 64, 65, 1], [390]]
config = fcp.PlanConfig(4, 100, block_size=64, coalesce=2)
mesh = jax.make_mesh((2, 4), ("dp", "cp"))
plan = fcp.make_batch_plan(ROWS, config)  # every process plans, to the same end
rng = np.random.default_rng(0)
args = [operands(rng, config.capacity) for _ in ROWS]
sharding = NamedSharding(mesh, P("dp", "cp"))


def place(*rows):
    whole = np.stack(rows)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


@jax.jit
def step(q, k, v, dout, plan):
    out, pullback = jax.vjp(lambda q, k, v: fcp.attention(q, k, v, plan, mesh=mesh), q, k, v)
    return out, *pullback(dout)


placed = [place(*rows) for rows in zip(*args, strict=True)]
if mode == "die":
    jax.block_until_ready(step(*placed, plan))
    if process_id == num_processes - 1:
        os._exit(7)
    for _ in range(1000):
        placed[0], *_ = step(*placed, plan)
        jax.block_until_ready(placed[0])
    sys.exit("the collectives went on without a dead process")

results = step(*placed, plan)
for row, (lengths, own) in enumerate(zip(ROWS, args, strict=True)):
    ids = segment_ids_of(fcp.Segments.from_seqlens(lengths), config.capacity)
    out, _, *grads = dense_attention(*own, ids, True)
    for got, want in zip(results, (out, *grads), strict=True):
        for shard in got.addressable_shards:
            if shard.index[0].start in (None, row):
                piece = np.asarray(shard.data)[0]
                expected = want[shard.index[1]]
                error = np.linalg.norm(piece - expected) / max(np.linalg.norm(want), 1.0)
                assert error < 1e-5, (row, shard.index, error)
assert relative_error([1.0], [1.0]) == 0
print("agrees with the dense reference")
