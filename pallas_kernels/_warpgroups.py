"""What kernels for warp groups share: how their memory lies, and what waits for whom.

Runs inside kernels, but for what lays out their memory. Knows nothing of what is
computed.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowRing:
    """Blocks of up to 64 rows, of which a product takes 64 in any case.

    What lies past them is of other blocks, or of none: it gives results that nobody
    reads, while a block of its own for each would take twice the memory.

    Attributes:
      rows: of a block, a multiple of 8.
      block_k: its columns.
    """

    rows: int
    block_k: int

    def memory(self, stages: int, dtype: Any) -> Any:
        return tiled_memory(self._size(stages), self.block_k, dtype=dtype)

    def num_bytes(self, stages: int, itemsize: int) -> int:
        return self._size(stages) * self.block_k * itemsize

    def loaded(self, ref: Any, stage: Array) -> Any:
        """Return where a block is loaded to."""
        return ref.at[pl.ds(stage * self.rows, self.rows)]

    def multiplied(self, ref: Any, stage: Array) -> Any:
        """Return what a product takes of it."""
        return ref.at[pl.ds(stage * self.rows, GROUP_ROWS)]

    def _size(self, stages: int) -> int:
        return (stages - 1) * self.rows + GROUP_ROWS


def store(ref, value: Array) -> None:
    """Store a product as rows that lie as in memory."""
    # Eight rows at a time meet in a bank, which JAX 0.12 wants to be told is known.
    if hasattr(_LIBRARY, "store"):
        _LIBRARY.store(ref, value, optimized=False)
    else:
        ref[...] = value


def load(ref, *, optimized: bool = True) -> Array:
    """Load what a product takes, or adds to; at any place if not `optimized`."""
    layout = plgpu.Layout.WGMMA
    return _LIBRARY.load(ref, layout=layout, optimized=optimized)


def wait_read() -> None:
    """Wait until this group's copies to global memory have read shared memory.

    That may then change, or the program end. What they write only a later launch may
    read: it waits for all of this one.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """Return the places along an axis of a product."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
