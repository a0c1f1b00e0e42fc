"""A few rows' linear layer and what follows it in a decoder layer, in one launch.

For batches without adapters: with them, an expand has to wait for all of the shrink.
Two forms: SiLU(gate) * up, and the rotary embedding with the stores into the KV cache.
Knows arrays; nothing of models or sequences.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels import _project_warpgroups
from punica_jax.pallas_kernels._dispatch import shared_bytes
from punica_jax.pallas_kernels._head_halves import (
    keys_or_values,
    kv_places,
    rotate,
    store_halves,
)
from punica_jax.pallas_kernels._launch import (
    compiled_once,
    given,
    pallas_call,
    split_number,
)
from punica_jax.pallas_kernels._norm import NormedRows, row_scales
from punica_jax.pallas_kernels._page_tiles import load, mask_of, silu_product
from punica_jax.pallas_kernels._project import product
from punica_jax.pallas_kernels._project_config import ProjectConfig, project_config


@compiled_once
def gated(
    x: Array | NormedRows,
    weight: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Launch a layer of gate and up, and SiLU(gate) * up; see `lora_gated`."""
    options = given(bias=bias, residual=residual)
    if not interpret and _project_warpgroups.fits(x, weight, None, options, gated=True):
        return _project_warpgroups.gated(x, weight, options)
    form = _Gated(width=weight.shape[0] // 2)
    shape = jax.ShapeDtypeStruct((x.shape[0], form.width), x.dtype)
    [h] = _launch(form, x, weight, options, (), [shape], interpret)
    return h


@compiled_once
def rotary(
    x: Array | NormedRows,
    weight: Array,
    cache: tuple[tuple[Array, Array], Array, Array, Array],
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Launch a layer of q, k and v, rotate and store them; see `lora_rotary`.

    Args:
      x, weight, bias, residual, interpret: see `project`.
      cache: the tables of angles, the pages, and each row's page and place in it.
    """
    tables, kv_pages, page, offset = cache
    _, _, kv_heads, _, head_dim = kv_pages.shape
    heads = weight.shape[0] // head_dim - 2 * kv_heads
    form = _Rotary(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    shapes = [
        jax.ShapeDtypeStruct((x.shape[0], heads, head_dim), x.dtype),
        jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
    ]
    options = given(bias=bias, residual=residual)
    operands = (kv_pages, *tables, page, offset)
    q, kv_pages = _launch(form, x, weight, options, operands, shapes, interpret)
    return q, kv_pages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Some columns of each of a form's two parts, `i32`, and which are there."""

    parts: Sequence[Array]
    inside: Array | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A program's rows: `i32[n]`, and `bool[n]`, which are live; None if all are."""

    row: Array
    live: Array | None

    def mask(self, shape: tuple[int, ...], inside: Array | None) -> Array | None:
        live = None if self.live is None else self.live[:, None]
        return mask_of(shape, live, None if inside is None else inside[None, :])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Gated:
    """The columns `c` of gate and of up."""

    name: ClassVar = "gated"

    width: int

    def part_n(self, block_n: int) -> int:
        return max(16, block_n // 2)

    def num_blocks(self, part_n: int) -> int:
        return pl.cdiv(self.width, part_n)

    def columns(self, block: Array, part_n: int, index: Array) -> _Columns:
        column = block * part_n + index
        inside = None if self.width % part_n == 0 else column < self.width
        return _Columns(parts=[column, self.width + column], inside=inside)

    def finish(self, refs, block, index: Array, rows: _Rows, sums) -> None:
        [h_ref] = refs
        at = self.columns(block, index.size, index)
        gate, up = sums
        h = silu_product(gate, up).astype(h_ref.dtype)
        mask = rows.mask(h.shape, at.inside)
        plgpu.store(h_ref.at[rows.row[:, None], at.parts[0][None, :]], h, mask=mask)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rotary:
    """Lanes `i` and `head_dim / 2 + i` of one head; q's heads, then k's, then v's."""

    name: ClassVar = "rotary"

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def half(self) -> int:
        return self.head_dim // 2

    def part_n(self, block_n: int) -> int:
        return min(max(16, block_n // 2), max(16, pl.next_power_of_2(self.half)))

    def num_blocks(self, part_n: int) -> int:
        return (self.heads + 2 * self.kv_heads) * pl.cdiv(self.half, part_n)

    def columns(self, block: Array, part_n: int, index: Array) -> _Columns:
        head, lane, inside = self._lanes(block, part_n, index)
        first = head * self.head_dim + lane
        return _Columns(parts=[first, first + self.half], inside=inside)

    def finish(self, refs, block, index: Array, rows: _Rows, sums) -> None:
        _, cos_ref, sin_ref, page_ref, offset_ref, q_ref, kv_ref = refs
        num_pages = kv_ref.shape[1]
        head, lane, inside = self._lanes(block, index.size, index)
        mask = rows.mask(sums[0].shape, inside)
        row, lane = rows.row[:, None], lane[None, :]
        cos, sin = (
            load(ref.at[row, lane], mask).astype(jnp.float32)
            for ref in (cos_ref, sin_ref)
        )
        turned = rotate(sums, cos, sin)

        @pl.when(head < self.heads)
        def _():
            store_halves(q_ref, (row, head), lane, turned, mask)

        @pl.when(head >= self.heads)
        def _():
            page, offset, there = kv_places(
                page_ref, offset_ref, rows.row, rows.live, num_pages
            )
            is_v = (head >= self.heads + self.kv_heads).astype(jnp.int32)
            values = keys_or_values(is_v > 0, sums, turned)
            kv_head = head - self.heads - is_v * self.kv_heads
            at = is_v, page[:, None], kv_head, offset[:, None]
            there = mask_of(sums[0].shape, mask, there[:, None])
            store_halves(kv_ref, at, lane, values, there)

    def _lanes(
        self, block, part_n: int, index: Array
    ) -> tuple[Array, Array, Array | None]:
        head, part = split_number(block, pl.cdiv(self.half, part_n))
        lane = part * part_n + index
        inside = None if self.half % part_n == 0 else lane < self.half
        return head, lane, inside


def _launch(
    form: _Gated | _Rotary,
    x: Array | NormedRows,
    weight: Array,
    options: dict[str, Array],
    operands: tuple[Array, ...],
    shapes: list[jax.ShapeDtypeStruct],
    interpret: bool,
) -> Sequence[Array]:
    """Launch a form; of `operands` the first, if any, becomes the last result."""
    eps = 0.0
    if isinstance(x, NormedRows):
        options = options | {"squares": x.squares}
        eps, x = x.eps, x.x
    (num_rows, d_in), d_out = x.shape, weight.shape[0]
    config = project_config(
        *(d_in, d_out, x.dtype, shared_bytes()),
        tile_rows=max(16, pl.next_power_of_2(num_rows)),
    )
    part_n = form.part_n(config.block_n)
    return pallas_call(
        functools.partial(
            _kernel,
            form=form,
            part_n=part_n,
            option_names=tuple(options),
            eps=eps,
            config=config,
        ),
        out_shape=shapes,
        grid=(form.num_blocks(part_n),),
        input_output_aliases={2 + len(options): len(shapes) - 1} if operands else {},
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name=f"lora_project_{form.name}",
    )(x, weight, *options.values(), *operands)


def _kernel(
    x_ref,  # [rows, d_in]
    w_ref,  # [d_out, d_in]
    *refs,  # the options; the form's operands and results
    form: _Gated | _Rotary,
    part_n: int,
    option_names: tuple[str, ...],
    eps: float,
    config: ProjectConfig,
):
    options = dict(zip(option_names, refs, strict=False))
    num_rows, d_in = x_ref.shape
    block = pl.program_id(0)
    row = jnp.arange(max(16, pl.next_power_of_2(num_rows)), dtype=jnp.int32)
    rows = _Rows(row=row, live=None if row.size == num_rows else row < num_rows)
    # The two parts' columns take turns: so one product does both, and a thread that has
    # a column of one has that of the other.
    turn = jnp.arange(2 * part_n, dtype=jnp.int32)
    own, part = split_number(turn, 2)
    columns = form.columns(block, part_n, own)
    is_second = part == 1
    both = jnp.where(is_second, columns.parts[1], columns.parts[0])
    index = jnp.arange(part_n, dtype=jnp.int32)
    held = form.columns(block, part_n, index)
    mask = rows.mask((row.size, part_n), held.inside)
    # Loaded before the loop: after it, nothing would hide how long that takes.
    added = [[] for _ in held.parts]
    for own, column in zip(added, held.parts, strict=True):
        if "bias" in options:
            own.append(load(options["bias"].at[column], held.inside)[None, :])
        if "residual" in options:
            at = row[:, None], column[None, :]
            own.append(load(options["residual"].at[at], mask))
    scale = 1.0
    if "squares" in options:
        scale = row_scales(options["squares"], row, rows.live, d_in, eps)
    acc = product(x_ref, w_ref, (row, rows.live), both, columns.inside, config) * scale
    acc = acc.reshape(row.size, part_n, 2)
    second = jnp.arange(2, dtype=jnp.int32)[None, None, :]
    sums = [jnp.where(second == part, acc, 0.0).sum(axis=2) for part in range(2)]
    for number, own in enumerate(added):
        for array in own:
            sums[number] += array.astype(jnp.float32)
    # Rounded where a batch with adapters is: a row without one is the same there.
    sums = [own.astype(x_ref.dtype).astype(jnp.float32) for own in sums]
    form.finish(refs[len(options) :], block, index, rows, sums)
