"""One rank page: how it lies in memory, and in what memory of the host.

Knows sizes and arrays; nothing of adapters, or of what a device has.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from punica_jax.models._config import LlamaConfig
from punica_jax.pallas_kernels import RANK_PAGE


class RankPage(NamedTuple):
    """One rank page of a module group, in every layer, on its way to the device.

    Attributes:
      a: `[layers, C, 16, d_in]`; zeros where a module has no such rank.
      b: `[layers, d_out_total, 16]`, as files have it; zeros likewise.
      scale: `f32[layers, C]`, what multiplies each module's b.
    """

    a: Any
    b: Any
    scale: Any


@dataclasses.dataclass(frozen=True, slots=True)
class PageShape:
    """What one group's rank pages are like; hashable.

    Attributes:
      layers: decoder layers.
      d_in: width of the group's input.
      d_outs: width of each of its `C` modules' outputs.
    """

    layers: int
    d_in: int
    d_outs: tuple[int, ...]

    @classmethod
    def of(cls, config: LlamaConfig, group: str) -> "PageShape":
        return cls(config.num_layers, config.d_in(group), config.d_outs(group))

    @property
    def _shapes(self) -> RankPage:
        return RankPage(
            (self.layers, len(self.d_outs), RANK_PAGE, self.d_in),
            (self.layers, sum(self.d_outs), RANK_PAGE),
            (self.layers, len(self.d_outs)),
        )

    def size(self, dtype: Any) -> int:
        """Return the elements of a page with its scales, in the weights' dtype."""
        a, b, scale = map(math.prod, self._shapes)
        return a + b + scale * 4 // np.dtype(dtype).itemsize

    def cut(self, packed: Any) -> RankPage:
        """Return what lies in an array of `size` elements: a, then b, then the scales.

        One array, for each that is copied to a device costs its host 50 to 100 us.
        NumPy's parts are views, JAX's can be traced.
        """
        shapes = self._shapes
        end_a = math.prod(shapes.a)
        end_b = end_a + math.prod(shapes.b)
        return RankPage(
            packed[:end_a].reshape(shapes.a),
            packed[end_a:end_b].reshape(shapes.b),
            packed[end_b:].view(np.float32).reshape(shapes.scale),
        )


class HostBuffer(NamedTuple):
    """Host memory of one rank page.

    Attributes:
      array: its elements, for NumPy; they may be written while this is held.
      source: what is to be copied to the device: the same memory.
    """

    array: np.ndarray
    source: Any

    @classmethod
    def empty(cls, size: int, dtype: Any) -> "HostBuffer":
        """Return ordinary memory of so many elements."""
        array = np.empty(size, dtype)
        return cls(array, array)

    @property
    def is_locked(self) -> bool:
        """Whether it is no ordinary memory: devices copy from it directly."""
        return self.source is not self.array


EmptyBuffer: TypeAlias = Callable[[int, Any], HostBuffer]
