"""Host memory that a device copies from directly, for the rank pages of adapters.

Knows how large pages are, and which adapters came to the device when; nothing of slots.
"""

import contextlib
import ctypes
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from punica_jax.models import Adapter, HostBuffer

_KIND = "pinned_host"


class LockedPages:
    """Page-locked memory for some rank pages of each module group.

    A device cannot copy from ordinary memory: its driver does so by way of a little
    locked memory, at a third of the rate. To lock memory takes longer than either, and
    holds up steps: all of it is taken at once, and kept. Those adapters have it that
    were read while there was some, until one that has none is copied a second time:
    then those have to move that were copied longest ago.
    """

    def __init__(
        self,
        device: Any,
        sizes: Sequence[int],
        dtype: Any,
        num_bytes: int,
        mover: Executor | None = None,
    ):
        """Take the memory.

        Args:
          device: a `jax.Device` that has memory of that kind.
          sizes: elements of each module group's rank page.
          dtype: of the weights.
          num_bytes: most bytes; as many pages of each group as fit.
          mover: brings adapters from one memory to the other.
        """
        self._mover = mover or ThreadPoolExecutor(1, "punica-jax-locks")
        self._lock = threading.Lock()
        self._copied: weakref.WeakKeyDictionary[Adapter, None]
        self._copied = weakref.WeakKeyDictionary()  # in the order of the last time
        self._free: dict[int, deque[jax.Array]] = {size: deque() for size in sizes}
        sharding = SingleDeviceSharding(device, memory_kind=_KIND)
        num_pages = num_bytes // (sum(sizes) * np.dtype(dtype).itemsize)
        # The machine may have less than that, or the process be allowed less.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for _ in range(num_pages):
                for size in sizes:
                    page = jax.device_put(np.empty(size, dtype), sharding)
                    self._free[size].append(jax.block_until_ready(page))
        self._num_pages = self.num_free

    @property
    def num_free(self) -> dict[int, int]:
        """Size of a page in elements -> those that nobody has."""
        return {size: len(pages) for size, pages in self._free.items()}

    def empty(self, size: int, dtype: Any) -> HostBuffer:
        """Return a page that nobody has, or else ordinary memory; in any thread.

        It is free again when the last array is gone that has to do with it.
        """
        free = self._free.get(size, deque())
        try:
            source = free.pop()
        except IndexError:
            return HostBuffer.empty(size, dtype)
        memory = (ctypes.c_uint8 * source.nbytes).from_address(
            source.unsafe_buffer_pointer()
        )
        weakref.finalize(memory, free.append, source).atexit = False
        return HostBuffer(np.frombuffer(memory, dtype), source)

    def note_copied(self, adapter: Adapter) -> None:
        """Take note that an adapter has come to the device; in any thread."""
        with self._lock:
            is_known = adapter in self._copied
            self._copied.pop(adapter, None)
            self._copied[adapter] = None
        if is_known and not adapter.is_locked:
            self._mover.submit(self._take_in, adapter)

    def _take_in(self, adapter: Adapter) -> None:
        """Bring an adapter to locked memory, and others out of it if they have to."""
        needed = Counter(buffer.array.size for buffer in adapter.all_buffers)
        if adapter.is_locked or any(
            num > self._num_pages.get(size, 0) for size, num in needed.items()
        ):
            return
        with self._lock:
            others = [one for one in self._copied if one is not adapter]
        for other in others:
            if all(len(self._free[size]) >= num for size, num in needed.items()):
                break
            if any(buffer.is_locked for buffer in other.all_buffers):
                other.move(HostBuffer.empty)
        adapter.move(self.empty)
