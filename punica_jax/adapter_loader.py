"""Adapters' way from a directory to the device, and off it.

Knows files, the table of who owns which pages, and the pools that they are written to.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from punica_jax.adapters import AdapterTable
from punica_jax.device_pools import DevicePools
from punica_jax.hub import local_dir
from punica_jax.models import (
    MODULE_GROUPS,
    AdapterError,
    AdapterReport,
    LlamaConfig,
    read_adapter,
    read_rank,
)
from punica_jax.placements import (
    AdapterCapacityError,
    LoadedAdapter,
    check_sources,
)
from punica_jax.sizes import Sizes


def adapter_dirs(
    adapters: Any, config: LlamaConfig, sizes: Sizes, *, progress: bool = False
) -> dict[str, Path]:
    """Find a first set of adapters, and check what needs no weights.

    Args:
      adapters: see `LLM`.
      config: the base model's.
      sizes: what the adapters must fit.
      progress: show progress bars while fetching.

    Returns:
      Each name's directory.

    Raises:
      ValueError: they are no mapping, or too many, or one of them is refused as by
        `LLM.load_adapter`.
    """
    if adapters is None:
        return {}
    check_sources(adapters)
    if len(adapters) > sizes.num_slots:
        raise AdapterCapacityError(
            f"adapters must be at most num_slots = {sizes.num_slots}, got "
            f"{len(adapters)}; raise num_slots"
        )
    folders = {}
    for name, path in adapters.items():
        folders[name] = local_dir(path, "adapter", progress=progress)
        rank = read_rank(folders[name], config)
        if rank > sizes.max_rank:
            raise AdapterCapacityError(
                f"adapter {name!r} does not fit: its rank is {rank}, above max_rank = "
                f"{sizes.max_rank}; raise max_rank"
            )
    return folders


class AdapterLoader:
    """Loads and unloads the adapters of one base model."""

    def __init__(
        self,
        device: DevicePools,
        table: AdapterTable,
        config: LlamaConfig,
        base_names: Sequence[str],
    ):
        """Take the pools and the table of their adapters.

        Args:
          device: holds the pools.
          table: says which slots and pages are whose.
          config: the base model's.
          base_names: what the base may be called, for adapters that name theirs.
        """
        self._device = device
        self._table = table
        self._config = config
        self._base_names = base_names
        self._reporting: threading.Thread | None = None

    def load(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        allow_nan: bool = False,
        progress: bool = False,
    ) -> LoadedAdapter:
        """Load an adapter; see `LLM.load_adapter`."""
        folder = local_dir(path, "adapter", progress=progress)
        adapter = read_adapter(
            folder,
            self._config,
            dtype=self._device.pools.dtype,
            base_names=self._base_names,
        )
        num_pages = {group: adapter.num_pages(group) for group in MODULE_GROUPS}
        placement = self._table.allocate(name, num_pages, adapter.rank)
        try:
            finite = self._device.write(adapter, placement.pages)
            if not finite and not allow_nan:
                raise AdapterError(
                    f"adapter {name!r} at {path} has weights that are NaN or "
                    "infinite; all must be finite (allow_nan=True loads it all "
                    "the same)"
                )
            self._device.show(placement.slot, adapter, placement.pages)
        except BaseException:
            self._table.cancel(placement)
            raise
        self._table.publish(placement, adapter.report)
        self._complete(adapter.report)
        return self._table[name]

    def _complete(self, report: AdapterReport) -> None:
        """Compute a report's norms beside what follows; until then it holds weights."""
        if self._reporting is not None:
            self._reporting.join()
        self._reporting = threading.Thread(target=report.complete)
        self._reporting.start()

    def unload(self, name: str) -> None:
        """Forget an adapter; see `LLM.unload_adapter`."""
        self._device.clear_slot(self._table.free(name).slot)
