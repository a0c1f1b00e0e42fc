"""How a few rows' shrink is cut into pieces for warp groups.

Knows shapes, and what memory a piece takes; nothing of how it is multiplied.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import ShrinkConfig, shrink_config
from punica_jax.pallas_kernels._warpgroups import (
    GROUP_ROWS,
    RowRing,
    barriers,
    tiled_memory,
)

# Of a piece, by its number of modules: a thread has registers for the sums of 96 ranks.
# With one page of q, k and v 32 rows of four pages each take 37.8 us, not 31.2 (one
# H200).
_MOST_PAGES = {1: 4, 2: 2, 3: 2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PieceForm:
    """How pieces of so many pages, at most, are multiplied; static.

    Attributes:
      pages: of one adapter.
      num_modules: C, which share a page.
      rows: the blocks of the rows.
      stages: blocks that a program holds.
    """

    pages: int
    num_modules: int
    rows: RowRing
    stages: int

    @property
    def page_ranks(self) -> int:
        """Ranks of a page, of all modules."""
        return self.num_modules * RANK_PAGE

    @property
    def ranks(self) -> int:
        return self.pages * self.page_ranks

    def memory(self, dtype: Any) -> "FormMemory":
        a = tiled_memory(self.stages, self.ranks, self.rows.block_k, dtype=dtype)
        blocks = self.rows.memory(self.stages, dtype), a
        return FormMemory(
            *(blocks, plgpu.SMEM((GROUP_ROWS, self.ranks), jnp.float32)),
            loaded=barriers(self.stages, 1 + self.pages),
        )

    def num_bytes(self, itemsize: int) -> int:
        """Return how much that is, of blocks, or of v, which takes their place."""
        a_bytes = self.stages * self.ranks * self.rows.block_k * itemsize
        blocks = self.rows.num_bytes(self.stages, itemsize) + a_bytes
        return max(blocks, GROUP_ROWS * self.ranks * 4)


class FormMemory(NamedTuple):
    blocks: Any  # a ring of rows, and [stages, ranks, k]
    v: Any  # f32[64, ranks]
    loaded: Any  # [stages]


class PieceMemory(NamedTuple):
    """What a program's pieces take of its memory."""

    # Of each form its blocks and its v, one at a time.
    shared: Any
    loaded: Any  # by form, [stages]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkCut:
    """How a launch's shrink is cut into pieces; static.

    A group of splits of some pages of one adapter each. Those of a single page have
    blocks of their own: as many and as wide as if no adapter had more. Else they would
    take from the product's blocks, 1 to 2 us of each launch (32 rows, one H200).

    A page is one copy, of all its modules: each copy costs a block 0.1 us, more than
    the ranks do of modules that an adapter has nothing for.

    Attributes:
      num_tiles: of the segments.
      block_rows: of a tile.
      max_pages: of an adapter.
      config: of the splits.
      forms: of a single page; of more, where an adapter may have them.
    """

    num_tiles: int
    block_rows: int
    max_pages: int
    config: ShrinkConfig
    forms: tuple[PieceForm, ...]

    @classmethod
    def of(cls, pool: LoraPool, segments: Segments) -> "ShrinkCut":
        """Cut so that a thread's registers hold the sums of a piece."""
        max_pages, rows = pool.page_table.shape[1], segments.num_rows
        pages = min(max_pages, _MOST_PAGES.get(pool.num_modules, 1))

        def form(count: int) -> PieceForm:
            block_k, stages = _blocks(count)
            return PieceForm(
                pages=count,
                num_modules=pool.num_modules,
                rows=RowRing(rows=rows, block_k=block_k),
                stages=stages,
            )

        return cls(
            num_tiles=segments.num_tiles,
            block_rows=segments.block_rows,
            max_pages=max_pages,
            config=shrink_config(pool.d_in, pool.dtype),
            forms=tuple(form(count) for count in dict.fromkeys((1, pages))),
        )

    @property
    def fits(self) -> bool:
        """Whether there are so many modules, and splits of whole blocks."""
        block_d = self.config.block_d
        is_whole = all(block_d % form.rows.block_k == 0 for form in self.forms)
        return self.num_modules in _MOST_PAGES and is_whole

    @property
    def num_modules(self) -> int:
        return self.forms[0].num_modules

    @property
    def page_ranks(self) -> int:
        return self.forms[0].page_ranks

    @property
    def pages(self) -> int:
        """Pages of a piece, at most."""
        return self.forms[-1].pages

    @property
    def total(self) -> int:
        return self.num_tiles * self.num_chunks * self.config.num_groups

    @property
    def num_chunks(self) -> int:
        """Pieces of an adapter's pages, of each group of splits."""
        return pl.cdiv(self.max_pages, self.pages)

    def memory(self, dtype: Any) -> PieceMemory:
        """Return what a program's pieces take."""
        own = [form.memory(dtype) for form in self.forms]
        lifetimes = [lifetime for form in own for lifetime in (form.blocks, form.v)]
        return PieceMemory(
            shared=plgpu.RefUnion(*lifetimes), loaded=[form.loaded for form in own]
        )

    def num_bytes(self, itemsize: int) -> int:
        """Return how much that is."""
        return max(form.num_bytes(itemsize) for form in self.forms)


def _blocks(pages: int) -> tuple[int, int]:
    """Return the columns of a block of such pieces, and how many a program holds."""
    # Of a single page they were two or three of 128: a step of 32 rows of Llama-2-7B
    # takes 0.2 % less of one adapter so, 0.6 of 32, of Llama-3.1-8B 0.3 of 8 (one
    # H100). Of many pages half blocks are too many copies.
    if pages == 1:
        return 64, 4
    return (64, 3) if pages == 2 else (128, 2)
