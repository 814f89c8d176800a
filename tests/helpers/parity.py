"""Running fcp.attention and its gradients, and comparing them with the dense reference."""

import functools

import jax
import numpy as np
from jax.sharding import AxisType
from reference import relative_error

import fcp_jax as fcp


def operands(rng, num_tokens, heads=(4, 2), dim=8, dtype=np.float32):
    """q, k, v and the cotangent of the output."""
    sizes = (heads[0], heads[1], heads[1], heads[0])
    q, k, v, dout = (rng.normal(size=(num_tokens, n, dim)).astype(dtype) for n in sizes)
    return q, k, v, dout


@functools.cache
def cp_mesh(ranks, kind=AxisType.Explicit):
    return jax.make_mesh((ranks,), ("cp",), axis_types=(kind,), devices=jax.devices()[:ranks])


@functools.partial(jax.jit, static_argnames=("mesh", "layout"))
def value_and_grads(q, k, v, dout, plan, mesh, layout="caller"):
    def run(q, k, v):
        return fcp.attention(q, k, v, plan, mesh=mesh, layout=layout, return_lse=True)

    out, pullback, lse = jax.vjp(run, q, k, v, has_aux=True)
    return out, lse, *pullback(dout)


def assert_close(got, want, out_limit=2e-6, grad_limit=1e-5):
    """`want` from `dense_attention`; the limits are those of float32."""
    out, lse, *grads = (np.asarray(x) for x in got)
    want_out, want_lse, *want_grads = want
    assert relative_error(out, want_out) <= out_limit
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=1e-5, atol=1e-4)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        assert relative_error(grad, want_grad) <= grad_limit
    hidden = ~seen.any(-1)
    assert all((x[hidden] == 0).all() for x in (out, *grads))
