"""Token shards: padding, splitting and gathering hidden states at the model's boundaries.

Hidden states are `[tokens, features]` or `[rows, tokens, features]`, global arrays. With an active
context the token axis is padded with zero rows to a multiple of tp and sharded over tp; rows are
sharded over the data-parallel axes. Padding exists only between `shard_tokens` and a gather.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from flashcomm_jax.config import ParallelConfig
from flashcomm_jax.context import FlashCommContext, is_active


def token_spec(parallel: ParallelConfig, shape: Sequence[int], tokens=None, features=None) -> P:
    """PartitionSpec of an array shaped `[(rows,) tokens, features, ...]`."""
    if len(shape) == 2:
        return P(tokens, features)
    return P(parallel.row_axes(shape[0]) or None, tokens, features)


def per_rank(
    function: Callable[..., Any], parallel: ParallelConfig, in_specs: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """`shard_map` over the whole mesh, on explicit meshes with inputs brought to `in_specs`.

    Varying-axes checks are off: Pallas kernels do not carry them.
    """
    mapped = jax.shard_map(
        function,
        mesh=parallel.mesh,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        check_vma=False,
    )
    if not parallel.explicit:
        return mapped

    def call(*arrays):
        return mapped(
            *(
                jax.tree.map(
                    lambda s, leaf: parallel.put(leaf, *s),
                    spec,
                    array,
                    is_leaf=lambda s: isinstance(s, P),
                )
                for spec, array in zip(in_specs, arrays, strict=True)
            )
        )

    return call


def destination_major(x: jax.Array, ranks: int) -> jax.Array:
    """[(rows,) tokens, features] of one rank to [ranks * rows * local_tokens, features]."""
    if x.ndim == 2:
        return x
    rows, tokens, features = x.shape
    blocks = x.reshape(rows, ranks, tokens // ranks, features)
    return blocks.swapaxes(0, 1).reshape(rows * tokens, features)


def token_major(x: jax.Array, ranks: int, lead: Sequence[int]) -> jax.Array:
    """Inverse of `destination_major`; `lead` is (rows,) or ()."""
    if not lead:
        return x
    features = x.shape[-1]
    blocks = x.reshape(ranks, *lead, -1, features).swapaxes(0, 1)
    return blocks.reshape(*lead, -1, features)


def pad_tokens(x: jax.Array, context: FlashCommContext) -> jax.Array:
    """Appends the context's zero rows unless they are there already.

    Raises:
      ValueError: if the token axis has neither the original nor the padded length.
    """
    if x.shape[-2] == context.padded_num_tokens:
        return x
    if x.shape[-2] != context.original_num_tokens:
        raise ValueError(
            f"the token axis must have original_num_tokens={context.original_num_tokens} or "
            f"padded_num_tokens={context.padded_num_tokens} entries, got {x.shape=}"
        )
    widths = [(0, 0)] * x.ndim
    widths[-2] = (0, context.pad_size)
    return jnp.pad(x, widths)


def unpad_tokens(x: jax.Array, context: FlashCommContext) -> jax.Array:
    """Drops the context's padding rows if they are there."""
    return x[..., : context.original_num_tokens, :] if context.pad_size else x


def shard_tokens(x: jax.Array, context: FlashCommContext) -> jax.Array:
    """Splits hidden states over tp along the token axis; moves no data between ranks.

    Args:
      x: [(rows,) original_num_tokens, features], the same on every tp rank.
      context: the step's context.

    Returns:
      [(rows,) padded_num_tokens, features] sharded over tp, or x itself if inactive.

    Raises:
      ValueError: if the token axis does not fit the context.
    """
    if not context.active:
        return x
    parallel = context.parallel
    x = pad_tokens(x, context)
    return parallel.put(x, *token_spec(parallel, x.shape, parallel.tp_axis))


def gather_tokens(
    x: jax.Array, context: FlashCommContext, *, keep_padding: bool = False
) -> jax.Array:
    """Restores hidden states that every rank sees whole: an all-gather over tp.

    Args:
      x: [(rows,) padded_num_tokens, features], sharded over tp.
      context: the step's context.
      keep_padding: leave the padding rows at the end.

    Returns:
      [(rows,) original_num_tokens, features], or x itself if inactive.

    Raises:
      ValueError: if the token axis does not fit the context.
    """
    if not context.active:
        return x
    parallel = context.parallel
    x = pad_tokens(x, context)
    full = per_rank(
        lambda shard: lax.all_gather(shard, parallel.tp_axis, axis=shard.ndim - 2, tiled=True),
        parallel,
        [token_spec(parallel, x.shape, parallel.tp_axis)],
        token_spec(parallel, x.shape),
    )(x)
    return full if keep_padding else unpad_tokens(full, context)


def take_tokens(x: jax.Array, index: jax.Array, context: FlashCommContext | None) -> jax.Array:
    """Picks tokens of each row and gives them to every rank, without gathering the rest.

    The LM head of a prefill needs the last token of each sequence and no other.

    Args:
      x: hidden states: token shards if the context is active, else whole.
      index: int32 [(rows,) picks], positions on the unpadded token axis.
      context: the step's context, or None.

    Returns:
      [(rows,) picks, features].
    """
    if not is_active(context):
        return jnp.take_along_axis(x, index[..., None], axis=-2)
    parallel = context.parallel
    axis, local = parallel.tp_axis, context.padded_local_num_tokens

    def pick(shard, index):
        mine = jnp.clip(index - lax.axis_index(axis) * local, 0, local - 1)
        candidates = jnp.take_along_axis(shard, mine[..., None], axis=-2)
        every = lax.all_gather(candidates, axis)
        return jnp.take_along_axis(every, (index // local)[None, ..., None], axis=0)[0]

    row_axes = () if x.ndim == 2 else (parallel.row_axes(x.shape[0]) or None,)
    return per_rank(
        pick,
        parallel,
        [token_spec(parallel, x.shape, axis), P(*row_axes, None)],
        P(*row_axes, None, None),
    )(x, index)
