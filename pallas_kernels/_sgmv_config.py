"""How adapters' products are cut, and what is cut added: functions of sizes.

Knows widths, pages and dtypes; nothing of kernels. The figures are of one H200,
bfloat16, 64 rows of 64 adapters of rank 16 unless they say otherwise.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

# Up to so many rows one launch multiplies and shrinks; XLA multiplies more of them, and
# the shrink may then run beside it. A step of 64 rows of 8 adapters took 9.31 ms so,
# and 9.69 by XLA's products (a 7B on one H200); of 128 rows 1.5 ms more than by XLA's.
MAX_PROJECT_ROWS = 64

# Up to so many rows an expand's programs, few as they are, wait for their loads alone.
_FEW_ROWS = 128

# From so many rows on an expand's program takes some blocks of columns, or heads, for
# there are programs enough: of 128 rows that once lost a quarter.
_WALKED_ROWS = 2048

# Rank pages of one adapter that are multiplied at once, at most.
MAX_AT_ONCE = 4

# Tiles whose programs take turns. A launch has as many tiles as its rows may need, and
# where rows share an adapter most are idle, and lie behind the busy ones; but an idle
# program, too, waits for its turn. 64 rows of one adapter of rank 64 to 11008 columns
# take 10.2 us so, shrink and expand, and 12.7 where all tiles take turns; with one tile
# after the other 10.1, but of 8 adapters to 4096 columns 12.9, not 12.0. 4096 rows of
# 16 adapters of rank 16 to 11008 columns take 92.5 us, not 99.8 (one H100).
TILES_AT_ONCE = 8

# Entries of a window: of those that begin in one, a program of many rows' shrink, or
# of a wide expand, takes all tiles of an adapter.
WINDOW_ROWS = 64

# Modules of which one program shrinks a page each, at most.
MAX_JOINT_MODULES = 4

# From so many rows on a program of the shrink takes a group of splits, and of several
# modules all of them. 4096 to 4096 columns at rank 16 take 24.0 us so for 2048 rows,
# and 25.7 with a program a split; for 512 rows 13.1 and 12.3 (one H200, both halves).
# Of q, k and v's, and of gate and up's, each block of an expand then reads a quarter:
# of 2048 rows of 4 adapters they take 47 and 64 us, not 52 and 72; one module's expand
# has so few blocks that it saves nothing.
_MANY_ROWS = 1024
# From so many on it takes all splits of all modules, for x is more than the L2 holds:
# of 8192 rows of 16 adapters q, k, v's shrink takes 35 us so, not 56, gate and up's 26,
# not 40; of one module down's takes 52, not 57, and each expand 8 us less. Of 2048 rows
# down's takes 34 us so, not 15.
JOINT_ROWS = 8192
# And from so many on windows of tiles, of which there are as many as multiprocessors
# take at once; see `_shrink_tile`. Of 8192 rows that gains nothing.
WINDOWED_ROWS = 16384
# Of an expand's programs some take windows from so many on, with a v of so many sums,
# at most; see `expand_config`.
_WINDOWED_EXPAND_ROWS = 512
_MOST_SUMS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkConfig:
    """`splits` cut d_in; each walks its `steps` blocks of `block_d` columns.

    The splits are summed in groups of `group_size`, the groups one after the other:
    whoever adds what keeps to this order (`add_splits`). A program of a tile has
    `num_warps`, one of a window `window_warps`.
    """

    splits: int
    steps: int
    block_d: int
    num_warps: int
    num_stages: int
    window_warps: int = 4

    @property
    def group_size(self) -> int:
        return group_size(self.splits)

    @property
    def num_groups(self) -> int:
        return pl.cdiv(self.splits, self.group_size)

    def part_size(self, num_rows: int, *, whole: bool, for_windows: bool) -> int:
        """Return the splits that one program sums: one, a group, or the `whole`.

        What many rows' tiles give, each block of an expand reads: the fewer the better.
        An expand by windows has no registers for all splits of its rows.
        """
        if num_rows < _MANY_ROWS:
            return self.group_size if for_windows else 1
        return self.splits if whole else self.group_size


def group_size(splits: int) -> int:
    """Return the splits of a group; there are at most four groups.

    Of up to four splits it is 1: who is given sums of groups adds them as they are.
    """
    return pl.cdiv(splits, 4)


def add_splits(parts: Sequence[Array]) -> Array:
    """Add what splits gave, or groups of them, in the one order that there is.

    The splits of each group one by one, then the groups. A reduction over an axis has
    an order of the compiler's choosing; on one H200 it was 0.3 us of an expand's 3.5
    faster.
    """
    size = group_size(len(parts))
    groups = [
        functools.reduce(operator.add, parts[first : first + size])
        for first in range(0, len(parts), size)
    ]
    return functools.reduce(operator.add, groups)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What an expand does where many tiles have an adapter: only the device knows.

    From `least_tiles` on a program takes the columns of `shares` programs, in a loop
    over blocks of `block_n`, some of which it loads ahead; the launch's last programs
    then have nothing to do.
    """

    shares: int
    least_tiles: int
    block_n: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpandConfig:
    """`num_blocks` blocks of `block_n` columns of one module a program.

    At most `pages_at_once` rank pages of its adapter are multiplied at once. A
    `windowed` program takes all tiles of its adapter that begin in one window.

    Raises:
      ValueError: a crowd's blocks do not fill a program's columns, or are a window's.
    """

    block_n: int
    num_warps: int
    num_blocks: int = 1
    pages_at_once: int = 1
    windowed: bool = False
    crowd: Crowd | None = None

    def __post_init__(self):
        crowd = self.crowd
        if crowd and (self.windowed or self.num_columns % crowd.block_n):
            raise ValueError(
                "a crowd's block_n must divide a program's columns, which are no "
                f"window's, got {self}"
            )

    @property
    def num_columns(self) -> int:
        return self.num_blocks * self.block_n

    def may_crowd(self, num_tiles: int) -> bool:
        """Whether a launch of so many tiles may be a crowd's."""
        return self.crowd is not None and num_tiles >= self.crowd.least_tiles

    def programs(self, d_outs: Sequence[int], shares: int = 1) -> tuple[int, ...]:
        """Return each module's programs of a tile, if one has the columns of shares."""
        return tuple(pl.cdiv(width, shares * self.num_columns) for width in d_outs)


def shrink_config(d_in: int, dtype: Any) -> ShrinkConfig:
    """Choose how d_in is cut (never by rows: that fixes the order of a row's sum)."""
    block_d = 128 if jnp.dtype(dtype).itemsize == 2 else 32
    block_d = min(block_d, max(16, pl.next_power_of_2(d_in)))
    blocks = pl.cdiv(d_in, block_d)
    # At 4096 columns 8, 16, 32 splits make the shrink 5.2, 5.6, 5.6 us and the expand,
    # which sums them, 6.4, 7.2, 8.4 us. At 11008, 11 instead of 22 cost a single row's
    # pair 0.8 us of 6.7, and save where each block of an expand reads them all.
    steps = min(blocks, max(4, pl.cdiv(blocks, 11)))
    return ShrinkConfig(
        splits=pl.cdiv(blocks, steps),
        steps=steps,
        block_d=block_d,
        # A page is 16 columns wide, two warps' worth: of four, two would repeat what
        # the others load. 128 rows take 4.3, not 5.5 us; of rank 64 2048 rows 28, not
        # 30.
        num_warps=2,
        num_stages=3,
    )


def expand_config(
    d_outs: tuple[int, ...],
    dtype: Any,
    max_pages: int,
    num_rows: int,
    *,
    num_sums: int = _MOST_SUMS,
) -> ExpandConfig:
    """Choose the columns of a program; each column's sum is its own.

    Few rows wait for their loads, and have up to four pages at once: a row of rank 64
    takes 2.6 us so, and 4.9 with one page after the other; 128 rows of 13 adapters 5.2,
    not 6.0. At rank 16 these 128 rows take 5.1, 4.1, 3.7 us with 512, 256, 128 columns.
    Where a module has many blocks, each of which reads its v, that counts: 64 rows of 8
    adapters to 11008 columns take 10.5 us with 512 columns, shrink and expand, and 11.9
    with 128; of rank 64 the expand alone takes 8.8, 8.6, 9.1 us with 128, 256, 512.

    More rows wait for each other, and what a program holds counts: 512 rows of 8
    adapters take 5.2 us with 256 columns and 5.6 with 128, at rank 64 8.9 and 10.4;
    with 256 and four pages at once 10.1.

    Of many rows a program takes four blocks, each with all pages at once if these are
    up to four: 8192 rows of 16 adapters take 41 us so, not 46, and to 11008 columns
    108, not 118; at rank 64 64, not 85; of rank 16 where others may have 64 44, not 46.
    (Four pages at once in one block: 48.)

    Where adapters may have several pages and a module is wide, a program also takes a
    window's tiles, for each block of B is 64 ranks: 512 rows of rank 64 to 11008
    columns take 21 us so, shrink and expand, not 27, 2048 rows 53, not 62. Of rank 16
    beside them 17.9, not 15.7, and 45, not 43. (Of `num_sums` in v, for more would
    leave the program too few registers.)
    """
    most = most_pages_at_once(dtype)
    pages_fit = max_pages <= most
    pages_at_once = most
    is_wide = max(d_outs) > 8192
    gains = is_wide and max_pages > 1 and num_rows >= _WINDOWED_EXPAND_ROWS
    if gains and pages_fit and num_sums <= _MOST_SUMS:
        return ExpandConfig(
            block_n=128, num_warps=8, num_blocks=4, pages_at_once=most, windowed=True
        )
    if jnp.dtype(dtype).itemsize > 2:
        block_n, num_warps = 64, 2
    elif num_rows >= _WALKED_ROWS:
        block_n, num_warps = 128, 4
        pages_at_once = most if pages_fit else 1
    elif num_rows > _FEW_ROWS:
        block_n, num_warps, pages_at_once = 256, 8, 1
    elif is_wide:
        block_n, num_warps = 512 if max_pages == 1 else 256, 8
    else:
        block_n, num_warps = 128, 4
    block_n = min(block_n, max(16, pl.next_power_of_2(max(d_outs))))
    num_blocks = 1
    if pages_fit:
        num_blocks = walked_blocks(num_rows, pl.cdiv(max(d_outs), block_n))
    return ExpandConfig(
        block_n=block_n,
        num_warps=num_warps,
        num_blocks=num_blocks,
        pages_at_once=pages_at_once,
    )


def gated_config(
    width: int, dtype: Any, max_pages: int | None, num_rows: int
) -> ExpandConfig:
    """Choose the columns of gate, and of up, of a program that ends with SiLU.

    8192 rows of 16 adapters, 2 x 11008 columns, take 203 us with 128 columns and four
    warps a program of one block, 220 with 64 and two, 226 with 256; with tiles of 32
    rows 224 and more.

    Of many rows (where they are not `_gated_product`'s) a program takes four blocks:
    16384 rows of 32 adapters take 382 us so, not 403 (with two 408), 2048 rows of 16
    adapters 53, not 56. Where adapters may have up to four pages it has two of them at
    once, for all would leave room for fewer programs: 8192 rows of rank 64 take 399 us
    so, with one page and block 440; of rank 16 where others may have 64 202 and 212,
    with all four at once 246. Fewer rows have one at a time: of 512 those of rank 16
    take 20.5 us so, with two at once 22.1.

    Args:
      max_pages: of an adapter; None if there are no adapters, for then a program's
        blocks would share nothing.
    """
    block_n = 64 if jnp.dtype(dtype).itemsize > 2 else 128
    block_n = min(block_n, max(16, pl.next_power_of_2(width)))
    num_blocks = 1
    if max_pages is not None and max_pages <= most_pages_at_once(dtype):
        num_blocks = walked_blocks(num_rows, pl.cdiv(width, block_n))
    return ExpandConfig(
        block_n=block_n,
        num_warps=4,
        num_blocks=num_blocks,
        pages_at_once=2 if num_blocks > 1 else 1,
    )


def rotary_pages_at_once(
    max_pages: int, dtype: Any, head_dim: int, num_heads: int
) -> int:
    """Return how many rank pages a program that ends with rotary embedding has at once.

    All, where it takes several heads, as it does of many rows: 8192 rows of rank 64
    take 239 us so, with one page at a time 290; of rank 16 where others may have 64 153
    with either. A program of one head has one at a time: 512 rows of rank 64 take 41 us
    so, and 37 with all at once, but of rank 16 20 and 24.

    Args:
      max_pages: of an adapter.
      dtype: of B.
      head_dim: columns of a head; of wide ones all pages would not fit in registers.
      num_heads: of a program.
    """
    most = most_pages_at_once(dtype)
    return most if num_heads > 1 and head_dim <= 128 and max_pages <= most else 1


def most_pages_at_once(dtype: Any) -> int:
    """Return how many rank pages may be multiplied at once, whatever is asked for.

    float32 has no tensor cores, and a product of more would be unrolled.
    """
    return MAX_AT_ONCE if jnp.dtype(dtype).itemsize == 2 else 1


def walked_blocks(num_rows: int, most: int) -> int:
    """Return how many blocks of columns, or heads, an expand's program may take.

    They share v and the tables, which are then read once for all of them.

    Args:
      most: how many there are.
    """
    return min(4, most) if num_rows >= _WALKED_ROWS else 1
