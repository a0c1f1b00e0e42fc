"""How long an adapter's way from host memory to the device takes, part by part.

Knows one adapter's files and the pools; nothing of requests.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from punica_jax.bench_model import BenchModel
from punica_jax.models import MODULE_GROUPS, EmptyBuffer, read_adapter

_NUM_COPIES = 5


def copies(bench: BenchModel, path: Path, empty: EmptyBuffer) -> dict[str, Any]:
    """Time an adapter's copy, a plain copy of as many bytes, and its writing to pages.

    Writes over the adapter of slot 0.

    Args:
      bench: has the pools.
      path: the adapter's directory.
      empty: makes the host's memory of both.

    Returns:
      Of the adapter's copy `stage_ms`, and `begin_ms` of the host's to begin it;
      `place_ms` of the host's to have it written; `copy_ms` of the plain copy.
    """
    adapter = read_adapter(path, bench.config, dtype=bench.dtype, empty=empty)
    pools = bench.runner.adapters
    pages = {group: range(adapter.num_pages(group)) for group in MODULE_GROUPS}
    plain: Any = np.zeros(adapter.nbytes, np.uint8)
    there = jax.device_put(plain).sharding
    if adapter.is_locked:
        plain = jax.device_put(plain, there.with_memory_kind("pinned_host"))
    staged = pools.stage(adapter, 0, pages)
    return {
        "adapter_bytes": adapter.nbytes,
        "is_locked": adapter.is_locked,
        "stage_ms": _best_ms(lambda: pools.wait(pools.stage(adapter, 0, pages))),
        "begin_ms": _best_ms(lambda: pools.stage(adapter, 0, pages)),
        "copy_ms": _best_ms(
            lambda: jax.block_until_ready(jax.device_put(plain, there))
        ),
        "place_ms": _best_ms(lambda: pools.place(staged)),
    }


def _best_ms(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_NUM_COPIES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)
