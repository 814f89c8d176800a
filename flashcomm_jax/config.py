"""What is switched on, and over which mesh axes: the two inputs of a FlashComm decision."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

# The documented names of `mmrs_comm_mode` and the backends they select here.
BACKENDS = {
    "aiv": "pallas",
    "pallas": "pallas",
    "ai_cpu": "ring",
    "ring": "ring",
    "none": "none",
}


@dataclasses.dataclass(frozen=True)
class FlashCommConfig:
    """Switches of FlashComm; the defaults are the documented ones, everything off.

    Attributes:
      enable_flashcomm1: master switch: token shards between the layers of a prefill.
      enable_mmrs_fusion: overlap matmul with reduce-scatter, and all-gather with matmul. Read
        only when `enable_flashcomm1` is set.
      flashcomm1_min_prefill_tokens: a prefill of fewer tokens (per data-parallel row) runs the
        original program.
      mmrs_comm_mode: how fused products communicate. "aiv" (or "pallas"): the product is cut
        by output columns into pieces computed by the Pallas GEMM where the device has one, and
        each piece is reduce-scattered while the next is computed. "ai_cpu" (or "ring"):
        bidirectional ring of permutes. "none": never fuse.
      mmrs_accumulate_float32: carry partial sums of fused products in float32 (twice the bytes
        on the wire for bfloat16).
      mmrs_reserve_sms: multiprocessors that a Pallas product leaves to the transfer beside it, so
        that both make progress; it otherwise holds every one until it ends.
      strict: raise `FlashCommFallbackError` where a fallback would be taken.
    """

    enable_flashcomm1: bool = False
    enable_mmrs_fusion: bool = False
    flashcomm1_min_prefill_tokens: int = 8192
    mmrs_comm_mode: str = "aiv"
    mmrs_accumulate_float32: bool = False
    mmrs_reserve_sms: int = 0
    strict: bool = False

    def __post_init__(self):
        """Checks every field."""
        for field in dataclasses.fields(self):
            if field.type is bool and not isinstance(getattr(self, field.name), bool):
                raise ValueError(
                    f"{field.name} must be True or False, got {getattr(self, field.name)!r}"
                )
        for name in ("flashcomm1_min_prefill_tokens", "mmrs_reserve_sms"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
        if self.mmrs_comm_mode not in BACKENDS:
            raise ValueError(
                f"mmrs_comm_mode must be one of {sorted(BACKENDS)}, got {self.mmrs_comm_mode!r}"
            )

    @property
    def backend(self) -> str:
        """The backend behind `mmrs_comm_mode`: "pallas", "ring" or "none"."""
        return BACKENDS[self.mmrs_comm_mode]


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """A mesh and the meaning of its axes. Axes the mesh lacks have size 1.

    Attributes:
      mesh: the device mesh; None for one device. An `AbstractMesh` is enough to plan with.
      tp_axis: tensor parallel: heads, feed-forward columns and, with FlashComm, tokens.
      dp_axis: data parallel: rows of tokens.
      cp_axis: context parallel; FlashComm stays inactive when its size is not 1.
      ep_axes: the axes experts are spread over. They may include `dp_axis` and `tp_axis`
        (one expert group over all devices) or name an axis of their own, which then also
        shards rows where their number allows.
    """

    mesh: Mesh | AbstractMesh | None = None
    tp_axis: str = "tp"
    dp_axis: str = "dp"
    cp_axis: str = "cp"
    ep_axes: tuple[str, ...] = ("ep",)

    def __post_init__(self):
        """Checks the mesh and that axes differ."""
        if self.mesh is not None and not isinstance(self.mesh, Mesh | AbstractMesh):
            raise ValueError(f"mesh must be a jax.sharding.Mesh or None, got {self.mesh!r}")
        if len({self.tp_axis, self.dp_axis, self.cp_axis}) != 3:
            raise ValueError(
                "tp_axis, dp_axis and cp_axis must differ, got "
                f"{self.tp_axis!r}, {self.dp_axis!r}, {self.cp_axis!r}"
            )

    @property
    def tp(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.size(self.tp_axis)

    @property
    def cp(self) -> int:
        """Number of context-parallel ranks."""
        return self.size(self.cp_axis)

    @property
    def explicit(self) -> bool:
        """Whether array types carry shardings on this mesh."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of `ep_axes` that the mesh has."""
        return tuple(axis for axis in self.ep_axes if self.size(axis) > 1)

    def size(self, axis: str) -> int:
        """Size of a mesh axis, 1 if there is none of that name."""
        return 1 if self.mesh is None else dict(self.mesh.shape).get(axis, 1)

    def name(self, axis: str) -> str | None:
        """The axis if the mesh has it, for use in a PartitionSpec."""
        return axis if self.mesh is not None and axis in self.mesh.axis_names else None

    def row_axes(self, rows: int) -> tuple[str, ...]:
        """The axes that shard a leading axis of `rows` rows: dp, then ep, as far as they divide."""
        axes, size = [], 1
        for axis in dict.fromkeys((self.dp_axis, *self.ep_axes)):
            if axis == self.tp_axis or self.size(axis) == 1:
                continue
            if rows % (size * self.size(axis)) == 0:
                axes.append(axis)
                size *= self.size(axis)
        return tuple(axes)

    def num_rows(self, batch: int) -> int:
        """How many rows of tokens a batch of sequences folds into: one per data-parallel rank."""
        rows = 1
        for axis in self.row_axes(batch):
            rows *= self.size(axis)
        return rows

    def metadata(self, *names: str | tuple[str, ...] | None) -> dict[str, Any]:
        """`kernel_metadata` of an nnx layer whose parameter is sharded like `names`.

        Parameters are created sharded where the mesh is concrete and the axes of the mesh divide
        them; otherwise only the annotation is left.
        """
        if isinstance(self.mesh, Mesh):
            known = tuple(_known(name, self.mesh.axis_names) for name in names)
            return {"out_sharding": known, "mesh": self.mesh}
        return {"out_sharding": names, "eager_sharding": False}

    def sharding(self, *names) -> NamedSharding:
        """The sharding of an array whose axes are split over the named mesh axes."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*names))

    def put(self, x: jax.Array, *names) -> jax.Array:
        """Constrains an array to a sharding, under either kind of mesh axes."""
        if self.mesh is None:
            return x
        if self.explicit:
            return jax.sharding.reshard(x, self.sharding(*names))
        return jax.lax.with_sharding_constraint(x, self.sharding(*names))

    def reshape(self, x: jax.Array, shape: tuple[int, ...], *names) -> jax.Array:
        """Reshapes; on explicit meshes to a named sharding, which types cannot infer."""
        if not self.explicit:
            return x.reshape(shape)
        return jnp.reshape(x, shape, out_sharding=self.sharding(*names))


SINGLE_DEVICE = ParallelConfig()


def _known(name, axis_names):
    if isinstance(name, tuple):
        kept = tuple(n for n in name if n in axis_names)
        return kept or None
    return name if name in axis_names else None
