"""One tile of keys and values: how the attention kernels read it and attend to it.

Knows how a sequence's tokens lie in pages, and a softmax's running sums; nothing of
which tiles a program visits.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# Both factors of a tensor-core product, and the queries' rows, are at least this.
MIN_DOT_DIM = 16


def padded(dim: int) -> int:
    """The lanes that `dim` values take in a product: a power of two, at least 16."""
    return max(MIN_DOT_DIM, pl.next_power_of_2(dim))


def load_rows(
    ref,  # [rows, heads, head_dim]
    row: Array,  # i32[] or i32[n]
    head: Array,  # i32[n]
    mask: Array,  # bool[n]
) -> Array:
    """Load `[n, padded(head_dim)]`; masked rows and padding lanes are zeros."""
    row = row[:, None] if row.ndim else row
    index, live = _lanes(ref.shape[-1])
    return plgpu.load(
        ref.at[row, head[:, None], index], mask=mask[:, None] & live, other=0.0
    )


def store_rows(
    ref,  # [rows, heads, head_dim]
    row: Array,  # i32[] or i32[n]
    head: Array,  # i32[n]
    mask: Array,  # bool[n]
    value: Array,  # [n, padded(head_dim)]
) -> None:
    """Store the rows that are not masked, without their padding lanes."""
    row = row[:, None] if row.ndim else row
    index, live = _lanes(ref.shape[-1])
    value = value.astype(ref.dtype)
    plgpu.store(ref.at[row, head[:, None], index], value, mask=mask[:, None] & live)


def load_page_ids(
    table_ref,  # i32[seqs, pages_per_seq]
    seq: Array,  # i32[]
    start: Array,  # i32[]
    *,
    end: Array,  # i32[]
    block_kv: int,
    page_size: int,
) -> Array:
    """The page of each token of a tile: one for all, where no tile spans two pages.

    Entries for tokens at and after `end` are not read.

    Returns:
      `i32[]`, or `i32[block_kv]` if `block_kv > page_size`.
    """
    token = start
    if block_kv > page_size:
        token = start + jnp.arange(block_kv, dtype=jnp.int32)
    return plgpu.load(
        table_ref.at[seq, lax.div(token, jnp.int32(page_size))],
        mask=token < end,
        other=0,
    )


def load_kv(
    ref,  # [2, pages, kv_heads, page_size, head_dim]
    part: int,  # 0 for keys, 1 for values
    page_ids: Array,  # i32[] or i32[block_kv]
    kv_head: Array,  # i32[]
    start: Array,  # i32[]
    end: Array | None,  # i32[]; None if the whole tile is before the end
    *,
    block_kv: int,
) -> Array:
    """Load tokens `start .. start + block_kv` as `[block_kv, padded(head_dim)]`.

    Tokens at and after `end` are zeros, whatever memory holds: it may be NaN.
    """
    *_, page_size, head_dim = ref.shape
    token = jnp.arange(block_kv, dtype=jnp.int32)
    if page_ids.ndim:
        page_ids = page_ids[:, None]
        place = lax.rem(start + token, jnp.int32(page_size))
    else:
        place = lax.rem(start, jnp.int32(page_size)) + token
    index, live = _lanes(head_dim)
    if end is not None:
        live = live & (start + token < end)[:, None]
    elif padded(head_dim) == head_dim:
        live = None
    at = ref.at[part, page_ids, kv_head, place[:, None], index]
    return plgpu.load(at, mask=live, other=None if live is None else 0.0)


# f32[n] maximum; f32[n] total, or f32[n, block_kv] still to be added up; f32[n, lanes]
Sums = tuple[Array, Array, Array]


def empty_sums(q: Array, block_kv: int | None = None) -> Sums:  # q: [n, lanes]
    """The sums over no tokens, for `attend_block`.

    Args:
      q: the queries.
      block_kv: tokens of a tile, if a total is kept for each of its places.
    """
    places = () if block_kv is None else (block_kv,)
    return (
        # Finite, for the difference of two of them must not be NaN.
        jnp.full(q.shape[:1], jnp.finfo(jnp.float32).min, jnp.float32),
        jnp.zeros(q.shape[:1] + places, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )


def attend_block(
    q: Array,  # [n, lanes]
    k: Array,  # [block_kv, lanes]
    v: Array,  # [block_kv, lanes]
    seen: Array | None,  # bool[n or 1, block_kv]; None if every row sees every token
    scale: float,
    sums: Sums,
) -> Sums:
    """Add a tile to each row's running maximum, total of weights and weighted sum.

    Weights are powers of two: `scale` has a factor log2(e). A total that is kept for
    each place of a tile is the caller's to add up, once: a sum over the tile stands
    before the next one's loads.
    """
    top, total, acc = sums
    scores = _dot(q, k, trans_b=True)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    # Scaled after the maximum, so that each weight takes one multiply-add.
    new_top = jnp.maximum(top, scores.max(axis=1) * scale)
    weights = jnp.exp2(scores * scale - new_top[:, None])
    decay = jnp.exp2(top - new_top)
    acc = acc * decay[:, None] + _dot(weights.astype(v.dtype), v)
    if total.ndim == 2:
        return new_top, total * decay[:, None] + weights, acc
    return new_top, total * decay + weights.sum(axis=1), acc


def _dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    # Accumulated in float32; no TF32 for float32 factors.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)


def _lanes(head_dim: int) -> tuple[Array, Array]:  # i32[1, lanes], bool[1, lanes]
    index = jnp.arange(padded(head_dim), dtype=jnp.int32)[None, :]
    return index, index < head_dim
