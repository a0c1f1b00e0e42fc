"""What an adapter changes, module by module: ranks, scales and norms.

Knows numbers and, until the norms have been computed, what computes them.
"""

import math
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np


class ReportRow(NamedTuple):
    """What one module got from an adapter.

    Attributes:
      layer: the decoder layer, from 0.
      module: its name in the layer, such as "self_attn.q_proj".
      rank: the rank of its LoRA.
      scale: what multiplies `B A`: alpha / rank, or alpha / sqrt(rank).
      delta_norm: Frobenius norm of `scale B A`, of the weights as they are served: a
        file of a wider dtype has been rounded.
    """

    layer: int
    module: str
    rank: int
    scale: float
    delta_norm: float


Measure: TypeAlias = Callable[[Iterable[ReportRow]], Iterable[ReportRow]]


class AdapterReport:
    """What an adapter binds, one row for each module; `str` prints it as a table.

    Norms take longer than loading: they are computed after it, in another thread.
    Whoever asks sooner waits for them, or computes them.

    Attributes:
      rank: the greatest rank; known at once.
    """

    def __init__(self, rank: int, measure: Measure) -> None:
        """Make a report that is not complete.

        Args:
          rank: the greatest rank.
          measure: computes the rows, given those of the same weights that are known.
        """
        self.rank = rank
        self._measure: Measure | None = measure
        self._rows: tuple[ReportRow, ...] = ()
        self._lock = threading.Lock()

    def complete(self, known: Iterable[ReportRow] = ()) -> "AdapterReport":
        """Compute what has not been yet, and let the weights go; return itself.

        Args:
          known: rows of another report of the same weights.
        """
        with self._lock:
            if self._measure is not None:
                self._rows = tuple(self._measure(known))
                self._measure = None
        return self

    @property
    def rows(self) -> tuple[ReportRow, ...]:
        return self.complete()._rows

    @property
    def delta_norm(self) -> float:
        """Frobenius norm of the whole change, all modules together."""
        return math.hypot(*(row.delta_norm for row in self.rows))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdapterReport) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash(self.rows)

    def __repr__(self) -> str:
        return f"AdapterReport(rows={self.rows})"

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
