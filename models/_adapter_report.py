"""What an adapter changes, module by module: ranks, scales and norms.

Knows numbers and, until the norms have been computed, what computes them.
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import ml_dtypes
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


# A `ReportRow` as it is kept: Python's garbage collection does not walk through plain
# tuples of numbers and names.
Row: TypeAlias = tuple[int, str, int, float, float]
Measure: TypeAlias = Callable[[Iterable[Row]], Iterable[Row]]


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
        self._rows: list[Row] = []
        self._lock = threading.Lock()

    def complete(self, known: Iterable[Row] = ()) -> "AdapterReport":
        """Compute what has not been yet, and let the weights go; return itself.

        Args:
          known: rows of another report of the same weights.
        """
        with self._lock:
            if self._measure is not None:
                self._rows = list(self._measure(known))
                self._measure = None
        return self

    @property
    def rows(self) -> tuple[ReportRow, ...]:
        return tuple(ReportRow(*row) for row in self.complete()._rows)

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


def product_norms(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> np.ndarray:
    """Return the Frobenius norm of `B A` in each layer without forming the product.

    *Semantics:* `||B A||^2 = tr((B^T B)(A A^T))`, both factors rank x rank, in float64.

    Args:
      a: parts of A, one below the other: `[layers, lanes, d_in]`, float16, bfloat16 or
        float32.
      b: as many of B, one beside the other: `[layers, d_out, lanes]`.

    Returns:
      The norms `f64[layers]`; not finite where weights are not.
    """
    a_whole = np.concatenate([_widened(part) for part in a], axis=1)
    b_whole = np.concatenate([_widened(part) for part in b], axis=2)
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.sum((b_whole.mT @ b_whole) * (a_whole @ a_whole.mT), axis=(1, 2))
        # Rounding can leave a product that cancels to nothing just below zero.
        return np.sqrt(np.maximum(squares, 0.0))


def _widened(array: np.ndarray) -> np.ndarray:
    """Return values in float64.

    Those of bfloat16 by their bits, the upper half of a float32's: the conversion of
    `ml_dtypes` holds Python's lock, 0.1 s for 80 MB, as steps are to be launched.
    """
    if array.dtype == ml_dtypes.bfloat16:
        bits = array.view(np.uint16).astype(np.uint32)
        bits <<= 16
        array = bits.view(np.float32)
    return array.astype(np.float64)
