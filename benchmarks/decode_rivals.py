"""Other ways to add the adapters' products in the very same decode step.

A rival's `Stacks` take the place of the pools in a step's arguments; `adapt` makes a
model's layers understand both. Knows arrays; nothing of batches or timing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks.sgmv_rivals import launch_loop, launch_ragged_dot
from punica_jax.batch import Bucket
from punica_jax.bench import gather_lora
from punica_jax.models import (
    MODULE_GROUPS,
    Attended,
    DecoderLayer,
    Llama,
    LoraPools,
    RMSNorm,
)
from punica_jax.models._layers import Unprojected
from punica_jax.pallas_kernels import RANK_PAGE, LoraPool, NormedRows, reference
from punica_jax.runner import Runner


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stack:
    """One layer's one group: dense adapters, and which row uses which.

    Attributes:
      a: `[slots, C, rank, d_in]`; for `ragged_dot` `[slots, d_in, C * rank]`.
      b: `[slots, d_out, rank]`; for `ragged_dot` `[slots, rank, d_out]`.
      rows: what the method needs to know of the rows: arrays.
      d_outs: width of each of the C modules' outputs (static).
      launch: `launch(y, x, a, b, rows, d_outs)` (static).
    """

    a: Array
    b: Array
    rows: tuple[Array, ...]
    d_outs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    launch: Callable[..., Array] = dataclasses.field(metadata={"static": True})

    def add(self, y: Array, x: Array) -> Array:
        return self.launch(y, x, self.a, self.b, self.rows, self.d_outs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(Unprojected):
    """Its `x`, an array, is what the modules gave already."""

    @property
    def is_plain(self) -> bool:
        return False

    def heads(self) -> tuple[Array, Array, Array]:
        assert not isinstance(self.x, NormedRows)
        return self.cut(self.x)


# A rival is XLA's, as its users write it, but for attention.
_XLA: dict[str, Any] = {"implementation": "xla"}


class AnyLayer(nnx.Module):
    """A decoder layer that takes `Stack`s where it would take pools.

    With pools, or without adapters, it is the layer itself.
    """

    def __init__(self, layer: DecoderLayer):
        self.layer = layer

    def heads(
        self, normed: Array, index: int, rotary, attend, pools, segments, **options: Any
    ) -> Array:
        layer = self.layer
        if not isinstance(pools, LayerStacks):
            own = pools, segments
            return layer.heads(normed, index, rotary, attend, *own, **options)
        given = Given(
            x=pools.qkv.add(layer.qkv(normed, **_XLA), normed),
            linear=layer.qkv,
            lora=None,
            rotary=rotary,
            norms=None,
            head_dim=layer.head_dim,
            **_XLA,
        )
        return attend(index, given).reshape(normed.shape[0], -1)

    def after_attention(
        self,
        attended: Attended,
        pools,
        segments,
        *,
        next_norm: RMSNorm,
        **options: Any,
    ) -> tuple[Array, Any]:
        layer = self.layer
        if not isinstance(pools, LayerStacks):
            options["next_norm"] = next_norm
            return layer.after_attention(attended, pools, segments, **options)

        def linear(group: str, rows: Array) -> Array:
            return getattr(pools, group).add(getattr(layer, group)(rows, **_XLA), rows)

        x = attended.x + linear("o", attended.heads)
        gated = reference.gated(linear("gate_up", layer.mlp_norm(x, **_XLA)))
        x = x + linear("down", gated)
        return x, next_norm(x, **_XLA)

    @property
    def input_norm(self) -> RMSNorm:
        return self.layer.input_norm


def adapt(model: Llama) -> None:
    """Let a model's layers take pools or stacks; what pools compute stays the same."""
    layers: Any = nnx.List([AnyLayer(layer) for layer in model.layers])
    model.layers = layers


def _gather(y, x, a, b, rows, d_outs):
    return gather_lora(y, x, rows[0], a, b, d_outs=d_outs)


def _ragged_dot(y, x, a, b, rows, d_outs):
    order, inverse, counts = rows
    return launch_ragged_dot(y, x, a, b, order, inverse, counts, d_outs=d_outs)


def _loop(y, x, a, b, rows, d_outs):
    return launch_loop(y, x, a, b, rows[0], d_outs=d_outs)


LAUNCHES = {"gather": _gather, "ragged_dot": _ragged_dot, "loop": _loop}


class LayerStacks(NamedTuple):
    """One decoder layer's stack for each of its module groups."""

    qkv: Stack
    o: Stack
    gate_up: Stack
    down: Stack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacks:
    """A step's adapters as a rival wants them, in place of `LoraPools`.

    Attributes:
      groups: module group -> a `Stack` for each layer.
      num_slots: adapters of the stacks (static).
    """

    groups: dict[str, tuple[Stack, ...]]
    num_slots: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, pools: LoraPools, method: str, num_adapters: int) -> "Stacks":
        """Copy the first `num_adapters` slots; a lower rank is padded with zeros."""
        groups = {}
        for name in MODULE_GROUPS:
            layers = (pools.group(name).layer(i) for i in range(pools.num_layers))
            groups[name] = tuple(
                Stack(
                    *_dense(layer, method == "ragged_dot", num_adapters, _rank(layer)),
                    rows=(),
                    d_outs=layer.d_outs,
                    launch=LAUNCHES[method],
                )
                for layer in layers
            )
        return cls(groups=groups, num_slots=num_adapters)

    def for_rows(self, slots: np.ndarray) -> "Stacks":
        """Return the stacks for a batch whose row `i` uses adapter `slots[i]`."""
        assert slots.min() >= 0, "a rival has no rows without an adapter"
        tables: tuple[Any, ...] = (slots,)
        if self.groups["qkv"][0].launch is _ragged_dot:
            order = np.argsort(slots, kind="stable")
            counts = np.bincount(slots, minlength=self.num_slots)
            tables = order, np.argsort(order), counts
        rows = tuple(jnp.asarray(table, jnp.int32) for table in tables)
        return dataclasses.replace(
            self,
            groups={
                name: tuple(dataclasses.replace(stack, rows=rows) for stack in stacks)
                for name, stacks in self.groups.items()
            },
        )

    def layer(self, index: int) -> "LayerStacks":
        return LayerStacks(*(self.groups[g][index] for g in LayerStacks._fields))


def _rank(pool: LoraPool) -> int:
    return RANK_PAGE * int(np.asarray(pool.layer_num_pages).max())


class AnyRunner(Runner):
    """A runner of pools or stacks."""

    def overlaps(self, bucket: Bucket) -> bool:
        """Let rivals run as they are fastest: launches beside each other.

        8B, 32 rows of one adapter, by XLA's gather on one H200: 5.7 ms so, else 6.3.
        """
        return isinstance(self.adapters.pools, Stacks) or super().overlaps(bucket)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _dense(
    pool: LoraPool, transposed: bool, num_adapters: int, rank: int
) -> tuple[Array, Array]:
    table = pool.page_table[:num_adapters, : rank // RANK_PAGE] + pool.first_page
    page = jnp.arange(table.shape[1])[None, :]
    used = page < pool.layer_num_pages[:num_adapters].max(axis=1)[:, None]
    # [slots, pages, ...] -> [slots, C, rank, d_in] and [slots, rank, d_out]
    a = jnp.where(used[:, :, None, None, None], pool.a[table], 0).astype(pool.dtype)
    b = jnp.where(used[:, :, None, None], pool.b[table], 0).astype(pool.dtype)
    a = a.swapaxes(1, 2).reshape(num_adapters, pool.num_modules, rank, pool.d_in)
    b = b.reshape(num_adapters, rank, pool.d_out)
    if transposed:
        return a.reshape(num_adapters, -1, pool.d_in).swapaxes(1, 2), b
    return a, b.swapaxes(1, 2)
