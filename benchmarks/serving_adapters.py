"""Where the adapters of `benchmarks.serving` are: on the device, or on disk.

Knows names, slots and files; nothing of what is measured.
"""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from punica_jax.adapters import AdapterTable
from punica_jax.bench_model import BenchModel, num_rank_pages
from punica_jax.engine import NUM_SPARE
from punica_jax.models import (
    MODULE_GROUPS,
    EmptyBuffer,
    HostBuffer,
    LlamaConfig,
    read_adapter,
    save_adapter,
)
from punica_jax.policies import FirstComeFirstServed
from punica_jax.residence import AdapterResidence
from punica_jax.sequence import SequenceState
from punica_jax.tasks import Tasks

RANK = 16
# Different files; others are links to them, since 1000 of a 7B model take 80 GB.
NUM_FILES = 16
_SCALE = 0.02


class _There:
    """An adapter on the device; see `claims.Resident`."""

    ready, error, is_replaced = True, None, False

    def __init__(self, slot: int, weights: int):
        self.slot = slot
        self.weights = weights
        self.num_users = 0

    def verify(self) -> None:
        """Return what is wrong with it: nothing is."""


class AllThere:
    """Adapters that need no loading: whichever name, it has a slot at once.

    The slots hold random adapters. Names beyond them take the slot of an idle one, the
    one unused for longest: what differs from an `AdapterResidence` is that nothing is
    read or copied.
    """

    def __init__(self, num_slots: int):
        self._base = _There(-1, 0)
        self._free = list(range(num_slots))
        self._there: dict[str, _There] = {}  # in the order of last use
        self._weights: dict[str, int] = {}

    @property
    def in_use(self) -> set[str]:
        """Names that sequences hold."""
        return {name for name, there in self._there.items() if there.num_users}

    def claim(self, name: str | None) -> _There | None:
        """Hold an adapter; see `claims.Adapters`."""
        if name is None:
            return self._base
        there = self._there.pop(name, None)
        if there is None:
            if not self._free:
                users = {n: there.num_users for n, there in self._there.items()}
                idle = next((n for n in users if not users[n]), None)
                if idle is None:
                    return None
                self._free.append(self._there.pop(idle).slot)
            weights = self._weights.setdefault(name, len(self._weights) + 1)
            there = _There(self._free.pop(), weights)
        self._there[name] = there
        there.num_users += 1
        return there

    def is_here(self, name: str | None) -> bool:
        """Tell whether a claim takes no more room."""
        return name is None or name in self._there

    def lacks_room(self, name: str | None) -> bool:
        """Tell whether that is why the last claim got nothing: it always is."""
        return not self.is_here(name)

    def share(self, resident: Any) -> Any:
        resident.num_users += 1
        return resident

    def release(self, resident: Any) -> None:
        resident.num_users -= 1

    def forgo(self, name: str) -> None:
        """Do nothing: none of them is on its way."""


class OneAtATime(AllThere):
    """The same, but one adapter's requests have to end before another's can run."""

    def claim(self, name: str | None) -> _There | None:
        return super().claim(name) if self.in_use <= {name} else None

    def is_here(self, name: str | None) -> bool:
        return super().is_here(name) and self.in_use <= {name}


class LargestGroup(FirstComeFirstServed):
    """The requests of the adapter in use first; then those for which most wait."""

    def __init__(self, adapters: OneAtATime):
        super().__init__()
        self._adapters = adapters

    def __iter__(self) -> Iterator[SequenceState]:
        groups: dict[str | None, list[SequenceState]] = {}
        for sequence in super().__iter__():
            groups.setdefault(sequence.adapter, []).append(sequence)
        in_use = self._adapters.in_use
        order = sorted(
            groups, key=lambda name: (name not in in_use, -len(groups[name]))
        )
        return (sequence for name in order for sequence in groups[name])


def write_adapters(folder: Path, config: LlamaConfig, dtype: Any, count: int) -> None:
    """Write random adapters `a0` and on, of rank 16 on all modules, as PEFT would."""
    for number in range(count):
        path = folder / f"a{number}"
        if number >= NUM_FILES:
            path.symlink_to(folder / f"a{number % NUM_FILES}")
            continue
        rng = np.random.default_rng(number)

        def draw(*shape: int, rng: np.random.Generator = rng) -> np.ndarray:
            return (_SCALE * rng.standard_normal(shape, np.float32)).astype(dtype)

        tensors: dict[str | tuple[int, str], Any] = {
            (layer, module): (draw(RANK, config.d_in(group)), draw(d_out, RANK))
            for layer in range(config.num_layers)
            for group, modules in MODULE_GROUPS.items()
            for module, d_out in zip(modules, config.d_outs(group), strict=True)
        }
        save_adapter(path, config, tensors)


def on_disk(
    bench: BenchModel,
    folder: Path,
    names: Iterable[str],
    tasks: Tasks,
    *,
    num_slots: int,
    host_bytes: float,
    empty: EmptyBuffer = HostBuffer.empty,
) -> AdapterResidence:
    """Return a residence that knows some adapters of a folder and has read none.

    It has slots to spare as an `Engine` has, beside those that it is asked for.
    """
    num_slots += NUM_SPARE
    num_pages = num_slots * num_rank_pages(RANK)
    table = AdapterTable(num_slots, dict.fromkeys(MODULE_GROUPS, num_pages), RANK)
    residence = AdapterResidence(
        table,
        bench.runner.adapters,
        tasks,
        host_bytes=host_bytes,
        num_spare=NUM_SPARE,
    )
    for name in names:
        read = functools.partial(
            read_adapter, folder / name, bench.config, dtype=bench.dtype, empty=empty
        )
        residence.register(name, read)
    return residence
