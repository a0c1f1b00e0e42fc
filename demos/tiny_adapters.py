"""Adapters that train together: their weights in rank pages, with true ranks.

What trains are arrays of the pools' own shapes, so the library's mixed-adapter op takes
them as they are. A mask keeps lanes past an adapter's rank, and modules it does not
target, at zero: they get no gradient and are not saved.

Knows nothing of tasks, tokens or optimisers.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from punica_jax.models import MODULE_GROUPS, LayerPools, LlamaConfig, save_adapter
from punica_jax.models._base_modules import BaseModule, base_modules
from punica_jax.models._peft_config import PeftLoraConfig
from punica_jax.pallas_kernels import RANK_PAGE, LoraPool

# group -> per layer (A `f32[pages, C, 16, d_in]`, B `f32[pages, 16, d_out_total]`);
# unlike the pools' B, this one is not multiplied by the scale.
AdapterWeights = dict[str, list[tuple[Array, Array]]]


@dataclasses.dataclass(frozen=True)
class _GroupLayout:
    """Where one module group's adapters lie, and which lanes they use.

    Attributes:
      page_table: `i32[slots, max_pages]`.
      num_pages: per layer `i32[slots, C]`.
      a_masks: per layer `f32[pages, C, 16, 1]`, 1 where an adapter has that rank.
      b_scales: per layer `f32[pages, 16, d_out_total]`, the adapter's scale there.
    """

    page_table: np.ndarray
    num_pages: list[np.ndarray]
    a_masks: list[np.ndarray]
    b_scales: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class TrainingPools:
    """What a model takes in place of `LoraPools`: arrays of its own for each layer.

    Each layer's gradient of arrays that hold all layers would be as large as they are.
    """

    layers: tuple[LayerPools, ...]

    def layer(self, index: int) -> LayerPools:
        return self.layers[index]


class AdapterSet:
    """Several adapters of one base model, one a slot, laid out for training.

    Attributes:
      fields: name -> the fields of its `adapter_config.json`; the place in this
        mapping is the adapter's slot.
    """

    def __init__(
        self, config: LlamaConfig, fields: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.fields = dict(fields)
        self._config = config
        self._modules = tuple(base_modules(config))
        self._specs = [
            PeftLoraConfig.from_fields({"peft_type": "LORA", **adapter})
            for adapter in self.fields.values()
        ]
        self._layouts = {group: self._lay_out(group) for group in MODULE_GROUPS}

    def init(self, rng: np.random.Generator) -> AdapterWeights:
        """Draw A from U(-1/sqrt(d_in), 1/sqrt(d_in)) and set B to zero, as PEFT does.

        The numbers come from the host, so they are the same on every device.
        """
        weights: AdapterWeights = {}
        for group, layout in self._layouts.items():
            d_in = self._config.d_in(group)
            weights[group] = []
            for mask, scale in zip(layout.a_masks, layout.b_scales, strict=True):
                shape = (*mask.shape[:3], d_in)
                a = rng.uniform(-(d_in**-0.5), d_in**-0.5, shape).astype(np.float32)
                weights[group].append(
                    (jnp.asarray(a * mask), jnp.zeros(scale.shape, jnp.float32))
                )
        return weights

    def pools(self, weights: AdapterWeights, dtype: Any) -> TrainingPools:
        """Make the pools of these weights; differentiable, with gradients in float32.

        Args:
          weights: as `init` made them.
          dtype: of the model.
        """
        groups = {
            group: self._group_pools(group, weights, dtype) for group in MODULE_GROUPS
        }
        layers = range(self._config.num_layers)
        return TrainingPools(
            tuple(
                LayerPools(*(groups[group][layer] for group in LayerPools._fields))
                for layer in layers
            )
        )

    def save(self, weights: AdapterWeights, path: Path, dtype: Any) -> None:
        """Write each adapter as a PEFT directory `path / name`, with its true ranks."""
        for slot, (name, fields) in enumerate(self.fields.items()):
            tensors: dict[str | tuple[int, str], tuple[Any, Any]] = {}
            for module in self._modules:
                if rank := self._rank(slot, module):
                    a, b = self._cut_out(weights, slot, module)
                    tensors[module.path] = (
                        np.asarray(a[:rank]).astype(dtype),
                        np.asarray(b[:, :rank]).astype(dtype),
                    )
            save_adapter(path / name, self._config, tensors, **fields)

    def _group_pools(
        self, group: str, weights: AdapterWeights, dtype: Any
    ) -> list[LoraPool]:
        """Make each layer's pool of one module group."""
        layout, pools = self._layouts[group], []
        for (a, b), counts, mask, scale in zip(
            weights[group],
            layout.num_pages,
            layout.a_masks,
            layout.b_scales,
            strict=True,
        ):
            # Rounded before the scale too, for so it is saved.
            b_saved = b.astype(dtype).astype(jnp.float32)
            pool = LoraPool(
                a=(a * mask).astype(dtype),
                b=(b_saved * scale).astype(dtype),
                page_table=jnp.asarray(layout.page_table),
                num_pages=jnp.asarray(counts),
                d_outs=self._config.d_outs(group),
            )
            pools.append(pool)
        return pools

    def _cut_out(
        self, weights: AdapterWeights, slot: int, module: BaseModule
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return one module's A and B, of whole pages."""
        layout = self._layouts[module.group]
        num_pages = layout.num_pages[module.layer][slot, module.index]
        pages = layout.page_table[slot, :num_pages]
        a, b = (
            np.asarray(array)[pages] for array in weights[module.group][module.layer]
        )
        start = sum(self._config.d_outs(module.group)[: module.index])
        b = b[:, :, start : start + module.d_out]
        return (
            a[:, module.index].reshape(-1, module.d_in),
            b.reshape(-1, module.d_out).T,
        )

    def _rank(self, slot: int, module: BaseModule) -> int:
        """Return the rank of one adapter in one module, 0 where it is no target."""
        spec = self._specs[slot]
        return spec.rank(module.path) if spec.targets(module.path) else 0

    def _lay_out(self, group: str) -> _GroupLayout:
        config, slots = self._config, len(self._specs)
        modules = [module for module in self._modules if module.group == group]
        most = [
            max(-(-self._rank(slot, module) // RANK_PAGE) for module in modules)
            for slot in range(slots)
        ]
        first = np.cumsum([0, *most])
        # A group that no adapter targets still has one page: no array is empty.
        pages, d_outs = max(1, first[-1]), config.d_outs(group)
        page_table = np.zeros((slots, max(1, *most)), np.int32)
        for slot, num in enumerate(most):
            page_table[slot, :num] = np.arange(first[slot], first[slot] + num)
        layers = range(config.num_layers)
        num_pages = [np.zeros((slots, len(d_outs)), np.int32) for _ in layers]
        a_masks = [
            np.zeros((pages, len(d_outs), RANK_PAGE, 1), np.float32) for _ in layers
        ]
        b_scales = [
            np.zeros((pages, RANK_PAGE, sum(d_outs)), np.float32) for _ in layers
        ]
        for module in modules:
            start = sum(d_outs[: module.index])
            columns = slice(start, start + module.d_out)
            for slot, spec in enumerate(self._specs):
                rank = self._rank(slot, module)
                num_pages[module.layer][slot, module.index] = -(-rank // RANK_PAGE)
                for r in range(rank):
                    page, lane = first[slot] + r // RANK_PAGE, r % RANK_PAGE
                    a_masks[module.layer][page, module.index, lane] = 1
                    b_scales[module.layer][page, lane, columns] = spec.scale(
                        module.path
                    )
        return _GroupLayout(page_table, num_pages, a_masks, b_scales)
