"""The linear layer of q, k and v, and what follows it: rotation, the cache, attention.

Checks and choice of implementation; the kernels are `_one_launch.py`'s,
`_row_expand.py`'s, `_fused.py`'s and `_rotary_attention.py`'s. Knows arrays of one
layer; nothing of models, and of sequences where their rows and pages are.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from punica_jax.pallas_kernels import (
    _one_launch,
    _project,
    _rotary_attention,
    _row_expand,
    reference,
)
from punica_jax.pallas_kernels._epilogues import (
    Lora,
    check_linear,
    plain_linear,
    project_rows,
    resolve_rows,
)
from punica_jax.pallas_kernels._lora_operands import check_lora
from punica_jax.pallas_kernels._norm import NormedRows
from punica_jax.pallas_kernels._operands import require
from punica_jax.pallas_kernels._paged_attention import (
    attend,
    check_attention,
    scale_of,
)


def lora_rotary(
    x: Float[Array, "rows d_in"] | NormedRows,
    weight: Float[Array, "d_out d_in"],
    rotary: tuple[Float[Array, "rows head_dim"], Float[Array, "rows head_dim"]],
    kv_pages: Float[Array, "2 pages kv_heads page_size head_dim"],
    page: Int32[Array, "rows"],
    offset: Int32[Array, "rows"],
    lora: Lora | None = None,
    *,
    bias: Float[Array, "d_out"] | None = None,
    residual: Float[Array, "rows d_out"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows heads head_dim"], Array]:
    """Apply the linear layer of q, k and v, rotate, and store k and v.

    *Semantics*, with `q, k, v` the heads of `lora_linear`: `rotate(q)`, and the pages
    with `rotate(k[i])` and `v[i]` at `[:, page[i], :, offset[i]]`. The kernel rounds
    once after the base product, at the stores; the XLA form rounds each step. Not
    differentiable.

    Args:
      x, bias, residual, implementation: see `lora_linear`.
      weight: the rows of all of q's heads, then k's, then v's.
      rotary: cosine and sine of each row's angles, both halves of the lanes alike.
      kv_pages: this layer's keys, then its values; changed in place where XLA may.
      page: each row's page, 0 or more; a row with one past the last stores nothing.
      offset: each row's place in its page. No two rows may share one.
      lora: the pool's modules are q, k and v.

    Returns:
      q, rotated, and the pages.

    Raises:
      ValueError: an operand does not fit the others.
    """
    options = {"lora": lora, "bias": bias, "residual": residual}
    cache = (rotary, kv_pages, page, offset)
    _check(x, weight, cache, **options)
    return _rotate(resolve_rows(implementation, x), x, weight, cache, **options)


def lora_attention(
    x: Float[Array, "rows d_in"] | NormedRows,
    weight: Float[Array, "d_out d_in"],
    rotary: tuple[Float[Array, "rows head_dim"], Float[Array, "rows head_dim"]],
    kv_pages: Float[Array, "2 pages kv_heads page_size head_dim"],
    page: Int32[Array, "rows"],
    offset: Int32[Array, "rows"],
    page_table: Int32[Array, "seqs pages_per_seq"],
    bounds: Int32[Array, "seqs+1"],
    kv_lens: Int32[Array, "seqs"],
    lora: Lora | None = None,
    *,
    bias: Float[Array, "d_out"] | None = None,
    max_query_len: int,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows heads head_dim"], Array]:
    """Apply the linear layer of q, k and v, rotate, store k and v, and attend.

    *Semantics*: `q, kv_pages = lora_rotary(x, ...)`, and `paged_attention(q, kv_pages,
    ...)` with the pages. Of up to 64 rows that decode, where heads do not share keys, a
    kernel does all that follows the base product, to the same bits. Not differentiable.

    Args:
      x, weight, rotary, kv_pages, lora, bias: see `lora_rotary`.
      page, offset: see `lora_rotary`. A sequence's rows are stored where its pages have
        its last tokens, which no other sequence of the call reads (rows of one call do
        not wait for each other); padding rows have pages past the last.
      page_table, bounds, kv_lens, max_query_len, scale: see `paged_attention`.
      implementation: see `resolve`.

    Returns:
      What rows attend to, and the pages.

    Raises:
      ValueError: an operand does not fit the others.
    """
    cache = (rotary, kv_pages, page, offset)
    options = {"lora": lora, "bias": bias, "residual": None}
    heads = _check(x, weight, cache, **options)
    sequences = (page_table, bounds, kv_lens)
    q = jax.ShapeDtypeStruct((x.shape[0], heads, kv_pages.shape[-1]), x.dtype)
    check_attention(q, kv_pages, *sequences, max_query_len)
    scale = scale_of(scale, q)
    resolved = resolve_rows(implementation, x)
    if (
        resolved != "xla"
        and max_query_len == 1
        and lora is not None
        and lora[1].num_passes == 1
        and _project.are_few(x, weight)
        and _rotary_attention.fits(q, kv_pages, page_table, lora[0])
    ):
        forms, y, shrunk = project_rows(resolved, x, weight, **options)
        assert forms is _row_expand and shrunk is not None, forms
        return _rotary_attention.rotary_attention(
            *(y, shrunk, *cache, *sequences),
            scale=scale,
            interpret=resolved != "pallas_triton",
        )
    rotated, kv_pages = _rotate(resolved, x, weight, cache, **options)
    out = attend(
        *(rotated, kv_pages, *sequences),
        max_query_len=max_query_len,
        scale=scale,
        implementation=resolved,
    )
    return out, kv_pages


def _check(x, weight, cache, lora, bias, residual) -> int:
    """Raise unless the operands fit; return how many heads q has."""
    rotary, kv_pages, page, offset = cache
    check_lora(lora)
    parts, _, kv_heads, _, head_dim = kv_pages.shape
    rows, d_out = x.shape[0], weight.shape[0]
    heads = d_out // head_dim - 2 * kv_heads
    if parts != 2 or d_out % head_dim or heads < 1:
        raise ValueError(
            "weight must be [(heads + 2 * kv_heads) * head_dim, d_in] for pages "
            f"[2, pages, kv_heads, page_size, head_dim], got {weight.shape} and "
            f"{kv_pages.shape}"
        )
    for name, table in (("the cosine", rotary[0]), ("the sine", rotary[1])):
        require(name, table, (rows, head_dim), table.dtype)
    require("page", page, (rows,), jnp.dtype("int32"))
    require("offset", offset, (rows,), jnp.dtype("int32"))
    widths = tuple(count * head_dim for count in (heads, kv_heads, kv_heads))
    if lora is not None and lora[0].d_outs != widths:
        raise ValueError(f"the pool's modules must be {widths} wide: {lora[0].d_outs}")
    check_linear(x, weight, lora, bias, residual)
    return heads


def _rotate(implementation, x, weight, cache, lora, bias, residual):
    operands = (x, weight, lora, bias, residual)
    if implementation == "xla":
        return reference.rotary(plain_linear(implementation, *operands), *cache)
    interpret = implementation != "pallas_triton"
    if lora is None and _project.are_few(x, weight):
        options = {"bias": bias, "residual": residual, "interpret": interpret}
        return _one_launch.rotary(x, weight, cache, **options)
    forms, y, shrunk = project_rows(implementation, *operands)
    return forms.rotary_expand(y, shrunk, *cache, interpret=interpret)
