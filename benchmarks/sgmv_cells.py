"""The cells of the SGMV benchmark: shapes, inputs on the device, and the oracle.

Knows what is multiplied; nothing of kernels or of how they are timed.
"""

import dataclasses
import functools
import json
import pathlib
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.device_time import PEAK_BYTES_PER_S
from punica_jax.pallas_kernels import RANK_PAGE, LoraPool
from punica_jax.pallas_kernels.shapes import Popularity, segment_sizes

NUM_SLOTS = 64
DTYPE = jnp.bfloat16
_PEERS = pathlib.Path(__file__).with_name("peers_h200.json")


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
    def floor_us(self) -> float:
        return self.num_bytes / PEAK_BYTES_PER_S * 1e6


def load_cells() -> list[Cell]:
    """Return the cells that the peers were measured in."""
    peers = json.loads(_PEERS.read_text())
    records = [dict(zip(peers["columns"], row, strict=True)) for row in peers["rows"]]
    return [
        Cell(
            **{name: record[name] for name in ("suite", "d_in", "rank", "rows")},
            d_outs=tuple(record["d_outs"]),
            popularity=record["popularity"],
            peer=record["best"],
            peer_us=record["best_us"],
            loop_us=record["loop_us"],
        )
        for record in records
    ]


def peers_source() -> str:
    peers = json.loads(_PEERS.read_text())
    return f"{peers['source']}, {peers['date']}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """`num_sets` sets of inputs that share one pool but no page of it."""

    a: Array  # [sets * adapters, C, rank, d_in]
    b: Array  # [sets * adapters, d_out, rank], as PEFT has it
    pool: LoraPool  # the same values in rank pages; its page table is set 0's
    page_tables: list[Array]
    xs: list[Array]
    ys: list[Array]


def slots_of(cell: Cell) -> np.ndarray:
    """Return each row's slot; decode rows lie in a random order."""
    rng = np.random.default_rng(cell.rows)
    names = rng.permutation(NUM_SLOTS)[: cell.num_adapters]
    slots = np.repeat(names, cell.sizes).astype(np.int32)
    return slots if cell.popularity.startswith("seg") else rng.permutation(slots)


def page_table_of(cell: Cell, number: int) -> np.ndarray:
    """Return set `number`'s page table; its adapters follow those of earlier sets."""
    names = np.random.default_rng(cell.rows).permutation(NUM_SLOTS)
    table = np.zeros((NUM_SLOTS, cell.pages), np.int32)
    first = number * cell.num_adapters
    for k, slot in enumerate(names[: cell.num_adapters]):
        table[slot] = (first + k) * cell.pages + np.arange(cell.pages)
    return table


def input_shapes(cell: Cell, num_sets: int) -> Inputs:
    """Return the inputs' shapes, for compiling before there are any."""
    a, b, x, y = jax.eval_shape(functools.partial(_random, cell, num_sets))
    pool = jax.eval_shape(functools.partial(_pool, cell), a, b)
    tables = [pool.page_table] * num_sets
    return Inputs(
        a=a,
        b=b,
        pool=pool,
        page_tables=tables,
        xs=[x] * num_sets,
        ys=[y] * num_sets,
    )


def make_inputs(cell: Cell, num_sets: int) -> Inputs:
    a, b, x, y = jax.jit(functools.partial(_random, cell, num_sets))()
    xs = [jnp.copy(x) for _ in range(num_sets)]
    ys = [jnp.copy(y) for _ in range(num_sets)]
    pool = jax.jit(functools.partial(_pool, cell))(a, b)
    tables = [jnp.asarray(page_table_of(cell, n)) for n in range(num_sets)]
    return Inputs(a=a, b=b, pool=pool, page_tables=tables, xs=xs, ys=ys)


def _random(cell: Cell, num_sets: int) -> tuple[Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    adapters = num_sets * cell.num_adapters
    a_shape = (adapters, len(cell.d_outs), cell.rank, cell.d_in)
    scale_a = jnp.asarray(cell.d_in**-0.5, DTYPE)
    scale_b = jnp.asarray(cell.rank**-0.5, DTYPE)
    return (
        jax.random.normal(keys[0], a_shape, DTYPE) * scale_a,
        jax.random.normal(keys[1], (adapters, cell.d_out, cell.rank), DTYPE) * scale_b,
        jax.random.normal(keys[2], (cell.rows, cell.d_in), DTYPE),
        jax.random.normal(keys[3], (cell.rows, cell.d_out), DTYPE),
    )


def _pool(cell: Cell, a: Array, b: Array) -> LoraPool:
    adapters, modules = a.shape[:2]
    total = adapters * cell.pages
    a = a.reshape(adapters, modules, cell.pages, RANK_PAGE, cell.d_in)
    b = b.reshape(adapters, cell.d_out, cell.pages, RANK_PAGE)
    counts = np.zeros((NUM_SLOTS, modules), np.int32)
    counts[np.unique(slots_of(cell))] = cell.pages
    return LoraPool(
        a=a.swapaxes(1, 2).reshape(total, modules, RANK_PAGE, cell.d_in),
        b=b.swapaxes(1, 2).reshape(total, cell.d_out, RANK_PAGE),
        page_table=jnp.asarray(page_table_of(cell, 0)),
        num_pages=jnp.asarray(counts),
        d_outs=cell.d_outs,
    )


def relative_error(cell: Cell, inputs: Inputs, x: Array, y: Array, out: Array) -> float:
    """Return the error of set 0's `out` in the 2-norm of what the product adds."""
    a = np.asarray(inputs.a[: cell.num_adapters]).astype(np.float32)
    b = np.asarray(inputs.b[: cell.num_adapters]).astype(np.float32)
    x_host, y_host = (np.asarray(array).astype(np.float32) for array in (x, y))
    slots = slots_of(cell)
    names = np.random.default_rng(cell.rows).permutation(NUM_SLOTS)
    delta = np.zeros_like(y_host)
    for k, slot in enumerate(names[: cell.num_adapters]):
        rows = np.flatnonzero(slots == slot)
        start = 0
        for c, width in enumerate(cell.d_outs):
            v = (x_host[rows] @ a[k, c].T).astype(DTYPE).astype(np.float32)
            delta[rows, start : start + width] = v @ b[k, start : start + width].T
            start += width
    error = np.asarray(out).astype(np.float32) - (y_host + delta)
    return float(np.linalg.norm(error) / np.linalg.norm(delta))
