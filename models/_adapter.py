"""One adapter in host memory, ready to be cut into rank pages, and its report.

Knows nothing of the files it came from, of the device, or of slots.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from punica_jax.models._base_modules import BaseModule
from punica_jax.models._config import MODULE_GROUPS, LlamaConfig
from punica_jax.pallas_kernels import RANK_PAGE


class ReportRow(NamedTuple):
    """What one module got from an adapter.

    Attributes:
      layer: the decoder layer, from 0.
      module: its name in the layer, such as "self_attn.q_proj".
      rank: the rank of its LoRA.
      scale: what multiplies `B A`: alpha / rank, or alpha / sqrt(rank).
      delta_norm: Frobenius norm of `scale B A`.
    """

    layer: int
    module: str
    rank: int
    scale: float
    delta_norm: float


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What an adapter binds, one row for each module; `str` prints it as a table."""

    rows: tuple[ReportRow, ...]

    @property
    def rank(self) -> int:
        """The greatest rank."""
        return max(row.rank for row in self.rows)

    @property
    def delta_norm(self) -> float:
        """Frobenius norm of the whole change, all modules together."""
        return math.hypot(*(row.delta_norm for row in self.rows))

    def __str__(self) -> str:
        modules = list(dict.fromkeys(row.module for row in self.rows))
        cells: dict[int, dict[str, str]] = {}
        for row in self.rows:
            text = f"{row.rank} x{row.scale:g} {row.delta_norm:.3g}"
            cells.setdefault(row.layer, {})[row.module] = text
        table = [["layer", *modules]]
        for layer, found in sorted(cells.items()):
            table.append([str(layer), *(found.get(module, "-") for module in modules)])
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        head = (
            f"{len(self.rows)} modules in {len(cells)} layers, greatest rank "
            f"{self.rank}, norm of the whole change {self.delta_norm:.3g}; "
            "each cell: rank xscale norm"
        )
        lines = (
            "  ".join(
                cell.ljust(width) for cell, width in zip(line, widths, strict=True)
            )
            for line in table
        )
        return "\n".join([head, *(line.rstrip() for line in lines)])


class Factors(NamedTuple):
    """One module's LoRA as it will lie on the device."""

    a: np.ndarray  # [rank, d_in]
    b: np.ndarray  # [d_out, rank], times the scale


class Adapter:
    """One adapter's weights in host memory, cut into rank pages as the device has them.

    Attributes:
      report: what it binds.
      dtype: of its weights, here and on the device.
      rank: the greatest rank of any module.
    """

    def __init__(
        self,
        config: LlamaConfig,
        factors: Mapping[BaseModule, Factors],
        report: AdapterReport,
        dtype: np.dtype,
    ) -> None:
        self.report = report
        self.dtype = dtype
        self.rank = max(a.shape[0] for a, _ in factors.values())
        self._counts = {
            group: np.zeros((config.num_layers, len(modules)), np.int32)
            for group, modules in MODULE_GROUPS.items()
        }
        for module, (a, _) in factors.items():
            pages = -(-a.shape[0] // RANK_PAGE)
            modules = slice(module.index, module.index + module.num_modules)
            self._counts[module.group][module.layer, modules] = pages
        self._pages = {
            group: self._cut(config, factors, group) for group in MODULE_GROUPS
        }

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the weights take, as many as on the device."""
        return sum(
            a.nbytes + b.nbytes for pages in self._pages.values() for a, b in pages
        )

    def digest(self) -> str:
        """Return what two adapters share only if their weights are the same."""
        digest = hashlib.blake2b(str(self.dtype).encode(), digest_size=16)
        for group, pages in self._pages.items():
            digest.update(f"{group} {len(pages)}".encode())
            digest.update(self._counts[group].data)
            for page in pages:
                for array in page:
                    digest.update(array.view(np.uint8).data)
        return digest.hexdigest()

    def counts(self, group: str) -> np.ndarray:
        """Return the rank pages that each module uses: `i32[layers, C]`."""
        return self._counts[group].copy()

    def num_pages(self, group: str) -> int:
        """Return the rank pages that the group needs, 0 if it has no LoRA at all."""
        return int(self._counts[group].max())

    def page(self, group: str, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Cut out ranks `16 index` to `16 index + 15` of one group, in every layer.

        Args:
          group: the module group.
          index: which page of the adapter, from 0 to `num_pages(group) - 1`.

        Returns:
          `a [layers, C, 16, d_in]` and `b [layers, 16, d_out_total]`, in `dtype`; zeros
          where a module has no such rank.
        """
        return self._pages[group][index]

    def _cut(
        self, config: LlamaConfig, factors: Mapping[BaseModule, Factors], group: str
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Lay out one group's pages."""
        layers, d_outs = config.num_layers, config.d_outs(group)
        a_shape = (layers, len(d_outs), RANK_PAGE, config.d_in(group))
        b_shape = (layers, RANK_PAGE, sum(d_outs))
        pages = [
            (np.zeros(a_shape, self.dtype), np.zeros(b_shape, self.dtype))
            for _ in range(self.num_pages(group))
        ]
        for module, (a, b) in factors.items():
            if module.group != group:
                continue
            start = sum(d_outs[: module.index])
            columns = slice(start, start + module.d_out)
            # A linear layer that is several modules has one A, and they all use it.
            modules = slice(module.index, module.index + module.num_modules)
            for index, first in enumerate(range(0, a.shape[0], RANK_PAGE)):
                a_page, b_page = pages[index]
                lanes = min(a.shape[0] - first, RANK_PAGE)
                a_page[module.layer, modules, :lanes] = a[first : first + lanes]
                b_page[module.layer, :lanes, columns] = b[:, first : first + lanes].T
        return pages


def delta_norm(a: np.ndarray, b: np.ndarray, scale: float) -> float:
    """Return the Frobenius norm of `scale B A` without forming the product.

    *Semantics:* `||s B A||^2 = s^2 tr((B^T B)(A A^T))`, both factors rank x rank, in
    float64.

    Args:
      a: `[rank, d_in]`.
      b: `[d_out, rank]`, not yet times the scale.
      scale: the adapter's scale.

    Returns:
      The norm; NaN if the weights are not finite.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        square = np.sum((b.T @ b) * (a @ a.T))
        # Rounding can leave a product that cancels to nothing just below zero.
        return abs(scale) * float(np.sqrt(np.maximum(square, 0.0)))


def fold_scale(a: np.ndarray, b: np.ndarray, scale: float, dtype: np.dtype) -> Factors:
    """Multiply B by the scale in float32, then cast both factors.

    Args:
      a: `[rank, d_in]`, any float dtype.
      b: `[d_out, rank]`, any float dtype.
      scale: the adapter's scale.
      dtype: of the result. What overflows it becomes infinite, and is found when the
        page is written to the device.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = b.astype(np.float32) * np.float32(scale)
        return Factors(a.astype(dtype), scaled.astype(dtype))
