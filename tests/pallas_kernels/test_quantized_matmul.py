"""The int8 kernels in the Pallas interpreter: sums are exact, scales are applied in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import matmul_mgpu, quantize_mgpu, quantize_rows, quantized_matmul
from pallas_kernels.matmul_mgpu import MatmulConfig


def operands(m, k, n, seed=0):
    rng = np.random.default_rng(seed)
    x, w = (jnp.asarray(rng.integers(-128, 128, shape), jnp.int8) for shape in ((m, k), (n, k)))
    x_scale, w_scale = (jnp.asarray(rng.uniform(0.01, 2, size), jnp.float32) for size in (m, n))
    return x, x_scale, w, w_scale


def expected(x, x_scale, w, w_scale):
    """The exact sums, then the float32 arithmetic that the documentation promises."""
    sums = np.asarray(x, np.int64) @ np.asarray(w, np.int64).T
    assert np.abs(sums).max() < 2**31
    return sums.astype(np.float32) * np.asarray(x_scale)[:, None] * np.asarray(w_scale)


CASES = {
    "one_step": dict(m=128, k=128, n=64, columns=(0, 64)),
    "uneven": dict(m=136, k=256, n=192, columns=(0, 192), config=MatmulConfig(128, 2)),
    "column_range": dict(m=128, k=128, n=320, columns=(64, 256), config=MatmulConfig(128, 2)),
    # One thread block takes all tiles: scales of one tile after the other in the same memory.
    "persistent": dict(
        m=264, k=384, n=128, columns=(0, 128), reserve_sms=131, config=MatmulConfig(64, 2)
    ),
    "chosen": dict(m=200, k=128, n=192, columns=(0, 192), config=None),
}


@pytest.mark.parametrize("name", CASES)
def test_product_is_exact(name):
    case = dict(config=MatmulConfig(stages=2), reserve_sms=0) | CASES[name]
    x, x_scale, w, w_scale = operands(case["m"], case["k"], case["n"])
    x = x.at[3].set(0).at[5].set(-128)  # a row of zeros, and the largest sums there are
    w = w.at[64].set(-128) if case["n"] > 64 else w
    options = {key: case[key] for key in ("columns", "config", "reserve_sms")}
    run = functools.partial(matmul_mgpu.matmul, out_dtype=jnp.float32, interpret=True, **options)
    got = jax.jit(run)(x, w, (x_scale, w_scale))
    want = expected(x, x_scale, w, w_scale)[:, slice(*case["columns"])]
    np.testing.assert_array_equal(got, want)
    assert (np.asarray(got)[3] == 0).all()


def test_result_is_rounded_once():
    x, x_scale, w, w_scale = operands(128, 128, 64)
    run = functools.partial(
        matmul_mgpu.matmul, columns=(0, 64), out_dtype=jnp.bfloat16, interpret=True
    )
    got = jax.jit(run)(x, w, (x_scale, w_scale))
    want = jnp.asarray(expected(x, x_scale, w, w_scale)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_plain_twin_is_exact_in_a_column_range():
    x, x_scale, w, w_scale = operands(5, 7, 9)
    got = jax.jit(
        lambda *x: quantized_matmul(*x, columns=(2, 8), out_dtype=jnp.float32, implementation="xla")
    )(x, x_scale, w, w_scale)
    np.testing.assert_array_equal(got, expected(x, x_scale, w, w_scale)[:, 2:8])


def rows(m, k, dtype):
    x = np.random.default_rng(0).normal(size=(m, k)) * np.logspace(-3, 3, m)[:, None]
    x[3], x[4] = 0, 1e-33
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
def test_quantized_rows_are_within_half_a_step(implementation):
    x = rows(8, 512, jnp.bfloat16)
    if implementation == "kernel":
        values, scale = jax.jit(functools.partial(quantize_mgpu.quantize, interpret=True))(x)
    else:
        values, scale = quantize_rows(x, implementation="xla")
    assert values.dtype == jnp.int8 and values.shape == x.shape
    assert scale.dtype == jnp.float32 and scale.shape == (8,)
    values, scale, x = (np.asarray(a, np.float64) for a in (values, scale, x))
    assert (np.abs(values * scale[:, None] - x) <= 0.5001 * scale[:, None]).all()
    assert (np.abs(values).max(1)[[0, 1, 2, 5, 6, 7]] == 127).all()
    assert (values[3:5] == 0).all() and (scale[3:5] == 1).all()


def test_kernel_and_twin_quantize_alike():
    x = rows(8, 512, jnp.float16)
    got = jax.jit(functools.partial(quantize_mgpu.quantize, interpret=True))(x)
    for a, b in zip(got, quantize_rows(x, implementation="xla"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_lowers_for_cuda_without_a_gpu():
    def product(x, w, w_scale):
        values, scale = quantize_rows(x, implementation="mosaic_gpu")
        options = dict(out_dtype=x.dtype, columns=(2048, 4096), implementation="mosaic_gpu")
        return quantized_matmul(values, scale, w, w_scale, **options)

    x = jax.ShapeDtypeStruct((8192, 3584), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((8192, 3584), jnp.int8)
    scale = jax.ShapeDtypeStruct((8192,), jnp.float32)
    text = jax.jit(product).trace(x, w, scale).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    assert "stablehlo.slice" not in text and "stablehlo.dot" not in text


def test_bad_arguments_are_named():
    x, x_scale, w, w_scale = operands(128, 128, 64)
    options = dict(out_dtype=jnp.bfloat16)
    named = dict(implementation="mosaic_gpu", **options)
    deep = jnp.zeros((128, 131072), jnp.int8), x_scale, jnp.zeros((64, 131072), jnp.int8), w_scale
    for call, reason in (
        (lambda: quantized_matmul(x, x_scale, w.T, w_scale, **options), r"\[m, k\], \[m\]"),
        (lambda: quantized_matmul(x, x_scale[:, None], w, w_scale, **options), r"\[m, k\], \[m\]"),
        (lambda: quantized_matmul(x * 1.0, x_scale, w, w_scale, **options), "must be int8"),
        (lambda: quantized_matmul(x, x, w, w_scale, **options), r"\[m, k\], \[m\]"),
        (
            lambda: quantized_matmul(x, x_scale.astype(jnp.int8), w, w_scale, **options),
            "scales must be float32",
        ),
        (
            lambda: quantized_matmul(x, x_scale, w, w_scale, reserve_sms=-1, **options),
            "reserve_sms must not be negative",
        ),
        (
            lambda: quantized_matmul(x, x_scale, w, w_scale, columns=(0, 65), **options),
            "columns must be a range",
        ),
        (
            lambda: quantized_matmul(x[:, :64], x_scale, w[:, :64], w_scale, **named),
            "k that is a multiple of 128, got 64",
        ),
        (lambda: quantized_matmul(*deep, **named), r"k below 2\*\*31 / 128\*\*2 for int8"),
        (lambda: quantize_rows(x[0] * 1.0), r"x must be \[m, k\]"),
        (
            lambda: quantize_rows(x * 1.0, implementation="mosaic_gpu"),
            "bfloat16 or float16 rows, got float32",
        ),
        (
            lambda: quantize_rows(jnp.zeros((6, 256), jnp.bfloat16), implementation="mosaic_gpu"),
            "multiple of 4 rows, got 6",
        ),
        (
            lambda: quantize_rows(jnp.zeros((8, 4352), jnp.bfloat16), implementation="mosaic_gpu"),
            "multiple of 256 columns, at most 4096, got 4352",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            call()
