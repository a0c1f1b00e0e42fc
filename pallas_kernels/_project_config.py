"""How a few rows' dense product is cut into programs: a function of sizes.

Knows widths and dtypes; nothing of kernels. The figures are of one H200, bfloat16,
adapters of rank 16.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

# Of more rows a product's programs load less ahead, so that all find room at once.
MAX_ROOMY_ROWS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProjectConfig:
    """`block_n` columns a program, which walks d_in in blocks of `block_k`."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def project_config(
    d_in: int,
    d_out: int,
    dtype: Any,
    shared_bytes: int,
    *,
    tile_rows: int,
    shrinks: bool = False,
) -> ProjectConfig:
    """Choose the programs of a few rows' dense product.

    What counts is how much of the weight is on its way: with one program for each of
    132 multiprocessors, deep blocks; with several, shallower ones. 32 rows, with the
    shrink of one adapter, against XLA's product alone: 4096 to 4096 columns 12.9 us
    (11.4), to 12288 29.6 (31.0), to 22016 49.1 (48.9), 11008 to 4096 27.1 (29.5); a
    single row 12.5 (12.3), 26.6 (38.2), 44.1 (49.2), 24.7 (36.2).

    Programs of a shrink wait where those of the product fill the multiprocessors, idle
    ones too; so where there are any, the product's are fewer or leave room. With 32
    adapters, against the blocks that are best without: 4096 to 4096 columns 14.8 us
    (16.4), to 6144 21.0 (25.2), to 12288 33.4 (35.7), 11008 to 4096 31.2 (34.9); of one
    adapter 13.5 (14.0), 18.9 (23.0), 30.5 (30.1), 29.8 (27.3). What 64 rows load ahead
    of 12288 and 22016 columns would take so much room that some programs wait: a layer
    of 8 adapters takes 7 us less so. Of 28672 some wait in any case: blocks of 64 would
    take it 11 us more.

    Args:
      d_in, d_out: the weight's.
      dtype: of all operands.
      shared_bytes: what a program may take.
      tile_rows: the rows, up to a power of two; they choose how much it loads ahead.
        (A block of 64 instead of 128 changed no bit of a result on a GPU.)
      shrinks: whether programs of a shrink are in the grid.
    """
    if jnp.dtype(dtype).itemsize > 2:
        block_n, block_k, num_stages = 32, 32, 3
    elif d_out <= 4224 and d_in <= 5120 and shrinks:
        block_n, block_k, num_stages = 32, 128, 6
    elif d_out <= 4224:
        block_n, block_k, num_stages = 32, 256, 4 if shrinks else 5
    elif d_out <= 8192 and shrinks:
        block_n, block_k, num_stages = 32, 128, 5
    elif d_out <= 16384:
        block_n, block_k = 64 if shrinks else 32, 128
        num_stages = 3 if shrinks and tile_rows > MAX_ROOMY_ROWS else 4
    elif tile_rows > MAX_ROOMY_ROWS and d_out <= 24576:
        block_n, block_k, num_stages = 64, 64, 4
    else:
        block_n, block_k, num_stages = 64, 128, 3
    block_n = min(block_n, max(16, pl.next_power_of_2(d_out)))
    block_k = min(block_k, max(16, pl.next_power_of_2(d_in)))
    # A block of the weight and one of the rows; or a rank page of each of
    # `MAX_JOINT_MODULES`, and a tile.
    values = max((block_n + tile_rows) * block_k, (64 + 16) * 128)
    stage_bytes = values * jnp.dtype(dtype).itemsize
    return ProjectConfig(
        block_n=block_n,
        block_k=block_k,
        num_warps=4,
        num_stages=max(2, min(num_stages, shared_bytes // stage_bytes)),
    )
