"""What the operands of adapters' products must be to each other, and launches take.

Knows pools, segments and rows; nothing of what is computed.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from punica_jax.pallas_kernels._norm import NormedRows
from punica_jax.pallas_kernels._pool import LoraPool
from punica_jax.pallas_kernels._segments import Segments

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_lora(lora: Any) -> None:
    """Raise unless this is a pool with segments, or None."""
    if lora is None:
        return
    parts = lora if isinstance(lora, tuple | list) else [lora]
    kinds = LoraPool, Segments
    if len(parts) != 2 or not all(map(isinstance, parts, kinds)):
        raise ValueError(
            "lora must be (pool, segments), a LoraPool such as pools.layer(i).qkv and "
            "what segment_metadata returns, or None, got "
            f"({', '.join(type(part).__name__ for part in parts)})"
        )


def check_operand(
    name: str,
    operand: Array | NormedRows,
    width: int,
    pool: LoraPool,
    segments: Segments,
) -> None:
    """Raise unless `operand` is [segments' rows, width] in the pool's dtype."""
    if operand.shape != (segments.num_rows, width):
        raise ValueError(
            f"{name} must be [rows, width] = {(segments.num_rows, width)} as the "
            f"segments and the pool have it, got {operand.shape}"
        )
    if operand.dtype != pool.dtype or pool.b.dtype != pool.dtype:
        raise ValueError(
            f"{name}, A and B must have one dtype, got {name} {operand.dtype}, "
            f"A {pool.dtype}, B {pool.b.dtype}; cast them before the call"
        )
    if pool.dtype not in _DTYPES:
        raise ValueError(
            f"dtype must be float32, bfloat16 or float16, got {pool.dtype}"
        )
    if pool.num_slots != segments.num_slots:
        raise ValueError(
            f"segments were made for {segments.num_slots} slots, "
            f"the pool has {pool.num_slots}"
        )
    for label, size in (("d_in", pool.d_in), *(("d_out", d) for d in pool.d_outs)):
        if size % 8:
            raise ValueError(
                f"{label} must be a multiple of 8 (16-byte loads), got {size}; "
                "pad the module's weights"
            )


def launch_tables(pool: LoraPool, segments: Segments) -> tuple[Array, ...]:
    """Return where every launch looks up its pages and rows, in the kernels' order."""
    return (
        *pool.tables,
        segments.rows,
        segments.tile_slot,
        segments.tile_first,
        segments.tile_end,
    )
