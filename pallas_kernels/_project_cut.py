"""How a few rows' product and shrink are cut into programs for warp groups.

Knows shapes, and what memory a program has; nothing of what its groups do.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels._dispatch import multiprocessors
from punica_jax.pallas_kernels._norm import NormedRows
from punica_jax.pallas_kernels._pool import LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._shrink_cut import ShrinkCut
from punica_jax.pallas_kernels._warpgroups import (
    GROUP_ROWS,
    RowRing,
    barriers,
    tiled_memory,
)

# Wider blocks of the narrow parts' weight take 16.1 us instead of 17.4, of 32 rows from
# 4096 to 6144 columns (one H200).
_BLOCK_K, _DEEP_BLOCK_K = 128, 256
_NARROW = 64
_MAX_COLUMNS = 256  # of a program
_MAX_PART = 128  # of them in one block of the weight
_MIN_STAGES = 3  # one that is multiplied, one that is left next, one on its way
_MAX_STAGES = 16
# Multiprocessors without columns: those of one adapter's shrink.
_FREE = 4
_SHARED_BYTES = 225 * 1024  # of 227; barriers, and what aligns, take some
_COPIED = 256  # values along an axis, at most, that one copy takes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProjectCut:
    """How the columns are cut, and what a program holds at a time; static.

    Attributes:
      width: columns of what is written.
      part_n: columns of a block of the weight.
      num_parts: blocks side by side.
      gated: whether the two parts are gate's and up's columns.
      rows: blocks of the rows.
      num_stages: blocks of the weight.
      num_squares: values that rows are divided by.
      pieces: the shrink's; None without adapters.
    """

    width: int
    part_n: int
    num_parts: int
    gated: bool
    rows: RowRing
    num_stages: int
    num_squares: int
    pieces: ShrinkCut | None

    @classmethod
    def of(
        cls,
        x: Array | NormedRows,
        weight: Array,
        lora: tuple[LoraPool, Segments] | None,
        *,
        gated: bool,
    ) -> "ProjectCut":
        """Cut so that each multiprocessor has columns, but for a few with adapters."""
        (d_out, d_in), size = weight.shape, weight.dtype.itemsize
        share = pl.cdiv(d_out, multiprocessors() - (0 if lora is None else _FREE))
        num_parts = 2 if gated else pl.cdiv(share, _MAX_PART)
        part_n = _up(pl.cdiv(share, num_parts), 8)
        num_squares = x.squares.size if isinstance(x, NormedRows) else 0
        held = (num_squares + GROUP_ROWS) * 4 + GROUP_ROWS * num_parts * part_n * size
        pieces = None
        if lora is not None:
            pieces = ShrinkCut.of(*lora)
            held += pieces.num_bytes(size)
        left = _SHARED_BYTES - held
        # Narrow parts leave room for more of the weight on its way.
        is_deep = part_n <= _NARROW and d_in % _DEEP_BLOCK_K == 0
        for block_k in (_DEEP_BLOCK_K, _BLOCK_K) if is_deep else (_BLOCK_K,):
            rows = RowRing(rows=x.shape[0], block_k=block_k)
            num_stages = _most_stages(num_parts, part_n * size, left, size, rows)
            if num_stages >= _MIN_STAGES:
                break
        return cls(
            width=d_out // 2 if gated else d_out,
            part_n=part_n,
            num_parts=num_parts,
            gated=gated,
            rows=rows,
            num_stages=num_stages,
            num_squares=num_squares,
            pieces=pieces,
        )

    @property
    def fits(self) -> bool:
        """Whether a program's memory is enough, and copies take all that there is."""
        if self.num_stages < _MIN_STAGES or self.num_parts * self.part_n > _MAX_COLUMNS:
            return False
        if self.pieces is not None and not self.pieces.fits:
            return False
        # What a copy brings is a multiple of 128 bytes.
        return self.num_squares % 32 == 0

    @property
    def num_row_stages(self) -> int:
        return _row_stages(self.num_stages, self.num_parts)

    @property
    def num_tiles(self) -> int:
        """How many programs have columns."""
        return pl.cdiv(self.width, self._columns)

    @property
    def _columns(self) -> int:
        return self.part_n if self.gated else self.num_parts * self.part_n

    def part(self, program: Array, number: int) -> Any:
        """Return the columns of one of a program's parts.

        The last program begins so that all its columns are there: some are computed
        twice, with equal bits.
        """
        first = jnp.minimum(program * self._columns, self.width - self._columns)
        apart = self.width if self.gated else self.part_n
        return pl.ds(first + number * apart, self.part_n)

    def memory(self, dtype: Any) -> "ProductMemory":
        """Return what a program takes for the product."""
        stages, row_stages = self.num_stages, self.num_row_stages
        return ProductMemory(
            x=self.rows.memory(row_stages, dtype),
            w=tiled_memory(stages, self.part_n, self.rows.block_k, dtype=dtype),
            y=plgpu.SMEM((self.num_parts, GROUP_ROWS, self.part_n), dtype),
            squares=plgpu.SMEM((self.num_squares + GROUP_ROWS,), jnp.float32),
            x_loaded=barriers(row_stages),
            x_used=barriers(row_stages),
            w_loaded=barriers(stages),
            w_used=barriers(stages),
            y_loaded=barriers(1, self.num_parts),
            squares_loaded=barriers(1, max(1, len(copies(self.num_squares)))),
        )


class ProductMemory(NamedTuple):
    """A program's memory for the product, and the barriers of what is loaded to it."""

    x: Any  # a ring of rows
    w: Any  # [stages, part_n, k]
    y: Any  # [parts, 64, part_n]; the residual until then
    squares: Any  # f32[parts * rows, and 64 more that are read past them]
    x_loaded: Any  # [row stages]
    x_used: Any
    w_loaded: Any  # [stages]
    w_used: Any
    y_loaded: Any  # [1]
    squares_loaded: Any  # [1]


def copies(size: int) -> list[Any]:
    """Return slices of what one copy takes each."""
    return [pl.ds(i, min(_COPIED, size - i)) for i in range(0, size, _COPIED)]


def _most_stages(
    num_parts: int, column_bytes: int, left: int, size: int, rows: RowRing
) -> int:
    """Return how many blocks of the weight fit, with rows for them."""

    def fit(count: int) -> bool:
        row_bytes = rows.num_bytes(_row_stages(count, num_parts), size)
        return count * column_bytes * rows.block_k + row_bytes <= left

    return max((n for n in range(1, _MAX_STAGES + 1) if fit(n)), default=0)


def _row_stages(num_stages: int, num_parts: int) -> int:
    # One more than there are blocks of the weight for: none waits for rows.
    return pl.cdiv(num_stages, num_parts) + 1


def _up(number: int, size: int) -> int:
    return pl.cdiv(number, size) * size
