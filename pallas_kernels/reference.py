"""The plain `jax.numpy` meaning of every operation, and what runs off NVIDIA GPUs.

Each function has the signature of its kernel. Rows are visited tile by tile, so that an
adapter is gathered once for up to `block_rows` rows and not once a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32

from punica_jax.pallas_kernels._attention_reference import paged_attention
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments, max_tiles

__all__ = [
    "expand",
    "gated",
    "paged_attention",
    "rotary",
    "rotate",
    "segment_metadata",
    "segment_outer",
    "shrink",
    "store_rows",
]


def segment_metadata(slots: Array, *, num_slots: int, block_rows: int) -> Segments:
    """Sort rows by slot and cut the runs into tiles; see `Segments`.

    Args:
      slots: `i32[passes, rows]`; values outside 0 .. num_slots - 1 are idle.
    """
    rows = slots.shape[1]
    # Two at least: XLA's CPU sums a product of one tile in another order (JAX 0.12).
    tiles = max(2, max_tiles(rows, num_slots, block_rows))
    index = jnp.arange(rows, dtype=jnp.int32)

    def one_pass(slots: Array):
        known = (slots >= 0) & (slots < num_slots)
        key = jnp.where(known, slots, num_slots)
        order = jnp.argsort(key, stable=True).astype(jnp.int32)
        key = key[order]
        before = jnp.searchsorted(key, key, side="left").astype(jnp.int32)
        after = jnp.searchsorted(key, key, side="right").astype(jnp.int32)
        starts = (index - before) % block_rows == 0
        at = jnp.where(starts, jnp.cumsum(starts, dtype=jnp.int32) - 1, tiles)
        slot = jnp.where(key < num_slots, key, -1)
        end = jnp.minimum(after, index + block_rows)
        empty = jnp.zeros((tiles,), jnp.int32)
        tables = (
            (empty - 1).at[at].set(slot, mode="drop"),
            empty.at[at].set(index, mode="drop"),
            empty.at[at].set(end, mode="drop"),
        )
        return order, slot, *tables

    order, slot, tile_slot, tile_first, tile_end = jax.vmap(one_pass)(slots)
    return Segments(
        rows=order,
        slots=slot,
        weights=None,
        tile_slot=tile_slot,
        tile_first=tile_first,
        tile_end=tile_end,
        num_slots=num_slots,
        block_rows=block_rows,
    )


def shrink(
    x: Float[Array, "rows d_in"], pool: LoraPool, segments: Segments
) -> Float[Array, "parts entries ranks"]:
    """Compute `v[e, c, r] = sum_k x[rows[e], k] * A[slots[e], c, r, k]`.

    Returns:
      `f32[1, passes * rows, C * max_rank]`; zeros where an adapter has no rank.
    """
    products = []
    for number in range(segments.num_passes):
        tile = _Tiles(pool, segments, number)
        x_tile = jnp.where(tile.live[:, :, None], x[tile.row], jnp.zeros((), x.dtype))

        a = pool.a[tile.page]
        a = jnp.where(tile.used[..., None, None], a, jnp.zeros((), a.dtype))
        v = _einsum("tbd,tpcrd->tbcpr", x_tile, a).reshape(*x_tile.shape[:2], -1)
        out = jnp.zeros((segments.num_rows, v.shape[-1]), jnp.float32)
        products.append(out.at[tile.entry].set(v, mode="drop"))
    return jnp.concatenate(products)[None]


def expand(
    y: Float[Array, "rows d_out"],
    v: Float[Array, "parts entries ranks"],
    pool: LoraPool,
    segments: Segments,
    *,
    scale: Float[Array, "slots d_out"] | None = None,
    bias: Float[Array, "slots d_out"] | None = None,
    residual: Float[Array, "rows d_out"] | None = None,
) -> Float[Array, "rows d_out"]:
    """Compute `y[row] = (y[row] + w * v @ B^T) * scale + bias + residual[row]`.

    `v` is summed over the splits, times the entry's weight, in float32, and rounded to
    the pool's dtype; the rest is float32 until the one rounding at the end.
    """
    v = v.sum(axis=0)
    for number in range(segments.num_passes):
        tile = _Tiles(pool, segments, number)
        entry = jnp.minimum(tile.entry, segments.num_rows - 1)
        v_tile = v[number * segments.num_rows + entry]
        if segments.weights is not None:
            v_tile = v_tile * segments.weights[number][entry][:, :, None]
        pages = (*tile.entry.shape, pool.num_modules, -1, RANK_PAGE)
        used = tile.used.swapaxes(1, 2)[:, None, :, :, None]
        v_tile = jnp.where(used, v_tile.reshape(pages), 0.0).astype(pool.dtype)
        columns = []
        for c, (start, width) in enumerate(
            zip(pool.d_out_offsets, pool.d_outs, strict=True)
        ):
            b = pool.b[tile.page, :, start : start + width]
            b = jnp.where(tile.used[:, :, c, None, None], b, jnp.zeros((), b.dtype))
            columns.append(_einsum("tbpr,tprn->tbn", v_tile[:, :, c], b))
        delta = jnp.concatenate(columns, axis=-1)
        out = y[tile.row].astype(jnp.float32) + delta
        slot = jnp.maximum(tile.slot, 0)[:, None]
        busy = (tile.slot >= 0)[:, None, None]
        if scale is not None:
            out = jnp.where(busy, out * scale[slot].astype(jnp.float32), out)
        if bias is not None:
            out = jnp.where(busy, out + bias[slot].astype(jnp.float32), out)
        if residual is not None and number == segments.num_passes - 1:
            out = out + residual[tile.row].astype(jnp.float32)
        target = jnp.where(tile.live, tile.row, segments.num_rows)
        y = y.at[target].set(out.astype(y.dtype), mode="drop")
    return y


def linear(
    x: Float[Array, "rows d_in"],
    weight: Float[Array, "d_out d_in"],
    bias: Float[Array, "d_out"] | None = None,
    residual: Float[Array, "rows d_out"] | None = None,
) -> Float[Array, "rows d_out"]:
    """Compute `x W^T + bias`, rounded once, and add `residual`.

    Without a bias the product itself is rounded: a float32 one that is rounded later is
    written and read once more, a tenth of a step of 2048 rows on one H200.
    """
    if bias is None:
        y = matmul_rows(x, weight, weight.dtype)
    else:
        y = matmul_rows(x, weight) + bias.astype(jnp.float32)[None, :]
        y = y.astype(weight.dtype)
    return y if residual is None else y + residual


def matmul_rows(
    x: Float[Array, "rows d_in"],
    weight: Float[Array, "d_out d_in"],
    dtype: Any = jnp.float32,
) -> Float[Array, "rows d_out"]:
    """Compute `x W^T`, accumulated in float32 and returned in `dtype`.

    Float32 operands are multiplied as float32 on every device (no TF32).
    """
    exact = jnp.promote_types(x.dtype, weight.dtype) == jnp.float32
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=dtype,
    )


def rms_norm(
    x: Float[Array, "*rows width"], weight: Float[Array, "width"], eps: float
) -> Float[Array, "*rows width"]:
    """Compute `weight * (x / sqrt(mean(x^2) + eps))`, the quotient rounded first."""
    wide = x.astype(jnp.float32)
    variance = jnp.square(wide).mean(axis=-1, keepdims=True)
    normed = (wide * lax.rsqrt(variance + eps)).astype(x.dtype)
    return jnp.expand_dims(weight, range(x.ndim - 1)) * normed


def gated(y: Float[Array, "rows two_width"]) -> Float[Array, "rows width"]:
    """Compute `SiLU(gate) * up` of the halves of `y`; SiLU in float32."""
    gate, up = jnp.split(y, 2, axis=-1)
    return jax.nn.silu(gate.astype(jnp.float32)).astype(up.dtype) * up


def rotary(
    y: Float[Array, "rows d_out"],
    tables: tuple[Float[Array, "rows head_dim"], Float[Array, "rows head_dim"]],
    kv_pages: Float[Array, "2 pages kv_heads page_size head_dim"],
    page: Int32[Array, "rows"],
    offset: Int32[Array, "rows"],
) -> tuple[Float[Array, "rows heads head_dim"], Array]:
    """Rotate q and k, and store k and v in their pages.

    Lanes `(i, i + head_dim / 2)` of a head turn by their row's angle.

    Returns:
      q, rotated, and the pages with each row's k and v at `[:, page, :, offset]`.
    """
    _, _, kv_heads, _, head_dim = kv_pages.shape
    heads = y.shape[1] // head_dim - 2 * kv_heads
    x = y.reshape(y.shape[0], heads + 2 * kv_heads, head_dim)
    q, k, v = jnp.split(x, [heads, heads + kv_heads], axis=1)
    q, k = (rotate(part, tables) for part in (q, k))
    return q, store_rows(kv_pages, k, v, page, offset)


def rotate(
    x: Float[Array, "rows heads head_dim"],
    tables: tuple[Float[Array, "rows rotary_dim"], Float[Array, "rows rotary_dim"]],
) -> Float[Array, "rows heads head_dim"]:
    """Turn each pair of lanes `(i, i + rotary_dim / 2)` by its row's angle.

    Lanes from `rotary_dim` on, where the tables are narrower than a head, stay.
    """
    cos, sin = (table[:, None, :] for table in tables)
    turned, kept = jnp.split(x, [cos.shape[-1]], axis=-1)
    low, high = jnp.split(turned, 2, axis=-1)
    turned = turned * cos + jnp.concatenate([-high, low], axis=-1) * sin
    return jnp.concatenate([turned, kept], axis=-1) if kept.size else turned


def store_rows(
    kv_pages: Float[Array, "2 pages kv_heads page_size head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    page: Int32[Array, "rows"],
    offset: Int32[Array, "rows"],
) -> Float[Array, "2 pages kv_heads page_size head_dim"]:
    """Write rows to `[:, page, :, offset]`, each its own; drop those past the end."""
    rows = jnp.stack([k, v], axis=1).astype(kv_pages.dtype)
    return kv_pages.at[:, page, :, offset].set(rows, mode="drop", unique_indices=True)


def segment_outer(
    v: Float[Array, "entries ranks"],
    x: Float[Array, "rows d"],
    pool: LoraPool,
    segments: Segments,
) -> Float[Array, "pages modules 16 d"]:
    """Compute `out[page of (s, p), c, r] = sum_e v[e, c, 16 p + r] * x[rows[e]]`.

    The sum runs over the entries of slot `s`: the gradient of a shrink with respect to
    A. Pages that no live slot owns are zeros.

    Returns:
      Float32 array like `pool.a` with `d` in place of `d_in`.
    """
    num_pages, modules = pool.a.shape[:2]
    out = jnp.zeros((num_pages + 1, modules, RANK_PAGE, x.shape[1]), jnp.float32)
    for number in range(segments.num_passes):
        tile = _Tiles(pool, segments, number)
        entry = jnp.minimum(tile.entry, segments.num_rows - 1)
        v_tile = v[number * segments.num_rows + entry]
        v_tile = jnp.where(tile.live[:, :, None], v_tile, 0.0).astype(pool.dtype)
        v_tile = v_tile.reshape(*entry.shape, modules, -1, RANK_PAGE)
        x_tile = jnp.where(tile.live[:, :, None], x[tile.row], jnp.zeros((), x.dtype))
        # Swapped first: XLA's CPU takes no bfloat16 product with two split axes.
        product = _einsum("tbpcr,tbd->tpcrd", v_tile.swapaxes(2, 3), x_tile)
        product = jnp.where(tile.used[..., None, None], product, 0.0)
        owned = jnp.where(tile.used.any(axis=-1), tile.page, num_pages)
        out = out.at[owned].add(product)
    return out[:num_pages]


class _Tiles:
    """One pass's tiles, looked up in a pool.

    Attributes:
      live: `bool[tiles, block_rows]`, which lanes have an entry.
      entry: `i32[tiles, block_rows]`, out of range in dead lanes: stores drop them.
      row: `i32[tiles, block_rows]`, the entry's row.
      slot: `i32[tiles]`.
      page: `i32[tiles, max_pages]`, where the adapter's pages are in the arrays.
      used: `bool[tiles, max_pages, C]`, which of them each module has.
    """

    def __init__(self, pool: LoraPool, segments: Segments, number: int):
        lane = jnp.arange(segments.block_rows, dtype=jnp.int32)
        entry = segments.tile_first[number][:, None] + lane[None, :]
        self.live = entry < segments.tile_end[number][:, None]
        # Entries of dead lanes are out of range: stores drop them.
        self.entry = jnp.where(self.live, entry, segments.num_rows)
        rows = segments.rows[number]
        self.row = rows[jnp.minimum(self.entry, segments.num_rows - 1)]
        self.slot = segments.tile_slot[number]
        slot = jnp.maximum(self.slot, 0)
        counts = pool.layer_num_pages[slot]
        counts = jnp.where((self.slot >= 0)[:, None], counts, 0)
        max_pages = pool.page_table.shape[1]
        # All pages at once, not as many as the longest adapter has: loops of dynamic
        # length would double the time that XLA takes to compile a model.
        page = jnp.clip(pool.page_table[slot], 0, pool.pages_per_layer - 1)
        self.page = pool.first_page + page
        p = jnp.arange(max_pages, dtype=jnp.int32)
        self.used = p[None, :, None] < counts[:, None, :]


def _einsum(spec: str, left: Array, right: Array) -> Array:
    """Product of one dtype, summed in float32, without TF32."""
    return jnp.einsum(
        spec,
        left,
        right,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
