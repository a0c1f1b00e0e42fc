"""The modules of a base model that can have a LoRA, and what they are called.

Knows names and widths only: no weights, no files, no adapters.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from punica_jax.models._config import MODULE_GROUPS, LlamaConfig


@dataclass(frozen=True, slots=True, order=True)
class BaseModule:
    """One linear layer of a checkpoint, in one decoder layer.

    It is one module of a module group or, in families that store them as one, all.

    Attributes:
      layer: the decoder layer, from 0.
      group: its module group, a key of `MODULE_GROUPS`.
      index: the place in that group of its first module, from 0.
      num_modules: how many modules of the group it is.
      short_name: the name within its parent, such as "q_proj".
      d_in: width of its input.
      d_out: width of its output.
    """

    layer: int
    group: str
    index: int
    num_modules: int
    short_name: str
    d_in: int
    d_out: int

    @property
    def name(self) -> str:
        """The name within its layer, such as "self_attn.q_proj"."""
        parent = "self_attn" if self.group in ("qkv", "o") else "mlp"
        return f"{parent}.{self.short_name}"

    @property
    def path(self) -> str:
        """The name within the model, such as "model.layers.3.self_attn.q_proj"."""
        return f"model.layers.{self.layer}.{self.name}"


def base_modules(config: LlamaConfig) -> Iterator[BaseModule]:
    """Yield every linear layer that can have a LoRA, layer by layer, group by group."""
    for layer in range(config.num_layers):
        for group, names in MODULE_GROUPS.items():
            d_in, d_outs = config.d_in(group), config.d_outs(group)
            if fused := config.family.fused.get(group):
                yield BaseModule(layer, group, 0, len(names), fused, d_in, sum(d_outs))
                continue
            for index, (name, d_out) in enumerate(zip(names, d_outs, strict=True)):
                yield BaseModule(layer, group, index, 1, name, d_in, d_out)


@functools.lru_cache(maxsize=8)
def modules_by_path(config: LlamaConfig) -> Mapping[str, BaseModule]:
    """Return all of them by path; every adapter that is read asks for them."""
    return MappingProxyType({module.path: module for module in base_modules(config)})
