"""Serve long prompts with the FlashComm switches, and check that the tokens do not change.

    python examples/prefill_flashcomm.py                       # 8 host devices, or 8 GPUs
    python examples/prefill_flashcomm.py --enable_mmrs_fusion --mmrs_comm_mode ai_cpu
    python examples/prefill_flashcomm.py --dtype int8 --dp 2 --tp 4

A plain `flax.nnx` Llama gives the weights; the FlashComm model loads its state unchanged. Prompts
of different lengths go through one prefill, then decode greedily, once with the switches off and
once with them on.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from flashcomm_jax import (
    FlashCommConfig,
    FlashCommLlama,
    LlamaConfig,
    ParallelConfig,
    fallback_counts,
    hlo,
    load_checkpoint,
    quantize_w8a8,
)
from flashcomm_jax.serving import Engine


def main() -> None:
    """Serves the prompts off and on and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--enable_flashcomm1", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--enable_mmrs_fusion", action="store_true")
    parser.add_argument("--flashcomm1_min_prefill_tokens", type=int, default=1024)
    parser.add_argument("--mmrs_comm_mode", default="aiv", choices=("aiv", "ai_cpu", "none"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=999, help="the longest prompt")
    parser.add_argument("--output-tokens", type=int, default=12)
    parser.add_argument("--requests", type=int, default=4)
    options = parser.parse_args()

    mesh = jax.make_mesh((options.dp, options.tp), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    dtype = jnp.bfloat16 if options.dtype == "bfloat16" else jnp.float32
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=16,
        num_kv_heads=8,
        head_dim=8,
        dtype=dtype,
    )
    # On one device the model is a plain nnx model; its state is the checkpoint.
    checkpoint = nnx.state(FlashCommLlama(shape, rngs=nnx.Rngs(0)))
    model = FlashCommLlama(shape, parallel=ParallelConfig(mesh), rngs=nnx.Rngs(1))
    load_checkpoint(model, checkpoint)
    if options.dtype == "int8":
        quantize_w8a8(model)

    rng = np.random.default_rng(0)
    lengths = rng.integers(options.prompt_tokens // 2, options.prompt_tokens, options.requests)
    lengths[0] = options.prompt_tokens
    prompts = np.zeros((options.requests, options.prompt_tokens), np.int32)
    for row, length in zip(prompts, lengths, strict=True):
        row[:length] = rng.integers(0, shape.vocab_size, length)
    lengths = lengths.astype(np.int32)
    print(f"{options.requests} prompts of {lengths.tolist()} tokens on mesh {dict(mesh.shape)}")

    configs = {
        "off": FlashCommConfig(),
        "on": FlashCommConfig(
            enable_flashcomm1=options.enable_flashcomm1,
            enable_mmrs_fusion=options.enable_mmrs_fusion,
            flashcomm1_min_prefill_tokens=options.flashcomm1_min_prefill_tokens,
            mmrs_comm_mode=options.mmrs_comm_mode,
        ),
    }
    tokens = {}
    for name, config in configs.items():
        engine = Engine(model, config)
        engine.generate(prompts, lengths, options.output_tokens)  # compiles
        result = engine.generate(prompts, lengths, options.output_tokens)
        tokens[name] = result.tokens
        max_len = options.prompt_tokens + options.output_tokens
        batch, length = prompts.shape
        text = engine.prefill_text(batch, length, max_len)
        kinds = sorted({collective.kind for collective in hlo.collectives(text)})
        tpot = result.decode_seconds / max(options.output_tokens - 1, 1)
        print(
            f"{name:>4}: first token after {result.prefill_seconds * 1e3:.1f} ms, then "
            f"{tpot * 1e3:.2f} ms a token; prefill uses {', '.join(kinds)}"
        )
    print("fallbacks:", {str(reason): count for reason, count in fallback_counts().items()})
    print("tokens of the first request:", tokens["on"][0].tolist())
    same = bool((tokens["off"] == tokens["on"]).all())
    print("tokens equal on and off:", same)
    if not same:
        raise SystemExit("tokens differ")


if __name__ == "__main__":
    main()
