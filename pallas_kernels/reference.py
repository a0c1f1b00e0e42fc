"""The plain `jax.numpy` meaning of every operation, and what runs off NVIDIA GPUs.

Each function has the signature of its kernel. Rows are visited tile by tile, so that an
adapter is gathered once for up to `block_rows` rows and not once a row.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from punica_jax.pallas_kernels._attention_reference import paged_attention
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import Segments, max_tiles, tile_numbers

__all__ = ["expand", "paged_attention", "segment_metadata", "segment_outer", "shrink"]

# No TF32 in float32; for narrower types this changes nothing.
_PRECISION = lax.Precision.HIGHEST


def segment_metadata(slots: Array, *, num_slots: int, block_rows: int) -> Segments:
    """Sort rows by slot and cut the runs into tiles; see `Segments`.

    Args:
      slots: `i32[passes, rows]`; values outside 0 .. num_slots - 1 are idle.
    """
    rows = slots.shape[1]
    tiles = max_tiles(rows, num_slots, block_rows)
    index = jnp.arange(rows, dtype=jnp.int32)

    def one_pass(slots: Array):
        known = (slots >= 0) & (slots < num_slots)
        key = jnp.where(known, slots, num_slots)
        order = jnp.argsort(key, stable=True).astype(jnp.int32)
        key = key[order]
        before = jnp.searchsorted(key, key, side="left").astype(jnp.int32)
        after = jnp.searchsorted(key, key, side="right").astype(jnp.int32)
        same_before = index - before
        segments = jnp.cumsum(same_before == 0, dtype=jnp.int32) - 1
        number, _ = tile_numbers(
            before, segments, after - before, same_before, block_rows
        )
        at = jnp.where(same_before % block_rows == 0, number, tiles)
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
) -> Float[Array, "splits entries ranks"]:
    """Compute `v[e, c, r] = sum_k x[rows[e], k] * A[slots[e], c, r, k]`.

    Returns:
      `f32[1, passes * rows, C * max_rank]`; zeros where an adapter has no rank.
    """
    products = []
    for number in range(segments.num_passes):
        tile = _Tiles(pool, segments, number)
        x_tile = jnp.where(tile.live[:, :, None], x[tile.row], jnp.zeros((), x.dtype))

        def page_product(p, tile=tile, x_tile=x_tile):
            page, used = tile.page(p)
            a = pool.a[page]
            a = jnp.where(used[:, :, None, None], a, jnp.zeros_like(a))
            return jnp.einsum(
                "tbd,tcrd->tbcr",
                x_tile,
                a,
                precision=_PRECISION,
                preferred_element_type=jnp.float32,
            )

        def store_page(p, v, page_product=page_product):
            at = (0, 0, 0, p * RANK_PAGE)
            return lax.dynamic_update_slice(v, page_product(p), at)

        shape = (*x_tile.shape[:2], pool.num_modules, pool.max_rank)
        v = store_page(0, jnp.zeros(shape, jnp.float32))
        v = lax.fori_loop(1, tile.max_pages, store_page, v)
        v = v.reshape(*x_tile.shape[:2], -1)
        out = jnp.zeros((segments.num_rows, v.shape[-1]), jnp.float32)
        products.append(out.at[tile.entry].set(v, mode="drop"))
    return jnp.concatenate(products)[None]


def expand(
    y: Float[Array, "rows d_out"],
    v: Float[Array, "splits entries ranks"],
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
        v_tile = v_tile.reshape(*tile.entry.shape, pool.num_modules, pool.max_rank)

        def page_product(p, tile=tile, v_tile=v_tile):
            page, used = tile.page(p)
            at = (0, 0, 0, p * RANK_PAGE)
            v_page = lax.dynamic_slice(v_tile, at, (*v_tile.shape[:3], RANK_PAGE))
            v_page = jnp.where(used[:, None, :, None], v_page, 0.0).astype(pool.dtype)
            columns = []
            for c, (start, width) in enumerate(
                zip(pool.d_out_offsets, pool.d_outs, strict=True)
            ):
                b = pool.b[page, start : start + width]
                b = jnp.where(used[:, c, None, None], b, jnp.zeros_like(b))
                columns.append(
                    jnp.einsum(
                        "tbr,tnr->tbn",
                        v_page[:, :, c],
                        b,
                        precision=_PRECISION,
                        preferred_element_type=jnp.float32,
                    )
                )
            return jnp.concatenate(columns, axis=-1)

        delta = page_product(0)
        delta = lax.fori_loop(
            1, tile.max_pages, lambda p, sum_, f=page_product: sum_ + f(p), delta
        )
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

        def add_page(p, out, tile=tile, v_tile=v_tile, x_tile=x_tile):
            page, used = tile.page(p)
            product = jnp.einsum(
                "tbcr,tbd->tcrd",
                lax.dynamic_index_in_dim(v_tile, p, axis=3, keepdims=False),
                x_tile,
                precision=_PRECISION,
                preferred_element_type=jnp.float32,
            )
            product = jnp.where(used[:, :, None, None], product, 0.0)
            owned = jnp.where(used.any(axis=1), page, num_pages)
            return out.at[owned].add(product)

        out = lax.fori_loop(1, tile.max_pages, add_page, add_page(0, out))
    return out[:num_pages]


class _Tiles:
    """One pass's tiles, looked up in a pool."""

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
        counts = pool.num_pages[slot]
        self._counts = jnp.where((self.slot >= 0)[:, None], counts, 0)
        self._page_table = pool.page_table[slot]
        self._last_page = pool.a.shape[0] - 1
        self.max_pages = self._counts.max()

    def page(self, p: Array | int) -> tuple[Array, Array]:
        """Return each tile's page `p`, and `[tiles, C]`: which modules use it."""
        page = lax.dynamic_index_in_dim(self._page_table, p, axis=1, keepdims=False)
        return jnp.clip(page, 0, self._last_page), p < self._counts
