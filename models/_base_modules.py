"""The modules of a base model that can have a LoRA, and what they are called.

Knows names and widths only: no weights, no files, no adapters.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from punica_jax.models._config import MODULE_GROUPS, MODULE_PATHS, LlamaConfig


@dataclass(frozen=True, slots=True, order=True)
class BaseModule:
    """One projection of one decoder layer.

    Attributes:
      layer: the decoder layer, from 0.
      group: its module group, a key of `MODULE_GROUPS`.
      index: its place in that group, from 0.
      d_in: width of its input.
      d_out: width of its output.
    """

    layer: int
    group: str
    index: int
    d_in: int
    d_out: int

    @property
    def short_name(self) -> str:
        """The name within its parent, such as "q_proj"."""
        return MODULE_GROUPS[self.group][self.index]

    @property
    def name(self) -> str:
        """The name within its layer, such as "self_attn.q_proj"."""
        return MODULE_PATHS[self.short_name]

    @property
    def path(self) -> str:
        """The name within the model, such as "model.layers.3.self_attn.q_proj"."""
        return f"model.layers.{self.layer}.{self.name}"


def base_modules(config: LlamaConfig) -> Iterator[BaseModule]:
    """Yield every module that can have a LoRA, layer by layer, group by group."""
    for layer in range(config.num_layers):
        for group in MODULE_GROUPS:
            d_in, d_outs = config.d_in(group), config.d_outs(group)
            for index, d_out in enumerate(d_outs):
                yield BaseModule(layer, group, index, d_in, d_out)
