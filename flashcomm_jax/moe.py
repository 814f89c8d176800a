"""Mixture of experts on token shards: routed where tokens live, summed by reduce-scatter."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from flashcomm_jax.config import SINGLE_DEVICE, ParallelConfig
from flashcomm_jax.context import FlashCommContext, is_active
from flashcomm_jax.tokens import pad_tokens, per_rank, token_spec


def expert_outputs(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """Weighted sum of the given experts' outputs per token; no token is dropped.

    Args:
      x: [tokens, hidden].
      experts: int32 [tokens, k], indices into the given experts; num_experts for "not here".
      weights: [tokens, k].
      gate: [num_experts, hidden, features].
      up: like gate.
      down: [num_experts, features, hidden].

    Returns:
      [tokens, hidden].
    """
    num_experts = gate.shape[0]
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    token = order // experts.shape[1]
    sizes = jnp.bincount(flat, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    rows = x[token]
    hidden = nnx.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes)
    out = lax.ragged_dot(hidden, down, sizes) * weights.reshape(-1)[order, None].astype(x.dtype)
    # Rows past the last group are other ranks' experts; what a GEMM leaves there is undefined.
    out = jnp.where((flat[order] < num_experts)[:, None], out, 0)
    return jnp.zeros_like(x).at[token].add(out)


class FlashCommMoE(nnx.Module):
    """Top-k routed SwiGLU experts (softmax over all, renormalized over the k).

    Experts are sharded over `parallel.expert_axes`, and each expert's features over tp unless tp
    is one of those. Tokens are gathered over the axes that split both tokens and experts' work;
    partial outputs are summed once, by the reduce-scatter that returns them to their owners.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        experts_per_token: int,
        *,
        parallel: ParallelConfig = SINGLE_DEVICE,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
          hidden_size: features of a hidden state.
          intermediate_size: features inside an expert; a multiple of tp unless experts are
            spread over tp.
          num_experts: experts; a multiple of the product of the expert axes.
          experts_per_token: experts that see a token.
          parallel: mesh and axes.
          dtype: of the computation.
          param_dtype: of the parameters.
          rngs: for initialization.

        Raises:
          ValueError: if the experts do not fit the mesh.
        """
        expert_ranks = 1
        for axis in parallel.expert_axes:
            expert_ranks *= parallel.size(axis)
        if num_experts % expert_ranks:
            raise ValueError(
                f"{num_experts=} must be a multiple of the {expert_ranks} ranks of the expert "
                f"axes {parallel.expert_axes}"
            )
        if not 1 <= experts_per_token <= num_experts:
            raise ValueError(f"{experts_per_token=} must be between 1 and {num_experts=}")
        split_features = parallel.tp_axis not in parallel.expert_axes
        if split_features and intermediate_size % parallel.tp:
            raise ValueError(f"{intermediate_size=} must be a multiple of tp={parallel.tp}")
        self.parallel = parallel
        self.features_axis = parallel.name(parallel.tp_axis) if split_features else None
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.dtype = dtype
        self.router = nnx.Linear(
            hidden_size,
            num_experts,
            use_bias=False,
            kernel_metadata=parallel.metadata(None, None),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        init = nnx.initializers.lecun_normal(batch_axis=(0,))

        def kernels(shape, spec):
            value = init(rngs.params(), shape, param_dtype)
            return nnx.Param(value, **parallel.metadata(*spec))

        wide, tall = self._specs()
        self.gate = kernels((num_experts, hidden_size, intermediate_size), wide)
        self.up = kernels((num_experts, hidden_size, intermediate_size), wide)
        self.down = kernels((num_experts, intermediate_size, hidden_size), tall)

    def _specs(self) -> tuple[P, P]:
        experts = self.parallel.expert_axes or None
        return P(experts, None, self.features_axis), P(experts, self.features_axis, None)

    def __call__(self, x: jax.Array, context: FlashCommContext | None) -> jax.Array:
        """Applies the layer to hidden states [(rows,) tokens, hidden_size]; returns the same."""
        parallel, tp = self.parallel, self.parallel.tp_axis
        active = is_active(context)
        if is_active(context):
            x = pad_tokens(x, context)
        dtype = self.dtype or jnp.result_type(x.dtype, self.gate.dtype)
        kernels = [w[...].astype(dtype) for w in (self.gate, self.up, self.down)]
        router = self.router.kernel[...].astype(dtype)
        row_axes = parallel.row_axes(x.shape[0]) if x.ndim == 3 else ()
        # Tokens are split over these axes and needed whole by every expert rank along them.
        gather_axes = tuple(axis for axis in row_axes if axis in parallel.expert_axes)
        # Work on the same tokens is split over these.
        token_axes = ((tp,) if active else ()) + gather_axes
        sum_axes = tuple(
            axis
            for axis in dict.fromkeys((*parallel.expert_axes, tp))
            if axis not in token_axes and parallel.size(axis) > 1
        )
        expert_axes = parallel.expert_axes

        def local(x, router, gate, up, down):
            flat = x.reshape(-1, x.shape[-1]).astype(dtype)
            weights, experts = self._route(flat @ router)
            if is_active(context):
                experts = self._drop_padding(experts, x, context)
            for axis in token_axes:
                flat, weights, experts = (
                    lax.all_gather(y, axis, tiled=True) for y in (flat, weights, experts)
                )
            first = lax.axis_index(expert_axes) * gate.shape[0] if expert_axes else 0
            mine = (experts >= first) & (experts < first + gate.shape[0])
            experts = jnp.where(mine, experts - first, gate.shape[0])
            out = expert_outputs(flat, experts, weights, gate, up, down)
            if active and sum_axes:
                # Whole token groups per rank: scatter over the extra axes too, then restore.
                out = self._scatter(out, token_axes)
                out = _sum(out, sum_axes, {a: parallel.size(a) for a in sum_axes})
            else:
                out = self._scatter(out, token_axes)
                if sum_axes:
                    out = lax.psum(out, sum_axes)
            return out.reshape(x.shape)

        if parallel.mesh is None:
            return local(x, router, *kernels)
        wide, tall = self._specs()
        spec = token_spec(parallel, x.shape, tp if active else None)
        return per_rank(local, parallel, [spec, P(None, None), wide, wide, tall], spec)(
            x, router, *kernels
        )

    def _route(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights [tokens, k], summing to 1, and expert indices [tokens, k]."""
        probabilities = jax.nn.softmax(logits.astype(jnp.float32))
        weights, experts = lax.top_k(probabilities, self.experts_per_token)
        return weights / weights.sum(-1, keepdims=True), experts

    def _drop_padding(self, experts, x, context):
        """Padding rows belong to no expert: index num_experts."""
        rank = lax.axis_index(context.parallel.tp_axis)
        local = context.padded_local_num_tokens
        real = rank * local + jnp.arange(local) < context.original_num_tokens
        rows = experts.shape[0] // local
        return jnp.where(jnp.tile(real, rows)[:, None], experts, self.num_experts)

    def _scatter(self, out, axes):
        for axis in reversed(axes):
            out = lax.psum_scatter(out, axis, tiled=True)
        return out


def _sum(x, axes, sizes):
    """Sum over axes as reduce-scatter + all-gather over features: an all-reduce's bytes."""
    for axis in axes:
        if x.shape[-1] % sizes[axis]:
            x = lax.all_gather(x, axis).sum(0)
            continue
        part = lax.psum_scatter(x, axis, scatter_dimension=x.ndim - 1, tiled=True)
        x = lax.all_gather(part, axis, axis=x.ndim - 1, tiled=True)
    return x
