"""What a plan costs: balance, rounds, bytes, memory."""

import dataclasses
from typing import Any

import numpy as np

from fcp_jax.config import PlanConfig

KERNEL_TFLOPS = 600.0
"""Forward attention rate of one rank, TFLOP/s: cuDNN and FlashAttention-3 reach 590-640 on an H200
at 64/8 heads, head_dim 128, bfloat16, causal or not, over 32768 tokens."""


@dataclasses.dataclass(frozen=True)
class PlanStats:
    """Figures of one plan, all JSON-ready.

    Attributes:
      method: planner that made it.
      num_ranks: ranks.
      block_size: rows a block, as chosen.
      num_blocks: blocks placed.
      transport: how rounds are counted.
      transport_reason: why this transport.
      compute_imbalance: max/mean - 1 over ranks of token pairs over rank speed.
      comm_imbalance: max/mean - 1 over ranks of KV bytes sent plus received.
      bandwidth_needed: GB/s a direction that hides the busiest rank's transfers behind its forward
        compute at `KERNEL_TFLOPS`.
      num_transfers: KV blocks sent from one rank to another.
      max_degree: the most of them that one rank sends or receives; no schedule has fewer rounds.
      num_rounds: permutes that run, empty ones included.
      num_stages: coalesced stages.
      payload_bytes_max: KV bytes the busiest rank sends or receives, whichever is more.
      wire_bytes_max: the same with the padding that the rounds carry.
      send_bytes_max: KV bytes the busiest sender sends.
      intra_node_bytes: KV bytes of all transfers between ranks of one node.
      inter_node_bytes: KV bytes of all other transfers.
      reshuffle_bytes_max: q, k and v bytes the busiest rank sends or receives in dispatch.
      memory_tokens_max: rows a rank holds in the plan's layout.
      planning_seconds: wall time of planning.
    """

    method: str
    num_ranks: int
    block_size: int
    num_blocks: int
    transport: str
    transport_reason: str
    compute_imbalance: float
    comm_imbalance: float
    bandwidth_needed: float
    num_transfers: int
    max_degree: int
    num_rounds: int
    num_stages: int
    payload_bytes_max: int
    wire_bytes_max: int
    send_bytes_max: int
    intra_node_bytes: int
    inter_node_bytes: int
    reshuffle_bytes_max: int
    memory_tokens_max: int
    planning_seconds: float


def imbalance(loads: np.ndarray) -> float:
    """Returns max/mean - 1, 0 where there is no load at all."""
    mean = float(loads.mean())
    return float(loads.max()) / mean - 1.0 if mean else 0.0


def seconds_per_pair(config: PlanConfig) -> float:
    """Returns the forward time of one token pair, all heads, at `KERNEL_TFLOPS`."""
    return 4.0 * config.num_q_heads * config.head_dim / (KERNEL_TFLOPS * 1e12)


def transfer_stats(
    config: PlanConfig,
    block_size: int,
    rank_pairs: np.ndarray,
    src: np.ndarray,
    dst: np.ndarray,
    moved: np.ndarray,
    num_rounds: int,
    transport: str,
) -> dict[str, Any]:
    """Computes the balance and byte figures of `PlanStats`.

    Args:
      config: prices.
      block_size: rows a block.
      rank_pairs: int64 [N], token pairs each rank computes.
      src: int64 [num_transfers], sender of each KV block.
      dst: int64 [num_transfers], receiver.
      moved: int64 [N, N], tokens that dispatch moves from one rank to another.
      num_rounds: KV permutes that run.
      transport: "static" and "ragged" send only real payloads; the others in every round.
    """
    ranks = config.num_ranks
    block_bytes = block_size * config.kv_bytes_per_token
    sent = np.bincount(src, minlength=ranks) * block_bytes
    received = np.bincount(dst, minlength=ranks) * block_bytes
    speeds = np.ones(ranks) if config.rank_speeds is None else np.array(config.rank_speeds)
    seconds = seconds_per_pair(config) * rank_pairs / speeds
    larger = np.maximum(sent, received)
    busy = larger > 0
    with np.errstate(divide="ignore"):
        needed = larger[busy] / seconds[busy] / 1e9
    qkv_heads = config.num_q_heads + 2 * config.num_kv_heads
    qkv_bytes = config.kv_bytes_per_token * qkv_heads // (2 * config.num_kv_heads)
    away = moved - np.diag(np.diag(moved))
    busiest = int(larger.max(initial=0))
    padded = transport in ("xor", "shift")
    inside = int((src // config.ranks_per_node == dst // config.ranks_per_node).sum())
    return {
        "compute_imbalance": imbalance(seconds),
        "comm_imbalance": imbalance(sent + received),
        "bandwidth_needed": float(needed.max(initial=0.0)),
        "payload_bytes_max": busiest,
        "wire_bytes_max": num_rounds * block_bytes if padded else busiest,
        "send_bytes_max": int(sent.max(initial=0)),
        "intra_node_bytes": inside * block_bytes,
        "inter_node_bytes": (len(src) - inside) * block_bytes,
        "reshuffle_bytes_max": int(max(away.sum(0).max(), away.sum(1).max())) * qkv_bytes,
    }
