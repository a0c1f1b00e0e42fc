"""Adapter pools for `pj.generate` and `pj.LoraLinear`, filled from PEFT directories.

For callers who hold a model themselves; `LLM` loads and unloads by name instead.
"""

import os
from collections.abc import Sequence

from punica_jax.device_pools import DevicePools
from punica_jax.models import (
    MODULE_GROUPS,
    AdapterError,
    Llama,
    LoraPools,
    read_adapter,
)


def load_adapters(
    model: Llama,
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> LoraPools:
    """Read PEFT directories into new pools on the device.

    Args:
      model: the base model that they were trained on.
      paths: a directory, or several; the i-th becomes slot i.

    Returns:
      Pools with a slot for each adapter and just the pages that they need. A pytree:
      pass it to `generate`; `pools.layer(i).qkv` is a view for `LoraLinear`.

    Raises:
      AdapterError: an adapter is broken, does not fit, or has values not finite.
      ValueError: `model` is none, or `paths` is empty or something else, such as a
        mapping.
    """
    if not isinstance(model, Llama):
        kind = type(model).__name__
        raise ValueError(f"model must be what load_model returns, got {kind}")
    kinds = (str, os.PathLike)
    if isinstance(paths, kinds):
        paths = [paths]
    is_list = isinstance(paths, Sequence)
    if not is_list or not all(isinstance(path, kinds) for path in paths):
        raise ValueError(
            "paths must be a PEFT directory or a list of them, whose order is that of "
            f"the slots (of a mapping, pass list(adapters.values())), got {paths!r}"
        )
    if not paths:
        raise ValueError("load_adapters needs at least one adapter, got none")
    dtype = model.dtype
    adapters = [read_adapter(path, model.config, dtype=dtype) for path in paths]
    num_pages = {
        group: sum(adapter.num_pages(group) for adapter in adapters)
        for group in MODULE_GROUPS
    }
    pools = LoraPools.zeros(
        model.config,
        num_slots=len(adapters),
        num_pages=max(num_pages.values()),
        max_rank=max(adapter.rank for adapter in adapters),
        dtype=dtype,
    )
    device = DevicePools(pools)
    used = dict.fromkeys(MODULE_GROUPS, 0)
    for slot, (path, adapter) in enumerate(zip(paths, adapters, strict=True)):
        pages = {}
        for group in MODULE_GROUPS:
            first = used[group]
            used[group] += adapter.num_pages(group)
            pages[group] = range(first, used[group])
        if not device.write(adapter, pages):
            raise AdapterError(
                f"adapter {path} has weights that are NaN or infinite; all must be "
                "finite"
            )
        device.show(slot, adapter, pages)
    return device.pools
