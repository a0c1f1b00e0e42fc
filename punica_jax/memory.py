"""What a model takes of its device's memory, reckoned before anything is there.

Knows configurations, sizes and one device; allocates nothing.
"""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from punica_jax.batch import Buckets
from punica_jax.forward import spent_bytes
from punica_jax.models import (
    MODULE_GROUPS,
    KvCache,
    Llama,
    LlamaConfig,
    LoraPools,
    check_dtype,
)
from punica_jax.pallas_kernels import resolve
from punica_jax.request import is_integer
from punica_jax.seats import Seats
from punica_jax.sizes import Sizes
from punica_jax.workspace import workspace_bytes

# The first NVIDIA GPUs that compute in bfloat16 (Ampere).
_MIN_BFLOAT16_CAPABILITY = 8.0
# Locking takes an H200's host 1.5 s for each GiB, before it serves; 26 adapters of rank
# 16 of a 7B model have room there.
_MOST_LOCKED_BYTES = 2 << 30


def default_device() -> Any:
    """Return the device that arrays go to."""
    return next(iter(jnp.zeros(()).devices()))


def default_dtype(device: Any) -> str:
    """Return the type of weights that suits a device.

    bfloat16; float32 on a CPU, which computes in it; float16 on an NVIDIA GPU below
    compute capability 8.0, which has no bfloat16.

    Args:
      device: a `jax.Device`.
    """
    if device.platform == "cpu":
        return "float32"
    try:
        capability = float(getattr(device, "compute_capability", "nan"))
    except ValueError:  # ROCm: "gfx942"
        return "bfloat16"
    return "float16" if capability < _MIN_BFLOAT16_CAPABILITY else "bfloat16"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory.

    Attributes:
      name: what to call the device.
      total_bytes: all of it that can be used; None where nobody knows.
      used_bytes: what is taken already.
    """

    name: str
    total_bytes: int | None
    used_bytes: int = 0

    @classmethod
    def of(cls, device: Any) -> "DeviceMemory":
        """Ask a `jax.Device`; a CPU has the machine's physical memory."""
        name = f"{device.platform} ({device.device_kind})"
        if device.platform == "cpu":
            name = "cpu"
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            return cls(name, stats["bytes_limit"], stats.get("bytes_in_use", 0))
        if device.platform != "cpu":
            return cls(name, None)
        return cls(name, cls.of_host().total_bytes)

    @classmethod
    def of_host(cls) -> "DeviceMemory":
        """Ask for this machine's physical memory."""
        if not hasattr(os, "sysconf"):
            return cls("host", None)
        return cls("host", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def share(self, name: str, value: Any) -> int:
        """Return the bytes that a limit such as `kv_memory` means.

        Raises:
          ValueError: it is neither bytes nor a fraction, or a fraction of what nobody
            knows.
        """
        if isinstance(value, float) and 0 < value <= 1:
            if self.total_bytes is None:
                raise ValueError(
                    f"{name} must be bytes here: how much memory {self.name} has is "
                    f"not known, got the fraction {value}"
                )
            return int(value * self.total_bytes)
        if is_integer(value) and value > 0:
            return int(value)
        raise ValueError(
            f"{name} must be bytes (an integer above 0), a fraction of the device's "
            f"memory (a float above 0, at most 1.0) or None, got {value!r}"
        )


def host_adapter_bytes(limit: float | None) -> float:
    """Return the bytes of host memory that adapters may take.

    Args:
      limit: bytes, or as a float up to 1.0 a fraction of the machine's; None is a
        quarter of it.

    Raises:
      ValueError: it is neither.
    """
    host = DeviceMemory.of_host()
    if limit is not None:
        return host.share("host_adapter_memory", limit)
    return math.inf if host.total_bytes is None else host.total_bytes // 4


def locked_bytes(host_bytes: float, device: Any) -> int:
    """Return how much of adapters' host memory is page-locked, at most a half.

    Args:
      host_bytes: what they may take.
      device: a `jax.Device`; 0 for one that does not copy from such memory faster.
    """
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform != "gpu" or "pinned_host" not in kinds:
        return 0
    return int(min(host_bytes / 2, _MOST_LOCKED_BYTES))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Who gets how many bytes.

    Attributes:
      sizes: the pages that fit are in it.
      num_params: the model's parameters.
      staging_bytes: what adapters take beside the pools, on their way there, at most.
      seat_bytes: what the seats keep for sampling: bias, counts and marks of tokens.
      result_bytes: what decode steps write their logits and rows to.
      workspace_bytes: what a step takes while it runs, at most.
    """

    sizes: Sizes
    num_params: int
    weight_bytes: int
    kv_bytes: int
    adapter_bytes: int
    staging_bytes: int
    seat_bytes: int
    result_bytes: int
    workspace_bytes: int
    device: DeviceMemory

    @classmethod
    def of(
        cls,
        config: LlamaConfig,
        sizes: Sizes,
        dtype: Any,
        device: DeviceMemory,
        *,
        kv_memory: float | None = None,
        adapter_memory: float | None = None,
        implementation: str | None = None,
    ) -> "MemoryPlan":
        """Reckon what a model takes, served with these sizes.

        Args:
          config: the model's.
          sizes: without limits of pages.
          dtype: of weights, cache and adapters.
          device: where they go.
          kv_memory: most bytes of the KV cache, or as a float the fraction of the
            device's memory; None: for `max_seats` sequences of `max_model_len`, or as
            many of their pages as there is room for.
          adapter_memory: the same for the adapters; None: for one more than
            `num_slots` adapters of `max_rank`, or as many of their pages as there
            is room for: what the cache does not need, at least a half.
          implementation: see `pallas_kernels.resolve`.

        Raises:
          ValueError: weights cannot have that type, a limit breaks its rule, is too
            low for one sequence of `max_model_len` or one adapter of `max_rank`, or
            the sum is more than what the device has left.
        """
        check_dtype(dtype)
        kv_page = _kv_bytes(config, 1, sizes.page_size, dtype)
        if kv_memory is not None:
            most = device.share("kv_memory", kv_memory) // kv_page
            if most < sizes.pages_per_seq:
                raise ValueError(
                    f"kv_memory = {kv_memory!r} is {bytes_text(most * kv_page)} in "
                    f"whole pages, and one sequence of max_model_len = "
                    f"{sizes.max_model_len} tokens needs "
                    f"{bytes_text(sizes.pages_per_seq * kv_page)}; raise kv_memory or "
                    "lower max_model_len"
                )
            sizes = dataclasses.replace(sizes, max_kv_pages=most)
        tables = _pool_bytes(config, sizes, 1, dtype)
        rank_page = _pool_bytes(config, sizes, 2, dtype) - tables
        tables -= rank_page
        if adapter_memory is not None:
            share = device.share("adapter_memory", adapter_memory)
            most = max(0, share - tables) // rank_page
            if most < sizes.pages_per_adapter:
                needed = tables + sizes.pages_per_adapter * rank_page
                raise ValueError(
                    f"adapter_memory = {adapter_memory!r} is {bytes_text(share)}, and "
                    f"one adapter of max_rank = {sizes.max_rank} needs "
                    f"{bytes_text(needed)}; raise adapter_memory or lower max_rank"
                )
            sizes = dataclasses.replace(sizes, max_rank_pages=most)
        model = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
        fixed = {
            "weight_bytes": _num_bytes(model),
            "staging_bytes": _staging_bytes(config, sizes, rank_page),
            "seat_bytes": _seat_bytes(sizes.max_seats, config.vocab_size),
            "result_bytes": spent_bytes(
                config, dtype, Buckets(sizes.max_seats, sizes.max_rows)
            ),
            "workspace_bytes": workspace_bytes(
                config, sizes, dtype, resolve(implementation)
            ),
        }
        if device.total_bytes is not None:
            room = device.total_bytes - device.used_bytes - sum(fixed.values()) - tables
            if adapter_memory is None:
                share = room - sizes.num_kv_pages * kv_page
                if kv_memory is None:
                    share = max(share, room // 2)
                most = max(share // rank_page, sizes.pages_per_adapter)
                sizes = dataclasses.replace(sizes, max_rank_pages=most)
            if kv_memory is None:
                most = (room - sizes.num_rank_pages * rank_page) // kv_page
                most = max(most, sizes.pages_per_seq)
                sizes = dataclasses.replace(sizes, max_kv_pages=most)
        plan = cls(
            sizes=sizes,
            num_params=sum(math.prod(x.shape) for x in jax.tree.leaves(model)),
            kv_bytes=sizes.num_kv_pages * kv_page,
            adapter_bytes=tables + sizes.num_rank_pages * rank_page,
            device=device,
            **fixed,
        )
        plan._check()
        return plan

    @property
    def total_bytes(self) -> int:
        """Everything together, also what is taken only for a time."""
        resident = self.weight_bytes + self.kv_bytes + self.adapter_bytes
        at_times = self.staging_bytes + self.workspace_bytes
        return resident + self.seat_bytes + self.result_bytes + at_times

    def _check(self) -> None:
        total = self.device.total_bytes
        if total is None or self.total_bytes + self.device.used_bytes <= total:
            return
        sizes = self.sizes
        rows = [
            (self.weight_bytes, "weights"),
            (
                self.kv_bytes,
                f"KV cache: {sizes.num_kv_pages} pages of {sizes.page_size} tokens "
                f"({sizes.pages_per_seq} for one sequence of max_model_len = "
                f"{sizes.max_model_len})",
            ),
            (
                self.adapter_bytes,
                f"adapters: {sizes.num_rank_pages} rank pages "
                f"({sizes.pages_per_adapter} for one of max_rank = {sizes.max_rank})",
            ),
            (self.staging_bytes, "adapters on their way there"),
            (self.seat_bytes, "what seats keep for sampling"),
            (self.result_bytes + self.workspace_bytes, "what a step takes at most"),
            (self.device.used_bytes, "in use already"),
            (self.total_bytes + self.device.used_bytes, "together"),
            (total, f"that {self.device.name} has"),
        ]
        table = "\n".join(f"  {bytes_text(n):>10}  {what}" for n, what in rows if n)
        raise ValueError(
            f"the model does not fit into the device's memory:\n{table}\nLower "
            "max_model_len, max_seats or kv_memory, max_rank, num_slots or "
            "adapter_memory, or take a dtype of two bytes"
        )


def bytes_text(num_bytes: float) -> str:
    """Spell a number of bytes for people: `bytes_text(3 * 2**30)` is "3.00 GiB"."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if num_bytes >= 1024:
            num_bytes, unit = num_bytes / 1024, larger
    digits = 0 if unit == "bytes" or num_bytes >= 100 else 2
    return f"{num_bytes:.{digits}f} {unit}"


def _kv_bytes(config: LlamaConfig, num_pages: int, page_size: int, dtype: Any) -> int:
    return _num_bytes(
        jax.eval_shape(lambda: KvCache.zeros(config, num_pages, page_size, dtype))
    )


def _pool_bytes(config: LlamaConfig, sizes: Sizes, num_pages: int, dtype: Any) -> int:
    return _num_bytes(
        jax.eval_shape(
            lambda: LoraPools.zeros(
                config,
                num_slots=sizes.num_device_slots,
                num_pages=num_pages,
                max_rank=sizes.max_rank,
                dtype=dtype,
            )
        )
    )


def _staging_bytes(config: LlamaConfig, sizes: Sizes, rank_page: int) -> int:
    """Return what adapters of `max_rank` take; each page has its scales with it."""
    num_modules = sum(len(config.d_outs(group)) for group in MODULE_GROUPS)
    scales = 4 * config.num_layers * num_modules
    return sizes.num_staged * sizes.pages_per_adapter * (rank_page + scales)


def _seat_bytes(num_seats: int, vocab_size: int) -> int:
    counts = 4 * num_seats * vocab_size
    seats = jax.eval_shape(lambda: Seats.zeros(num_seats, vocab_size))
    return counts + _num_bytes(seats)


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
