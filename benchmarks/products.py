"""One product `y += x A B` for rows whose adapters lie anywhere in a large pool.

Every call reads other pages than those before it, so that caches are cold. Knows which
page each row needs; nothing of popularities, nor of what is compared.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.device_time import PEAK_BYTES_PER_S, compile_step, measure
from punica_jax.bench import gather_lora
from punica_jax.pallas_kernels import RANK_PAGE, LoraPool, lora, segment_metadata

METHODS = ("segments", "per_row", "gather")
DTYPE = jnp.bfloat16
# bfloat16 outputs: rounding alone is 0.3 %.
_MAX_ERROR = 1e-2


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
        """Least traffic of a call: adapters and x read, y read and written."""
        adapters = num_adapters * RANK_PAGE * 2 * self.width
        return 2 * (adapters + 3 * self.rows * self.width)

    @property
    def num_flops(self) -> int:
        return 4 * self.rows * RANK_PAGE * self.width

    def time(self, calls: Sequence[np.ndarray], method: str) -> dict[str, Any]:
        """Time calls one after the other; `calls[i][row]` is the row's page.

        Returns:
          The record's fields: the median microseconds of a call, its floor, the error.

        Raises:
          SystemExit: a sum is wrong.
        """
        operands, shared = self._lay_out(calls, method)
        launch = _launch_gather if method == "gather" else _launch_ours
        carries = [jnp.zeros((self.rows, self.width), DTYPE)]
        one = jax.jit(launch)(jnp.copy(carries[0]), *operands[0], *shared)
        error = self._error(calls[0], one)
        if not error < _MAX_ERROR:
            raise SystemExit(f"{method}: relative error {error:.1e}")
        step = compile_step(launch, carries, operands, shared)
        seconds, _ = measure(step, carries, operands, shared)
        adapters = max(len(np.unique(pages)) for pages in calls)
        floor_s = self.num_bytes(adapters) / PEAK_BYTES_PER_S
        return {
            "method": method,
            "us": seconds * 1e6,
            "floor_us": floor_s * 1e6,
            "x_floor": seconds / floor_s,
            "in_batch": adapters,
            "bytes": self.num_bytes(adapters),
            "flops": self.num_flops,
            "error": error,
        }

    def _lay_out(
        self, calls: Sequence[np.ndarray], method: str
    ) -> tuple[list[Any], tuple[Any, ...]]:
        if method == "gather":
            index = [(jnp.asarray(pages, jnp.int32),) for pages in calls]
            return index, (self.a, self.b.swapaxes(1, 2), self.x)
        operands = []
        for pages in calls:
            slots = np.arange(self.rows)
            if method == "segments":
                # Any slot of its own will do: the row's first neighbour of the adapter.
                slots = np.argmax(pages[:, None] == pages[None, :], axis=1)
            table = np.asarray(pages, np.int32)[:, None]
            segments = segment_metadata(
                jnp.asarray(slots, jnp.int32), num_slots=self.rows
            )
            operands.append((jnp.asarray(table), segments))
        counts = jnp.ones((self.rows, 1), jnp.int32)
        return operands, (self.a, self.b, counts, self.x)

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
    return gather_lora(y, x, index, a, b, d_outs=(b.shape[1],))
