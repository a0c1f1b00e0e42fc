"""Host memory that a device copies from directly, for the rank pages of adapters.

Knows how large pages are; nothing of adapters or slots.
"""

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from punica_jax.models import HostBuffer

_KIND = "pinned_host"
_log = logging.getLogger(__name__)


class LockedPages:
    """Page-locked memory for some rank pages of each module group.

    A device cannot copy from ordinary memory: its driver does so by way of a little
    locked memory, at less than half of the rate. To lock memory takes longer than
    either, and holds up steps: all of it is taken at once, and kept. Those adapters
    have it that are read while there is some.
    """

    def __init__(self, device: Any, sizes: Sequence[int], dtype: Any, num_bytes: int):
        """Take the memory.

        Args:
          device: a `jax.Device` that has memory of that kind.
          sizes: elements of each module group's rank page.
          dtype: of the weights.
          num_bytes: most bytes; as many pages of each group as fit.
        """
        self._dtype = np.dtype(dtype)
        self._free: dict[int, deque[jax.Array]] = {size: deque() for size in sizes}
        sharding = SingleDeviceSharding(device, memory_kind=_KIND)
        num_pages = num_bytes // (sum(sizes) * self._dtype.itemsize)
        try:
            for _ in range(num_pages):
                for size in sizes:
                    page = jax.device_put(np.empty(size, dtype), sharding)
                    self._free[size].append(jax.block_until_ready(page))
        except jax.errors.JaxRuntimeError as error:
            # The machine may have less, or the process be allowed less.
            _log.warning(
                "%d pages of each module group were to be locked, %d are: %s",
                num_pages,
                min(self.num_free.values()),
                error,
            )

    @property
    def num_free(self) -> dict[int, int]:
        """Size of a page in elements -> those that nobody has."""
        return {size: len(pages) for size, pages in self._free.items()}

    def empty(self, size: int, dtype: Any) -> HostBuffer:
        """Return a page that nobody has, or else ordinary memory; in any thread.

        It is free again when the last array is gone that has to do with it.
        """
        assert np.dtype(dtype) == self._dtype, (dtype, self._dtype)
        free = self._free.get(size, deque())
        try:
            source = free.pop()
        except IndexError:
            return HostBuffer.empty(size, dtype)
        memory: Any = (ctypes.c_uint8 * source.nbytes).from_address(
            source.unsafe_buffer_pointer()
        )
        weakref.finalize(memory, free.append, source).atexit = False
        return HostBuffer(np.frombuffer(memory, dtype), source)
