"""The plain `jax.numpy` meaning of paged attention, and its form off NVIDIA GPUs.

Knows queries, pages and sequences; nothing of models, rotary embeddings, or who owns
a page.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

# Rows of one sequence that are computed at once: the scores of one tile are
# f32[heads, 64, pages_per_seq * page_size], whatever the number of rows.
_BLOCK_ROWS = 64


def paged_attention(
    q: Float[Array, "rows heads head_dim"],
    kv_pages: Float[Array, "2 pages kv_heads page_size head_dim"],
    page_table: Int32[Array, "seqs pages_per_seq"],
    bounds: Int32[Array, "seqs+1"],
    kv_lens: Int32[Array, " seqs"],
    *,
    max_query_len: int,
    scale: float | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """Attend to paged keys and values, causally, for a ragged batch of sequences.

    *Semantics*, for row `j` of sequence `s` (`bounds[s] <= j < bounds[s + 1]`), which
    sits at position `p = kv_lens[s] - bounds[s + 1] + j`, and query head `h`:

        out[j, h] = softmax(scale * q[j, h] @ K[: p + 1].T) @ V[: p + 1]

    where K and V are kv head `h // (heads // kv_heads)` of the pages
    `page_table[s]`, one after the other. Everything is computed in float32 and rounded
    once at the end. Arguments are those of `punica_jax.pallas_kernels.paged_attention`;
    they are not checked here.

    Returns:
      `[rows, heads, head_dim]` in q's dtype; zeros for rows at and after `bounds[-1]`.
    """
    rows, _, head_dim = q.shape
    seqs = kv_lens.shape[0]
    attend = functools.partial(
        _attend, scale=head_dim**-0.5 if scale is None else scale
    )
    if max_query_len == 1:
        q_rows = q.at[bounds[:-1]].get(mode="clip")[:, None]
        out = jax.vmap(attend, in_axes=(0, None, 0, 0, 0))(
            q_rows, kv_pages, page_table, kv_lens, kv_lens - 1
        )
        # A sequence without a row is given one that does not exist.
        row = jnp.where(bounds[1:] > bounds[:-1], bounds[:-1], rows + _range(seqs))
        return jnp.zeros_like(q).at[row].set(out[:, 0], mode="drop")

    block_rows = min(_BLOCK_ROWS, max_query_len)
    tile_seq, tile_first = query_tiles(bounds, rows=rows, block_rows=block_rows)

    def attend_tile(tile):
        seq, first = tile
        q_rows = q.at[first + _range(block_rows)].get(mode="clip")
        position = kv_lens[seq] - bounds[seq + 1] + first
        return jax.lax.cond(
            seq < 0,
            lambda: jnp.zeros_like(q_rows),
            lambda: attend(q_rows, kv_pages, page_table[seq], kv_lens[seq], position),
        )

    out = jax.lax.map(attend_tile, (tile_seq, tile_first))
    row = tile_first[:, None] + _range(block_rows)[None, :]
    live = (tile_seq[:, None] >= 0) & (row < bounds[tile_seq + 1][:, None])
    row = jnp.where(live, row, rows + _range(row.size).reshape(row.shape))
    return jnp.zeros_like(q).at[row].set(out, mode="drop")


def _range(size: int) -> Array:
    return jnp.arange(size, dtype=jnp.int32)


def max_query_tiles(rows: int, seqs: int, block_rows: int, aligned: int = 1) -> int:
    """Most tiles that `rows` rows of `seqs` sequences can need; see `query_tiles`."""
    used = min(rows, seqs)
    return used + (rows - used + used * (aligned - 1)) // block_rows


def with_padding(
    bounds: Int32[Array, " edges"], rows: int, *, skip_lone: bool
) -> tuple[Int32[Array, "edges+1"], Bool[Array, " edges"] | None]:
    """Return `query_tiles`' bounds, padding rows a sequence more, and what it skips.

    With `skip_lone` that is sequences of one row; the padding is not, though it be one.
    """
    skipped = jnp.append(jnp.diff(bounds) == 1, False) if skip_lone else None
    return jnp.append(bounds, jnp.int32(rows)), skipped


def query_tiles(
    bounds: Int32[Array, " edges"],
    *,
    rows: int,
    block_rows: int,
    aligned: int = 1,
    skipped: Bool[Array, " seqs"] | None = None,
) -> tuple[Int32[Array, " tiles"], Int32[Array, " tiles"]]:
    """Cut the rows of every sequence into tiles of at most `block_rows` rows.

    Args:
      bounds: `i32[seqs + 1]`, rows `bounds[s] .. bounds[s + 1]` are sequence `s`'s.
      rows: rows of the batch, padding included (static).
      block_rows: rows of a tile (static).
      aligned: what tiles begin at multiples of (static), a divisor of `block_rows`: a
        sequence's first one may begin at some rows of the one before.
      skipped: which sequences' rows are no tile's; None if none are.

    Returns:
      Each tile's sequence, -1 if the tile is unused, and its first row. Tiles of a
      sequence are consecutive; unused ones come last.
    """
    seqs = bounds.shape[0] - 1
    begins = bounds[:-1] // aligned * aligned
    tiles_of_seq = (bounds[1:] - begins + (block_rows - 1)) // block_rows
    has_tiles = bounds[1:] > bounds[:-1]
    if skipped is not None:
        has_tiles &= ~skipped
    tiles_of_seq = jnp.where(has_tiles, tiles_of_seq, 0)
    ends = jnp.cumsum(tiles_of_seq)
    tile = _range(max_query_tiles(rows, seqs, block_rows, aligned))
    seq = jnp.searchsorted(ends, tile, side="right", method="compare_all")
    index = jnp.minimum(seq, seqs - 1)
    nth = tile - (ends - tiles_of_seq)[index]
    first = begins[index] + nth * block_rows
    return jnp.where(seq < seqs, seq, -1).astype(jnp.int32), first.astype(jnp.int32)


def _attend(
    q: Array,  # [n, heads, head_dim], consecutive rows of one sequence
    kv_pages: Array,  # [2, pages, kv_heads, page_size, head_dim]
    table: Array,  # i32[pages_per_seq]
    kv_len: Array,  # i32[]
    position: Array,  # i32[], of the first row
    *,
    scale: float,
) -> Array:
    num_rows, heads, head_dim = q.shape
    _, _, kv_heads, page_size, _ = kv_pages.shape
    key = _range(table.shape[0] * page_size)

    def tokens(part: int) -> Array:  # f32[kv_heads, tokens, head_dim]
        gathered = kv_pages.at[part, table].get(mode="clip").swapaxes(0, 1)
        gathered = gathered.reshape(kv_heads, -1, head_dim).astype(jnp.float32)
        # Selected, not multiplied: what is no token of this sequence may be NaN.
        return jnp.where((key < kv_len)[None, :, None], gathered, 0.0)

    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    groups = q.astype(jnp.float32).reshape(num_rows, kv_heads, -1, head_dim)
    scores = einsum("nkgd,ktd->kgnt", groups, tokens(0)) * scale
    row_position = position + _range(num_rows)
    seen = (key[None, :] <= row_position[:, None]) & (key < kv_len)[None, :]
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    # A row that sees nothing (an idle sequence) has no finite maximum.
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1)
    out = einsum("kgnt,ktd->nkgd", weights, tokens(1))
    out = out / jnp.where(total > 0, total, 1.0).transpose(2, 0, 1)[..., None]
    return out.reshape(num_rows, heads, head_dim).astype(q.dtype)
