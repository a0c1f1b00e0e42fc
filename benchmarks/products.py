"""One product `y += x A B` for rows whose adapters lie anywhere in a large pool.

Every call reads other pages than those before it, more than the L2 holds until one is
read again; `x` and `y` stay there, as between a model's layers. Knows which adapter
each row has; nothing of popularities, nor of what is compared.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.device_time import (
    PEAK_BYTES_PER_S,
    compile_step,
    measure,
    num_sets,
)
from punica_jax.bench import after, gather_lora
from punica_jax.pallas_kernels import RANK_PAGE, LoraPool, lora, segment_metadata

METHODS = ("segments", "per_row", "gather")
DTYPE = jnp.bfloat16
# bfloat16 outputs: rounding alone is 0.3 %.
_MAX_ERROR = 1e-2
# 134 MB of single adapters at a width of 4096.
_MOST_CALLS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """Adapters of one rank page each, and rows.

    `segments` sorts rows by adapter, as serving does; `per_row` is the same kernels
    with a segment for every row, whoever shares its adapter; `gather` is XLA's.
    """

    a: Array  # [pages, 1, 16, d_in]
    b: Array  # [pages, 16, d_out]
    x: Array  # [rows, d_in]

    @classmethod
    def random(cls, *, num_pages: int, width: int, rows: int) -> "Product":
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
        a = jax.random.normal(keys[0], (num_pages, 1, RANK_PAGE, width), DTYPE)
        b = jax.random.normal(keys[1], (num_pages, RANK_PAGE, width), DTYPE)
        return cls(
            a=a * jnp.asarray(width**-0.5, DTYPE),
            b=b * jnp.asarray(RANK_PAGE**-0.5, DTYPE),
            x=jax.random.normal(keys[2], (rows, width), DTYPE),
        )

    @property
    def num_pages(self) -> int:
        return self.a.shape[0]

    @property
    def width(self) -> int:
        return self.a.shape[-1]

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    def num_bytes(self, num_adapters: int) -> int:
        """Return the bytes of so many adapters' A and B: the rest is in the caches."""
        return 2 * num_adapters * RANK_PAGE * 2 * self.width

    @property
    def num_flops(self) -> int:
        return 4 * self.rows * RANK_PAGE * self.width

    def time(self, names: np.ndarray, method: str) -> dict[str, Any]:
        """Time calls one after the other, each with adapters of its own.

        Args:
          names: `names[row]` is the row's adapter, one of 0 to n - 1.
          method: one of `METHODS`.

        Returns:
          The record's fields: the median microseconds of a call, the host's to enqueue
          one, the floor, the error.

        Raises:
          SystemExit: a sum is wrong.
        """
        draws = self._draws(int(names.max()) + 1)
        operands, shared = self._lay_out(names, draws, method)
        launch = _launch_gather if method == "gather" else _launch_ours
        carries = [jnp.zeros((self.rows, self.width), DTYPE)]
        one = jax.jit(launch)(jnp.copy(carries[0]), *operands[0], *shared)
        error = self._error(draws[0][names], one)
        if not error < _MAX_ERROR:
            raise SystemExit(f"{method}: relative error {error:.1e}")
        step = compile_step(launch, carries, operands, shared)
        times, _ = measure(step, carries, operands, shared)
        num_bytes = self.num_bytes(draws.shape[1])
        floor_s = num_bytes / PEAK_BYTES_PER_S
        return {
            "method": method,
            **times.fields(floor_us=1e6 * floor_s),
            "floor_us": floor_s * 1e6,
            "in_batch": draws.shape[1],
            "bytes": num_bytes,
            "flops": self.num_flops,
            "error": error,
        }

    def _draws(self, num_adapters: int) -> np.ndarray:
        """Return `[calls, adapters]`, their pages, all of them read in turn."""
        num_calls = num_sets(self.num_bytes(num_adapters), most=_MOST_CALLS)
        pages = np.random.default_rng(0).permutation(self.num_pages)
        return np.resize(pages, (num_calls, num_adapters)).astype(np.int32)

    def _lay_out(
        self, names: np.ndarray, draws: np.ndarray, method: str
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Return one array for each call: with more the host may be the slower one."""
        if method == "gather":
            index = [(jnp.asarray(pages[names]),) for pages in draws]
            return index, (self.a, self.b.swapaxes(1, 2), self.x)
        slots = names
        if method == "per_row":
            slots, draws = np.arange(self.rows), draws[:, names]
        num_slots = draws.shape[1]
        segments = segment_metadata(jnp.asarray(slots, jnp.int32), num_slots=num_slots)
        counts = jnp.ones((num_slots, 1), jnp.int32)
        tables = [(jnp.asarray(pages[:, None]),) for pages in draws]
        return tables, (segments, self.a, self.b, counts, self.x)

    def _error(self, pages: np.ndarray, out: Array) -> float:
        a, b, x = (
            np.asarray(array).astype(np.float32)
            for array in (self.a[pages, 0], self.b[pages], self.x)
        )
        v = np.einsum("nrd,nd->nr", a, x).astype(DTYPE).astype(np.float32)
        expected = np.einsum("nro,nr->no", b, v)
        error = np.asarray(out).astype(np.float32) - expected
        return float(np.linalg.norm(error) / np.linalg.norm(expected))


def _launch_ours(y, table, segments, a, b, counts, x):
    pool = LoraPool(a=a, b=b, page_table=table, num_pages=counts, d_outs=(b.shape[-1],))
    return lora(y, x, pool, segments)


def _launch_gather(y, index, a, b, x):
    return gather_lora(y, x + after(y), index, a, b, d_outs=(b.shape[1],))
