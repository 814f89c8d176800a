"""A plain nnx Llama without any knowledge of FlashComm, and meshes of CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from flashcomm_jax import (
    FlashCommConfig,
    FlashCommContext,
    LlamaConfig,
    ParallelConfig,
    reset_fallback_counts,
)
from flashcomm_jax.attention import causal_attention, rotary

OFF = FlashCommConfig()
FC1 = FlashCommConfig(enable_flashcomm1=True, flashcomm1_min_prefill_tokens=1)
AIV = FlashCommConfig(True, True, 1, "aiv")
RING = FlashCommConfig(True, True, 1, "ai_cpu")
FLOAT32_SUMS = FlashCommConfig(True, True, 1, "ai_cpu", mmrs_accumulate_float32=True)
CONFIGS = {"off": OFF, "fc1": FC1, "aiv": AIV, "ring": RING}

TINY = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=4,
)


class PlainAttention(nnx.Module):
    def __init__(self, config, **options):
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nnx.Linear(config.hidden_size, q, **options)
        self.k_proj = nnx.Linear(config.hidden_size, kv, **options)
        self.v_proj = nnx.Linear(config.hidden_size, kv, **options)
        self.o_proj = nnx.Linear(q, config.hidden_size, **options)
        self.config = config

    def __call__(self, x, positions):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        shape = (*positions.shape, -1, self.config.head_dim)
        q, k, v = q.reshape(shape), k.reshape(shape), v.reshape(shape)
        theta = self.config.rope_theta
        out = causal_attention(rotary(q, positions, theta), rotary(k, positions, theta), v)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))


class PlainMLP(nnx.Module):
    def __init__(self, config, **options):
        h, f = config.hidden_size, config.intermediate_size
        self.gate_proj = nnx.Linear(h, f, **options)
        self.up_proj = nnx.Linear(h, f, **options)
        self.down_proj = nnx.Linear(f, h, **options)

    def __call__(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(nnx.silu(gate) * up)


class PlainLayer(nnx.Module):
    def __init__(self, config, rngs, **options):
        self.input_layernorm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.self_attn = PlainAttention(config, rngs=rngs, **options)
        self.post_attention_layernorm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.mlp = PlainMLP(config, rngs=rngs, **options)

    def __call__(self, x, positions):
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nnx.Module):
    def __init__(self, config, rngs):
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List(
            [PlainLayer(config, rngs, use_bias=False) for _ in range(config.num_layers)]
        )
        self.norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.lm_head = nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
        x = self.embed_tokens(tokens.reshape(1, -1))
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x)).reshape(batch, length, -1)


def make_mesh(axes, *, explicit=False, permutation=None):
    """Mesh over the first devices, e.g. {"dp": 2, "tp": 4}; maybe in another device order."""
    shape = tuple(axes.values())
    devices = np.array(jax.devices()[: np.prod(shape)])
    if permutation is not None:
        devices = devices[np.asarray(permutation)]
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return Mesh(devices.reshape(shape), tuple(axes), axis_types=(kind,) * len(axes))


def relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.fixture(autouse=True)
def fresh_counters():
    reset_fallback_counts()


@pytest.fixture(scope="session")
def plain():
    """The plain model, its state, tokens [4, 13] and their logits."""
    model = PlainLlama(TINY, nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, TINY.vocab_size, (4, 13)), jnp.int32)
    return model, nnx.state(model), tokens, jax.jit(model)(tokens)


@pytest.fixture(scope="session")
def helpers():
    """Names above, for test modules (which cannot import this file)."""
    from types import SimpleNamespace

    return SimpleNamespace(**{k: v for k, v in globals().items() if not k.startswith("_")})


def context_for(mesh, num_tokens, config, stage="prefill", **axes):
    return FlashCommContext.build(num_tokens, ParallelConfig(mesh, **axes), config, stage)
