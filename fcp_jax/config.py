"""What a plan is asked for."""

import dataclasses
import math
import numbers

METHODS = ("fcp", "ring", "all_gather", "bytescale", "wlb", "magi")
TRANSPORTS = ("auto", "static", "xor", "shift", "ragged")
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """The hashable request from which, with the segments, a plan follows deterministically.

    Attributes:
      num_ranks: context parallel ranks.
      tokens_per_rank: rows of the caller's layout on each rank, padding included.
      block_size: rows per block, a multiple of 64. Baselines choose their own; the stats say which.
      causal: each token attends to itself and earlier tokens of its segment; else to all of it.
      method: how blocks are cut and placed, one of `METHODS`.
      transport: how rounds run, one of `TRANSPORTS`. "static" compiles the rounds in; "xor" and
        "shift" take them as data, so that a new batch does not recompile; so does "ragged", which
        sends no padding but runs on GPUs only; "auto" is "xor" where num_ranks is a power of two
        and "shift" elsewhere.
      coalesce: rounds that make a stage, for blocks of `block_size`; more of smaller blocks.
      ranks_per_node: consecutive ranks that share a node.
      rank_speeds: relative speed of each rank, length num_ranks; None for equal ranks.
      num_q_heads: query heads. This and the fields below only price FLOPs and bytes.
      num_kv_heads: key and value heads.
      head_dim: features a head.
      kv_dtype: dtype of keys and values on the wire.
    """

    num_ranks: int
    tokens_per_rank: int
    block_size: int = 4096
    causal: bool = True
    method: str = "fcp"
    transport: str = "auto"
    coalesce: int = 16
    ranks_per_node: int = 8
    rank_speeds: tuple[float, ...] | None = None
    num_q_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_dtype: str = "bfloat16"

    def __post_init__(self):
        """Checks every field; see the class for what is allowed."""
        for name in (
            "num_ranks tokens_per_rank block_size coalesce ranks_per_node "
            "num_q_heads num_kv_heads head_dim"
        ).split():
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
            object.__setattr__(self, name, int(value))
        if self.block_size % 64:
            raise ValueError(f"block_size must be a multiple of 64, got {self.block_size}")
        _check_choice("method", self.method, METHODS)
        _check_choice("transport", self.transport, TRANSPORTS)
        _check_choice("kv_dtype", self.kv_dtype, tuple(_DTYPE_BYTES))
        if self.transport == "xor" and self.num_ranks & (self.num_ranks - 1):
            raise ValueError(
                f'transport="xor" needs a power-of-two num_ranks, got {self.num_ranks}; '
                'use "shift" or "auto"'
            )
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_q_heads, got {self.num_kv_heads} "
                f"and {self.num_q_heads}"
            )
        if self.rank_speeds is not None:
            speeds = tuple(float(speed) for speed in self.rank_speeds)
            if len(speeds) != self.num_ranks or not all(
                math.isfinite(speed) and speed > 0 for speed in speeds
            ):
                raise ValueError(
                    f"rank_speeds must be {self.num_ranks} positive numbers, got {self.rank_speeds}"
                )
            object.__setattr__(self, "rank_speeds", speeds)

    @property
    def capacity(self) -> int:
        """Tokens that the caller's layout holds."""
        return self.num_ranks * self.tokens_per_rank

    @property
    def kv_itemsize(self) -> int:
        """Bytes of one feature of a key or value."""
        return _DTYPE_BYTES[self.kv_dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_itemsize

    @property
    def resolved_transport(self) -> str:
        """The transport with "auto" decided."""
        if self.transport != "auto":
            return self.transport
        power_of_two = not self.num_ranks & (self.num_ranks - 1)
        return "xor" if power_of_two and self.method == "fcp" else "shift"


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
