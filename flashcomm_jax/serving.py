"""Prefill and greedy decode with the switches: what the command line and the example run."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flashcomm_jax.collective_matmul import compiler_options
from flashcomm_jax.config import FlashCommConfig
from flashcomm_jax.context import FlashCommContext
from flashcomm_jax.model import FlashCommLlama


@dataclasses.dataclass(frozen=True)
class Generation:
    """Result of one batch of requests served together.

    Attributes:
      tokens: int32 [batch, new_tokens].
      prompt_logits: float32 [batch, vocab_size], of each prompt's last token.
      prefill_seconds: time to first token.
      decode_seconds: time of all further tokens.
    """

    tokens: np.ndarray
    prompt_logits: np.ndarray
    prefill_seconds: float
    decode_seconds: float


class Engine:
    """Serves batches of prompts with one model and one configuration.

    The context of each step is built from the batch's shape and is a static argument of the
    compiled step: a prefill above the threshold runs on token shards, everything else as ever.
    """

    def __init__(self, model: FlashCommLlama, config: FlashCommConfig):
        """Keeps the model's state; its arrays are not copied.

        Args:
          model: the model.
          config: the switches.
        """
        self.model = model
        self.config = config
        graph, self._state = nnx.split(model)

        def step(context: FlashCommContext, state, tokens, caches, lengths):
            logits, caches = nnx.merge(graph, state)(
                tokens, context, caches, lengths, logits="last"
            )
            return logits[:, 0].astype(jnp.float32), caches

        self._step = jax.jit(step, static_argnums=0, compiler_options=compiler_options())
        # One decision, and one log line, per shape.
        self._context = functools.cache(
            lambda batch, length, stage: model.build_context(batch, length, config, stage)
        )

    def prefill_text(self, batch: int, length: int, max_len: int) -> str:
        """Compiled text of a prefill, to read its collectives from."""
        context = self._context(batch, length, "prefill")
        tokens, lengths = np.zeros((batch, length), np.int32), np.full(batch, length, np.int32)
        caches = self.model.init_caches(batch, max_len)
        lowered = self._step.lower(context, self._state, tokens, caches, lengths)
        return lowered.compile().as_text() or ""

    def generate(self, prompts: np.ndarray, lengths: np.ndarray, new_tokens: int) -> Generation:
        """Prefills the prompts, then decodes greedily.

        Args:
          prompts: int32 [batch, length], padded on the right.
          lengths: int32 [batch], tokens of each prompt.
          new_tokens: tokens to generate for each, at least 1.

        Returns:
          Tokens, logits and times.

        Raises:
          ValueError: if shapes or counts do not fit.
        """
        batch, length = prompts.shape
        if lengths.shape != (batch,) or (lengths < 1).any() or (lengths > length).any():
            raise ValueError(f"lengths must be {batch} counts in 1..{length}, got {lengths}")
        if new_tokens < 1:
            raise ValueError(f"new_tokens must be >= 1, got {new_tokens}")
        caches = self.model.init_caches(batch, length + new_tokens)
        prefill = self._context(batch, length, "prefill")
        ones = np.ones(batch, np.int32)
        jax.block_until_ready(caches)

        start = time.perf_counter()
        logits, caches = self._step(prefill, self._state, prompts, caches, lengths)
        tokens = [np.argmax(logits, axis=-1).astype(np.int32)]
        first_token = time.perf_counter()
        prompt_logits = np.asarray(logits)
        if new_tokens > 1:
            decode = self._context(batch, 1, "decode")
            for _ in range(new_tokens - 1):
                logits, caches = self._step(decode, self._state, tokens[-1][:, None], caches, ones)
                tokens.append(np.argmax(logits, axis=-1).astype(np.int32))
        end = time.perf_counter()
        return Generation(
            np.stack(tokens, axis=1), prompt_logits, first_token - start, end - first_token
        )
