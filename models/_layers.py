"""The layers of a decoder: normalisation, rotary embedding, a linear layer with LoRA.

Knows flat rows and widths; nothing of caches, sequences, files or whole models. An
adapter's weights are never a layer's state: they come in with the call.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int32

import punica_jax.pallas_kernels as kernels
from punica_jax.pallas_kernels import LoraPool, Norm, NormedRows, Segments, reference

# Standard deviation of random weights: transformers' default for Llama.
INIT_STDDEV = 0.02

# `attend(layer_index, unprojected)` -> `[rows, heads, head_dim]`.
Attend = Callable[[int, "Unprojected"], Array]


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal_weight(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw a random weight in one compiled program per shape, drawn in float32."""
    return (INIT_STDDEV * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


class RMSNorm(nnx.Module):
    """Divide each row by its root mean square, then multiply by a learned vector.

    The mean and the quotient are float32; the quotient is rounded to the row's dtype
    before it meets the weight, as in transformers' Llama.
    """

    def __init__(self, width: int, eps: float, *, dtype: Any):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(
        self, x: Float[Array, "*rows width"], *, implementation: str | None = None
    ) -> Float[Array, "*rows width"]:
        """Normalise rows; see `punica_jax.pallas_kernels.rms_norm`."""
        return kernels.rms_norm(
            x, self.weight[...], eps=self.eps, implementation=implementation
        )

    @property
    def arrays(self) -> Norm:
        """What it multiplies and divides by, as `pallas_kernels` takes it."""
        return Norm(self.weight[...], self.eps)


def rotary_tables(
    positions: Int32[Array, "rows"],
    inv_freq: Float[Array, "pairs"],
    dtype: Any,
    amplitude: float = 1.0,
) -> tuple[Float[Array, "rows rotary_dim"], Float[Array, "rows rotary_dim"]]:
    """Return the cosine and sine of each row's angles, once for all layers.

    Args:
      positions: each row's place in its sequence, from 0.
      inv_freq: angle per position of each pair of lanes, float32.
      dtype: what the tables, computed in float32, are rounded to.
      amplitude: what multiplies them.
    """
    # Repeated while they are constants: of angles, joined, XLA makes a launch for each
    # of the tables.
    inv_freq = jnp.concatenate([inv_freq, inv_freq])
    angles = positions.astype(jnp.float32)[:, None] * inv_freq[None, :]
    cos, sin = jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude
    return cos.astype(dtype), sin.astype(dtype)


class LoraLinear(nnx.Module):
    """A linear layer, or several that share their input, with a LoRA for each row.

    *Semantics*, with `A`, `B` those of row r's adapter in the pool:
    `y[r] = W x[r] + bias + B A x[r]`; rows without an adapter get `W x[r] + bias`.

    Attributes:
      weight: `[d_out_total, d_in]`, one module after the other, as Hugging Face
        stores each.
      bias: `[d_out_total]`, or None.
      d_outs: width of each module's output.
    """

    def __init__(
        self,
        d_in: int,
        d_outs: int | Sequence[int],
        *,
        use_bias: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Make a layer with random weights and a bias of zeros.

        Args:
          d_in: width of the input.
          d_outs: width of the output, or of each of several modules' outputs.
          use_bias: add a bias.
          dtype: of the weights and of the output.
          rngs: its `params` stream gives the weights.

        Raises:
          ValueError: a width is no integer of at least 1, or there is none.
        """
        given: Any = d_outs
        are_many = isinstance(given, Iterable) and not isinstance(given, str)
        widths: list[Any] = list(given) if are_many else [given]
        if not widths:
            raise ValueError("d_outs must have a width for each module, got none")
        for name, width in (("d_in", d_in), *(("d_outs", width) for width in widths)):
            kernels.require_count(name, width)
        self.d_outs = tuple(map(int, widths))
        d_out = sum(self.d_outs)
        self.weight = nnx.Param(
            normal_weight(rngs.params(), (d_out, d_in), jnp.dtype(dtype))
        )
        self.bias = nnx.Param(jnp.zeros((d_out,), dtype)) if use_bias else None

    def __call__(
        self,
        x: Float[Array, "rows d_in"] | NormedRows,
        lora: tuple[LoraPool, Segments] | None = None,
        *,
        residual: Float[Array, "rows d_out"] | None = None,
        implementation: str | None = None,
    ) -> Float[Array, "rows d_out"]:
        """Apply the layer.

        Args:
          x: the rows; or as `punica_jax.pallas_kernels.lora_normed` returns them.
          lora: this layer's pool and the batch's segments, or None for no adapter.
          residual: added to the output.
          implementation: see `punica_jax.pallas_kernels.resolve`.

        Returns:
          The modules' outputs side by side; rounded before the LoRA is added.

        Raises:
          ValueError: `lora` is no such pair, or an operand does not fit the others.
        """
        return kernels.lora_linear(
            x,
            lora=lora,
            residual=residual,
            implementation=implementation,
            **self.arrays,
        )

    @property
    def arrays(self) -> dict[str, Any]:
        """The weight and the bias, as the operations of `pallas_kernels` name them."""
        bias = None if self.bias is None else self.bias[...]
        return {"weight": self.weight[...], "bias": bias}

    def split(self, y: Float[Array, "rows d_out"]) -> list[Array]:
        """Cut an output into the modules' own."""
        edges = list(itertools.accumulate(self.d_outs))[:-1]
        return jnp.split(y, edges, axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Unprojected:
    """What a layer gives to attention: q, k and v, and all that is left to do for them.

    That is left to whoever attends, since one kernel can do all that follows the base
    product where keys and values go to a cache.

    Attributes:
      x: input of the three modules, `[rows, d_in]`, a norm's.
      linear: the layer of all three, q's heads first, then k's, then v's.
      lora: its pool and the batch's segments, or None.
      rotary: cosine and sine of each row's angles, `[rows, rotary_dim]`.
      norms: of each head of q and of k, or None.
      head_dim: width of a head (static).
      implementation: see `punica_jax.pallas_kernels.resolve` (static).
    """

    x: Array | NormedRows
    linear: LoraLinear
    lora: tuple[LoraPool, Segments] | None
    rotary: tuple[Array, Array]
    norms: tuple[RMSNorm, RMSNorm] | None
    head_dim: int = dataclasses.field(metadata={"static": True})
    implementation: str | None = dataclasses.field(metadata={"static": True})

    @property
    def is_plain(self) -> bool:
        """Whether heads are rotated whole, and nothing comes before it."""
        return self.norms is None and self.rotary[0].shape[-1] == self.head_dim

    def heads(self) -> tuple[Array, Array, Array]:
        """Return q, k and v of each row, the first two rotated."""
        return self.cut(
            self.linear(self.x, self.lora, implementation=self.implementation)
        )

    def cut(self, y: Array) -> tuple[Array, Array, Array]:
        """Return `heads` of the layer's output."""
        modules = self.linear.split(y)
        q, k, v = (part.reshape(y.shape[0], -1, self.head_dim) for part in modules)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = (reference.rotate(heads, self.rotary) for heads in (q, k))
        return q, k, v


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Attended:
    """Rows behind a layer's attention; of what follows, a row needs no other.

    Attributes:
      x: the rows that the layer was given.
      heads: what they attended to, all heads of a row side by side.
    """

    x: Float[Array, "rows hidden"]
    heads: Float[Array, "rows heads_dim"]

    def take(self, rows: Int32[Array, "n"]) -> "Attended":
        """Return some of the rows, by their numbers."""
        return Attended(self.x[rows], self.heads[rows])

    def join(self) -> Float[Array, "rows hidden_and_heads"]:
        """Return both side by side, for `split`."""
        return jnp.concatenate([self.x, self.heads], axis=1)

    @classmethod
    def split(
        cls, joined: Float[Array, "rows hidden_and_heads"], hidden_size: int
    ) -> "Attended":
        """Take apart what `join` gave.

        Args:
          joined: its rows, all or some.
          hidden_size: the model's, which is `x`'s width.
        """
        return cls(joined[:, :hidden_size], joined[:, hidden_size:])


def dense_causal_attention(seq_len: int) -> Attend:
    """Return an `attend` for training: no cache, differentiable, plain products.

    Args:
      seq_len: rows of each sequence. A batch's rows are `[seqs * seq_len]`, one
        sequence after the other, none padded.
    """

    def attend(layer_index: int, unprojected: Unprojected) -> Array:
        del layer_index
        q, k, v = unprojected.heads()
        rows, heads, head_dim = q.shape
        if rows % seq_len:
            raise ValueError(
                f"rows must be a multiple of seq_len {seq_len}, got {rows}"
            )
        einsum = functools.partial(
            jnp.einsum,
            precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        q = q.reshape(-1, seq_len, k.shape[1], heads // k.shape[1], head_dim)
        k, v = (a.reshape(-1, seq_len, *a.shape[1:]) for a in (k, v))
        scores = einsum("sqkgd,stkd->skgqt", q, k) * head_dim**-0.5
        seen = jnp.tril(jnp.ones((seq_len, seq_len), bool))
        scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = einsum("skgqt,stkd->sqkgd", weights, v)
        return out.reshape(rows, heads, head_dim).astype(v.dtype)

    return attend
