"""Many rows' gate and up on Hopper: product, adapters' part and SiLU in one launch.

The product's sums are in registers when what follows needs them; XLA's product writes
them to memory, from where an expand takes them again. One warp group asks for rows and
weights ahead of two that multiply. The bits are those of an expand of the same product.
Knows arrays; nothing of models.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels._dispatch import has_warpgroups, multiprocessors
from punica_jax.pallas_kernels._launch import (
    CLUSTER,
    GROUP,
    PROGRAM,
    place_of_program,
    warpgroup_call,
)
from punica_jax.pallas_kernels._norm import NormedRows
from punica_jax.pallas_kernels._page_tiles import silu_product
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._shrink import shrink
from punica_jax.pallas_kernels._warpgroups import (
    GROUP_ROWS,
    GROUPS,
    WINDOW_ROWS,
    barriers,
    stage_of,
    tiled_memory,
    wait_read,
)
from punica_jax.pallas_kernels._window_adapters import (
    BLOCK_N,
    HALF_N,
    PAGE_STAGES,
    WindowAdapters,
    adapter_operands,
)

# Of fewer rows a program has few turns, and those with the rows that decode, each of an
# adapter of its own, end last: 2560 with 24 such rows take 835 us, by XLA's product and
# the expand 729; 4096 1132 and 1194 (7B, one H100). From 5632 to 18944 columns the two
# forms are then within 3 % at 4096.
_MIN_ROWS = 4096
_BLOCK_K = 64
# Programs on neighbouring multiprocessors, which share what they load of the weight.
_CLUSTER_SIZE = 2
# Rows that all blocks of columns take before the next ones: what programs read at a
# time then fits into the L2.
_PART_ROWS = 2048
_STAGES = 4  # of rows and weights


def fits(
    x: Array | NormedRows,
    weight: Array,
    lora: tuple[LoraPool, Segments] | None = None,
) -> bool:
    """Whether this form runs; a function of static things.

    It is the faster one where few adapters share 128 rows: 16384 rows of 32, all
    shuffled, take 6.5 ms, and 4.4 in two launches (7B, one H100).
    """
    (rows, d_in), width = x.shape, weight.shape[0] // 2
    return (
        has_warpgroups()
        and rows >= _MIN_ROWS
        and rows % (WINDOW_ROWS * _CLUSTER_SIZE) == 0
        and width % BLOCK_N == 0
        and d_in % _BLOCK_K == 0
        and x.dtype == weight.dtype
        and x.dtype.itemsize == 2
        and (lora is None or lora[0].dtype == x.dtype)
        and (lora is None or lora[1].num_passes == 1)
    )


# A function of its own is traced and lowered once for all layers.
@jax.jit
def gated(
    x: Array, weight: Array, lora: tuple[LoraPool, Segments] | None = None
) -> Array:
    """Launch a layer of gate and up, and SiLU(gate) * up, if it `fits`.

    Args:
      x: `[rows, d_in]`.
      weight: `[2 * width, d_in]`.
      lora: adapters, and which rows use them, one a row.

    Returns:
      `[rows, width]`: the product is rounded, and so is what it ends with.
    """
    operands = ()
    if lora is not None:
        operands = adapter_operands(shrink(x, *lora), *lora)
    return _launch(x, weight, operands)


def _launch(x: Array, weight: Array, operands: tuple[Array, ...]) -> Array:
    rows, width = x.shape[0], weight.shape[0] // 2
    shared = functools.partial(tiled_memory, dtype=x.dtype)
    return warpgroup_call(
        _gated_kernel,
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        scratch_types=[
            shared(_STAGES, WINDOW_ROWS, _BLOCK_K),  # x
            shared(_STAGES, 2, BLOCK_N, _BLOCK_K),  # weight
            shared(PAGE_STAGES, RANK_PAGE, BLOCK_N, swizzle=32),  # b
            shared(GROUPS, GROUP_ROWS, HALF_N),  # h
            (barriers(_STAGES, 3), barriers(_STAGES, GROUPS, cluster=True)),
            (barriers(PAGE_STAGES), barriers(PAGE_STAGES, GROUPS)),
        ],
        num_programs=multiprocessors() // _CLUSTER_SIZE,
        num_groups=GROUPS + 1,
        cluster_size=_CLUSTER_SIZE,
        name="lora_gated_product",
    )(x, weight, *operands)


class _Shared(NamedTuple):
    """A program's memory, and the barriers of its blocks of rows and weights."""

    x: Any  # [stages, 128, k]
    w: Any  # [stages, 2, columns, k], of gate and of up
    h: Any  # [groups, 64, columns / 2]
    loaded: Any  # [stages]
    used: Any  # [stages], of the cluster


def _gated_kernel(
    x_ref,  # [rows, d_in]
    w_ref,  # [2 * width, d_in]
    *refs,  # of `adapter_operands`, or none; h_ref [rows, width]; the scratch
):
    refs, (x, w, b, h, blocks, pages) = refs[:-6], refs[-6:]
    *refs, h_ref = refs
    shared = _Shared(x, w, h, *blocks)
    adapters = WindowAdapters(refs, b, *pages) if refs else None
    group = lax.axis_index(GROUP)

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _load_turns(x_ref, w_ref, adapters, shared)

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        _multiply_turns(h_ref, x_ref.shape[1] // _BLOCK_K, adapters, shared)


def _for_turns(rows: int, width: int, work: Callable[..., Any]) -> Any:
    """Fold `work(window, column, steps)` over what a program computes, turn by turn.

    `column` is the first of gate's; `steps` count blocks, and pages of B.
    """
    windows = pl.cdiv(rows, WINDOW_ROWS * _CLUSTER_SIZE)
    num_columns = width // BLOCK_N
    at_once = _PART_ROWS // (WINDOW_ROWS * _CLUSTER_SIZE)
    program, num_programs = lax.axis_index(PROGRAM), lax.axis_size(PROGRAM)

    def turn(i, steps):
        window, column = place_of_program(
            program + i * num_programs, windows, num_columns, at_once
        )
        window = window * _CLUSTER_SIZE + lax.axis_index(CLUSTER)
        return work(window, column * BLOCK_N, steps)

    num_turns = pl.cdiv(windows * num_columns - program, num_programs)
    return lax.fori_loop(0, num_turns, turn, (jnp.int32(0), jnp.int32(0)))


def _load_turns(x_ref, w_ref, adapters: WindowAdapters | None, shared: _Shared) -> None:
    """Ask for all that the program's groups multiply."""
    (num_rows, d_in), width = x_ref.shape, w_ref.shape[0] // 2

    def ask(window, column, steps):
        step, page_step = steps
        rows = pl.ds(window * WINDOW_ROWS, WINDOW_ROWS)
        found = None if adapters is None else adapters.look(window, 0)

        def ask_block(block, step):
            stage = stage_of(step, _STAGES)
            free, full = shared.used.at[stage], shared.loaded.at[stage]
            pl.when(step >= _STAGES)(lambda: plgpu.barrier_wait(free))
            k = pl.ds(block * _BLOCK_K, _BLOCK_K)
            plgpu.copy_gmem_to_smem(x_ref.at[rows, k], shared.x.at[stage], full)
            for part in range(2):
                plgpu.copy_gmem_to_smem(
                    w_ref.at[pl.ds(part * width + column, BLOCK_N), k],
                    shared.w.at[stage, part],
                    full,
                    collective_axes=CLUSTER,
                )
            return step + 1

        step = lax.fori_loop(0, d_in // _BLOCK_K, ask_block, step)
        if adapters is not None:
            page_step = adapters.ask(window, found, column, width, page_step)
        return step, page_step

    step, _ = _for_turns(num_rows, width, ask)
    # Nobody may leave while the other one still tells it what is used.
    left = jnp.minimum(step, _STAGES)

    @pl.loop(0, left)
    def _(i):
        plgpu.barrier_wait(shared.used.at[stage_of(step - left + i, _STAGES)])


def _multiply_turns(
    h_ref, num_blocks: int, adapters: WindowAdapters | None, shared: _Shared
) -> None:
    """Write all of a group's rows of the program's turns."""
    (num_rows, width), group = h_ref.shape, lax.axis_index(GROUP)
    h_shared = shared.h.at[group]

    def work(window, column, steps):
        step, page_step = steps
        rows = pl.ds(window * WINDOW_ROWS + group * GROUP_ROWS, GROUP_ROWS)
        begun = None if adapters is None else adapters.begin(window, rows)
        step, *parts = _product(group, num_blocks, step, shared)
        halves = [
            part[:, first : first + HALF_N].astype(h_ref.dtype).astype(jnp.float32)
            for part in parts
            for first in (0, HALF_N)
        ]
        if adapters is not None:
            page_step, halves = adapters.add(window, rows, begun, page_step, halves)
        for half in range(2):
            gate, up = halves[half], halves[2 + half]
            h = silu_product(gate, up).astype(h_ref.dtype)
            wait_read()
            h_shared[...] = h
            plgpu.commit_smem()
            columns = pl.ds(column + half * HALF_N, HALF_N)
            plgpu.copy_smem_to_gmem(h_shared, h_ref.at[rows, columns])
        return step, page_step

    _for_turns(num_rows, width, work)
    wait_read()


def _product(group, num_blocks: int, step, shared: _Shared) -> Any:
    """Return the step after, and `f32[64, columns]` of gate and of up."""
    own_rows = pl.ds(group * GROUP_ROWS, GROUP_ROWS)

    def multiply(*sums):
        def multiply_block(block, step):
            stage = stage_of(step, _STAGES)
            plgpu.barrier_wait(shared.loaded.at[stage])
            for part, acc in enumerate(sums):
                w = shared.w.at[stage, part].transpose((1, 0))
                plgpu.wgmma(acc, shared.x.at[stage, own_rows], w)
            plgpu.wgmma_wait(len(sums))  # for the block before this one

            @pl.when(block > 0)
            def _():
                plgpu.barrier_arrive(shared.used.at[stage_of(step - 1, _STAGES)])

            return step + 1

        after = lax.fori_loop(0, num_blocks, multiply_block, step)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.used.at[stage_of(after - 1, _STAGES)])
        return after, *(acc[...] for acc in sums)

    acc = plgpu.WGMMAAccumulatorRef((GROUP_ROWS, BLOCK_N), jnp.float32)
    return pl.run_scoped(multiply, acc, acc)
