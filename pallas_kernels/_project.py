"""A few rows' dense product, and the shrink of the same rows, in one launch.

While a decode step's few rows are multiplied, a GPU does little but read the weight. A
shrink in a launch of its own costs its latency on top of its bytes; here its programs
are the last of the product's grid, and end while the others still read. Knows arrays;
nothing of models.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels import _project_warpgroups
from punica_jax.pallas_kernels._dispatch import shared_bytes
from punica_jax.pallas_kernels._entries import tile_rows
from punica_jax.pallas_kernels._launch import (
    compiled_once,
    given,
    pallas_call,
    split_number,
)
from punica_jax.pallas_kernels._lora_operands import launch_tables
from punica_jax.pallas_kernels._norm import NormedRows, row_scales
from punica_jax.pallas_kernels._page_tiles import (
    AdapterPages,
    dot,
    load,
    mask_of,
)
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._project_config import (
    MAX_ROOMY_ROWS,
    ProjectConfig,
    project_config,
)
from punica_jax.pallas_kernels._segments import Segments
from punica_jax.pallas_kernels._sgmv_config import (
    MAX_AT_ONCE,
    MAX_PROJECT_ROWS,
    ShrinkConfig,
    shrink_config,
)
from punica_jax.pallas_kernels._shrink_tile import shrink_modules

# Gives what rows `i32[n]`, of which some are live, are multiplied by: `f32[n, 1]` or 1.
_Scales = Callable[[Array, Array | None], Array | float]


def are_few(x: Array | NormedRows, weight: Array) -> bool:
    """Tell whether one launch multiplies and shrinks the rows."""
    # Float32 has no tensor cores to fill: XLA's product is the better one.
    narrow = x.dtype == weight.dtype and weight.dtype.itemsize == 2
    return narrow and x.shape[0] <= MAX_PROJECT_ROWS


@compiled_once
def project(
    x: Array | NormedRows,
    weight: Array,
    lora: tuple[LoraPool, Segments] | None = None,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    config: ProjectConfig | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """Launch `x W^T + bias + residual`, rounded once, and with `lora` its shrink.

    Args:
      x: `[rows, d_in]`; every program holds all rows, so they should be few.
      weight: `[d_out, d_in]`.
      lora: adapters, and which rows use them, one a row.
      bias: `[d_out]`.
      residual: `[rows, d_out]`.
      config: how the product is cut into programs.
      interpret: see `resolve`.

    Returns:
      `[rows, d_out]`; and what `expand` takes, `f32[groups, rows, C * max_rank]`: the
      sums of the groups, at most 4, that it would add last, bitwise. Without `lora`
      None.
    """
    assert lora is None or lora[1].num_passes == 1, lora
    options = given(bias=bias, residual=residual)
    if (
        config is None
        and not interpret
        and _project_warpgroups.fits(x, weight, lora, options)
    ):
        return _project_warpgroups.project(x, weight, lora, options)
    eps = 0.0
    if isinstance(x, NormedRows):
        options["squares"], eps, x = x.squares, x.eps, x.x
    (rows, d_in), d_out = x.shape, weight.shape[0]
    config = config or project_config(
        *(d_in, d_out, x.dtype, shared_bytes()),
        tile_rows=max(16, pl.next_power_of_2(rows)),
        shrinks=lora is not None,
    )
    num_blocks = pl.cdiv(d_out, config.block_n)
    shapes = [jax.ShapeDtypeStruct((rows, d_out), x.dtype)]
    shrinks, operands = None, ()
    if lora is not None:
        pool, segments = lora
        shrinks = _Shrinks.of(pool, segments)
        operands = (pool.a, *launch_tables(pool, segments))
        shape = (shrinks.config.num_groups, rows, pool.num_modules * pool.max_rank)
        shapes.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    num_programs = 0 if shrinks is None else shrinks.num_programs
    out = pallas_call(
        functools.partial(
            _project_kernel,
            option_names=tuple(options),
            eps=eps,
            shrinks=shrinks,
            config=config,
        ),
        out_shape=shapes,
        grid=(num_blocks + num_programs,),
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="lora_project",
    )(x, weight, *options.values(), *operands)
    return out[0], None if shrinks is None else out[1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Shrinks:
    """The shrink's programs in a row: groups of splits, of tiles.

    All modules in one: most tiles are idle where rows share adapters, and each idle
    program waits for its turn on a multiprocessor, too. Modules that have each a single
    page share the loads of x; others come one after the other.
    """

    num_tiles: int
    block_rows: int
    config: ShrinkConfig

    @classmethod
    def of(cls, pool: LoraPool, segments: Segments) -> "_Shrinks":
        return cls(
            num_tiles=segments.num_tiles,
            block_rows=segments.block_rows,
            config=shrink_config(pool.d_in, pool.dtype),
        )

    @property
    def num_programs(self) -> int:
        return self.num_tiles * self.config.num_groups

    def place(self, program: Array) -> tuple[Array, Array]:
        """Return a program's tile and group."""
        return split_number(program, self.config.num_groups)


def _project_kernel(
    x_ref,  # [rows, d_in]
    w_ref,  # [d_out, d_in]
    # The options: [d_out], [rows, d_out], f32[parts, rows]; the shrink's operands;
    # y_ref, v_ref.
    *refs,
    option_names: tuple[str, ...],
    eps: float,
    shrinks: _Shrinks | None,
    config: ProjectConfig,
):
    options = dict(zip(option_names, refs, strict=False))
    refs = refs[len(options) :]
    program = pl.program_id(0)

    def scales(row, live):
        if "squares" not in options:
            return 1.0
        return row_scales(options["squares"], row, live, x_ref.shape[1], eps)

    if shrinks is None:
        _product(x_ref, w_ref, options, refs[0], program, scales, config)
        return
    *operands, y_ref, v_ref = refs
    num_blocks = pl.cdiv(w_ref.shape[0], config.block_n)

    @pl.when(program < num_blocks)
    def _():
        _product(x_ref, w_ref, options, y_ref, program, scales, config)

    @pl.when(program >= num_blocks)
    def _():
        _shrink_group(x_ref, operands, v_ref, program - num_blocks, scales, shrinks)


def _product(
    x_ref,
    w_ref,
    options: dict[str, Any],
    y_ref,
    block,
    scales: _Scales,
    config: ProjectConfig,
) -> None:
    """Write one block of columns of the dense product."""
    num_rows, d_out = x_ref.shape[0], w_ref.shape[0]
    row = jnp.arange(max(16, pl.next_power_of_2(num_rows)), dtype=jnp.int32)
    column = block * config.block_n + jnp.arange(config.block_n, dtype=jnp.int32)
    live = None if row.size == num_rows else row < num_rows
    inside = None if d_out % config.block_n == 0 else column < d_out
    at = (row[:, None], column[None, :])
    mask = mask_of(
        (row.size, column.size),
        None if live is None else live[:, None],
        None if inside is None else inside[None, :],
    )
    # Loaded before the loop: after it, nothing would hide how long that takes.
    places = {"bias": (column, inside), "residual": (at, mask)}
    loaded = {
        name: load(options[name].at[place], mask)
        for name, (place, mask) in places.items()
        if name in options
    }
    scale = scales(row, live)
    acc = product(x_ref, w_ref, (row, live), column, inside, config)
    acc *= scale
    if "bias" in loaded:
        acc += loaded["bias"].astype(jnp.float32)[None, :]
    if "residual" in loaded:
        acc += loaded["residual"].astype(jnp.float32)
    plgpu.store(y_ref.at[at], acc.astype(y_ref.dtype), mask=mask)


def product(
    x_ref,
    w_ref,
    rows: tuple[Array, Array | None],
    column: Array,
    inside: Array | None,
    config: ProjectConfig,
) -> Array:
    """Return `f32[n, m]`, some columns of some rows' dense product.

    Args:
      x_ref, w_ref: what is multiplied.
      rows: `i32[n]`, and `bool[n]`: which are live; None if all are.
      column: `i32[m]`, rows of the weight.
      inside: `bool[m]`, which are there; None if all are.
      config: of the blocks.
    """
    (row, live), d_in = rows, x_ref.shape[1]
    live = None if live is None else live[:, None]
    inside = None if inside is None else inside[:, None]
    whole = d_in % config.block_k == 0

    def add_block(step, acc):
        k = step * config.block_k + jnp.arange(config.block_k, dtype=jnp.int32)[None, :]
        there = None if whole else k < d_in
        x = load(x_ref.at[row[:, None], k], mask_of((row.size, k.size), live, there))
        mask = mask_of((column.size, k.size), inside, there)
        return acc + dot(x, load(w_ref.at[column[:, None], k], mask).T)

    acc = jnp.zeros((row.size, column.size), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(d_in, config.block_k), add_block, acc)


def _shrink_group(
    x_ref, operands, v_ref, program, scales: _Scales, shrinks: _Shrinks
) -> None:
    """Write a tile's sums of all modules over a group of splits."""
    a_ref, page_table_ref, num_pages_ref, layer_ref, rows_ref, *tiles = operands
    tile_slot_ref, tile_first_ref, tile_end_ref = tiles
    config, block_rows = shrinks.config, shrinks.block_rows
    tile, group = shrinks.place(program)
    num_modules = num_pages_ref.shape[1]
    max_rank = page_table_ref.shape[1] * RANK_PAGE
    slot = tile_slot_ref[0, tile]
    tables = page_table_ref, num_pages_ref, layer_ref

    def pages_of(module):
        # Of 64 rows four at once would hold so much that not all programs find room,
        # 8 us of a layer of 8 adapters.
        is_roomy = x_ref.shape[0] <= MAX_ROOMY_ROWS
        most = MAX_AT_ONCE if is_roomy else MAX_AT_ONCE // 2
        return AdapterPages.of(tables, a_ref, slot, module, most)

    @pl.when(slot >= 0)
    def _():
        entry, live, row = tile_rows(
            rows_ref, tile_first_ref, tile_end_ref, 0, tile, block_rows
        )
        scale = scales(row, live)

        def store(module, lanes, total):
            column = lanes.columns(module * max_rank, v_ref.shape[2])[None, :]
            mask = mask_of(total.shape, live[:, None], lanes.used_columns)
            total *= scale
            plgpu.store(v_ref.at[group, entry[:, None], column], total, mask=mask)

        shrink_modules(
            x_ref,
            a_ref,
            (row, live),
            range(num_modules),
            pages_of,
            store,
            config,
            part=group,
            part_size=config.group_size,
            # Of a single page two blocks a turn, so that more of it is on its way; of
            # several modules that much is on its way with one.
            at_once=2 if config.steps % 2 == 0 else 1,
        )
