"""`lora` together with what follows it in a decoder layer.

Checks, choice of implementation, gradients; the kernels are `_fused.py`'s. Knows arrays
of one layer; nothing of models or sequences.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from punica_jax.pallas_kernels import _fused, _ops, reference
from punica_jax.pallas_kernels._dispatch import resolve
from punica_jax.pallas_kernels._pool import LoraPool
from punica_jax.pallas_kernels._segments import Segments


def lora_gated(
    y: Float[Array, "rows two_width"],
    x: Float[Array, "rows d_in"] | None = None,
    pool: LoraPool | None = None,
    segments: Segments | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "rows width"]:
    """Add every row's own adapter product to gate and up, and multiply them.

    *Semantics*: `SiLU(g) * u` with `g, u` the halves of `lora(y, x, pool, segments)`.
    The kernel keeps all of it in float32 until one rounding at the store; the XLA form
    rounds each step. Differentiable wherever `lora` is.

    Args:
      y: base output, gate's columns and then up's.
      x: input of the module group; with `pool` and `segments`, or none of them.
      pool: adapters of this layer's gate and up.
      segments: from `segment_metadata`.
      implementation: see `resolve`.

    Raises:
      ValueError: an operand does not fit the others.
    """
    if y.ndim != 2 or y.shape[1] % 2:
        raise ValueError(f"y must be [rows, 2 * width], got {y.shape}")
    if pool is not None and pool.d_outs != (y.shape[1] // 2,) * 2:
        raise ValueError(
            f"the pool must have two modules as wide as y's halves {y.shape}, got "
            f"{pool.d_outs}"
        )
    lora = _operands(y, x, pool, segments)
    return _lora_gated(resolve(implementation), y, lora)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lora_gated(implementation, y, lora):
    if implementation == "xla":
        return _plain_gated(implementation, y, lora)
    y, shrunk = _shrink(implementation, y, lora)
    return _fused.gated_expand(y, shrunk, interpret=implementation != "pallas_triton")


def _plain_gated(implementation, y, lora):
    if lora is not None:
        y = _ops.lora(y, *lora, implementation=implementation)
    return reference.gated(y)


def _gated_forward(implementation, y, lora):
    return _lora_gated(implementation, y, lora), (y, lora)


def _gated_backward(implementation, saved, dh):
    _, pull = jax.vjp(functools.partial(_plain_gated, implementation), *saved)
    return pull(dh)


_lora_gated.defvjp(_gated_forward, _gated_backward)


def lora_rotary(
    y: Float[Array, "rows d_out"],
    rotary: tuple[Float[Array, "rows head_dim"], Float[Array, "rows head_dim"]],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page: Int32[Array, "rows"],
    offset: Int32[Array, "rows"],
    x: Float[Array, "rows d_in"] | None = None,
    pool: LoraPool | None = None,
    segments: Segments | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows heads head_dim"], Array, Array]:
    """Add every row's own adapter product to q, k and v, rotate, and store k and v.

    *Semantics*, with `q, k, v` the heads of `lora(y, x, pool, segments)`:
    `rotate(q)`, and the pages with `rotate(k[i])` and `v[i]` at
    `[page[i], :, offset[i]]`. The kernel rounds once, at the stores; the XLA form
    rounds each step. Not differentiable.

    Args:
      y: base output, all of q's heads, then k's, then v's.
      rotary: cosine and sine of each row's angles, both halves of the lanes alike.
      k_pages, v_pages: the cache of this layer; changed in place where XLA may.
      page: each row's page; a row whose page is out of range stores nothing.
      offset: each row's place in its page. No two rows may share one.
      x, pool, segments: see `lora_gated`; the pool's modules are q, k and v.
      implementation: see `resolve`.

    Returns:
      q, rotated, and the pages.

    Raises:
      ValueError: an operand does not fit the others.
    """
    _, kv_heads, _, head_dim = k_pages.shape
    heads = y.shape[1] // head_dim - 2 * kv_heads
    if k_pages.shape != v_pages.shape or y.shape[1] % head_dim or heads < 1:
        raise ValueError(
            "y must be [rows, (heads + 2 * kv_heads) * head_dim] for pages [pages, "
            f"kv_heads, page_size, head_dim], got {y.shape}, k {k_pages.shape} and v "
            f"{v_pages.shape}"
        )
    for name, table in (("cosine", rotary[0]), ("sine", rotary[1])):
        if table.shape != (y.shape[0], head_dim):
            raise ValueError(
                f"the {name} must be [rows, head_dim] = {(y.shape[0], head_dim)}, got "
                f"{table.shape}"
            )
    widths = tuple(count * head_dim for count in (heads, kv_heads, kv_heads))
    if pool is not None and pool.d_outs != widths:
        raise ValueError(f"the pool's modules must be {widths} wide: {pool.d_outs}")
    lora = _operands(y, x, pool, segments)
    implementation = resolve(implementation)
    cache = (rotary, k_pages, v_pages, page, offset)
    if implementation == "xla":
        if lora is not None:
            y = _ops.lora(y, *lora, implementation=implementation)
        return reference.rotary(y, *cache)
    y, shrunk = _shrink(implementation, y, lora)
    interpret = implementation != "pallas_triton"
    return _fused.rotary_expand(y, shrunk, *cache, interpret=interpret)


def _operands(
    y: Array, x: Array | None, pool: LoraPool | None, segments: Segments | None
) -> tuple[Array, LoraPool, Segments] | None:
    """Return `lora`'s operands but the first, or None where there are none."""
    if x is None and pool is None and segments is None:
        return None
    if x is None or pool is None or segments is None:
        raise ValueError("x, pool and segments must be given together")
    _ops.check_operand("x", x, pool.d_in, pool, segments)
    _ops.check_operand("y", y, pool.d_out, pool, segments)
    return x, pool, segments


def _shrink(implementation, y, lora):
    """Return y, and the product that is left for a fused expand to add."""
    if lora is None:
        return y, None
    x, pool, segments = lora
    if segments.num_passes > 1:
        # In-place adds of several adapters a row are launches of their own.
        return _ops.lora(y, x, pool, segments, implementation=implementation), None
    v = _ops.shrink(x, pool, segments, implementation=implementation)
    return y, _fused.Shrunk(jnp.asarray(v), pool, segments)
