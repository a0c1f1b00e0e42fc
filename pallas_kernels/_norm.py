"""Root mean square normalisation of rows, one program a row, or a part of others.

XLA makes two launches of it where a kernel of ours reads the result. Where few rows are
multiplied before and after it, it is no launch at all: see `NormedRows`. Knows arrays;
nothing of layers.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float

from punica_jax.pallas_kernels import reference
from punica_jax.pallas_kernels._dispatch import resolve
from punica_jax.pallas_kernels._launch import pallas_call
from punica_jax.pallas_kernels._operands import require
from punica_jax.pallas_kernels._page_tiles import load, mask_of

# Of a row's parts, each added to in turn. More are waited for less often.
_MOST_SUMS = 16
# Values that a program's registers hold.
_MAX_WIDTH = 16384


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """What a normalisation multiplies and divides by.

    Attributes:
      weight: `[width]`.
      eps: keeps a row of zeros finite (static).
    """

    weight: Array
    eps: float = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormedRows:
    """Normalised rows that are still to be divided by their root mean square.

    *Semantics*: row r is `x[r] / sqrt(squares[:, r].sum() / width + eps)`. A linear
    layer commutes with that factor: whoever writes the rows multiplies by the norm's
    weight, and whoever multiplies them by a matrix divides at its end. So a norm takes
    no launch, of 1.7 us in a step of 32 rows on one H200.

    Attributes:
      x: `[rows, width]`, times the norm's weight, rounded.
      squares: `f32[parts, rows]`, the squares of the rows as they were before, summed
        over some of the columns each.
      eps: of the norm (static).
    """

    x: Array
    squares: Array
    eps: float = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, x: Array, norm: Norm, num_parts: int = 1) -> "NormedRows":
        """Return `[rows, width]` normalised but for the quotient."""
        wide = x.astype(jnp.float32)
        squares = jnp.square(wide).sum(axis=-1)[None]
        return cls(
            x=(wide * norm.weight.astype(jnp.float32)[None, :]).astype(x.dtype),
            squares=jnp.pad(squares, ((0, num_parts - 1), (0, 0))),
            eps=norm.eps,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def dtype(self) -> Any:
        return self.x.dtype


def divided(rows: Array | NormedRows) -> Array:
    """Return rows that nothing is left to do for, `[rows, width]`."""
    if not isinstance(rows, NormedRows):
        return rows
    mean = rows.squares.sum(axis=0) / rows.x.shape[1]
    scale = lax.rsqrt(mean + rows.eps)[:, None]
    return (rows.x.astype(jnp.float32) * scale).astype(rows.x.dtype)


def row_scales(
    squares_ref: Any,  # f32[parts, rows]
    row: Array,  # i32[n]
    live: Array | None,  # bool[n]
    width: int,
    eps: float,
) -> Array:
    """Return what rows of a `NormedRows` are multiplied by, `f32[n, 1]`; in a kernel.

    In a loop: all parts' loads at once take registers from the rest of the program, of
    which two instead of four then share a multiprocessor.
    """
    num_parts = squares_ref.shape[0]
    num_sums = _num_sums(num_parts)

    def add_part(total, part):
        mask = live
        if num_parts % num_sums:
            mask = mask_of(row.shape, live, jnp.full(row.shape, part < num_parts))
        return total + load(squares_ref.at[part, row], mask)

    def add(step, sums):
        first = step * num_sums
        return [add_part(total, first + i) for i, total in enumerate(sums)]

    zeros = [jnp.zeros(row.shape, jnp.float32)] * num_sums
    sums = lax.fori_loop(0, pl.cdiv(num_parts, num_sums), add, zeros)
    return scale_of(_add_pairs(sums), width, eps)[:, None]


def sum_of_parts(load_part: Callable[[int], Array], num_parts: int) -> Array:
    """Return the sum that `row_scales` takes, in its order, of what has registers."""
    num_sums = _num_sums(num_parts)
    sums = []
    for first in range(num_sums):
        own = [load_part(part) for part in range(first, num_parts, num_sums)]
        sums.append(functools.reduce(operator.add, own))
    return _add_pairs(sums)


def _num_sums(num_parts: int) -> int:
    return 1 << min(_MOST_SUMS, num_parts).bit_length() - 1


def _add_pairs(sums: Sequence[Array]) -> Array:
    """Add by halves, of any number of rows alike.

    A sum over an axis has an order of the compiler's choosing, which was another one
    for 32 rows than for 16.
    """
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [
            own + other for own, other in zip(sums[:half], sums[half:], strict=True)
        ]
    return sums[0]


def scale_of(total: Array, width: int, eps: float) -> Array:
    """Return what rows of a sum of squares are multiplied by.

    No product is added to: some compilers would round that once, and others twice.
    """
    return lax.rsqrt((total + width * eps) * (1 / width))


# Jitted so that all of a model's layers share one trace of it.
@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def rms_norm(
    x: Float[Array, "*rows width"],
    weight: Float[Array, "width"],
    *,
    eps: float,
    implementation: str | None = None,
) -> Float[Array, "*rows width"]:
    """Divide each row by its root mean square, then multiply by a vector.

    *Semantics*: `weight * (x / sqrt(mean(x^2) + eps))`; the quotient is computed in
    float32 and rounded to the row's dtype before it meets the weight. Differentiable.

    Args:
      x: the rows.
      weight: of the rows' dtype.
      eps: keeps a row of zeros finite.
      implementation: see `resolve`. Other shapes than `[rows, width]`, no rows, and
        rows that one program cannot hold, take the XLA form anyway.

    Raises:
      ValueError: the weight is not the rows'.
    """
    require("the norm's weight", weight, x.shape[-1:], x.dtype)
    implementation = resolve(implementation)
    if x.ndim != 2 or not x.shape[0] or x.shape[1] > _MAX_WIDTH:
        implementation = "xla"
    return _norm(implementation, eps, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(implementation, eps, x, weight):
    if implementation == "xla":
        return reference.rms_norm(x, weight, eps)
    rows, width = x.shape
    block = max(16, pl.next_power_of_2(width))
    return pallas_call(
        functools.partial(_norm_kernel, eps=eps, block=block),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(
            num_warps=8 if block >= 2048 else 4, num_stages=1
        ),
        interpret=implementation == "pallas_interpret",
        name="rms_norm",
    )(x, weight)


def _norm_kernel(
    x_ref,  # [rows, width]
    weight_ref,  # [width]
    out_ref,  # [rows, width]
    *,
    eps: float,
    block: int,
):
    row, width = pl.program_id(0), x_ref.shape[1]
    column = jnp.arange(block, dtype=jnp.int32)
    inside = None if block == width else column < width
    weight = load(weight_ref.at[column], inside)
    x = load(x_ref.at[row, column], inside).astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(x * x) / width + eps)
    out = weight * (x * scale).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row, column], out, mask=inside)


def _norm_forward(implementation, eps, x, weight):
    return _norm(implementation, eps, x, weight), (x, weight)


def _norm_backward(implementation, eps, saved, d_out):
    del implementation
    _, pull = jax.vjp(lambda x, weight: reference.rms_norm(x, weight, eps), *saved)
    return pull(d_out)


_norm.defvjp(_norm_forward, _norm_backward)
