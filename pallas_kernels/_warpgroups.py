"""What kernels for warp groups share: windows of rows, and their way back to memory.

Runs inside kernels, but for what lays out their memory. Knows rows; nothing of what is
computed of them.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from punica_jax.pallas_kernels._launch import CLUSTER

GROUPS = 2  # that multiply; one more loads
GROUP_ROWS = 64  # of a warp group's product
WINDOW_ROWS = GROUPS * GROUP_ROWS
# A copy of rows as a product takes them begins at a multiple of this.
ALIGNED_ROWS = 8
STAGES = 2  # of what a program has loaded and asked for, in turn
_LIBRARY: Any = plgpu  # its types are those of one version, or abstract


def tiled_memory(*shape: int, dtype: Any, swizzle: int = 128) -> Any:
    """Return shared memory for what products take, whose tiles are a swizzle wide."""
    transforms = (
        _LIBRARY.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
        _LIBRARY.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def barriers(count: int, arrivals: int = 1, *, cluster: bool = False) -> Any:
    """Return `count` barriers that open after so many arrivals each.

    Those of a cluster open for all of its programs, after so many of each.
    """
    if cluster:
        return plgpu.ClusterBarrier(
            collective_axes=(CLUSTER,), num_barriers=count, num_arrivals=arrivals
        )
    return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)


def stage_of(step: Array, stages: int = STAGES) -> Array:
    """Return where what is loaded in a step lies."""
    return lax.rem(step, jnp.int32(stages))


def _rows_of_group(window: Any, group: Array) -> tuple[Array, Array, Array]:
    """Return a group's first row, and which of its 64 from there on are the window's.

    Args:
      window: has `first`, `begin` and `end`.
    """
    first = group * GROUP_ROWS
    begin, end = (
        jnp.clip(row - first, 0, GROUP_ROWS) for row in (window.begin, window.end)
    )
    return window.first + first, begin, end


def store_rows(
    window: Any,
    group: Array,
    value: Array,  # [64, columns]
    at: Callable[[Any], Any],
    shared,  # [64, columns] of `tiled_memory`
    rows_shared,  # [64, columns], as they lie in memory
) -> None:
    """Write a group's rows that are the window's: at once if all are.

    Args:
      at: gives a row's ref, or that of a slice of rows.
    """
    first, begin, end = _rows_of_group(window, group)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(end - begin == GROUP_ROWS)
    def _():
        shared[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared, at(pl.ds(first, GROUP_ROWS)))

    @pl.when((begin < end) & (end - begin < GROUP_ROWS))
    def _():
        # Eight rows at a time meet in a bank, which JAX 0.12 wants to be told is known.
        if hasattr(_LIBRARY, "store"):
            _LIBRARY.store(rows_shared, value, optimized=False)
        else:
            rows_shared[...] = value
        plgpu.commit_smem()

        @pl.loop(begin, end)
        def _(row):
            plgpu.copy_smem_to_gmem(rows_shared.at[row], at(first + row))


def load(ref, *, optimized: bool = True) -> Array:
    """Load what a product takes, or adds to; at any place if not `optimized`."""
    layout = plgpu.Layout.WGMMA
    return _LIBRARY.load(ref, layout=layout, optimized=optimized)


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """Return the places along an axis of a product."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
