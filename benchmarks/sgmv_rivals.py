"""What else JAX offers for `y += x A B` with an adapter a row.

Knows dense stacks of adapters; nothing of pools, segments or timing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.device_time import Carries
from benchmarks.sgmv_cells import Cell, Inputs, adapter_of_row
from punica_jax.bench import after

# What each set's output starts as, each set's own operands, what all sets share.
Problem = tuple[Carries, list[Any], Any]
Launch = Callable[..., Array | tuple[Array, ...]]


def in_turn(launch: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
    """Let each set's call wait for that of the set before it.

    XLA may compute those that do not wait in one launch; of the loop over adapters,
    too, which is none where there is one adapter.

    Args:
      launch: `launch(y, x, *operands)` gives the new y.

    Returns:
      The same for a carry of all sets' `y`, the next one first.
    """

    def next_of(ys, x, *operands, **options):
        return (*ys[1:], launch(ys[0], x + after(ys[-1]), *operands, **options))

    return next_of


def gather_problem(cell: Cell, inputs: Inputs, num_sets: int) -> Problem:
    """Each row's adapter; `punica_jax.bench.gather_lora` does the rest."""
    adapter = adapter_of_row(cell)
    index = [
        jnp.asarray(adapter + n * cell.num_adapters, jnp.int32) for n in range(num_sets)
    ]
    operands = list(zip(_rows(cell, inputs.x, num_sets), index, strict=True))
    return [tuple(_rows(cell, inputs.y, num_sets))], operands, (inputs.a, inputs.b)


def ragged_dot_problem(cell: Cell, inputs: Inputs, num_sets: int) -> Problem:
    """Sort the rows by adapter (not timed), then two `jax.lax.ragged_dot`."""
    adapter = adapter_of_row(cell)
    order = np.argsort(adapter, kind="stable")
    counts = np.bincount(adapter, minlength=cell.num_adapters)
    shared = [jnp.asarray(t, jnp.int32) for t in (order, np.argsort(order), counts)]
    operands = []
    for n, x in enumerate(_rows(cell, inputs.x, num_sets)):
        own = slice(n * cell.num_adapters, (n + 1) * cell.num_adapters)
        a = inputs.a[own].reshape(cell.num_adapters, -1, cell.d_in)
        operands.append((x, a.swapaxes(1, 2), inputs.b[own].swapaxes(1, 2)))
    return [tuple(_rows(cell, inputs.y, num_sets))], operands, shared


def launch_ragged_dot(y, x, a, b, order, inverse, sizes, *, d_outs: tuple[int, ...]):
    ragged = functools.partial(jax.lax.ragged_dot, preferred_element_type=jnp.float32)
    v = ragged(x[order], a, sizes).astype(x.dtype)
    rank, start, columns = b.shape[1], 0, []
    for c, width in enumerate(d_outs):
        v_c = v[:, c * rank : (c + 1) * rank]
        columns.append(ragged(v_c, b[:, :, start : start + width], sizes))
        start += width
    delta = jnp.concatenate(columns, axis=1)[inverse]
    return (y.astype(jnp.float32) + delta).astype(y.dtype)


def loop_problem(cell: Cell, inputs: Inputs, num_sets: int) -> Problem:
    """Each row's adapter among its set's own; see `launch_loop`."""
    operands = []
    for n, x in enumerate(_rows(cell, inputs.x, num_sets)):
        own = slice(n * cell.num_adapters, (n + 1) * cell.num_adapters)
        operands.append((x, inputs.a[own], inputs.b[own]))
    index = jnp.asarray(adapter_of_row(cell), jnp.int32)
    return [tuple(_rows(cell, inputs.y, num_sets))], operands, (index,)


def launch_loop(y, x, a, b, index, *, d_outs: tuple[int, ...]):
    """Multiply all rows by each adapter in turn and keep those that use it.

    Which rows an adapter has is data, so a compiled loop cannot cut them out.
    """
    dot = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)

    def add_one(k, y):
        start, columns = 0, []
        for c, width in enumerate(d_outs):
            v = dot(x, a[k, c].T).astype(x.dtype)
            columns.append(dot(v, b[k, start : start + width].T))
            start += width
        mine = (index == k)[:, None]
        return jnp.where(mine, y + jnp.concatenate(columns, axis=1), y)

    return jax.lax.fori_loop(0, a.shape[0], add_one, y.astype(jnp.float32)).astype(
        y.dtype
    )


def _rows(cell: Cell, array: Array, num_sets: int) -> list[Array]:
    return [array[n * cell.rows : (n + 1) * cell.rows] for n in range(num_sets)]
