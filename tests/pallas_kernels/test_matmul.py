"""The Hopper product in the Pallas interpreter against float64, and its compiled form."""

import functools
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import explain_matmul, matmul, matmul_mgpu
from pallas_kernels.matmul_mgpu import MatmulConfig

SMS = 132
# (tokens, k, n) of row-parallel products, one rank of tp = 8: 70B o_proj and down, 8B down.
PRODUCTS = [(m, k, n) for m in (8192, 32768) for k, n in ((1024, 8192), (3584, 8192), (1792, 4096))]


def operands(m, k, n, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((m, k), (k, n)))


def float64(x, w):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64)


CASES = {
    "one_step": dict(m=128, k=64, n=64, columns=(0, 64)),
    "float16": dict(m=128, k=64, n=64, columns=(0, 64), dtype=jnp.float16),
    # The last row tile begins at 8 and the last column tile at 64: both overlap their neighbors.
    "uneven": dict(m=136, k=128, n=192, columns=(0, 192), config=MatmulConfig(128, 2)),
    "column_range": dict(m=128, k=64, n=320, columns=(64, 256), config=MatmulConfig(128, 2)),
    "stages_reused": dict(m=128, k=448, n=64, columns=(0, 64), config=MatmulConfig(64, 3)),
    # Two thread blocks take three and two tiles each, in groups of two rows.
    "persistent": dict(
        m=264, k=128, n=128, columns=(0, 128), reserve_sms=SMS - 2,
        config=MatmulConfig(64, 3, group=2),
    ),
    "float32": dict(m=128, k=64, n=128, columns=(64, 128), out_dtype=jnp.float32),
    "chosen": dict(m=200, k=64, n=192, columns=(0, 192), config=None),
    # The last pair of thread blocks begins at 8.
    "cluster": dict(m=264, k=192, n=64, columns=(0, 64), config=MatmulConfig(64, 2, cluster=2)),
    "no_turns": dict(
        m=264, k=64, n=64, columns=(0, 64), reserve_sms=SMS - 1,
        config=MatmulConfig(64, 2, take_turns=False),
    ),
    "narrower_than_a_tile": dict(m=128, k=64, n=128, columns=(64, 128)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_product(name):
    case = dict(dtype=jnp.bfloat16, config=MatmulConfig(stages=2), reserve_sms=0) | CASES[name]
    case = dict(out_dtype=case["dtype"]) | case
    x, w = operands(case["m"], case["k"], case["n"], case["dtype"])
    options = {key: case[key] for key in ("columns", "out_dtype", "config", "reserve_sms")}
    got = jax.jit(functools.partial(matmul_mgpu.matmul, interpret=True, **options))(x, w)
    want = float64(x, w)[:, slice(*case["columns"])]
    assert got.shape == want.shape and got.dtype == case["out_dtype"]
    # Unwritten results are NaN in the interpreter.
    error = np.abs(np.asarray(got, np.float64) - want)
    assert (error <= jnp.finfo(case["out_dtype"]).eps * np.abs(want) + 1e-4).all()


def test_gradients_of_a_column_range(monkeypatch):
    run = functools.partial(matmul_mgpu.matmul, interpret=True)
    monkeypatch.setattr(matmul_mgpu, "matmul", run)
    x, w = operands(128, 64, 192, jnp.bfloat16)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(128, 128)), jnp.float32)

    def loss(implementation, x, w):
        y = matmul(x, w, columns=(64, 192), out_dtype=jnp.float32, implementation=implementation)
        return (y * weight).sum()

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, name), (0, 1)))(x, w)
        for name in ("mosaic_gpu", "xla")
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert (np.asarray(got[1])[:, :64] == 0).all()


def test_plain_twin_computes_column_ranges():
    x, w = operands(5, 3, 7, jnp.float32)
    got = matmul(x, w, columns=(2, 6), precision="highest", implementation="xla")
    np.testing.assert_allclose(got, float64(x, w)[:, 2:6], rtol=1e-5, atol=1e-5)


def test_pieces_are_cut_inside_the_kernel():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 1024), (1024, 8192)))

    def pieces(x, w):
        return [
            matmul(x, w, columns=(i, i + 2048), implementation="mosaic_gpu")
            for i in range(0, 8192, 2048)
        ]

    text = jax.jit(pieces).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 4
    assert "stablehlo.slice" not in text and "stablehlo.dynamic_slice" not in text


def test_named_implementation_is_refused_with_a_reason():
    def shaped(m, k, n, dtype=jnp.bfloat16):
        return (jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (k, n)))

    for (x, w), options, reason in (
        (shaped(256, 64, 64, jnp.float32), {}, "bfloat16, float16 or int8 operands, got float32"),
        (shaped(256, 64, 64, jnp.int8), {}, "multiplies int8 in quantized_matmul only"),
        (shaped(120, 64, 64), {}, "multiple of 8 rows, at least 128, got 120"),
        (shaped(257, 64, 64), {}, "multiple of 8 rows, at least 128, got 257"),
        (shaped(256, 96, 64), {}, "k that is a multiple of 64, got 96"),
        (shaped(256, 0, 64), {}, "k that is a multiple of 64, got 0"),
        (shaped(256, 64, 96), {}, "end at a multiple of 64, got 0 to 96"),
        (shaped(256, 64, 96), dict(columns=(0, 64)), "columns are a multiple of 64, got 96"),
        (shaped(256, 64, 128), dict(columns=(32, 96)), "multiple of 64, got 32 to 96"),
        (shaped(256, 64, 128), dict(columns=(64, 64)), "multiple of 64, got 64 to 64"),
        (shaped(256, 64, 64), dict(out_dtype=jnp.int8), "float32 result, got int8"),
        (shaped(256, 64, 64), dict(precision="highest"), "no precision to choose"),
    ):
        with pytest.raises(ValueError, match="implementation 'mosaic_gpu' cannot be used: it "):
            explain_matmul(x, w, implementation="mosaic_gpu", **options)
        with pytest.raises(ValueError, match=reason):
            explain_matmul(x, w, implementation="mosaic_gpu", **options)
        assert explain_matmul(x, w, implementation="xla", **options) == "xla: asked for"
    assert explain_matmul(*shaped(256, 64, 64)) == (
        "xla: mosaic_gpu is not used, as it needs a GPU, and the default device is of platform "
        "'cpu'"
    )


def test_bad_arguments_are_named():
    x, w = operands(128, 64, 64, jnp.bfloat16)
    for call, reason in (
        (lambda: matmul(x, w.T[:3]), r"x must be \[m, k\] and w \[k, n\]"),
        (lambda: matmul(x, w.astype(jnp.float16)), "must share a dtype"),
        (lambda: matmul(x, w, columns=(0, 65)), r"within the 64 columns of w, got \(0, 65\)"),
        (lambda: matmul(x, w, columns=(32, 16)), "columns must be a range"),
        (lambda: matmul(x, w, reserve_sms=-1), "reserve_sms must not be negative, got -1"),
        (lambda: matmul(x, w, implementation="cublas"), "must be one of"),
        (lambda: MatmulConfig(tile_n=96), "tile_n must be 64, 128, 192 or 256, got 96"),
        (lambda: MatmulConfig(cluster=4), "cluster must be 1 or 2, got 4"),
        (lambda: MatmulConfig(compute_registers=240), "at most 504, got 240 and 40"),
    ):
        with pytest.raises(ValueError, match=reason):
            call()


def modelled_cycles(m, k, n):
    config = matmul_mgpu.choose_config(m, n, SMS)
    tiles = -(-m // matmul_mgpu.TILE_M) * -(-n // config.tile_n)
    return -(-tiles // SMS) * (k // 64) * matmul_mgpu.step_cycles(config.tile_n)


@pytest.mark.parametrize(("m", "k", "n"), PRODUCTS)
def test_pieces_leave_no_multiprocessor_idle(m, k, n):
    whole = modelled_cycles(m, k, n)
    assert 4 * modelled_cycles(m, k, n // 4) <= whole / 0.95
    ideal = (m / 128) * (n / 256) * (k / 64) * matmul_mgpu.step_cycles(256) / SMS
    assert whole <= ideal / 0.95


def test_small_products_get_narrow_tiles():
    assert matmul_mgpu.choose_config(2048, 1024, SMS).tile_n == 128
    assert matmul_mgpu.choose_config(8192, 2048, SMS).tile_n == 256
    assert matmul_mgpu.choose_config(8192, 64, SMS).tile_n == 64


COMPILE = """
import pathlib, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from pallas_kernels import matmul_mgpu, quantize_mgpu

target = pathlib.Path(sys.argv[1]).read_text()
device = topologies.get_topology_desc(
    "", platform="cuda", target_config=target, topology="1x1x1"
).devices[0]

def shaped(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

dtype, out, tile_n, cluster = jnp.dtype(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
m, k, n = 2048, 1024, 2048
if out == "rows":
    operands, run = [shaped((m, 3584), dtype)], quantize_mgpu.quantize
else:
    config = matmul_mgpu.choose_config(m, tile_n, 1)
    config = matmul_mgpu.MatmulConfig(tile_n, config.stages, cluster=cluster)
    operands = [shaped((m, k), dtype), shaped((k, n), dtype)]
    if dtype == jnp.int8:
        operands[1] = shaped((n, k), dtype)
        operands.append((shaped((m,), jnp.float32), shaped((n,), jnp.float32)))
    run = lambda *operands: matmul_mgpu.matmul(
        *operands, columns=(0, n), out_dtype=out, config=config
    )
jax.jit(run).lower(*operands).compile()
"""


@pytest.mark.gpu_schedule
@pytest.mark.parametrize(
    ("dtype", "out", "tile_n", "cluster"),
    [
        *itertools.product(("bfloat16", "int8"), ("bfloat16",), (256, 192, 128, 64), (1, 2)),
        ("bfloat16", "float32", 256, 1),
        ("int8", "float32", 256, 1),
        ("bfloat16", "rows", 0, 1),
    ],
)
def test_compiled_kernel_spills_nothing(tmp_path, dtype, out, tile_n, cluster):
    target = pathlib.Path(__file__).parents[1] / "helpers" / "h200.txtpb"
    dump = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(target), dtype, out, str(tile_n), str(cluster)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | dump
    subprocess.run(command, env=environment, check=True, timeout=300)
    (report,) = tmp_path.glob("*.ptxas")
    text = report.read_text()
    assert "0 bytes spill stores, 0 bytes spill loads" in text
    assert "serialized" not in text
