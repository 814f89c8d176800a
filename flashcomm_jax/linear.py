"""Linear layers of tensor parallelism that know about token shards.

Both are `nnx.Linear`s: same parameters, same checkpoint, and with an inactive context the same
program.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from flashcomm_jax import gate
from flashcomm_jax.collective_matmul import (
    all_gather_matmul,
    implementation,
    matmul_reduce_scatter,
    num_pieces,
)
from flashcomm_jax.config import SINGLE_DEVICE, ParallelConfig
from flashcomm_jax.context import FlashCommContext
from flashcomm_jax.products import Quantized, multiply, quantize, quantize_kernel
from flashcomm_jax.reasons import FallbackReason, report
from flashcomm_jax.tokens import destination_major, pad_tokens, per_rank, token_major, token_spec

FUSED_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


class _TensorParallelLinear(nnx.Linear):
    """An `nnx.Linear` with one kernel axis sharded over tp.

    Attributes:
      kernel_scale: None, or after `quantize_w8a8` the float32 [out_features] scales of a kernel
        that is then int8 [out_features, in_features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parallel: ParallelConfig = SINGLE_DEVICE,
        use_bias: bool = True,
        **kwargs,
    ):
        """Makes the layer; other keyword arguments are those of `nnx.Linear`.

        Args:
          in_features: columns of the input.
          out_features: columns of the output.
          parallel: mesh and axes to shard the parameters over.
          use_bias: whether there is a bias.
          **kwargs: passed to `nnx.Linear`.

        Raises:
          ValueError: if tp does not divide the sharded axis.
        """
        sharded = in_features if self._row_parallel else out_features
        if sharded % parallel.tp:
            name = "in_features" if self._row_parallel else "out_features"
            raise ValueError(f"{name}={sharded} must be a multiple of tp={parallel.tp}")
        tp = parallel.tp_axis
        kernel_axes = (tp, None) if self._row_parallel else (None, tp)
        super().__init__(
            in_features,
            out_features,
            use_bias=use_bias,
            kernel_metadata=parallel.metadata(*kernel_axes),
            bias_metadata=parallel.metadata(None if self._row_parallel else tp),
            **kwargs,
        )
        self.kernel_scale = nnx.data(None)
        self.parallel = parallel

    _row_parallel: bool
    kernel_scale: nnx.Param[jax.Array] | None

    @property
    def quantized(self) -> bool:
        """Whether products run as w8a8-dynamic int8."""
        return self.kernel_scale is not None

    def quantize(self) -> None:
        """Replaces the kernel by int8 with one scale per output channel. Inference only."""
        if self.quantized:
            return
        kernel = quantize_kernel(self.kernel[...])
        parallel, tp = self.parallel, self.parallel.tp_axis
        axes = (None, tp) if self._row_parallel else (tp, None)
        scale_axes = (None,) if self._row_parallel else (tp,)
        self.kernel = nnx.Param(kernel.values, **parallel.metadata(*axes))
        self.kernel_scale = nnx.Param(kernel.scale, **parallel.metadata(*scale_axes))

    def _operands(self, inputs: jax.Array):
        """Inputs, kernel and bias in the computation's dtype."""
        bias = None if self.bias is None else self.bias[...]
        if self.kernel_scale is not None:
            inputs, bias = self.promote_dtype((inputs, bias), dtype=self.dtype)
            return inputs, Quantized(self.kernel[...], self.kernel_scale[...]), bias
        return self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)

    def _kernel_spec(self) -> Any:
        tp = self.parallel.tp_axis
        if not self.quantized:
            return P(tp, None) if self._row_parallel else P(None, tp)
        specs: Any = (P(None, tp), P(None)) if self._row_parallel else (P(tp, None), P(tp))
        return Quantized(*specs)

    def _original(self, inputs: jax.Array, out_features_axis: str | None) -> jax.Array:
        """The program of the plain layer."""
        parallel = self.parallel
        if self.quantized:
            return self._original_quantized(inputs)
        if not parallel.explicit:
            return super().__call__(inputs)
        spec = token_spec(parallel, inputs.shape, None, out_features_axis)
        return super().__call__(inputs, out_sharding=parallel.sharding(*spec))

    def _original_quantized(self, inputs: jax.Array) -> jax.Array:
        """int8 with the scales of each rank's own columns, reduced after dequantizing."""
        parallel = self.parallel
        inputs, kernel, bias = self._operands(inputs)
        tp = parallel.tp_axis
        reduce = self._row_parallel and parallel.tp > 1

        def local(x, kernel):
            flat = x.reshape(-1, x.shape[-1])
            out = multiply(flat, kernel, x.dtype)
            if reduce:
                out = lax.psum(out, tp)
            return out.reshape(*x.shape[:-1], -1)

        if parallel.mesh is not None:
            axes = (parallel.name(tp), None) if self._row_parallel else (None, parallel.name(tp))
            local = per_rank(
                local,
                parallel,
                [token_spec(parallel, inputs.shape, None, axes[0]), self._kernel_spec()],
                token_spec(parallel, inputs.shape, None, axes[1]),
            )
        out = local(inputs, kernel)
        return out if bias is None else out + bias.reshape(-1)

    def _backend(self, context: FlashCommContext, shape: gate.Product, dtype) -> str:
        """The backend of this product, "none" with a reported reason if it is not fused."""
        config = context.config
        reason = None
        if not config.enable_mmrs_fusion:
            reason = FallbackReason.FUSION_DISABLED
        elif config.backend == "none":
            reason = FallbackReason.COMM_MODE_NONE
        elif dtype not in FUSED_DTYPES:
            reason = FallbackReason.UNSUPPORTED_DTYPE
        elif self.dot_general is not lax.dot_general or self.preferred_element_type is not None:
            reason = FallbackReason.CUSTOM_DOT_GENERAL
        elif self.bias is not None and self.bias.shape != (self.out_features,):
            reason = FallbackReason.UNSUPPORTED_BIAS
        elif not _can_cut(config.backend, shape, self._row_parallel):
            reason = FallbackReason.UNSUPPORTED_SHAPE
        elif not gate.fusion_pays(shape, config.backend):
            reason = FallbackReason.SLOWER_THAN_UNFUSED
        if reason is None:
            return config.backend
        name = type(self).__name__
        report(reason, f"{name}, {shape}, dtype={jnp.dtype(dtype).name}", config.strict)
        return "none"


def _can_cut(backend: str, shape: gate.Product, row_parallel: bool) -> bool:
    """Whether a product has at least the two parts that overlap needs."""
    if backend == "ring":
        return shape.tokens // shape.tp >= 2
    return num_pieces(shape.out_features if row_parallel else shape.tokens // shape.tp) > 1


class RowParallelLinear(_TensorParallelLinear):
    """Linear layer whose input columns and kernel rows are sharded over tp.

    With an active context the sum over ranks is reduce-scattered into token shards; the bias is
    added once to every shard, after the sum. Otherwise it is `nnx.Linear`.
    """

    _row_parallel = True

    def __call__(
        self, inputs: jax.Array, context: FlashCommContext | None = None, out_sharding=None
    ) -> jax.Array:
        """Applies the layer.

        Args:
          inputs: [(rows,) tokens, in_features], columns sharded over tp; all tokens of the
            context's rows, padded or not.
          context: the step's context; None runs the original program.
          out_sharding: accepted for `nnx.Linear`'s signature; the context decides.

        Returns:
          [(rows,) padded_num_tokens, out_features] as token shards, or with an inactive context
          [(rows,) tokens, out_features], whole on every rank.

        Raises:
          ValueError: if the token axis does not fit the context.
          FlashCommFallbackError: if the product is not fused as asked and `strict` is set.
        """
        if _no_context(self, context):
            return self._original(inputs, None)
        assert context is not None
        parallel, tp = context.parallel, context.parallel.tp_axis
        inputs, kernel, bias = self._operands(pad_tokens(inputs, context))
        dtype = inputs.dtype
        shape = gate.Product.of(
            inputs.shape, self.in_features // parallel.tp, self.out_features, self, context, dtype
        )
        backend = self._backend(context, shape, dtype)
        fused_float32 = backend != "none" and context.config.mmrs_accumulate_float32
        travels = jnp.float32 if fused_float32 else dtype

        def local(x, kernel):
            flat = destination_major(x, parallel.tp)
            if self.quantized:
                flat = quantize(flat, implementation=implementation(backend))
            out = matmul_reduce_scatter(
                flat,
                kernel,
                tp,
                parallel.tp,
                backend=backend,
                out_dtype=travels,
                precision=self.precision,
                reserve_sms=context.config.mmrs_reserve_sms,
            )
            return out.reshape(*x.shape[:-2], -1, self.out_features).astype(dtype)

        out = per_rank(
            local,
            parallel,
            [token_spec(parallel, inputs.shape, None, tp), self._kernel_spec()],
            token_spec(parallel, inputs.shape, tp),
        )(inputs, kernel)
        return out if bias is None else out + bias.reshape(-1)


class ColumnParallelLinear(_TensorParallelLinear):
    """Linear layer whose kernel columns are sharded over tp.

    With an active context its input is token shards, which it gathers. Layers that read the same
    input (query, key and value; gate and up) share one gather through `column_parallel`.
    """

    _row_parallel = False

    def __call__(
        self, inputs: jax.Array, context: FlashCommContext | None = None, out_sharding=None
    ) -> jax.Array:
        """Applies the layer; see `column_parallel`."""
        return column_parallel([self], inputs, context)[0]


def column_parallel(
    layers: Sequence[ColumnParallelLinear],
    inputs: jax.Array,
    context: FlashCommContext | None,
    *,
    gathered: bool = False,
) -> list[jax.Array]:
    """Several column-parallel layers of one input, behind a single gather.

    Args:
      layers: layers with equal in_features, dtype and quantization.
      inputs: [(rows,) tokens, in_features]: token shards if the context is active.
      context: the step's context; None runs the original program.
      gathered: the inputs are whole on every rank already, so there is nothing to gather.

    Returns:
      One [(rows,) tokens, out_features] per layer, columns sharded over tp. With an active
      context tokens is padded_num_tokens: `unpad_tokens` drops the padding.

    Raises:
      ValueError: if the layers differ or the token axis does not fit the context.
      FlashCommFallbackError: if the products are not fused as asked and `strict` is set.
    """
    first = layers[0]
    if any(layer.quantized != first.quantized for layer in layers):
        raise ValueError("layers that share an input must all be quantized, or none of them")
    if gathered or _no_context(first, context):
        return [
            layer._original(inputs, layer.parallel.name(layer.parallel.tp_axis)) for layer in layers
        ]
    assert context is not None
    parallel, tp = context.parallel, context.parallel.tp_axis
    inputs = pad_tokens(inputs, context)
    operands = [layer._operands(inputs) for layer in layers]
    inputs = operands[0][0]
    dtype = inputs.dtype
    widest = max(layers, key=lambda layer: layer.out_features)
    total = sum(layer.out_features for layer in layers)
    shape = gate.Product.of(
        inputs.shape, first.in_features, total // parallel.tp, first, context, dtype
    )
    backend = widest._backend(context, shape, dtype)

    def local(x, *kernels):
        flat = x.reshape(-1, x.shape[-1])
        if first.quantized:
            # Before the gather: half the bytes.
            flat = quantize(flat, implementation=implementation(backend))
        outs = all_gather_matmul(
            flat,
            kernels,
            tp,
            parallel.tp,
            backend=backend,
            out_dtype=dtype,
            precision=first.precision,
            reserve_sms=context.config.mmrs_reserve_sms,
        )
        return tuple(token_major(out, parallel.tp, x.shape[:-2]) for out in outs)

    outs = per_rank(
        local,
        parallel,
        [token_spec(parallel, inputs.shape, tp), *(layer._kernel_spec() for layer in layers)],
        tuple(token_spec(parallel, inputs.shape, None, tp) for _ in layers),
    )(inputs, *(kernel for _, kernel, _ in operands))
    return [
        out if bias is None else out + bias.reshape(-1)
        for out, (_, _, bias) in zip(outs, operands, strict=True)
    ]


def _no_context(layer: _TensorParallelLinear, context: FlashCommContext | None) -> bool:
    """Whether the original program runs; a missing context is reported, an inactive one was."""
    if context is None:
        if layer.parallel.tp > 1:
            report(FallbackReason.NO_CONTEXT, type(layer).__name__, strict=False)
        return True
    return not context.active


def quantize_w8a8(model: nnx.Module) -> nnx.Module:
    """Turns every tensor-parallel linear layer of a model into w8a8-dynamic int8, in place.

    Kernels become int8 with one scale per output channel; activations are quantized per token at
    run time. The LM head, embeddings, norms, routers and experts keep their dtype.

    Args:
      model: any nnx module.

    Returns:
      The model.
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, _TensorParallelLinear) and "lm_head" not in path:
            module.quantize()
    return model
