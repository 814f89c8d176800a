"""Context-parallel attention over a plan: forward and backward.

Forward, on every rank: attend to the own blocks, then in each stage pull the blocks that the plan
sends here and continue the softmax with them. Backward pulls the same blocks again, adds to dq
where the queries live and pushes dk and dv partials back along the reversed rounds (paper,
"pull-compute-push").
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fcp_jax import check
from fcp_jax.exchange import all_sources, run_pipeline, transfer
from fcp_jax.mesh import Axes, rank_tables, resolve_axes, spmd, table_specs
from fcp_jax.places import query_ranges, rows_to_places, token_mask
from fcp_jax.plan import Plan, PlanShape
from fcp_jax.reshuffle import dispatch, undispatch
from pallas_kernels import (
    AttentionState,
    TokenMask,
    WorkList,
    block_attention,
    block_attention_grad,
)
from pallas_kernels.implementations import num_sms

DTYPES = ("float32", "bfloat16", "float16")

# Jitted, each is lowered once however many branches call it: a kernel that is the same to the last
# source location is compiled once.
_STATIC = ("block_size", "scale", "implementation", "reserve_sms")
_attend = jax.jit(block_attention, static_argnames=(*_STATIC, "out_dtype"))
_attend_grad = jax.jit(block_attention_grad, static_argnames=_STATIC)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: Plan,
    *,
    mesh: Mesh | None = None,
    axis_name: str = "cp",
    batch_axis_name: str | tuple[str, ...] = "dp",
    head_axis_name: str = "tp",
    layout: str = "caller",
    scale: float | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    implementation: str | None = None,
    reserve_sms: int = 0,
    return_lse: bool = False,
) -> Any:
    r"""Attention of packed segments whose tokens are sharded over a mesh axis.

    .. math:: o_i = \sum_j \mathrm{softmax}_j(s\, q_i \cdot k_j)\, v_j

    where j runs over the segment of i (up to i itself if the plan is causal).

    Args:
      q: [N*T, num_q_heads, head_dim], or [R, N*T, num_q_heads, head_dim] for a plan of R rows;
        float32, bfloat16 or float16. With layout="plan", N*S*B instead of N*T.
      k: like q with num_kv_heads, which divides num_q_heads.
      v: like k.
      plan: from `make_plan` or `make_batch_plan`, for these segments.
      mesh: devices. None computes the same plan on one device.
      axis_name: mesh axis of the plan's ranks; tokens are sharded over it.
      batch_axis_name: mesh axis or axes of the plan's rows, if it has several.
      head_axis_name: mesh axis that heads are sharded over, if the mesh has it.
      layout: "caller" takes tokens in packed order and moves them to the plan's layout and back;
        "plan" takes what `dispatch` returned and stays there.
      scale: multiplies q.k; 1/sqrt(head_dim) if None.
      segment_ids: int32 [N*T] or [R, N*T], nonzero in segments, for checking only: if they are not
        the segments of the plan, the output is NaN (and ValueError where the values are known).
      positions: int32, like segment_ids: must increase inside each segment, so that causal order
        is token order; checked in the same way.
      implementation: kernel, see `pallas_kernels.block_attention`.
      reserve_sms: multiprocessors that the "mosaic_gpu" kernels leave to transfers, so that both
        run at the same time; FCP leaves 6 or 8, by a CUDA Green Context.
      return_lse: also return the log-sum-exp.

    Returns:
      out, like q; with return_lse, (out, lse) with lse float32 [..., num_q_heads], -inf on rows
      that see nothing. Rows outside every segment are 0 in out and have zero gradient.

    Raises:
      TypeError: if an argument is of a wrong kind.
      ValueError: if an argument does not fit the others; both before anything is traced.

    References:
      FCP, arXiv 2605.08524.
    """
    check.raise_if_no_plan(plan)
    check.check_layout(layout)
    shape = plan.shape
    rows = shape.tokens_per_rank if layout == "caller" else shape.plan_rows_per_rank
    _check_operands(q, k, v, shape.num_rows, shape.num_ranks * rows, layout)
    axes = None
    if mesh is not None:
        axes = resolve_axes(plan, mesh, axis_name, batch_axis_name, head_axis_name)
    if axes and axes.heads:
        split = axes.mesh.shape[axes.heads]
        for name, x in (("q", q), ("k", k)):
            if x.shape[-2] % split:
                raise ValueError(
                    f"{name} has {x.shape[-2]} heads, which the {split} devices of mesh axis "
                    f"{axes.heads!r} do not divide; use a mesh whose {axes.heads!r} axis divides "
                    "num_kv_heads, or repeat the kv heads"
                )
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not isinstance(scale, numbers.Real) or not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be a positive Python or numpy number, got {scale!r}")
    if type(reserve_sms) is not int or not 0 <= reserve_sms < num_sms():
        raise ValueError(
            f"reserve_sms must be an int from 0 to {num_sms() - 1}, got {reserve_sms!r}"
        )
    check.raise_if_known_bad(plan, segment_ids, positions, layout)

    moving = dict(mesh=mesh, axis_name=axis_name, batch_axis_name=batch_axis_name)
    heads = (axes.heads if axes else None, None)
    no_rows = q.ndim == 3
    if layout == "caller":
        q, k, v = dispatch((q, k, v), plan, feature_spec=heads, **moving)
    if no_rows:
        q, k, v = q[None], k[None], v[None]
    call = _Call(axes, float(scale), implementation, return_lse, reserve_sms)
    out, *lse = (x[0] if no_rows else x for x in _attention(call, q, k, v, plan))
    if layout == "caller":
        out = undispatch(out, plan, feature_spec=heads, **moving)
        # Places outside every segment come back as 0; as a log-sum-exp that would be a lie.
        lse = [
            jnp.where(covered, x, -jnp.inf)
            for x, covered in (
                undispatch((x, jnp.isfinite(x)), plan, feature_spec=heads[:1], **moving)
                for x in lse
            )
        ]
    if segment_ids is not None or positions is not None:
        flags = check.check_batch(
            plan, segment_ids=segment_ids, positions=positions, layout=layout, **moving
        )
        out = jnp.where(flags == 0, out, jnp.nan)
    return (out, lse[0]) if return_lse else out


def _check_operands(q, k, v, num_rows: int, rows: int, layout: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, (np.ndarray, jax.Array)):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
        if 0 in x.shape:
            raise ValueError(f"{name} must have no axis of size 0, got {x.shape}")
    if q.ndim not in (3, 4) or q.ndim != k.ndim or k.shape != v.shape:
        raise ValueError(
            "q, k, v must be [rows, tokens, heads, head_dim] or [tokens, heads, head_dim], k and v "
            f"alike, got {q.shape}, {k.shape}, {v.shape}"
        )
    lead = (num_rows, rows) if q.ndim == 4 else (rows,)
    if q.ndim == 3 and num_rows != 1:
        raise ValueError(f"q must have a leading axis of the plan's {num_rows} rows, got {q.shape}")
    for name, x in (("q", q), ("k", k)):
        if x.shape[:-2] != lead:
            raise ValueError(
                f'{name} must have leading axes {lead} for this plan and layout="{layout}", got '
                f"{x.shape}"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must share head_dim, got {q.shape[-1]} and {k.shape[-1]}")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"num_kv_heads must divide num_q_heads, got {k.shape[-2]} and {q.shape[-2]}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype.name not in DTYPES:
        raise ValueError(
            f"q, k, v must share one dtype of {', '.join(DTYPES)}, got {q.dtype}, {k.dtype}, "
            f"{v.dtype}"
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of a call."""

    axes: Axes | None
    scale: float
    implementation: str | None
    return_lse: bool
    reserve_sms: int = 0

    def options(self, shape: PlanShape) -> dict:
        """Keyword arguments of the block kernels."""
        return dict(
            block_size=shape.block_size,
            scale=self.scale,
            implementation=self.implementation,
            reserve_sms=self.reserve_sms,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: _Call, q, k, v, plan: Plan):
    """(out, lse) or (out,) in the plan's layout: [R, N*S*B, heads, head_dim], [R, N*S*B, heads]."""
    return _forward(call, q, k, v, plan)[: 1 + call.return_lse]


@functools.partial(jax.jit, static_argnums=0)  # op by op, shard_map is very slow
def _forward(call: _Call, q, k, v, plan: Plan):
    if call.axes is None:
        return _one_device(call, plan, _one_device_forward, (q, k, v))
    heads, lse_spec = _specs(call.axes)
    body = functools.partial(_rank_forward, call=call)
    tables = table_specs(plan, call.axes)
    return spmd(body, call.axes, (heads, heads, heads, tables), (heads, lse_spec))(q, k, v, plan)


def _attention_fwd(call, q, k, v, plan):
    out, lse = _forward(call, q, k, v, plan)
    out, lse = checkpoint_name(out, "fcp_out"), checkpoint_name(lse, "fcp_lse")
    return (out, lse)[: 1 + call.return_lse], (q, k, v, out, lse, plan)


def _attention_bwd(call, residuals, cotangents):
    *residuals, plan = residuals
    return *_backward(call, *residuals, *cotangents, plan=plan), None


@functools.partial(jax.jit, static_argnums=0)
def _backward(call: _Call, q, k, v, out, lse, dout, dlse=None, *, plan: Plan):
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    if dlse is not None:
        delta -= dlse
    operands = (q, k, v, dout, lse, delta)
    if call.axes is None:
        grads = _one_device(call, plan, _one_device_backward, operands)
    else:
        heads, lse_spec = _specs(call.axes)
        specs = (heads, heads, heads, heads, lse_spec, lse_spec, table_specs(plan, call.axes))
        body = functools.partial(_rank_backward, call=call)
        grads = spmd(body, call.axes, specs, (heads, heads, heads))(*operands, plan)
    return tuple(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))


_attention.defvjp(_attention_fwd, _attention_bwd)


def _specs(axes: Axes) -> tuple[P, P]:
    rows = axes.rows or None
    return P(rows, axes.cp, axes.heads, None), P(rows, axes.cp, axes.heads)


def _rank_forward(q, k, v, plan: Plan, *, call: _Call):
    """One rank's program; q is [1, S*B, heads, head_dim]."""
    rank = _Rank(call, plan)
    q, k, v = q[0], k[0], v[0]
    kv = k, v

    # Blocks are joined only after the barrier: so their buffer may be that of the arrivals, which
    # the kernel has read by then, and no transfer starts late to hide behind the copy.
    def local(rounds):
        blocks = rank.pull(kv, 0, rounds)
        state = _attend(q, *kv, rank.own_mask, rank.own_work, **rank.options)
        blocks, state = lax.optimization_barrier((blocks, state))
        return rank.joined(kv, blocks), state

    def compute(index, rounds, _, arrivals, state):
        blocks = rank.pull(kv, index + 1, rounds)
        work, mask = rank.stage(index)
        state = _attend(q, *arrivals, mask, work, state, **rank.options)
        blocks, state = lax.optimization_barrier((blocks, state))
        return rank.joined(kv, blocks), state

    state: AttentionState = rank.run(local, compute)
    return state.out.astype(q.dtype)[None], state.lse.T[None]


def _rank_backward(q, k, v, dout, lse, delta, plan: Plan, *, call: _Call):
    """One rank's program; operands are [1, S*B, heads, ...]."""
    rank = _Rank(call, plan)
    q, k, v = q[0], k[0], v[0]
    kv = k, v
    own = (dout[0], lse[0].T, delta[0].T)
    # Stage 0, but not before delta is known. Keys and values alone would let its pull start during
    # forward, which pulls the same blocks: XLA would keep those, or mix up transfers on CPUs.
    first = jnp.minimum(jnp.isnan(delta[0, 0, 0]).astype(jnp.int32), 0)

    def local(rounds):
        blocks = rank.pull(kv, first, rounds)
        dq, *dkv = _attend_grad(q, *kv, *own, rank.own_mask, rank.own_work, **rank.options)
        blocks, dq, dkv = lax.optimization_barrier((blocks, dq, dkv))
        arrivals, dkv = rank.joined(kv, blocks), jnp.concatenate(dkv, axis=1)
        return arrivals, (dq, dkv, [jnp.zeros(x.shape, jnp.float32) for x in arrivals])

    def compute(index, rounds, back, arrivals, carry):
        dq, dkv, parts = carry
        blocks = rank.pull(kv, index + 1, rounds)
        # The old sums are packed before the kernel writes new ones, perhaps in their place.
        leaving, later_q = lax.optimization_barrier((rank.packed(parts, back), q))
        returned = rank.push(leaving, index - 1, back)
        work, mask = rank.stage(index)
        dq, *parts = _attend_grad(later_q, *arrivals, *own, mask, work, dq, **rank.options)
        # Sums wait for the barrier, lest the last transfer starts late to hide behind them.
        blocks, returned, dq, parts = lax.optimization_barrier((blocks, returned, dq, parts))
        dkv += rank.own_part(parts)
        return rank.joined(kv, blocks), (dq, rank.add(dkv, returned, index - 1, back), parts)

    def finish(index, back, carry):
        dq, dkv, parts = carry
        returned = rank.push(rank.packed(parts, back), index, back)
        return dq, rank.add(dkv, returned, index, back), parts

    def pull(index, rounds, _):
        return rank.joined(kv, rank.pull(kv, index, rounds))

    dq, dkv, _ = rank.run(local, compute, (pull, finish))
    dk, dv = jnp.split(dkv, 2, axis=1)
    return dq[None], dk[None], dv[None]


class _Rank:
    """What the programs of one rank share: its tables, masks, work lists and transfers."""

    def __init__(self, call: _Call, plan: Plan):
        assert call.axes is not None
        self.axes = call.axes
        self.plan = plan = rank_tables(plan)
        self.shape = shape = plan.shape
        self.options = call.options(shape)
        rows = jnp.arange(shape.plan_rows_per_rank, dtype=jnp.int32)
        rows += lax.axis_index(self.axes.cp) * shape.plan_rows_per_rank
        self.own_mask = TokenMask(*query_ranges(plan, rows))
        self.arriving_rows = plan.recv_block.shape[1] * shape.block_size
        self.own_work = WorkList(plan.local_row_starts, plan.local_columns)
        # A round in which it has nothing to send carries slot 0 to nobody's use, and zeros come
        # back for it.
        self.first_rows = jnp.maximum(plan.send_slot, 0) * shape.block_size
        # The rank of each block that arrives; what is none is of no rank.
        source = jnp.where(plan.recv_block < 0, shape.num_ranks, plan.recv_block // shape.num_slots)
        self.sources = all_sources(source, shape, self.axes)

    def run(self, local, compute, exposed=None):
        """Runs all stages; see `run_pipeline`."""
        groups, trips = self.shape.groups, self.plan.trips
        return run_pipeline(groups, trips, self.shape, local, compute, exposed)

    def stage(self, index) -> tuple[WorkList, TokenMask]:
        """The work list of a stage over its arrivals and own blocks, and their mask."""
        work = WorkList(self.plan.stage_row_starts[index], self.plan.stage_columns[index])
        blocks = self.plan.recv_block[index, :, None]
        inside = jnp.arange(self.shape.block_size, dtype=jnp.int32)
        rows = jnp.where(blocks < 0, -1, blocks * self.shape.block_size + inside)
        places = rows_to_places(self.plan, rows.reshape(-1)), self.own_mask.kv_index
        return work, self.own_mask._replace(kv_index=jnp.concatenate(places))

    def pull(self, kv: Sequence[jax.Array], index, rounds) -> Sequence[jax.Array] | jax.Array:
        """Sends own blocks through the rounds of a stage; returns the ones that arrive."""
        payloads = [
            jnp.concatenate([self._rows(x, first) for x in kv], axis=1)
            for first in self._sent_rows(index, rounds)
        ]
        return transfer(payloads, rounds, self.shape, self.axes, self._sources(index))

    def joined(self, kv: Sequence[jax.Array], blocks) -> list[jax.Array]:
        """The keys and the values of a stage: what `pull` returned, then this rank's own.

        All stages have as many rows, whatever their group, and zeros where they bring nothing.
        """
        pieces = [jnp.split(block, 2, axis=1) for block in blocks]
        rest = self.arriving_rows - len(pieces) * self.shape.block_size
        # Arrays of no rows make XLA's partitioner crash inside a scan.
        zeros = [[jnp.zeros((rest, *x.shape[1:]), x.dtype) for x in kv]] if rest else []
        return [jnp.concatenate(x) for x in zip(*pieces, *zeros, kv, strict=True)]

    def packed(self, parts: Sequence[jax.Array], rounds) -> list[jax.Array]:
        """The partial dk and dv of a stage's blocks, as they travel."""
        size = self.shape.block_size
        edges = range(0, len(rounds) * size, size)
        return [jnp.concatenate([x[i : i + size] for x in parts], axis=1) for i in edges]

    def own_part(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The partial dk and dv of a stage for this rank's own blocks, side by side."""
        return jnp.concatenate([x[self.arriving_rows :] for x in parts], axis=1)

    def push(self, leaving, index, rounds) -> Sequence[jax.Array] | jax.Array:
        """Sends partial sums back to the owners of a stage's blocks; returns what comes here."""
        sources = self._sources(index)
        return transfer(leaving, rounds, self.shape, self.axes, sources, back=True)

    def add(self, dkv: jax.Array, returned, index, rounds) -> jax.Array:
        """Adds what `push` returned to the sums of the blocks that this rank sent."""
        for first, block in zip(self._sent_rows(index, rounds), returned, strict=True):
            total = self._rows(dkv, first) + block
            dkv = lax.dynamic_update_slice_in_dim(
                dkv, total, first, axis=0, allow_negative_indices=False
            )
        return dkv

    def _sources(self, index) -> jax.Array | None:
        return None if self.sources is None else self.sources[:, index]

    def _sent_rows(self, index, rounds) -> list[jax.Array]:
        """First row of the block that this rank sends in each round of a stage."""
        first = lax.dynamic_index_in_dim(
            self.first_rows, index, keepdims=False, allow_negative_indices=False
        )
        return [first[position] for position in range(len(rounds))]

    def _rows(self, x: jax.Array, first: jax.Array) -> jax.Array:
        """The block of x that begins at a row."""
        size = self.shape.block_size
        return lax.dynamic_slice_in_dim(x, first, size, allow_negative_indices=False)


def _one_device(call: _Call, plan: Plan, program, operands):
    """Runs `program(call, plan, *operands)` for every row of the plan."""
    rows = []
    for row in range(plan.shape.num_rows):
        tables = jax.tree.map(lambda table, row=row: table[row] if table.ndim > 1 else table, plan)
        rows.append(program(call, tables, *(x[row] for x in operands)))
    return tuple(jnp.stack(parts) for parts in zip(*rows, strict=True))


def _one_device_forward(call: _Call, plan: Plan, q, k, v):
    work, mask = _whole_work(plan)
    state: AttentionState = _attend(
        q, k, v, mask, work, out_dtype=q.dtype, **call.options(plan.shape)
    )
    return state.out, state.lse.T


def _one_device_backward(call: _Call, plan: Plan, q, k, v, dout, lse, delta):
    work, mask = _whole_work(plan)
    operands = q, k, v, dout, lse.T, delta.T, mask, work
    return _attend_grad(*operands, **call.options(plan.shape))


def _whole_work(plan: Plan) -> tuple[WorkList, TokenMask]:
    """The work of all ranks and stages as one list over all blocks of the plan's layout."""
    shape = plan.shape
    slots, ranks = shape.num_slots, shape.num_ranks
    rank = jnp.arange(ranks, dtype=jnp.int32)
    local = _items(plan.local_row_starts, plan.local_columns)
    query = [jnp.where(local < slots, rank[:, None] * slots + local, ranks * slots).reshape(-1)]
    kv = [(rank[:, None] * slots + plan.local_columns).reshape(-1)]
    remote = _items(plan.stage_row_starts, plan.stage_columns)
    own_first = rank[:, None, None] * slots
    query.append(jnp.where(remote < slots, own_first + remote, ranks * slots).reshape(-1))
    own = jnp.broadcast_to(own_first + jnp.arange(slots), (*plan.recv_block.shape[:2], slots))
    blocks = jnp.concatenate([plan.recv_block, own], axis=2)
    kv.append(jnp.take_along_axis(blocks, plan.stage_columns, axis=2).reshape(-1))
    rows, columns = jnp.concatenate(query), jnp.concatenate(kv)
    order = jnp.argsort(rows, stable=True)
    starts = jnp.searchsorted(rows[order], jnp.arange(ranks * slots + 1)).astype(jnp.int32)
    every = jnp.arange(ranks * shape.plan_rows_per_rank, dtype=jnp.int32)
    return WorkList(starts, columns[order]), token_mask(plan, every, every)


def _items(row_starts: jax.Array, columns: jax.Array) -> jax.Array:
    """The query slot of each item of many work lists; S for padding items."""
    item = jnp.arange(columns.shape[-1], dtype=jnp.int32)
    return jnp.sum(item[:, None] >= row_starts[..., None, 1:], axis=-1).astype(jnp.int32)
