"""The cells of the SGMV benchmark: shapes, inputs on the device, and the oracle.

Knows what is multiplied; nothing of kernels or of how they are timed.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import peers
from benchmarks.device_time import PEAK_BYTES_PER_S
from punica_jax.pallas_kernels import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels.shapes import Popularity, segment_sizes

NUM_SLOTS = 64
DTYPE = jnp.bfloat16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One launch pair `y += x A B`, and the best figures of others for it."""

    suite: str
    d_in: int
    d_outs: tuple[int, ...]
    rank: int
    rows: int
    popularity: str  # a Popularity, or seg<n>: n equal segments
    peer: str = ""
    peer_us: float = float("nan")
    loop_us: float = float("nan")

    @property
    def name(self) -> str:
        d_outs = "+".join(map(str, self.d_outs))
        return f"{self.d_in}->{d_outs} r{self.rank} {self.rows} {self.popularity}"

    @property
    def family(self) -> tuple[Any, ...]:
        """Cells of one family can share their inputs."""
        return self.d_in, self.d_outs, self.rank

    @property
    def sizes(self) -> list[int]:
        if self.popularity.startswith("seg"):
            num_segments = int(self.popularity.removeprefix("seg"))
            return [self.rows // num_segments] * num_segments
        return segment_sizes(cast(Popularity, self.popularity), self.rows)

    @property
    def num_adapters(self) -> int:
        return len(self.sizes)

    @property
    def pages(self) -> int:
        return -(-self.rank // RANK_PAGE)

    @property
    def d_out(self) -> int:
        return sum(self.d_outs)

    @property
    def num_bytes(self) -> int:
        """Least traffic: A, B and x read, y read and written."""
        ranks = self.num_adapters * self.rank
        adapters = ranks * (self.d_in * len(self.d_outs) + self.d_out)
        return 2 * (adapters + self.rows * (self.d_in + 2 * self.d_out))

    @property
    def num_flops(self) -> int:
        """Every row with its own adapter, once down and once up."""
        widths = self.d_in * len(self.d_outs) + self.d_out
        return 2 * self.rows * self.rank * widths

    @property
    def floor_us(self) -> float:
        return self.num_bytes / PEAK_BYTES_PER_S * 1e6


def load_cells() -> list[Cell]:
    """Return the cells that the peers were measured in."""
    return [
        Cell(
            **{name: record[name] for name in ("suite", "d_in", "rank", "rows")},
            d_outs=tuple(record["d_outs"]),
            popularity=record["popularity"],
            peer=record["best"],
            peer_us=record["best_us"],
            loop_us=record["loop_us"],
        )
        for record in peers.load(peers.KERNELS)
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Random adapters and rows, enough for every set of every cell of one family.

    A cell's set `n` uses adapters `n k` to `n k + k - 1`, k being its number of
    adapters, and as many rows further on each time: no two sets share any byte.
    """

    a: Array  # [adapters, C, rank, d_in]
    b: Array  # [adapters, d_out, rank], as PEFT has it
    a_pages: Array  # the same values as a LoraPool has them
    b_pages: Array
    x: Array  # [rows, d_in]
    y: Array  # [rows, d_out]


def slots_of(cell: Cell) -> np.ndarray:
    """Return each row's slot; decode rows lie in a random order."""
    names = _names(cell)[: cell.num_adapters]
    slots = np.repeat(names, cell.sizes).astype(np.int32)
    if cell.popularity.startswith("seg"):
        return slots
    return np.random.default_rng(cell.rows).permutation(slots)


def adapter_of_row(cell: Cell) -> np.ndarray:
    """Return which of set 0's adapters each row uses."""
    return np.argsort(_names(cell))[slots_of(cell)]


def page_table_of(cell: Cell, number: int) -> np.ndarray:
    """Return set `number`'s page table; its adapters follow those of earlier sets."""
    table = np.zeros((NUM_SLOTS, cell.pages), np.int32)
    first = number * cell.num_adapters
    for k, slot in enumerate(_names(cell)[: cell.num_adapters]):
        table[slot] = (first + k) * cell.pages + np.arange(cell.pages)
    return table


def make_inputs(cell: Cell, *, num_adapters: int, num_rows: int) -> Inputs:
    """Make inputs of the cell's family (its widths and rank)."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    modules = len(cell.d_outs)
    a_shape = (num_adapters, modules, cell.rank, cell.d_in)
    a = jax.random.normal(keys[0], a_shape, DTYPE)
    b = jax.random.normal(keys[1], (num_adapters, cell.d_out, cell.rank), DTYPE)
    a = a * jnp.asarray(cell.d_in**-0.5, DTYPE)
    b = b * jnp.asarray(cell.rank**-0.5, DTYPE)
    a_pages = a.reshape(num_adapters, modules, cell.pages, RANK_PAGE, cell.d_in)
    return Inputs(
        a=a,
        b=b,
        a_pages=a_pages.swapaxes(1, 2).reshape(-1, modules, RANK_PAGE, cell.d_in),
        b_pages=b.swapaxes(1, 2).reshape(-1, RANK_PAGE, cell.d_out),
        x=jax.random.normal(keys[2], (num_rows, cell.d_in), DTYPE),
        y=jax.random.normal(keys[3], (num_rows, cell.d_out), DTYPE),
    )


def pool_of(cell: Cell, inputs: Inputs) -> LoraPool:
    """Return the inputs as a pool with set 0's page table."""
    counts = np.zeros((NUM_SLOTS, len(cell.d_outs)), np.int32)
    counts[np.unique(slots_of(cell))] = cell.pages
    return LoraPool(
        a=inputs.a_pages,
        b=inputs.b_pages,
        page_table=jnp.asarray(page_table_of(cell, 0)),
        num_pages=jnp.asarray(counts),
        d_outs=cell.d_outs,
    )


def _names(cell: Cell) -> np.ndarray:
    """Return the slots in the order in which adapters get them."""
    return np.random.default_rng(cell.rows).permutation(NUM_SLOTS)


def relative_error(cell: Cell, inputs: Inputs, out: Array, times: int) -> float:
    """Return the error of set 0's rows, in the 2-norm of what was added to them.

    Args:
      inputs: the inputs; only set 0 of them is read.
      out: `[rows, d_out]`, set 0's y plus `times` its product.
    """
    a, b, x, y = (
        np.asarray(array[:size]).astype(np.float32)
        for array, size in (
            (inputs.a, cell.num_adapters),
            (inputs.b, cell.num_adapters),
            (inputs.x, cell.rows),
            (inputs.y, cell.rows),
        )
    )
    adapter = adapter_of_row(cell)
    delta = np.zeros_like(y)
    for k in range(cell.num_adapters):
        rows, start = np.flatnonzero(adapter == k), 0
        for c, width in enumerate(cell.d_outs):
            v = (x[rows] @ a[k, c].T).astype(DTYPE).astype(np.float32)
            delta[rows, start : start + width] = v @ b[k, start : start + width].T
            start += width
    error = np.asarray(out).astype(np.float32) - (y + times * delta)
    return float(np.linalg.norm(error) / np.linalg.norm(times * delta))
