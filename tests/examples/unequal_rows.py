"""Run by test_train_packed_lm: one row a single segment, the other all tiny or nearly empty.

The two data-parallel groups need very different numbers of rounds; loops of different lengths
around a collective would hang. The whole model, forward and gradient, must be that of dense
attention on one device.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packed_lm.data import make_batch
from packed_lm.model import Decoder, ModelConfig, next_token_loss

import fcp_jax as fcp
import fcp_jax.layers
from fcp_jax.buckets import PlanBuckets

DP, CP, TOKENS = 2, 4, 128
CONFIG = ModelConfig(
    features=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_features=48
)


def dense_attention(q, k, v, plan, *, positions, segment_ids, **_):
    """Softmax over every earlier token with the same segment id; 0 on padding."""
    del plan, positions
    k, v = (jnp.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    scores = jnp.einsum("rqhd,rkhd->rhqk", q, k, precision="highest") * q.shape[-1] ** -0.5
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    real = segment_ids[:, :, None] > 0
    visible = same & real & jnp.tri(q.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30), axis=-1)
    weights = jnp.where(visible[:, None], weights, 0.0)
    return jnp.einsum("rhqk,rkhd->rqhd", weights, v, precision="highest")


@contextlib.contextmanager
def dense_layers(segment_ids):
    """Inside, `FCPAttention` attends densely."""
    staged = fcp_jax.layers.attention

    def attend(q, k, v, plan, **kind):
        return dense_attention(q, k, v, plan, **kind | dict(segment_ids=segment_ids))

    fcp_jax.layers.attention = attend
    try:
        yield
    finally:
        fcp_jax.layers.attention = staged


def loss_and_grads_on(mesh):
    """Returns a compiled function of (arrays, plan); dense attention where there is no mesh."""
    model = Decoder(CONFIG, mesh, rngs=nnx.Rngs(0))

    @nnx.jit
    def compiled(model, arrays, plan):
        dense = contextlib.nullcontext() if mesh else dense_layers(arrays["segment_ids"])
        with dense:
            loss_and_grad = nnx.value_and_grad(next_token_loss, has_aux=True)
            return loss_and_grad(model, arrays, plan)

    def run(arrays, plan):
        if mesh is not None:
            arrays = jax.device_put(arrays, NamedSharding(mesh, P("dp", "cp")))
        (loss, flags), grads = compiled(model, arrays, plan)
        assert int(flags) == 0
        return float(loss), [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]

    return run


def main():
    rng = np.random.default_rng(0)
    capacity = CP * TOKENS
    cases = {
        "giant and tiny": ([capacity], [3] * (capacity // 3)),
        "tiny and giant": ([2] * (capacity // 2 - 40), [capacity - 1]),
        "giant and nearly empty": ([capacity], [2]),
    }
    pieces = {
        name: [[rng.integers(0, 256, n).astype(np.uint8) for n in row] for row in rows]
        for name, rows in cases.items()
    }
    batches = {name: make_batch(rows, capacity) for name, rows in pieces.items()}
    config = fcp.PlanConfig(CP, TOKENS, block_size=64)
    plans = {name: fcp.make_batch_plan(b.segments, config) for name, b in batches.items()}
    buckets = PlanBuckets()
    buckets.reserve(plans.values())
    mesh = jax.make_mesh((DP, CP), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
    on_mesh, densely = loss_and_grads_on(mesh), loss_and_grads_on(None)
    for name, batch in batches.items():
        plan = buckets.pad(plans[name])
        fcp.validate_plan(plan)
        loss, grads = on_mesh(batch.arrays, plan)
        want_loss, want_grads = densely(batch.arrays, plan)
        assert abs(loss - want_loss) <= 2e-6 * want_loss, (name, loss, want_loss)
        for got, want in zip(grads, want_grads, strict=True):
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error <= 1e-5, (name, got.shape, error)
        print(name, "agrees", loss, want_loss)


if __name__ == "__main__":
    main()
