"""Packed masks, their block pairs, and dense attention over them in float64."""

import numpy as np


def packed_mask(lengths, rows, causal):
    """Segments in order, then padding."""
    index = np.full(rows, -1)
    lo, hi = np.full(rows, 1), np.full(rows, 0)
    start = 0
    for length in lengths:
        own = np.arange(start, start + length)
        index[own], lo[own] = own, start
        hi[own] = own if causal else start + length - 1
        start += length
    return lo, hi, index


def all_pairs(lo, hi, index, block):
    """Every block pair that holds a visible token pair."""
    visible = (lo[:, None] <= index) & (index <= hi[:, None])
    nq, nk = len(lo) // block, len(index) // block
    blocks = visible.reshape(nq, block, nk, block).any(axis=(1, 3))
    return np.argwhere(blocks)


def dense(q, k, v, dout, visible, scale):
    """float64 attention and its gradients."""
    group = q.shape[1] // k.shape[1]
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    kk, vv = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.where(visible, scale * np.einsum("qhd,khd->hqk", q, kk), -np.inf)
    top = np.where(visible.any(1), scores.max(-1), 0.0)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    weights /= np.where(total == 0, 1, total)[..., None]
    out = np.einsum("hqk,khd->qhd", weights, vv)
    dweights = np.einsum("qhd,khd->hqk", dout, vv)
    delta = (out * dout).sum(-1).T
    dscores = scale * weights * (dweights - delta[..., None])
    dq = np.einsum("hqk,khd->qhd", dscores, kk)
    fold = (k.shape[0], k.shape[1], group, k.shape[2])
    dk = np.einsum("hqk,qhd->khd", dscores, q).reshape(fold).sum(2)
    dv = np.einsum("hqk,qhd->khd", weights, dout).reshape(fold).sum(2)
    return out, lse, dq, dk, dv


def relative_error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30)
