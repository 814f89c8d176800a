"""Gated feed-forward layer: one gather for gate and up, output reduce-scattered."""

import jax
import jax.numpy as jnp
from flax import nnx

from flashcomm_jax.config import SINGLE_DEVICE, ParallelConfig
from flashcomm_jax.context import FlashCommContext
from flashcomm_jax.linear import ColumnParallelLinear, RowParallelLinear, column_parallel


class FlashCommMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv 2002.05202)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        parallel: ParallelConfig = SINGLE_DEVICE,
        use_bias: bool = False,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
          hidden_size: features of a hidden state.
          intermediate_size: features between the products; a multiple of tp.
          parallel: mesh and axes.
          use_bias: biases on all three projections.
          dtype: of the computation.
          param_dtype: of the parameters.
          rngs: for initialization.
        """
        options = dict(
            parallel=parallel, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, **options)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, **options)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, **options)

    def __call__(self, x: jax.Array, context: FlashCommContext | None) -> jax.Array:
        """Applies the layer to hidden states [(rows,) tokens, hidden_size]; returns the same.

        Padding rows stay in between: they cost less than moving the others together.
        """
        gate, up = column_parallel([self.gate_proj, self.up_proj], x, context)
        return self.down_proj(nnx.silu(gate) * up, context)
