"""Everything on the device: weights, KV cache, adapter pools, compiled programs.

Knows batches, pages and slots as numbers. Knows nothing of requests, text, names of
adapters, or which pages and slots are free.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from punica_jax.batch import Batch, Bucket
from punica_jax.models import (
    MODULE_GROUPS,
    Adapter,
    KvCache,
    Llama,
    LoraPools,
    set_slot,
    slot_tables,
    write_page,
)
from punica_jax.pallas_kernels import resolve
from punica_jax.step import run_step

# Lets the shrink run beside the base product: 8 % of a 7B step on an H200.
_GPU_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


class Runner:
    """Runs steps and moves adapters; owns all device state.

    The model is split once into a flat list of arrays: `nnx.jit` would walk the module
    on every call (50 ms a step for 32 layers against 0.5 ms so).
    """

    def __init__(
        self,
        model: Llama,
        *,
        num_kv_pages: int,
        page_size: int,
        num_slots: int,
        num_rank_pages: int,
        max_rank: int,
        implementation: str | None = None,
    ):
        """Allocate the cache and the pools beside a model.

        Args:
          model: taken over: its arrays are passed to every step.
          num_kv_pages: KV pages of each layer.
          page_size: tokens of a KV page.
          num_slots: adapters on the device at one time.
          num_rank_pages: rank pages of each module group, for all adapters.
          max_rank: greatest rank of an adapter.
          implementation: see `pallas_kernels.resolve`.
        """
        self.implementation = resolve(implementation)
        self._weights, self._structure = jax.tree.flatten(nnx.split(model))
        self._cache = KvCache.zeros(model.config, num_kv_pages, page_size, model.dtype)
        self._pools = LoraPools.zeros(
            model.config,
            num_slots=num_slots,
            num_pages=num_rank_pages,
            max_rank=max_rank,
            dtype=model.dtype,
        )
        on_gpu = self.implementation == "pallas_triton"
        self._step = jax.jit(
            functools.partial(_flat_step, self._structure, self.implementation),
            donate_argnums=1,
            static_argnums=4,
            compiler_options=_GPU_OPTIONS if on_gpu else None,
        )
        self._write_page = jax.jit(
            write_page, static_argnames="group", donate_argnums=0
        )
        self._set_slot = jax.jit(set_slot, donate_argnums=0)
        self._buckets: dict[Bucket, None] = {}
        self._compile_loading()

    @property
    def dtype(self) -> Any:
        return self._pools.dtype

    @property
    def pools(self) -> LoraPools:
        """The adapters on the device. Valid until the next load or unload."""
        return self._pools

    @property
    def programs(self) -> list[str]:
        """Names of the compiled programs, one each."""
        loading = [f"write_page[{group}]" for group in MODULE_GROUPS]
        return [*loading, "set_slot", *(bucket.name for bucket in self._buckets)]

    def step(self, batch: Batch) -> np.ndarray:
        """Run a step and wait for its tokens.

        Returns:
          `i32[seqs]`, the next token of each sequence of the bucket.
        """
        return np.asarray(self.launch(batch))

    def launch(self, batch: Batch) -> jax.Array:
        """Run a step without waiting; returns `i32[seqs]` on the device."""
        packed, layout = batch.pack()
        tokens, self._cache = self._step(
            self._weights, self._cache, self._pools, packed, layout
        )
        self._buckets[batch.bucket] = None
        return tokens

    def warm_up(self, buckets: Iterable[Bucket], pages_per_seq: int) -> None:
        """Compile the programs of some buckets, by running each without a live row."""
        for bucket in buckets:
            self.step(Batch.of([], bucket, pages_per_seq))

    def write_adapter(
        self, adapter: Adapter, pages: Mapping[str, Sequence[int]]
    ) -> bool:
        """Write an adapter's weights to rank pages that no slot uses.

        Args:
          adapter: its weights, in the pools' dtype.
          pages: module group -> the pages for it.

        Returns:
          Whether all its values are finite, as the device found them.
        """
        flags = []
        for group, numbers in pages.items():
            for index, page in enumerate(numbers):
                a_page, b_page = adapter.page(group, index)
                self._pools, finite = self._write_page(
                    self._pools,
                    group=group,
                    page=np.int32(page),
                    a_page=a_page,
                    b_page=b_page,
                )
                flags.append(finite)
        return all(bool(flag) for flag in flags)

    def show_adapter(
        self, slot: int, adapter: Adapter, pages: Mapping[str, Sequence[int]]
    ) -> None:
        """Point a slot at written pages: rows see the adapter from the next step on."""
        counts = {group: adapter.counts(group) for group in pages}
        tables = slot_tables(self._pools, pages, counts)
        self._pools = self._set_slot(self._pools, np.int32(slot), tables)

    def clear_slot(self, slot: int) -> None:
        """Empty a slot: rows that name it get no adapter's product."""
        tables = slot_tables(self._pools)
        self._pools = self._set_slot(self._pools, np.int32(slot), tables)

    def _compile_loading(self) -> None:
        # Slot 0 is empty and page 0 free: writing zeros there changes nothing.
        for group in MODULE_GROUPS:
            pools = self._pools.group(group)
            layers = self._pools.num_layers
            self._pools, _ = self._write_page(
                self._pools,
                group=group,
                page=np.int32(0),
                a_page=np.zeros((layers, *pools.a[0].shape[1:]), self.dtype),
                b_page=np.zeros((layers, *pools.b[0].shape[1:]), self.dtype),
            )
        self.clear_slot(0)


def _flat_step(structure, implementation, weights, cache, pools, packed, layout):
    graph, state = jax.tree.unflatten(structure, weights)
    model = nnx.merge(graph, state)
    batch = Batch.unpack(packed, layout)
    return run_step(model, cache, pools, batch, implementation=implementation)
