"""The operations that models call: checks, choice of implementation, gradients.

Knows shapes and rules; how each product is computed is `_shrink.py`'s,
`_expand.py`'s and `reference.py`'s business.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from punica_jax.pallas_kernels import _expand, _pair, _segment_outer, _shrink, reference
from punica_jax.pallas_kernels._dispatch import resolve
from punica_jax.pallas_kernels._launch import varying_alike
from punica_jax.pallas_kernels._lora_operands import check_lora, check_operand
from punica_jax.pallas_kernels._operands import (
    as_array,
    as_slots,
    is_count,
    require_count,
)
from punica_jax.pallas_kernels._pool import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels._segments import (
    DEFAULT_BLOCK_ROWS,
    Segments,
    fits_kernel,
    segment_metadata_kernel,
)
from punica_jax.pallas_kernels._sgmv_config import add_splits


def segment_metadata(
    slots: Int[Array, "rows"] | Int[Array, "rows passes"],
    weights: Float[Array, "rows"] | Float[Array, "rows passes"] | None = None,
    *,
    num_slots: int,
    block_rows: int = DEFAULT_BLOCK_ROWS,
    implementation: str | None = None,
) -> Segments:
    """Group a batch's rows by adapter, once a step.

    Args:
      slots: each row's slot, 0 to num_slots - 1, anything else for none; with a second
        axis, several slots a row, whose products are added in order.
      weights: float32 factor of each row's (each entry's) product; None means 1.
      num_slots: slots the pools have.
      block_rows: most rows of a tile, a power of two, at least 16. It chooses speed
        only: a row's result does not depend on it. The XLA form always takes 16, for
        XLA's products on a CPU sum in an order that depends on their shape.
      implementation: see `resolve`. Beyond 8192 rows, or 524288 pairs of a row and a
        slot, the kernel gives way to XLA's sort.

    Returns:
      The rows sorted by slot and cut into tiles; a pytree of fixed shapes.

    Raises:
      ValueError: a shape, dtype or count breaks these rules.
    """
    slots = as_array("slots", slots)
    if slots.ndim not in (1, 2) or not slots.size:
        raise ValueError(
            "slots must be i32[rows] or i32[rows, k] with rows and k at least 1, got "
            f"{slots.shape}"
        )
    if not jnp.issubdtype(slots.dtype, jnp.signedinteger):
        raise ValueError(f"slots must be signed integers, got {slots.dtype}")
    weights = None if weights is None else as_array("weights", weights)
    if weights is not None and weights.shape != slots.shape:
        raise ValueError(
            f"weights must have the shape of slots {slots.shape}, got {weights.shape}"
        )
    require_count("num_slots", num_slots)
    if not is_count(block_rows, 16) or block_rows & (block_rows - 1):
        raise ValueError(
            f"block_rows must be a power of two of at least 16, got {block_rows!r}"
        )
    implementation = resolve(implementation)
    slots = jnp.atleast_2d(as_slots(slots, num_slots).T)
    if implementation == "xla":
        block_rows = DEFAULT_BLOCK_ROWS
    if implementation == "xla" or not fits_kernel(slots.shape[1], num_slots):
        segments = reference.segment_metadata(
            slots, num_slots=num_slots, block_rows=block_rows
        )
    else:
        segments = segment_metadata_kernel(
            slots,
            num_slots=num_slots,
            block_rows=block_rows,
            interpret=implementation == "pallas_interpret",
        )
    if weights is None:
        return segments
    weights = jnp.atleast_2d(weights.astype(jnp.float32).T)
    weights = jnp.take_along_axis(weights, segments.rows, axis=1)
    return dataclasses.replace(segments, weights=weights)


def shrink(
    x: Float[Array, "rows d_in"],
    pool: LoraPool,
    segments: Segments,
    *,
    implementation: str | None = None,
) -> Float[Array, "parts entries ranks"]:
    """Project rows down to their adapters' ranks.

    *Semantics*: `v[:, e, c, r].sum() = sum_k x[rows[e], k] A[slots[e], c, r, k]`.

    Returns:
      `f32[parts, passes * rows, C * max_rank]`: partial sums over d_in, as many as the
      sizes ask for, by sorted entry. Ranks that an entry's adapter does not have are
      undefined.

    Raises:
      ValueError: `x` does not fit the pool or the segments.
    """
    check_lora((pool, segments))
    check_operand("x", x, pool.d_in, pool, segments)
    implementation = resolve(implementation)
    if implementation == "xla":
        return reference.shrink(x, pool, segments)
    return _shrink.shrink(
        x, pool, segments, interpret=implementation == "pallas_interpret"
    )


def expand(
    y: Float[Array, "rows d_out"],
    v: Float[Array, "parts entries ranks"],
    pool: LoraPool,
    segments: Segments,
    *,
    scale: Float[Array, "slots d_out"] | None = None,
    bias: Float[Array, "slots d_out"] | None = None,
    residual: Float[Array, "rows d_out"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """Add each row's expanded product to `y`, in place where XLA may.

    *Semantics*: `y[row] = (y[row] + w v B[slot]^T) scale[slot] + bias[slot] +
    residual[row]`; rows without an adapter get the residual alone. The splits are
    summed in fixed order; everything is float32 until one rounding at the store,
    but for `w v`, which is rounded to the pool's dtype.

    Args:
      y: base output.
      v: what `shrink` returned for the same pool and segments.
      scale: factor per slot and column (DoRA's magnitude over norm).
      bias: addend per slot and column.
      residual: addend per row, after the others, in the last pass.

    Returns:
      The new `y`, in its dtype.

    Raises:
      ValueError: an operand does not fit the pool or the segments.
    """
    check_lora((pool, segments))
    check_operand("y", y, pool.d_out, pool, segments)
    entries = segments.num_passes * segments.num_rows
    if v.shape[1:] != (entries, pool.num_modules * pool.max_rank):
        raise ValueError(
            "v must be f32[parts, entries, C * max_rank] = "
            f"[parts, {entries}, {pool.num_modules * pool.max_rank}], got {v.shape}"
        )
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector is not None and vector.shape != (pool.num_slots, pool.d_out):
            raise ValueError(
                f"{name} must be [slots, d_out] = {(pool.num_slots, pool.d_out)}, "
                f"got {vector.shape}"
            )
    if residual is not None and residual.shape != y.shape:
        raise ValueError(f"residual must be like y {y.shape}, got {residual.shape}")
    options: dict[str, Any] = {"scale": scale, "bias": bias, "residual": residual}
    implementation = resolve(implementation)
    if implementation == "xla":
        return reference.expand(y, v, pool, segments, **options)
    interpret = implementation == "pallas_interpret"
    return _expand.expand(y, v, pool, segments, **options, interpret=interpret)


def lora(
    y: Float[Array, "rows d_out"],
    x: Float[Array, "rows d_in"],
    pool: LoraPool,
    segments: Segments,
    *,
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """Add every row's own adapter product: SGMV (Punica, section 4).

    *Semantics*: `y[row] += w x[row] A[slot]^T B[slot]^T`, `B` times its scale already;
    rows without an adapter keep `y`. Differentiable (reverse mode) in `y`, `x`, the
    pool's `a` and `b`, and the weights; gradients with respect to `a` and `b` are
    summed in float32 and returned in the pool's dtype.

    On a GPU, up to 64 rows take one launch, whose programs wait for each other by
    counts that launches of the same segments share. XLA runs such launches one after
    the other, unless it is told to run them beside each other
    (`xla_gpu_command_buffer_scheduling_mode="CONCURRENT"`): do not, with so few rows.

    Args:
      y: base output, dtype of the pool.
      x: input of the module group, dtype of the pool.
      pool: adapters of this layer's module group.
      segments: from `segment_metadata` with the pool's number of slots.
      implementation: see `resolve`.

    Returns:
      `y` with the products added, in its dtype.

    Raises:
      ValueError: an operand does not fit the pool or the segments.
    """
    check_lora((pool, segments))
    x, y = jnp.asarray(x), jnp.asarray(y)
    check_operand("x", x, pool.d_in, pool, segments)
    check_operand("y", y, pool.d_out, pool, segments)
    return _lora(resolve(implementation), *varying_alike(y, x, pool, segments))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lora(implementation, y, x, pool, segments):
    if implementation != "xla":
        interpret = implementation == "pallas_interpret"
        return _pair.shrink_and_expand(y, x, pool, segments, interpret=interpret)
    v = shrink(x, pool, segments, implementation=implementation)
    return expand(y, v, pool, segments, implementation=implementation)


def _lora_forward(implementation, y, x, pool, segments):
    return _lora(implementation, y, x, pool, segments), (x, pool, segments)


def _lora_backward(implementation, saved, dy):
    # dv = dy B is a shrink by B^T, dx = w dv A an expand by A^T.
    # Constants may have become NumPy's, which a traced index cannot look into.
    x, pool, segments = jax.tree.map(jnp.asarray, saved)
    outer = (
        reference.segment_outer
        if implementation == "xla"
        else functools.partial(
            _segment_outer.segment_outer, interpret=implementation == "pallas_interpret"
        )
    )
    v = _total(shrink(x, pool, segments, implementation=implementation))
    dx = jnp.zeros_like(x)
    dv, db = [], []
    for c, (start, width) in enumerate(
        zip(pool.d_out_offsets, pool.d_outs, strict=True)
    ):
        flipped = _flip(pool, c)
        dy_c = dy[:, start : start + width]
        dv_c = shrink(dy_c, flipped, segments, implementation=implementation)
        dx = expand(dx, dv_c, flipped, segments, implementation=implementation)
        dv.append(_total(dv_c))
        v_c = v[:, c * pool.max_rank : (c + 1) * pool.max_rank]
        db.append(outer(_weigh(v_c, segments), dy_c, flipped, segments)[:, 0])
    dv = jnp.concatenate(dv, axis=1)
    da = outer(_weigh(dv, segments), x, pool, segments)
    db = jnp.concatenate(db, axis=2)
    dpool = dataclasses.replace(
        pool,
        a=da.astype(pool.dtype),
        b=db.astype(pool.dtype),
        page_table=_no_gradient(pool.page_table),
        num_pages=_no_gradient(pool.num_pages),
        layer=None if pool.layer is None else _no_gradient(pool.layer),
    )
    dsegments = jax.tree.map(_no_gradient, segments)
    if segments.weights is not None:
        used = _used_ranks(pool, segments)
        dweights = jnp.where(used, v * dv, 0.0).sum(axis=1)
        dweights = dweights.reshape(segments.weights.shape)
        dsegments = dataclasses.replace(dsegments, weights=dweights)
    return dy, dx, dpool, dsegments


_lora.defvjp(_lora_forward, _lora_backward)


def _total(v: Array) -> Array:
    return add_splits([v[split] for split in range(v.shape[0])])


def _flip(pool: LoraPool, c: int) -> LoraPool:
    """Return module `c` of the pool with A and B in each other's place."""
    start, width = pool.d_out_offsets[c], pool.d_outs[c]
    return LoraPool(
        a=pool.b[:, None, :, start : start + width],
        b=pool.a[:, c],
        page_table=pool.page_table,
        num_pages=pool.num_pages[:, c : c + 1],
        d_outs=(pool.d_in,),
        layer=pool.layer,
    )


def _weigh(v: Array, segments: Segments) -> Array:
    if segments.weights is None:
        return v
    return v * segments.weights.reshape(-1, 1)


def _used_ranks(pool: LoraPool, segments: Segments) -> Array:
    """Return `bool[entries, C * max_rank]`: the ranks each entry's adapter has."""
    slots = segments.slots.reshape(-1)
    counts = pool.layer_num_pages[jnp.maximum(slots, 0)]
    counts = jnp.where((slots >= 0)[:, None], counts, 0)
    rank = jnp.arange(pool.max_rank, dtype=jnp.int32)[None, None, :]
    return (rank < RANK_PAGE * counts[:, :, None]).reshape(slots.size, -1)


def _no_gradient(array: Array):
    return np.zeros(array.shape, jax.dtypes.float0)
