"""A few rows' dense product and shrink on Hopper, where warp groups share the work.

One group asks for blocks of the weight, as far ahead of one that multiplies as there is
memory; a third does the shrink, for whose pieces the product would else wait. A program
is as many columns as a multiprocessor's share: it reads the rows once for all of them.
Two forms: the product as it is, and without adapters gate and up with SiLU(gate) * up.
The bits are those of `_project` and `_one_launch`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels import _shrink_pieces
from punica_jax.pallas_kernels._dispatch import has_warpgroups, multiprocessors
from punica_jax.pallas_kernels._launch import GROUP, PROGRAM, warpgroup_call
from punica_jax.pallas_kernels._norm import NormedRows, scale_of, sum_of_parts
from punica_jax.pallas_kernels._page_tiles import silu_product
from punica_jax.pallas_kernels._pool import LoraPool
from punica_jax.pallas_kernels._project_cut import ProductMemory, ProjectCut, copies
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._warpgroups import (
    ALIGNED_ROWS,
    GROUP_ROWS,
    load,
    stage_of,
    store,
    wait_read,
)

_LIBRARY: Any = plgpu
# Of fewer rows Triton's form is as fast, or 3 % faster, but for wide weights: 8 rows
# from 4096 to 28672 columns take 67 us by it, and 56 by this one (one H200).
_MIN_ROWS = 16
_WIDE = 24576
# Without adapters, for a step of 64 rows of Llama-3.1-8B takes 1.2 % more by this form,
# of Llama-2-7B as long. Of 8 adapters it takes 3.4 and 1.9 % less (one H100).
_MAX_ROWS_ALONE = 32
_MAX_PAGES = 4  # of an adapter; of more the shrink would end last
# That three groups' threads share, one of each: for the sums of 64 x 256 columns, for
# addresses, and for those of 64 x 96 ranks twice.
_REGISTERS = 504
_MULTIPLIES, _ASKS, _SHRINKS = 208, 40, 152


def fits(
    x: Array | NormedRows,
    weight: Array,
    lora: tuple[LoraPool, Segments] | None,
    options: dict[str, Array],
    *,
    gated: bool = False,
) -> bool:
    """Whether this form runs, and is not the slower one; of static things."""
    rows, (d_out, d_in) = x.shape[0], weight.shape
    if not has_warpgroups() or weight.dtype.itemsize != 2:
        return False
    if rows < _MIN_ROWS and (lora is None or d_out <= _WIDE):
        return False
    if rows > (_MAX_ROWS_ALONE if lora is None else GROUP_ROWS):
        return False
    if rows % ALIGNED_ROWS or d_in % 128 or d_out % 16:
        return False
    if lora is not None and lora[0].page_table.shape[1] > _MAX_PAGES:
        return False
    # What is multiplied and then added to would be rounded once, and by Triton twice.
    if isinstance(x, NormedRows) and options:
        return False
    return ProjectCut.of(x, weight, lora, gated=gated).fits


def project(
    x: Array | NormedRows,
    weight: Array,
    lora: tuple[LoraPool, Segments] | None,
    options: dict[str, Array],
) -> tuple[Array, Array | None]:
    """Launch what `_project.project` does, if it `fits`.

    Args:
      x, weight, lora: see there.
      options: `bias` and `residual`, where there are any.
    """
    out = _launch(x, weight, lora, options, gated=False)
    return out[0], None if lora is None else out[1]


def gated(x: Array | NormedRows, weight: Array, options: dict[str, Array]) -> Array:
    """Launch what `_one_launch.gated` does, if it `fits`; see `project`."""
    return _launch(x, weight, None, options, gated=True)[0]


# A function of its own is traced and lowered once for all layers.
@functools.partial(jax.jit, static_argnames="gated")
def _launch(
    x: Array | NormedRows,
    weight: Array,
    lora: tuple[LoraPool, Segments] | None,
    options: dict[str, Array],
    *,
    gated: bool,
) -> list[Array]:
    cut = ProjectCut.of(x, weight, lora, gated=gated)
    num_rows, eps = x.shape[0], 0.0
    if isinstance(x, NormedRows):
        options = options | {"squares": x.squares.reshape(-1)}
        eps, x = x.eps, x.x
    shapes = [jax.ShapeDtypeStruct((num_rows, cut.width), x.dtype)]
    operands, memory, num_programs = (), None, cut.num_tiles
    if lora is not None and cut.pieces is not None:
        operands = _shrink_pieces.operands(*lora)
        memory = cut.pieces.memory(x.dtype)
        num_groups, max_rank = cut.pieces.config.num_groups, lora[0].max_rank
        shape = (num_groups, num_rows, lora[0].num_modules * max_rank)
        shapes.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        num_programs = max(num_programs, multiprocessors())
    kernel = functools.partial(
        _kernel, option_names=tuple(options), num_outs=len(shapes), eps=eps, cut=cut
    )
    return warpgroup_call(
        kernel,
        out_shape=shapes,
        scratch_types=[cut.memory(x.dtype), memory],
        num_programs=num_programs,
        num_groups=2 if cut.pieces is None else 3,
        name="lora_project_gated" if gated else "lora_project",
    )(x, weight, *options.values(), *operands)


def _kernel(
    x_ref,  # [rows, d_in]
    w_ref,  # [d_out, d_in]
    # The options: [d_out], [rows, d_out], f32[parts * rows]; the shrink's operands; y;
    # v; the memory.
    *refs,
    option_names: tuple[str, ...],
    num_outs: int,
    eps: float,
    cut: ProjectCut,
):
    *refs, shared, piece_memory = refs
    options = dict(zip(option_names, refs, strict=False))
    operands, (y_ref, *v_ref) = refs[len(options) : -num_outs], refs[-num_outs:]
    group, program = lax.axis_index(GROUP), lax.axis_index(PROGRAM)
    num_blocks = x_ref.shape[1] // cut.rows.block_k
    num_blocks = jnp.where(program < cut.num_tiles, num_blocks, 0)

    def begin_scale() -> Callable[[Array], Array]:
        if "squares" not in options:
            return lambda value: value
        scale = _row_scale(shared, cut.num_squares, x_ref.shape, eps)
        return lambda value: value * lax.broadcast_in_dim(scale, value.shape, [0])

    def set_registers(count: int) -> None:
        if cut.pieces is not None:  # two groups begin with enough
            action = "increase" if 3 * count > _REGISTERS else "decrease"
            plgpu.set_max_registers(count, action=action)

    @pl.when(group == 0)
    def _():
        set_registers(_MULTIPLIES)
        scaled = begin_scale()
        _multiply(y_ref, options, scaled, num_blocks, program, cut, shared)

    @pl.when(group == 1)
    def _():
        set_registers(_ASKS)
        _ask(x_ref, w_ref, options, num_blocks, program, cut, shared)

    if cut.pieces is not None:
        pieces = cut.pieces

        @pl.when(group == 2)
        def _():
            set_registers(_SHRINKS)
            _shrink_pieces.shrink(
                x_ref, operands, v_ref[0], pieces, piece_memory, begin_scale
            )


def _ask(
    x_ref, w_ref, options, num_blocks, program, cut: ProjectCut, shared: ProductMemory
) -> None:
    """Ask for all that a program's columns are computed of."""

    def ask_block(block, step):
        k = pl.ds(block * cut.rows.block_k, cut.rows.block_k)
        stage = stage_of(block, cut.num_row_stages)
        free, full = shared.x_used.at[stage], shared.x_loaded.at[stage]
        pl.when(block >= cut.num_row_stages)(lambda: plgpu.barrier_wait(free))
        place = cut.rows.loaded(shared.x, stage)
        plgpu.copy_gmem_to_smem(x_ref.at[:, k], place, full)
        for part in range(cut.num_parts):
            stage = stage_of(step, cut.num_stages)
            free, full = shared.w_used.at[stage], shared.w_loaded.at[stage]
            pl.when(step >= cut.num_stages)(lambda free=free: plgpu.barrier_wait(free))
            columns = w_ref.at[cut.part(program, part), k]
            plgpu.copy_gmem_to_smem(columns, shared.w.at[stage], full)
            step += 1
        return step

    # The rest behind the first block, whose memory is free: each copy takes the group
    # 0.1 us.
    assert cut.num_parts <= cut.num_stages, cut

    @pl.when(num_blocks > 0)
    def _():
        ask_block(jnp.int32(0), jnp.int32(0))
        if "residual" in options:
            residual = options["residual"]
            for part in range(cut.num_parts):
                columns = residual.at[:, cut.part(program, part)]
                place = shared.y.at[part, pl.ds(0, residual.shape[0])]
                plgpu.copy_gmem_to_smem(columns, place, shared.y_loaded.at[0])

    for at in copies(cut.num_squares):
        squares, place = options["squares"].at[at], shared.squares.at[at]
        plgpu.copy_gmem_to_smem(squares, place, shared.squares_loaded.at[0])
    lax.fori_loop(1, num_blocks, ask_block, jnp.int32(cut.num_parts))


def _multiply(
    y_ref, options, scaled, num_blocks, program, cut: ProjectCut, shared: ProductMemory
) -> None:
    """Write a program's columns."""
    acc = plgpu.WGMMAAccumulatorRef((GROUP_ROWS, cut.part_n), jnp.float32)
    product = functools.partial(_product, num_blocks, cut, shared)
    sums = pl.run_scoped(product, *[acc] * cut.num_parts)

    def finish(part: int, y: Array) -> Array:
        y = scaled(y)
        if "bias" in options:
            bias = _LIBRARY.load(
                options["bias"].at[cut.part(program, part)],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            y += lax.broadcast_in_dim(bias.astype(jnp.float32), y.shape, [1])
        if "residual" in options:
            y += load(shared.y.at[part], optimized=False).astype(jnp.float32)
        return y.astype(y_ref.dtype)

    @pl.when(num_blocks > 0)
    def _():
        if "residual" in options:
            plgpu.barrier_wait(shared.y_loaded.at[0])
        parts = [finish(part, y) for part, y in enumerate(sums)]
        if cut.gated:
            # Rounded where a batch with adapters is: a row without one is the same.
            halves = (own.astype(jnp.float32) for own in parts)
            parts = [silu_product(*halves).astype(y_ref.dtype)]
        for part, y in enumerate(parts):
            store(shared.y.at[part], y)
            plgpu.commit_smem()
            live = shared.y.at[part, pl.ds(0, y_ref.shape[0])]
            plgpu.copy_smem_to_gmem(live, y_ref.at[:, cut.part(program, part)])

    wait_read()


def _product(num_blocks, cut: ProjectCut, shared: ProductMemory, *sums) -> list[Array]:
    """Return `f32[64, part_n]` of each part."""

    def multiply(block, step):
        x_stage = stage_of(block, cut.num_row_stages)
        plgpu.barrier_wait(shared.x_loaded.at[x_stage])
        x = cut.rows.multiplied(shared.x, x_stage)
        for part, acc in enumerate(sums):
            stage = stage_of(step, cut.num_stages)
            plgpu.barrier_wait(shared.w_loaded.at[stage])
            plgpu.wgmma(acc, x, shared.w.at[stage].transpose((1, 0)))
            plgpu.wgmma_wait(1)  # for the one before this

            @pl.when(step > 0)
            def _(part=part, step=step):
                used = stage_of(step - 1, cut.num_stages)
                plgpu.barrier_arrive(shared.w_used.at[used])
                if part == 0:
                    used = stage_of(block - 1, cut.num_row_stages)
                    plgpu.barrier_arrive(shared.x_used.at[used])

            step += 1
        return step

    lax.fori_loop(0, num_blocks, multiply, jnp.int32(0))
    plgpu.wgmma_wait(0)
    return [acc[...] for acc in sums]


def _row_scale(
    shared: ProductMemory, num_squares: int, shape: tuple[int, int], eps: float
) -> Array:
    """Return what rows are multiplied by, `f32[64]`; see `_norm.row_scales`."""
    rows, d_in = shape
    plgpu.barrier_wait(shared.squares_loaded.at[0])
    layout = plgpu.Layout.WGMMA.reduce(1)

    def load_part(part):
        at = shared.squares.at[pl.ds(part * rows, GROUP_ROWS)]
        return _LIBRARY.load(at, layout=layout)

    return scale_of(sum_of_parts(load_part, num_squares // rows), d_in, eps)
