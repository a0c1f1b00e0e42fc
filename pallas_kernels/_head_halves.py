"""Heads of q, k and v in halves: how kernels rotate them, and where they store them.

Runs inside kernels only. Knows refs; nothing of how heads are computed.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu

from punica_jax.pallas_kernels._page_tiles import load

# Some lanes below half of a head's width, and those as far above it.
Halves = Sequence[Array]


def rotate(halves: Halves, cos: Array, sin: Array) -> Halves:
    """Return heads turned by their rows' angles."""
    low, high = halves
    return low * cos - high * sin, high * cos + low * sin


def keys_or_values(is_v: Array, halves: Halves, rotated: Halves) -> Halves:
    """Return what the cache takes: values are not rotated."""
    pairs = zip(halves, rotated, strict=True)
    return [jnp.where(is_v, plain, turned) for plain, turned in pairs]


def store_halves(
    ref: Any, at: tuple[Any, ...], lane: Array, halves: Halves, mask: Array | None
) -> None:
    """Store heads at some place of `[..., head_dim]`; `lane` is of the first half."""
    half = ref.shape[-1] // 2
    for start, value in zip((0, half), halves, strict=True):
        target = ref.at[(*at, start + lane)]
        plgpu.store(target, value.astype(ref.dtype), mask=mask)


def kv_places(
    page_ref: Any,  # i32[rows]
    offset_ref: Any,  # i32[rows]
    row: Array,
    live: Array | None,
    num_pages: int,
) -> tuple[Array, Array, Array]:
    """Return rows' KV pages, their places in these, and which have one.

    Those without are apart from each other and from all pages, as dead lanes' rows are.
    """
    page, offset = (load(ref.at[row], live) for ref in (page_ref, offset_ref))
    there = page < num_pages
    if live is not None:
        there &= live
    outside = num_pages + jnp.arange(row.size, dtype=jnp.int32)
    return jnp.where(there, page, outside), offset, there
