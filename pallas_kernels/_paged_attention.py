"""Causal attention over a paged key-value cache: the public operation.

Checks its arguments and picks the form and the implementation; knows nothing of who
fills the cache or hands out its pages.
"""

import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from punica_jax.pallas_kernels import _attention_reference
from punica_jax.pallas_kernels._attention_decode import decode_attention
from punica_jax.pallas_kernels._attention_parts import parts_attention, parts_config
from punica_jax.pallas_kernels._attention_prefill import prefill_attention
from punica_jax.pallas_kernels._attention_warpgroups import fits, warpgroup_attention
from punica_jax.pallas_kernels._decode_config import config_of
from punica_jax.pallas_kernels._dispatch import resolve
from punica_jax.pallas_kernels._operands import require_count

_DTYPES = ("float32", "bfloat16", "float16")
_MAX_HEAD_DIM = 256
_MIN_PAGE_SIZE = 16


# The checks below say more than jaxtyping's import hook, which would come first.
@typing.no_type_check
def paged_attention(
    q: Float[Array, "rows heads head_dim"],
    kv_pages: Float[Array, "2 pages kv_heads page_size head_dim"],
    page_table: Int32[Array, "seqs pages_per_seq"],
    bounds: Int32[Array, "seqs+1"],
    kv_lens: Int32[Array, " seqs"],
    *,
    max_query_len: int,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """Attend to paged keys and values, causally, for a ragged batch of sequences.

    *Semantics*, for row `j` of sequence `s` (`bounds[s] <= j < bounds[s + 1]`), which
    sits at position `p = kv_lens[s] - bounds[s + 1] + j`, and query head `h`:

        out[j, h] = softmax(scale * q[j, h] @ K[: p + 1].T) @ V[: p + 1]

    where K and V are kv head `h // (heads // kv_heads)` of the pages `page_table[s]`,
    one after the other. A sequence's rows are its last ones, and the pages hold their
    keys and values already. What the pages hold elsewhere changes nothing, NaN
    included; nor do the other sequences.

    On a GPU, where sequences of one row may have more than 4096 tokens, programs that
    share a long one count by an operand that calls with the same bounds share. XLA runs
    such calls one after the other, unless it is told to run independent ones beside
    each other (`xla_gpu_command_buffer_scheduling_mode="CONCURRENT"`): do not.

    Args:
      q: queries; float32, bfloat16 or float16. `head_dim` is a multiple of 8, at most
        256; `heads` a multiple of `kv_heads`.
      kv_pages: keys, then values, in q's dtype; `page_size` is a power of two, at
        least 16.
      page_table: pages of each sequence. Entries that `kv_lens` does not need may
        hold anything.
      bounds: rows `bounds[s] .. bounds[s + 1]` are sequence `s`'s, ascending from 0.
        Rows at and after `bounds[-1]` are padding. A sequence may have no rows.
      kv_lens: tokens of each sequence in the pages, at most
        `pages_per_seq * page_size`. Anything for a sequence without rows.
      max_query_len: most rows that any sequence has (static). 1 chooses the decode
        form, which splits a sequence's tokens over programs; many, on Hopper, that of
        warp groups. Among so many sequences that the decode form would not split them,
        those of one row take it, in a launch of their own.
      scale: factor of the products, positive, `head_dim ** -0.5` by default (static).
      implementation: `"pallas_triton"`, `"pallas_interpret"`, `"xla"`, or None to
        choose by device.

    Returns:
      `[rows, heads, head_dim]` in q's dtype, accumulated in float32; zeros for padding
      rows.

    Raises:
      ValueError: an argument's shape, dtype or value is none of the above.
    """
    check_attention(q, kv_pages, page_table, bounds, kv_lens, max_query_len)
    return attend(
        *(q, kv_pages, page_table, bounds, kv_lens),
        max_query_len=max_query_len,
        scale=scale_of(scale, q),
        implementation=resolve(implementation),
    )


def attend(
    q: Array,
    kv_pages: Array,
    page_table: Array,
    bounds: Array,
    kv_lens: Array,
    *,
    max_query_len: int,
    scale: float,
    implementation: str,
) -> Array:
    """Run `paged_attention`, on checked operands, by an implementation there is."""
    operands = (q, kv_pages, page_table, bounds, kv_lens)
    if implementation == "xla":
        return _attention_reference.paged_attention(
            *operands, max_query_len=max_query_len, scale=scale
        )
    interpret = implementation == "pallas_interpret"
    if max_query_len == 1:
        return _attend_rows(operands, scale=scale, interpret=interpret)
    skip_lone = _have_own_launch(*operands[:3])
    if not interpret and fits(q, kv_pages, max_query_len, skip_lone=skip_lone):
        out = warpgroup_attention(*operands, scale=scale, skip_lone=skip_lone)
    else:
        out = prefill_attention(
            *operands,
            max_query_len=max_query_len,
            scale=scale,
            skip_lone=skip_lone,
            interpret=interpret,
        )
    if not skip_lone:
        return out
    return _attend_rows(operands, others=out, scale=scale, interpret=interpret)


def _have_own_launch(q: Array, kv_pages: Array, page_table: Array) -> bool:
    """Whether sequences of one row, among longer ones, are a launch of their own.

    In a tile of a prompt's form one row takes as long as 64. Of 31 that decode beside a
    prompt of 18, at the lengths of the paper's trace, attention takes 38 us so, before
    59 (8B; 7B 80, before 113; one H200), and where there is none 3 us more. Fewer
    sequences, which would have splits, were not measured.
    """
    has_several = page_table.shape[0] > 1
    return has_several and config_of(q, kv_pages, page_table).splits == 1


def _attend_rows(
    operands: tuple[Array, ...], *, others: Array | None = None, **options: Any
) -> Array:
    """Attend with sequences of one row each; of more, if their rows are `others`."""
    q, kv_pages, page_table, *_ = operands
    parts = parts_config(q, kv_pages, page_table, others)
    if parts is None:
        return decode_attention(*operands, others=others, **options)
    return parts_attention(*operands, others=others, config=parts, **options)


def scale_of(scale: float | None, q: Array | jax.ShapeDtypeStruct) -> float:
    """Return the factor of products, by default that of q's width."""
    factor = q.shape[2] ** -0.5 if scale is None else float(scale)
    if not 0 < factor < math.inf:
        raise ValueError(f"scale must be positive and finite, got {factor}")
    return factor


def check_attention(
    q: Array | jax.ShapeDtypeStruct,
    kv_pages: Array,
    page_table: Array,
    bounds: Array,
    kv_lens: Array,
    max_query_len: int,
) -> None:
    """Raise unless `paged_attention`'s operands fit each other."""
    shapes: dict[str, tuple[Any, str, int]] = {
        "q": (q, "[rows, heads, head_dim]", 3),
        "kv_pages": (kv_pages, "[2, pages, kv_heads, page_size, head_dim]", 5),
        "page_table": (page_table, "[seqs, pages_per_seq]", 2),
    }
    for name, (array, shape, ndim) in shapes.items():
        if array.ndim != ndim or 0 in array.shape:
            raise ValueError(
                f"{name} must be {shape}, none of them 0, got shape {array.shape}"
            )
    _, heads, head_dim = q.shape
    parts, _, kv_heads, page_size, kv_head_dim = kv_pages.shape
    seqs = page_table.shape[0]
    if parts != 2:
        raise ValueError(
            f"kv_pages must be keys and values, 2 parts, got shape {kv_pages.shape}"
        )
    if kv_head_dim != head_dim:
        raise ValueError(
            f"kv_pages must have q's head_dim {head_dim}, got shape {kv_pages.shape}"
        )
    for name, array, shape in (
        ("bounds", bounds, (seqs + 1,)),
        ("kv_lens", kv_lens, (seqs,)),
    ):
        if array.shape != shape:
            raise ValueError(
                f"{name} must have shape {shape} (page_table {page_table.shape}), got "
                f"{array.shape}"
            )
    if q.dtype.name not in _DTYPES:
        raise ValueError(f"q must be one of {', '.join(_DTYPES)}, got {q.dtype}")
    for name, array, dtype in (
        ("kv_pages", kv_pages, q.dtype),
        ("page_table", page_table, jnp.dtype("int32")),
        ("bounds", bounds, jnp.dtype("int32")),
        ("kv_lens", kv_lens, jnp.dtype("int32")),
    ):
        if array.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {array.dtype}")
    if heads % kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads, got {heads} heads and {kv_heads} "
            "kv_heads"
        )
    if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim must be a multiple of 8 and at most {_MAX_HEAD_DIM}, got "
            f"{head_dim}"
        )
    if page_size < _MIN_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(
            f"page_size must be a power of two and at least {_MIN_PAGE_SIZE}, got "
            f"{page_size}"
        )
    require_count("max_query_len", max_query_len)
