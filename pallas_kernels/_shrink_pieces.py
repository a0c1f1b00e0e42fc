"""A few rows' shrink by one warp group of each program of their product.

A piece is some pages of one adapter, over one group of splits: the warp group loads
them and multiplies all rows by them, for a product of fewer than 64 would take as long,
and writes those of the adapter. Runs inside kernels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels._launch import PROGRAM, split_number
from punica_jax.pallas_kernels._lora_operands import launch_tables
from punica_jax.pallas_kernels._page_tiles import layer_starts
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import ShrinkConfig
from punica_jax.pallas_kernels._shrink_cut import (
    FormMemory,
    PieceForm,
    PieceMemory,
    ShrinkCut,
)
from punica_jax.pallas_kernels._warpgroups import (
    GROUP_ROWS,
    stage_of,
    store,
    wait_read,
)


class _Piece(NamedTuple):
    """A group of splits of some pages of one adapter; scalars."""

    index: Array  # which of the adapter's pages is the first
    counts: tuple[Array, ...]  # how many pages each module has from there on
    num_pages: Array  # of the piece; 0 if it is idle
    a_rows: tuple[Array, ...]  # where A of each page lies
    group: Array  # which group of splits
    begin: Array  # of the adapter's rows, by entry; any if it is idle
    end: Array


def operands(pool: LoraPool, segments: Segments) -> tuple[Array, ...]:
    """Return what `shrink` takes."""
    return (pool.a.reshape(-1, pool.d_in), *launch_tables(pool, segments))


def shrink(
    x_ref: Any,  # [rows, d_in]
    refs: Sequence[Any],  # of `operands`
    v_ref: Any,  # f32[groups, rows, C * max_rank]
    pieces: ShrinkCut,
    memory: PieceMemory,
    begin_scale: Callable[[], Callable[[Array], Array]],
) -> None:
    """Do a program's pieces, by one warp group.

    Args:
      x_ref, refs, v_ref, pieces, memory: what is read, written, and held.
      begin_scale: waits for what rows are to be multiplied by, and returns what
        multiplies their sums.
    """
    a_ref, *tables = refs
    rows_ref = tables[3]
    program, num_programs = lax.axis_index(PROGRAM), lax.axis_size(PROGRAM)
    num_turns = pl.cdiv(pieces.total, num_programs)
    # All are looked up at once: each would wait for memory, idle ones too. The last
    # programs are the first, for they have no columns of the product.
    turns = [
        _look_up((turn + 1) * num_programs - 1 - program, a_ref, tables, pieces)
        for turn in range(num_turns)
    ]

    scaled = begin_scale()

    def do_piece(_, turns):
        piece, *others = turns
        for number, form in enumerate(pieces.forms):
            blocks, v = memory.shared[2 * number], memory.shared[2 * number + 1]
            own = FormMemory(blocks, v, memory.loaded[number])
            single = form.pages == 1

            @pl.when(piece.num_pages == 1 if single else piece.num_pages > 1)
            def _(form=form, own=own):
                wait_read()  # v of the last piece, whose place is taken
                v = _multiply(piece, x_ref, a_ref, pieces.config, form, own)
                plgpu.commit_smem()  # No warp still reads what v takes the place of.
                store(own.v, scaled(v))
                plgpu.commit_smem()
                _write(piece, own.v, v_ref, rows_ref, pieces, form)

        return [*others, piece]

    lax.fori_loop(0, num_turns, do_piece, turns)
    wait_read()


def _look_up(number: Array, a_ref, tables, pieces: ShrinkCut) -> _Piece:
    page_table_ref, num_pages_ref, layer_ref, rows_ref, *tile_refs = tables
    tile_slot_ref, tile_first_ref, tile_end_ref = tile_refs
    page_group, group = split_number(number, pieces.config.num_groups)
    chunk, tile = split_number(page_group, pieces.num_tiles)
    index = jnp.minimum(chunk, pieces.num_chunks - 1) * pieces.pages
    slot = tile_slot_ref[0, tile]
    before = tile_slot_ref[0, jnp.maximum(tile - 1, 0)]
    leads = (tile == 0) | (before != slot)
    known = jnp.maximum(slot, 0)
    starts = layer_starts((page_table_ref, num_pages_ref, layer_ref), a_ref)
    first_count, first_row = starts
    counts = tuple(
        num_pages_ref[first_count + known, module] - index
        for module in range(pieces.num_modules)
    )
    most = jnp.int32(0)
    for count in counts:
        most = jnp.maximum(most, count)
    a_rows = []
    for page in range(pieces.pages):
        at = jnp.minimum(index + page, pieces.max_pages - 1)
        a_rows.append(first_row + page_table_ref[known, at] * pieces.page_ranks)
    begin = end = tile_first_ref[0, tile]
    for after in range(pl.cdiv(rows_ref.shape[1], pieces.block_rows)):
        other = jnp.minimum(tile + after, pieces.num_tiles - 1)
        end = jnp.where(tile_slot_ref[0, other] == slot, tile_end_ref[0, other], end)
    is_used = (chunk < pieces.num_chunks) & (slot >= 0) & leads
    return _Piece(
        index=index,
        counts=counts,
        num_pages=jnp.where(is_used, jnp.minimum(most, pieces.pages), 0),
        a_rows=tuple(a_rows),
        group=group,
        begin=begin,
        end=end,
    )


def _multiply(
    piece: _Piece,
    x_ref,
    a_ref,
    config: ShrinkConfig,
    form: PieceForm,
    memory: FormMemory,
) -> Array:
    """Return a piece's sums, `f32[64, ranks]`."""
    (x, a), block_k = memory.blocks, form.rows.block_k
    split = config.steps * (config.block_d // block_k)
    first = piece.group * (config.group_size * split)
    size = jnp.minimum(config.group_size * split, x_ref.shape[1] // block_k - first)

    def ask(step):
        """Ask for a block, if there is one."""

        @pl.when(step < size)
        def _():
            stage = stage_of(step, form.stages)
            loaded = memory.loaded.at[stage]
            k = pl.ds((first + step) * block_k, block_k)
            place = form.rows.loaded(x, stage)
            plgpu.copy_gmem_to_smem(x_ref.at[:, k], place, loaded)
            for page, a_row in enumerate(piece.a_rows[: form.pages]):
                own = pl.ds(page * form.page_ranks, form.page_ranks)
                source = a_ref.at[pl.ds(a_row, form.page_ranks), k]
                copy = functools.partial(
                    plgpu.copy_gmem_to_smem, source, a.at[stage, own], loaded
                )
                if form.pages == 1:
                    copy()
                else:  # not by a predicate of copies: in JAX 0.12 those do not arrive
                    is_there = page < piece.num_pages
                    pl.when(is_there)(copy)
                    pl.when(~is_there)(functools.partial(plgpu.barrier_arrive, loaded))

    def add_split(number, total):
        begin = number * split

        def multiply(acc):
            def multiply_block(step, carry):
                stage = stage_of(step, form.stages)
                plgpu.barrier_wait(memory.loaded.at[stage])
                rows = form.rows.multiplied(x, stage)
                plgpu.wgmma(acc, rows, a.at[stage].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                # Its copies wait for all warps first, which may still read the block.
                ask(step + form.stages)
                return carry

            lax.fori_loop(begin, jnp.minimum(begin + split, size), multiply_block, None)
            return acc[...]

        acc = plgpu.WGMMAAccumulatorRef((GROUP_ROWS, form.ranks), jnp.float32)
        return total + pl.run_scoped(multiply, acc)

    for step in range(form.stages):
        ask(jnp.int32(step))
    zeros = jnp.zeros((GROUP_ROWS, form.ranks), jnp.float32)
    zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    # The splits one by one, as `add_splits` has it.
    return lax.fori_loop(0, pl.cdiv(size, split), add_split, zeros)


def _write(
    piece: _Piece, v_shared, v_ref, rows_ref, pieces: ShrinkCut, form: PieceForm
) -> None:
    """Write the adapter's rows, which lie one after the other."""
    max_rank = pieces.max_pages * RANK_PAGE

    @pl.loop(piece.begin, piece.end)
    def _(entry):
        row = rows_ref[0, entry]
        for page in range(form.pages):
            for module, count in enumerate(piece.counts):
                own = page * pieces.page_ranks + module * RANK_PAGE
                column = module * max_rank + (piece.index + page) * RANK_PAGE

                @pl.when(page < count)
                def _(own=own, column=column):
                    plgpu.copy_smem_to_gmem(
                        v_shared.at[row, pl.ds(own, RANK_PAGE)],
                        v_ref.at[piece.group, entry, pl.ds(column, RANK_PAGE)],
                    )
