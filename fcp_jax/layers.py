"""Flax layers: a whole attention block, and an `attention_fn` for `nnx.MultiHeadAttention`."""

import contextlib

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fcp_jax.check import check_layout
from fcp_jax.mesh import explicit_axes
from fcp_jax.plan import Plan
from fcp_jax.staged_attention import attention


def apply_rope(x: jax.Array, positions: jax.Array, theta: float = 10000.0) -> jax.Array:
    """Rotates feature pairs by angles that grow with position (RoPE, arXiv 2104.09864).

    Args:
      x: [..., tokens, heads, head_dim]; head_dim is even, feature i pairs with i + head_dim / 2.
      positions: integers [..., tokens], the place of each token in its document.
      theta: base of the wavelengths.

    Returns:
      Like x; the rotation is computed in float32.

    Raises:
      ValueError: if head_dim is odd or positions are not those of the tokens.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"head_dim must be even for RoPE, got {x.shape[-1]}")
    if not 0 < positions.ndim < x.ndim - 1 or positions.shape != x.shape[-2 - positions.ndim : -2]:
        raise ValueError(
            f"positions must be of the tokens {x.shape[:-2]}, got shape {positions.shape}"
        )
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _check_theta(rope_theta: float | None) -> None:
    if rope_theta is not None and not rope_theta > 0:
        raise ValueError(f"rope_theta must be positive or None, got {rope_theta}")


class FCPAttention(nnx.Module):
    """Self-attention over packed segments, context parallel by a plan.

    Projects to queries, keys and values, rotates them by the caller's positions, attends, and
    projects back. The plan is an argument of the call: one trace serves every plan of its shape.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        mesh: Mesh | None = None,
        axis_name: str = "cp",
        batch_axis_name: str | tuple[str, ...] = "dp",
        head_axis_name: str = "tp",
        layout: str = "caller",
        rope_theta: float | None = 10000.0,
        use_bias: bool = False,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        implementation: str | None = None,
        reserve_sms: int = 0,
        rngs: nnx.Rngs,
    ):
        """Creates the projections.

        Args:
          in_features: features of the input and the output.
          num_heads: query heads.
          num_kv_heads: key and value heads; num_heads if None.
          head_dim: features a head, even; in_features // num_heads if None.
          mesh: devices; None for one device.
          axis_name: mesh axis of the plan's ranks.
          batch_axis_name: mesh axis or axes of the plan's rows.
          head_axis_name: mesh axis of the heads; the parameters are partitioned over it.
          layout: "caller" or "plan", see `fcp_jax.attention`.
          rope_theta: RoPE base; None for no rotation.
          use_bias: whether projections have biases.
          dtype: dtype of the computation; None to infer.
          param_dtype: dtype of the parameters.
          implementation: kernel, see `pallas_kernels.block_attention`.
          reserve_sms: see `fcp_jax.attention`.
          rngs: for initialization.

        Raises:
          ValueError: if the sizes do not fit together, or for a wrong `layout` or `rope_theta`.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(num_heads, num_kv_heads) < 1:
            raise ValueError(
                f"num_heads and num_kv_heads must be at least 1, got {num_heads}, {num_kv_heads}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}"
            )
        head_dim = head_dim or in_features // num_heads
        if head_dim < 1:
            raise ValueError(
                f"head_dim must be at least 1, got {head_dim} for {in_features=}, {num_heads=}"
            )
        check_layout(layout)
        _check_theta(rope_theta)
        if rope_theta is not None and head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {head_dim}")
        heads = head_axis_name if mesh is not None and head_axis_name in mesh.shape else None
        self.rope_theta = rope_theta
        self.call = dict(
            mesh=mesh,
            axis_name=axis_name,
            batch_axis_name=batch_axis_name,
            head_axis_name=head_axis_name,
            layout=layout,
            implementation=implementation,
            reserve_sms=reserve_sms,
        )

        def projection(inputs, outputs, spec, axis=-1):
            init = nnx.initializers.lecun_normal()
            if heads is not None:
                init = nnx.with_partitioning(init, spec)
            return nnx.LinearGeneral(
                inputs,
                outputs,
                axis=axis,
                kernel_init=init,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        inward = (None, heads, None)
        self.query = projection(in_features, (num_heads, head_dim), inward)
        self.key = projection(in_features, (num_kv_heads, head_dim), inward)
        self.value = projection(in_features, (num_kv_heads, head_dim), inward)
        outward = (heads, None, None)
        self.out = projection((num_heads, head_dim), in_features, outward, axis=(-2, -1))

    def __call__(
        self,
        x: jax.Array,
        plan: Plan,
        *,
        positions: jax.Array | None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Attends.

        Args:
          x: [R, tokens, in_features], or [tokens, in_features] for a plan of one row.
          plan: for these segments.
          positions: int32 [R, tokens] or [tokens], in the layout of x; may be None without
            rope_theta.
          segment_ids: like positions; checked against the plan if given.

        Returns:
          Like x.
        """
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.rope_theta is not None:
            if positions is None:
                raise ValueError("positions must be given where rope_theta is set")
            q, k = (apply_rope(y, positions, self.rope_theta) for y in (q, k))
        out = attention(q, k, v, plan, segment_ids=segment_ids, positions=positions, **self.call)
        return self.out(out, out_sharding=self._out_sharding(x.ndim))

    def _out_sharding(self, ndim: int):
        """On Explicit axes the sum over heads must say where its result lives."""
        mesh = self.call["mesh"]
        if mesh is None or not explicit_axes(mesh):
            return None
        batch = self.call["batch_axis_name"] if ndim == 3 else ()
        batch = (batch,) if isinstance(batch, str) else tuple(batch)
        lead = [tuple(name for name in batch if name in mesh.shape) or None] if ndim == 3 else []
        return NamedSharding(mesh, P(*lead, self.call["axis_name"], None))


class FCPAttentionFn(nnx.Module):
    """An `attention_fn` for `nnx.MultiHeadAttention` that attends by a plan.

    `MultiHeadAttention` has no argument for a plan, so the plan is state, set inside the jitted
    step that takes it as an argument; one trace then serves many plans. Layers may share it.

    Example:
      attention_fn = FCPAttentionFn(mesh=mesh)
      layer = nnx.MultiHeadAttention(..., attention_fn=attention_fn)

      @nnx.jit
      def step(layer, x, plan):
        with layer.attention_fn.using(plan):
          return layer(x, is_causal=True)

    Attributes:
      plan: `nnx.Variable` of the plan, None outside `using`. Whoever sets it for good changes the
        structure of the state once, which costs one more trace.
    """

    def __init__(
        self,
        *,
        mesh: Mesh | None = None,
        axis_name: str = "cp",
        batch_axis_name: str | tuple[str, ...] = "dp",
        head_axis_name: str = "tp",
        layout: str = "caller",
        implementation: str | None = None,
        reserve_sms: int = 0,
        rope_theta: float | None = None,
    ):
        """Stores where to run; arguments as in `FCPAttention`."""
        check_layout(layout)
        _check_theta(rope_theta)
        self.rope_theta = rope_theta
        self.call = dict(
            mesh=mesh,
            axis_name=axis_name,
            batch_axis_name=batch_axis_name,
            head_axis_name=head_axis_name,
            layout=layout,
            implementation=implementation,
            reserve_sms=reserve_sms,
        )
        self.plan: nnx.Variable[Plan | None] = nnx.Variable(None)

    @contextlib.contextmanager
    def using(self, plan: Plan):
        """Sets the plan for the calls inside a `with` block."""
        before = self.plan.get_value()
        self.plan.set_value(plan)
        try:
            yield
        finally:
            self.plan.set_value(before)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask=None,
        bias=None,
        dropout_rng=None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = True,
        dtype=None,
        precision=None,
        module=None,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attends; the arguments are those that `nnx.MultiHeadAttention` passes.

        Args:
          query: [R, tokens, num_heads, head_dim]; R is the plan's number of rows.
          key: like query with num_kv_heads.
          value: like key.
          mask: refused; the plan's segments are the mask.
          bias: refused.
          dropout_rng: unused.
          dropout_rate: refused above 0 unless deterministic.
          broadcast_dropout: unused.
          deterministic: whether dropout is off.
          dtype: dtype to compute in; None for that of query.
          precision: refused unless None; accumulation is float32.
          module: refused; attention weights never exist as a whole.
          is_causal: must be the plan's.
          input_positions: int32 [R, tokens], rotates queries and keys if rope_theta is set.

        Returns:
          Like query.

        Raises:
          ValueError: if no plan is set, or for an argument that is refused.
        """
        del dropout_rng, broadcast_dropout
        plan = self.plan.get_value()
        if plan is None:
            raise ValueError("plan is not set: call inside `with attention_fn.using(plan):`")
        refused = {"mask": mask, "bias": bias, "precision": precision, "sow_weights": module}
        for name, given in refused.items():
            if given is not None:
                raise ValueError(f"{name} is not supported by FCP attention, leave it unset")
        if dropout_rate > 0.0 and not deterministic:
            raise ValueError(f"dropout_rate must be 0 for FCP attention, got {dropout_rate}")
        if is_causal and not plan.shape.causal:
            raise ValueError("is_causal=True needs a plan made with PlanConfig(causal=True)")
        if self.rope_theta is not None:
            if input_positions is None:
                raise ValueError("input_positions must be given where rope_theta is set")
            query, key = (apply_rope(y, input_positions, self.rope_theta) for y in (query, key))
        if dtype is not None:
            query, key, value = (y.astype(dtype) for y in (query, key, value))
        return attention(query, key, value, plan, positions=input_positions, **self.call)
