"""Device time of `y += x A B`: `python -m benchmarks.sgmv [--quick] [--out FILE]`.

Every launch reads other pages, rows and outputs than those before it, so that caches
are cold; all launches of a step are unrolled in one program and run back to back, gaps
included; a figure is a median (see `device_time`). Results are compared with a float32
oracle before they count.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from rich.console import Console
from rich.table import Table

from benchmarks.device_time import Step, compile_step, measure, num_sets
from benchmarks.sgmv_cells import (
    NUM_SLOTS,
    Cell,
    Inputs,
    input_shapes,
    load_cells,
    make_inputs,
    peers_source,
    relative_error,
    slots_of,
)
from punica_jax.pallas_kernels import (
    LoraPool,
    Segments,
    expand,
    lora,
    segment_metadata,
    shrink,
)

# bfloat16 outputs: rounding alone is 0.3 %.
_MAX_ERROR = 1e-2
# A rival's set is several kernels, and slower: fewer sets outlast the dispatch.
_RIVAL_SETS = 16
_QUICK = (
    "4096->4096 r16 1 distinct",
    "4096->4096 r16 64 distinct",
    "4096->4096 r16 64 identical",
    "4096->4096 r64 64 distinct",
    "11008->4096 r16 64 distinct",
    "4096->4096 r16 512 seg8",
    "4096->4096+4096+4096 r16 64 distinct",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled step and what it runs on besides `inputs`."""

    step: Step
    num_sets: int


def block_rows_of(cell: Cell) -> int:
    return 16 if cell.suite == "decode" or cell.rows <= 64 else 32


def segments_of(cell: Cell) -> Segments:
    slots = jnp.asarray(slots_of(cell))
    return segment_metadata(
        slots, num_slots=NUM_SLOTS, block_rows=block_rows_of(cell)
    )


# Each launch takes its output (donated) first, then a set's own operands, then the
# shared ones.
def launch_pair(y, x, page_table, pool: LoraPool, segments: Segments):
    pool = dataclasses.replace(pool, page_table=page_table)
    return lora(y, x, pool, segments)


def launch_shrink(v, x, page_table, pool: LoraPool, segments: Segments):
    del v
    return shrink(x, dataclasses.replace(pool, page_table=page_table), segments)


def launch_expand(y, page_table, v, pool: LoraPool, segments: Segments):
    pool = dataclasses.replace(pool, page_table=page_table)
    return expand(y, v, pool, segments)


def launch_gather(y, x, index, a, b, d_outs: Sequence[int]):
    v = jnp.einsum("nd,ncrd->ncr", x, a[index], preferred_element_type=jnp.float32)
    b, v, start, columns = b[index], v.astype(x.dtype), 0, []
    for c, width in enumerate(d_outs):
        b_c = b[:, start : start + width]
        columns.append(
            jnp.einsum("nr,nor->no", v[:, c], b_c, preferred_element_type=jnp.float32)
        )
        start += width
    return (y.astype(jnp.float32) + jnp.concatenate(columns, axis=1)).astype(y.dtype)


def launch_ragged_dot(y, x, a, b, order, inverse, sizes, d_outs: Sequence[int]):
    """`a` is [adapters, d_in, C * rank], `b` [adapters, rank, d_out]."""
    f32 = jnp.float32
    v = jax.lax.ragged_dot(x[order], a, sizes, preferred_element_type=f32)
    v, rank, start, columns = v.astype(x.dtype), b.shape[1], 0, []
    for c, width in enumerate(d_outs):
        v_c, b_c = v[:, c * rank : (c + 1) * rank], b[:, :, start : start + width]
        columns.append(jax.lax.ragged_dot(v_c, b_c, sizes, preferred_element_type=f32))
        start += width
    delta = jnp.concatenate(columns, axis=1)[inverse]
    return (y.astype(jnp.float32) + delta).astype(y.dtype)
