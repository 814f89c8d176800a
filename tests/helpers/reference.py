"""Dense float64 attention over packed segments, forward and backward."""

import numpy as np


def segment_ids_of(segments, num_tokens):
    """1, 2, ... inside segments, 0 elsewhere."""
    ids = np.zeros(num_tokens, np.int32)
    for i, (start, length) in enumerate(zip(segments.starts, segments.lengths, strict=True)):
        ids[start : start + length] = i + 1
    return ids


def positions_of(ids):
    """The offset of each token in its run of equal ids."""
    at = np.arange(len(ids))
    first = np.flatnonzero(np.diff(ids, prepend=-1))
    return (at - np.repeat(first, np.diff(first, append=len(ids)))).astype(np.int32)


def dense_attention(q, k, v, dout, ids, causal, scale=None):
    """(out, lse, dq, dk, dv) of [tokens, heads, dim] operands; 0 (-inf for lse) where ids are 0."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    out, dq = np.zeros_like(q), np.zeros_like(q)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    lse = np.full(q.shape[:2], -np.inf)
    for segment in np.unique(ids[ids > 0]):
        at = np.flatnonzero(ids == segment)
        keys, values = np.repeat(k[at], group, 1), np.repeat(v[at], group, 1)
        scores = scale * np.einsum("qhd,khd->hqk", q[at], keys)
        if causal:
            scores = np.where(np.tri(len(at), dtype=bool), scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        weights /= total
        out[at] = np.einsum("hqk,khd->qhd", weights, values)
        lse[at] = (top + np.log(total))[..., 0].T
        dweights = np.einsum("qhd,khd->hqk", dout[at], values)
        delta = (out[at] * dout[at]).sum(-1).T
        dscores = scale * weights * (dweights - delta[..., None])
        dq[at] = np.einsum("hqk,khd->qhd", dscores, keys)
        fold = (len(at), k.shape[1], group, k.shape[2])
        dk[at] = np.einsum("hqk,qhd->khd", dscores, q[at]).reshape(fold).sum(2)
        dv[at] = np.einsum("hqk,qhd->khd", weights, dout[at]).reshape(fold).sum(2)
    return out, lse, dq, dk, dv


def relative_error(got, want):
    """Relative L2 error; absolute where the reference is zero (but for its own rounding)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    size = np.linalg.norm(want)
    return np.linalg.norm(got - want) / (size if size > 1e-9 else 1.0)
