"""Llama and its kin: a decoder on flat rows, one forward for prefill, decode, training.

Knows tokens, positions and layers. Knows nothing of caches, sequences or files: how a
row sees the others is the `attend` function's business.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int32

import punica_jax.pallas_kernels as kernels
from punica_jax.models._config import LlamaConfig
from punica_jax.models._layers import (
    Attend,
    Attended,
    LoraLinear,
    RMSNorm,
    Unprojected,
    normal_weight,
    rotary_tables,
)
from punica_jax.models._lora import LayerPools, LoraPools
from punica_jax.models._rope import inverse_frequencies
from punica_jax.pallas_kernels import LoraPool, NormedRows, Segments, reference


class DecoderLayer(nnx.Module):
    """One layer: attention, then a gated feed-forward network, each with a residual."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs):
        def linear(group: str, use_bias: bool) -> LoraLinear:
            return LoraLinear(
                config.d_in(group),
                config.d_outs(group),
                use_bias=use_bias,
                dtype=dtype,
                rngs=rngs,
            )

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, config.rms_norm_eps, dtype=dtype)

        self.input_norm = norm(config.hidden_size)
        self.qkv = linear("qkv", config.qkv_bias)
        self.o = linear("o", config.attention_bias)
        self.q_norm = norm(config.head_dim) if config.family.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.family.qk_norm else None
        self.mlp_norm = norm(config.hidden_size)
        self.gate_up = linear("gate_up", config.mlp_bias)
        self.down = linear("down", config.mlp_bias)
        self.head_dim = config.head_dim

    def heads(
        self,
        normed: Float[Array, "rows hidden"] | NormedRows,
        index: int,
        rotary: tuple[Array, Array],
        attend: Attend,
        pools: LayerPools | None,
        segments: Segments | None,
        *,
        implementation: str | None = None,
    ) -> Float[Array, "rows heads_dim"]:
        """Return what each row attends to in layer number `index`.

        Args:
          normed: the rows after `input_norm`.
          index, rotary, attend, pools, segments, implementation: see `Llama.__call__`.
        """
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm, self.k_norm
        unprojected = Unprojected(
            x=normed,
            linear=self.qkv,
            lora=_lora_of(pools, segments, "qkv"),
            rotary=rotary,
            norms=norms,
            head_dim=self.head_dim,
            implementation=implementation,
        )
        heads = attend(index, unprojected)
        return heads.reshape(heads.shape[0], -1)

    def after_attention(
        self,
        attended: Attended,
        pools: LayerPools | None,
        segments: Segments | None,
        *,
        next_norm: RMSNorm,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "rows hidden"], Array | NormedRows]:
        """Apply all that follows attention.

        Args:
          attended: the rows, and what `heads` gave for them.
          pools, segments, implementation: see `Llama.__call__`.
          next_norm: of whatever comes after the layer.

        Returns:
          The rows, and the rows after `next_norm`.
        """
        return _after_attention(
            self, next_norm, attended, pools, segments, implementation=implementation
        )


def _lora_of(
    pools: LayerPools | None, segments: Segments | None, group: str
) -> tuple[LoraPool, Segments] | None:
    """Return what a linear layer takes of a layer's adapters."""
    if pools is None or segments is None:
        return None
    return getattr(pools, group), segments


def _layer_pools(lora: LoraPools | None, index: int) -> LayerPools | None:
    return None if lora is None else lora.layer(index)


# A function of its own is traced and lowered once for all layers, which differ in
# their arrays alone: 32 layers take a tenth of the time until XLA begins.
@functools.partial(jax.jit, static_argnames="implementation")
def _after_attention(
    layer: DecoderLayer,
    next_norm: RMSNorm,
    attended: Attended,
    pools: LayerPools | None,
    segments: Segments | None,
    *,
    implementation: str | None,
) -> tuple[Array, Array | NormedRows]:
    """Apply all of a layer that follows attention, and the norm after it."""
    own = functools.partial(_lora_of, pools, segments)
    x, normed = kernels.lora_normed(
        attended.heads,
        norm=layer.mlp_norm.arrays,
        lora=own("o"),
        residual=attended.x,
        implementation=implementation,
        **layer.o.arrays,
    )
    gated = kernels.lora_gated(
        normed,
        lora=own("gate_up"),
        implementation=implementation,
        **layer.gate_up.arrays,
    )
    return kernels.lora_normed(
        gated,
        norm=next_norm.arrays,
        lora=own("down"),
        residual=x,
        implementation=implementation,
        **layer.down.arrays,
    )


class Llama(nnx.Module):
    """A Llama-shaped decoder of any family that `LlamaConfig` describes.

    Attributes:
      config: its sizes.
      embed: `[vocab, hidden]`.
      layers: the decoder layers.
      norm: the last normalisation.
      lm_head: `[vocab, hidden]`, or None where the embedding serves as both.
    """

    def __init__(
        self, config: LlamaConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        """Make a model with random weights; `load_model` reads trained ones.

        Args:
          config: the sizes.
          dtype: of the weights and of everything computed between the layers.
          rngs: its `params` stream gives the weights.
        """

        def table() -> nnx.Param:
            shape = (config.vocab_size, config.hidden_size)
            return nnx.Param(normal_weight(rngs.params(), shape, jnp.dtype(dtype)))

        self.config = config
        self.embed = table()
        self.layers = nnx.List(
            [
                DecoderLayer(config, dtype=dtype, rngs=rngs)
                for _ in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.lm_head = None if config.tie_word_embeddings else table()

    @property
    def dtype(self) -> Any:
        """Of the weights."""
        return self.embed.dtype

    def __call__(
        self,
        tokens: Int32[Array, "rows"],
        positions: Int32[Array, "rows"],
        attend: Attend,
        lora: LoraPools | None = None,
        segments: Segments | None = None,
        *,
        implementation: str | None = None,
    ) -> Float[Array, "rows hidden"]:
        """Run the decoder on flat rows.

        Args:
          tokens: each row's token, below the vocabulary's size. Whoever takes tokens
            from a user checks them: others are clamped here.
          positions: each row's place in its sequence, from 0.
          attend: called once a layer as `attend(layer_index, unprojected)`, see
            `Unprojected`; returns `[rows, heads, head_dim]`. `CachedAttention` for
            serving, `dense_causal_attention` for training.
          lora: the adapters' pools, or what else gives `LayerPools` for each
            `layer(index)`; or None.
          segments: which rows use which adapter, made once for all layers; None exactly
            when `lora` is.
          implementation: see `punica_jax.pallas_kernels.resolve`.

        Returns:
          The hidden rows after the last normalisation.

        Raises:
          ValueError: only one of `lora` and `segments` is given.
        """
        attended = self.attended(
            tokens, positions, attend, lora, segments, implementation=implementation
        )
        return self.hidden(attended, lora, segments, implementation=implementation)

    def attended(
        self,
        tokens: Int32[Array, "rows"],
        positions: Int32[Array, "rows"],
        attend: Attend,
        lora: LoraPools | None = None,
        segments: Segments | None = None,
        *,
        implementation: str | None = None,
    ) -> Attended:
        """Run the decoder up to its last attention; see `__call__`.

        Of what comes then, `hidden`, a row needs no other: who wants the logits of
        a few rows goes on with these.

        Raises:
          ValueError: only one of `lora` and `segments` is given.
        """
        if (lora is None) != (segments is None):
            raise ValueError(
                "lora and segments must be given together, got "
                f"{'segments' if lora is None else 'lora'} alone"
            )
        config = self.config
        scaling = config.rope_scaling
        inv_freq = inverse_frequencies(config.rotary_dim, config.rope_theta, scaling)
        amplitude = 1.0 if scaling is None else scaling.amplitude
        rotary = rotary_tables(positions, jnp.asarray(inv_freq), self.dtype, amplitude)

        def attended_in(index: int, x: Array, normed: Any) -> Attended:
            heads = self.layers[index].heads(
                normed,
                index,
                rotary,
                attend,
                _layer_pools(lora, index),
                segments,
                implementation=implementation,
            )
            return Attended(x, heads)

        x = self.embed[...].at[tokens].get(mode="clip")
        normed = self.layers[0].input_norm(x, implementation=implementation)
        attended = attended_in(0, x, normed)
        for index, (layer, following) in enumerate(itertools.pairwise(self.layers)):
            x, normed = layer.after_attention(
                attended,
                _layer_pools(lora, index),
                segments,
                next_norm=following.input_norm,
                implementation=implementation,
            )
            attended = attended_in(index + 1, x, normed)
        return attended

    def hidden(
        self,
        attended: Attended,
        lora: LoraPools | None = None,
        segments: Segments | None = None,
        *,
        implementation: str | None = None,
    ) -> Float[Array, "rows hidden"]:
        """Return `attended`'s rows after the last normalisation.

        Args:
          attended: all rows of a batch, or some.
          lora: as `attended` was given.
          segments: which of these rows use which adapter.
          implementation: see `punica_jax.pallas_kernels.resolve`.
        """
        last = len(self.layers) - 1
        _, normed = self.layers[last].after_attention(
            attended,
            _layer_pools(lora, last),
            segments,
            next_norm=self.norm,
            implementation=implementation,
        )
        return kernels.divided(normed)

    def logits(self, hidden: Float[Array, "n hidden"]) -> Float[Array, "n vocab"]:
        """Return the float32 scores of every next token for some hidden rows."""
        table = self.embed if self.lm_head is None else self.lm_head
        return reference.matmul_rows(hidden, table[...])
