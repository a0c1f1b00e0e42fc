"""A linear layer with its adapters' product, and what follows it in a decoder layer.

Checks, choice of implementation, gradients; the kernels are `_project.py`'s,
`_one_launch.py`'s, `_row_expand.py`'s, `_expand.py`'s, `_fused.py`'s and
`_gated_product.py`'s. Knows arrays of one layer; nothing of models or sequences.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from punica_jax.pallas_kernels import (
    _fused,
    _gated_product,
    _one_launch,
    _ops,
    _project,
    _row_expand,
    _shrink,
    reference,
)
from punica_jax.pallas_kernels._dispatch import resolve
from punica_jax.pallas_kernels._lora_operands import check_lora, check_operand
from punica_jax.pallas_kernels._norm import Norm, NormedRows, divided, rms_norm
from punica_jax.pallas_kernels._operands import require
from punica_jax.pallas_kernels._pool import LoraPool
from punica_jax.pallas_kernels._segments import Segments

# An adapters' pool and which rows use it.
Lora = tuple[LoraPool, Segments]


def lora_linear(
    x: Float[Array, "rows d_in"] | NormedRows,
    weight: Float[Array, "d_out d_in"],
    lora: Lora | None = None,
    *,
    bias: Float[Array, "d_out"] | None = None,
    residual: Float[Array, "rows d_out"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """Apply a linear layer with every row's own adapter.

    *Semantics*: `lora(y, x, pool, segments)` with `y = x W^T + bias + residual`, which
    is rounded once (of many rows, and in the XLA form, before the residual, too).
    Differentiable wherever `lora` is.

    Args:
      x: the rows; or as `lora_normed` returns them.
      weight: of one module or of several that share x, as Hugging Face stores them.
      lora: the layer's pool and the batch's segments, or None for no adapter.
      bias: of the layer.
      residual: added to the product.
      implementation: see `resolve`.

    Raises:
      ValueError: an operand does not fit the others.
    """
    return _apply("plain", x, weight, lora, bias, residual, implementation)


def lora_normed(
    x: Float[Array, "rows d_in"] | NormedRows,
    weight: Float[Array, "d_out d_in"],
    norm: Norm,
    lora: Lora | None = None,
    *,
    bias: Float[Array, "d_out"] | None = None,
    residual: Float[Array, "rows d_out"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows d_out"], Float[Array, "rows d_out"] | NormedRows]:
    """Apply a linear layer, and normalise its rows for the next one.

    *Semantics*: `y = lora_linear(x, ...)`, and `rms_norm(y, norm)`. Where a kernel
    expands a few rows, the second is left for the next product to divide, and rounded
    once instead of twice. Differentiable wherever `lora` is.

    Args:
      x, weight, lora, bias, residual, implementation: see `lora_linear`.
      norm: what `y` is normalised by, in the weight's dtype.

    Raises:
      ValueError: an operand does not fit the others.
    """
    check_linear(x, weight, lora, bias, residual)
    require("the norm", norm.weight, weight.shape[:1], weight.dtype)
    # A product's programs would write so many sums of squares that reading them costs
    # what the norm does; rows not divided yet could pass the greatest float16.
    fits = lora is not None and lora[1].num_passes == 1
    fits = fits and weight.dtype == jnp.bfloat16 and _project.are_few(x, weight)
    operands = (x, weight, lora, bias, residual)
    resolved = resolve_rows(implementation, x)
    if resolved != "xla" and fits:
        return _normed(resolved, norm, *operands)
    y: Any = _linear("plain", resolved, *operands)
    return y, rms_norm(y, norm.weight, eps=norm.eps, implementation=implementation)


def lora_gated(
    x: Float[Array, "rows d_in"] | NormedRows,
    weight: Float[Array, "two_width d_in"],
    lora: Lora | None = None,
    *,
    bias: Float[Array, "two_width"] | None = None,
    residual: Float[Array, "rows two_width"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows width"]:
    """Apply the linear layer of gate and up, and multiply them.

    *Semantics*: `SiLU(g) * u` with `g, u` the halves of `lora_linear`. The kernel keeps
    all that follows the base product in float32 until one rounding at the store; the
    XLA form rounds each step. Differentiable wherever `lora` is.

    Args:
      x, bias, residual, implementation: see `lora_linear`.
      weight: gate's rows and then up's.
      lora: the pool's modules are gate and up.

    Raises:
      ValueError: an operand does not fit the others.
    """
    check_lora(lora)
    width = weight.shape[0] // 2
    if weight.shape[0] % 2:
        raise ValueError(f"weight must be [2 * width, d_in], got {weight.shape}")
    if lora is not None and lora[0].d_outs != (width, width):
        raise ValueError(
            f"the pool must have two modules as wide as the weight's halves, {width}, "
            f"got {lora[0].d_outs}"
        )
    return _apply("gated", x, weight, lora, bias, residual, implementation)


def _apply(form, x, weight, lora, bias, residual, implementation):
    check_linear(x, weight, lora, bias, residual)
    operands = (x, weight, lora, bias, residual)
    return _linear(form, resolve_rows(implementation, x), *operands)


def resolve_rows(implementation: str | None, x: Array | NormedRows) -> str:
    """Return the implementation that runs: no rows are XLA's."""
    resolved = resolve(implementation)
    return resolved if x.shape[0] else "xla"


def check_linear(
    x: Array | NormedRows,
    weight: Array,
    lora: Lora | None,
    bias: Array | None,
    residual: Array | None,
) -> None:
    """Raise unless a layer's operands fit each other."""
    check_lora(lora)
    if len(x.shape) != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            "x must be [rows, d_in] and weight [d_out, d_in], got "
            f"{x.shape} and {weight.shape}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(
            f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}; cast "
            "them before the call"
        )
    if bias is not None:
        require("the bias", bias, weight.shape[:1], weight.dtype)
    if residual is not None:
        shape = (x.shape[0], weight.shape[0])
        require("the residual", residual, shape, weight.dtype)
    if isinstance(x, NormedRows) and x.squares.shape[1:] != x.shape[:1]:
        raise ValueError(
            f"squares must be f32[parts, rows] of {x.shape[0]} rows, got "
            f"{x.squares.shape}"
        )
    if lora is None:
        return
    pool, segments = lora
    check_operand("x", x, pool.d_in, pool, segments)
    if weight.shape[0] != pool.d_out:
        raise ValueError(
            f"the pool's modules must be {weight.shape[0]} wide together, as the "
            f"weight, got {pool.d_outs}"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(form, implementation, x, weight, lora, bias, residual):
    operands = (x, weight, lora, bias, residual)
    if implementation == "xla":
        return _plain(form, implementation, *operands)
    interpret = {"interpret": implementation != "pallas_triton"}
    few = _project.are_few(x, weight)
    if form == "plain" and lora is not None and not few:
        # The expand adds the residual, which is so rounded once: in XLA's product it
        # would be rounded there and by the expand.
        forms, y, shrunk = project_rows(implementation, x, weight, lora, bias, None)
        if shrunk is None:
            return y if residual is None else y + residual
        return forms.expand(y, shrunk, residual, **interpret)
    if form == "gated" and lora is None and few:
        options = {"bias": bias, "residual": residual} | interpret
        return _one_launch.gated(x, weight, **options)
    alone = bias is None and residual is None and implementation == "pallas_triton"
    if form == "gated" and alone and _gated_product.fits(x, weight, lora):
        return _gated_product.gated(divided(x), weight, lora)
    forms, y, shrunk = project_rows(implementation, *operands)
    if form == "gated":
        return forms.gated_expand(y, shrunk, **interpret)
    return y if shrunk is None else forms.expand(y, shrunk, **interpret)


def _plain(form, implementation, *operands):
    y = plain_linear(implementation, *operands)
    return reference.gated(y) if form == "gated" else y


def plain_linear(implementation, x, weight, lora, bias, residual):
    """Return `lora_linear`'s rows by XLA's product, whoever adds the adapters'."""
    x = divided(x)
    y = reference.linear(x, weight, bias, residual)
    if lora is None:
        return y
    return _ops.lora(y, x, *lora, implementation=implementation)


def project_rows(
    implementation, x, weight, lora, bias, residual
) -> tuple[Any, Array, _fused.Shrunk | None]:
    """Return the base product, what is left of the adapters' to add, and who adds it.

    Returns:
      The module of the expands that fit the rows; `[rows, d_out]`; and what they take.
    """
    interpret = implementation != "pallas_triton"
    passes = 1 if lora is None else lora[1].num_passes
    if passes > 1:
        # In-place adds of several adapters a row are launches of their own.
        y = plain_linear(implementation, x, weight, lora, bias, residual)
        return _fused, y, None
    forms, v = _fused, None
    if _project.are_few(x, weight):
        forms = _row_expand
        y, v = _project.project(
            x, weight, lora, bias=bias, residual=residual, interpret=interpret
        )
    else:
        x = divided(x)
        y = reference.linear(x, weight, bias, residual)
        if lora is not None:
            v = _shrink.shrink(x, *lora, interpret=interpret)
            forms = _row_expand if _row_expand.fits(*lora) else _fused
    return forms, y, None if v is None or lora is None else _fused.Shrunk(v, *lora)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(implementation, norm, x, weight, lora, bias, residual):
    forms, y, shrunk = project_rows(implementation, x, weight, lora, bias, residual)
    interpret = implementation != "pallas_triton"
    return forms.normed_expand(y, shrunk, norm, interpret=interpret)


def _normed_forward(implementation, *operands):
    return _normed(implementation, *operands), operands


def _normed_backward(implementation, saved, gradients):
    num_parts = gradients[1].squares.shape[0]

    def plain(norm, *operands):
        y = plain_linear(implementation, *operands)
        return y, NormedRows.of(y, norm, num_parts)

    _, pull = jax.vjp(plain, *saved)
    return pull(gradients)


_normed.defvjp(_normed_forward, _normed_backward)


def _linear_forward(form, implementation, *operands):
    return _linear(form, implementation, *operands), operands


def _linear_backward(form, implementation, saved, dy):
    _, pull = jax.vjp(functools.partial(_plain, form, implementation), *saved)
    return pull(dy)


_linear.defvjp(_linear_forward, _linear_backward)
