"""Root mean square normalisation of rows, one program a row.

XLA makes two launches of it where a kernel of ours reads the result. Knows arrays;
nothing of layers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float

from punica_jax.pallas_kernels import reference
from punica_jax.pallas_kernels._dispatch import resolve
from punica_jax.pallas_kernels._page_tiles import load

# Values that a program's registers hold.
_MAX_WIDTH = 16384


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
      implementation: see `resolve`. Other shapes than `[rows, width]`, and rows that
        one program cannot hold, take the XLA form anyway.
    """
    implementation = resolve(implementation)
    if x.ndim != 2 or x.shape[1] > _MAX_WIDTH:
        implementation = "xla"
    return _norm(implementation, eps, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(implementation, eps, x, weight):
    if implementation == "xla":
        return reference.rms_norm(x, weight, eps)
    rows, width = x.shape
    block = max(16, pl.next_power_of_2(width))
    return pl.pallas_call(
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
