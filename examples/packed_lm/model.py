"""A Llama-style decoder whose attention is context parallel."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fcp_jax as fcp


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the decoder.

    Attributes:
      vocab_size: tokens; embedding and output head are tied.
      features: width of the residual stream.
      num_layers: decoder layers.
      num_heads: query heads.
      num_kv_heads: key and value heads.
      head_dim: features a head.
      mlp_features: hidden width of the SwiGLU.
      rope_theta: RoPE base.
      dtype: of the computation; parameters, softmax and loss are float32.
      remat: recompute everything but the attention outputs in the backward pass.
      layout: "caller" moves tokens into the plan's layout and back in every attention; "plan"
        moves them once, before the first layer.
    """

    vocab_size: int = 256
    features: int = 256
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    mlp_features: int = 704
    rope_theta: float = 10000.0
    dtype: str = "float32"
    remat: bool = False
    layout: str = "caller"

    @property
    def dispatch_bytes(self) -> int:
        """Bytes that a training step moves for each token that changes rank."""
        if self.layout == "plan":
            return 4 * 4  # token, target, position and weight; none has a gradient
        # Queries, keys and values to the plan's layout and the output back; so do their gradients.
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        passes = 3 if self.remat else 2
        itemsize = jnp.dtype(self.dtype).itemsize
        return passes * self.num_layers * heads * self.head_dim * itemsize


class DecoderLayer(nnx.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: ModelConfig, mesh: Mesh | None, *, rngs: nnx.Rngs):
        """Creates the parameters; `mesh` is where attention runs."""
        dtype = jnp.dtype(config.dtype)

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs)

        self.attention_norm = nnx.RMSNorm(config.features, dtype=dtype, rngs=rngs)
        self.attention = fcp.FCPAttention(
            config.features,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            mesh=mesh,
            layout=config.layout,
            rope_theta=config.rope_theta,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(config.features, dtype=dtype, rngs=rngs)
        self.gate = linear(config.features, config.mlp_features)
        self.up = linear(config.features, config.mlp_features)
        self.down = linear(config.mlp_features, config.features)

    def __call__(self, x: jax.Array, positions: jax.Array, plan: fcp.Plan) -> jax.Array:
        """Maps [R, tokens, features] to the same."""
        x = x + self.attention(self.attention_norm(x), plan, positions=positions)
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """Embedding, layers, norm, tied head. Layers are stacked and scanned: one is compiled."""

    def __init__(self, config: ModelConfig, mesh: Mesh | None = None, *, rngs: nnx.Rngs):
        """Creates the parameters, the same for every mesh."""
        self.config = config
        self.mesh = mesh
        dtype = jnp.dtype(config.dtype)
        self.embedding = nnx.Embed(config.vocab_size, config.features, dtype=dtype, rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create_layers(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, mesh, rngs=rngs)

        self.layers = create_layers(rngs)
        self.norm = nnx.RMSNorm(config.features, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, plan: fcp.Plan) -> jax.Array:
        """Predicts the next token.

        Args:
          tokens: int32 [R, tokens], in the config's layout.
          positions: int32 [R, tokens], likewise.
          plan: for the segments of these rows.

        Returns:
          Logits, float32 [R, tokens, vocab_size].
        """

        def layer(x, layer, positions, plan):
            return layer(x, positions, plan)

        if self.config.remat:
            policy = jax.checkpoint_policies.save_only_these_names("fcp_out", "fcp_lse")
            layer = nnx.remat(layer, policy=policy)
        over_layers = nnx.scan(layer, in_axes=(nnx.Carry, 0, None, None), out_axes=nnx.Carry)
        x = self._shard(self.embedding(tokens))
        x = over_layers(x, self.layers, positions, plan)
        return self.embedding.attend(self.norm(x)).astype(jnp.float32)

    def _shard(self, x: jax.Array) -> jax.Array:
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P("dp", "cp")))


def next_token_loss(
    model: Decoder, batch: dict[str, jax.Array], plan: fcp.Plan
) -> tuple[jax.Array, jax.Array]:
    """Computes the mean cross entropy over the tokens that have a target.

    Args:
      model: the decoder.
      batch: the arrays of a `Batch`, in the caller's layout.
      plan: for its segments.

    Returns:
      (loss, flags): float32 scalar in nats, and the flags of `fcp.check_batch`, 0 if the plan is
      for this batch.
    """
    kind = dict(segment_ids=batch["segment_ids"], positions=batch["positions"])
    flags = fcp.check_batch(plan, mesh=model.mesh, **kind)
    used = {name: batch[name] for name in ("tokens", "targets", "positions", "weights")}
    if model.config.layout == "plan":
        used = fcp.dispatch(used, plan, mesh=model.mesh)
    logits = model(used["tokens"], used["positions"], plan)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, used["targets"])
    return jnp.sum(losses * used["weights"]) / jnp.sum(used["weights"]), flags
