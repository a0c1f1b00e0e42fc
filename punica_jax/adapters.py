"""Which adapters are loaded, and which slot and rank pages each of them owns.

Plain bookkeeping: names, small integers and free lists. Knows nothing of arrays, files
or devices; whoever allocates here writes the pages there.

The life of an adapter: `allocate` reserves a slot and pages that no row can reach yet;
then `publish`, when the pages are written and found good, or `cancel`, when they are
not; at last `free`. Replacing is the same with a name that is loaded: the new pages are
reserved beside the old ones, and the old ones are given back by `publish` only, so a
replacement that fails leaves the old adapter as it was. It keeps its slot, whose table
the device switches in one step.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from punica_jax.placements import (
    BASE_VERSION,
    NO_SLOT,
    AdapterCapacityError,
    Held,
    LoadedAdapter,
    Placement,
    UnknownAdapterError,
    check_name,
    listed_names,
)

if TYPE_CHECKING:
    from punica_jax.models import AdapterReport


class AdapterTable(Mapping[str, LoadedAdapter]):
    """The loaded adapters by name, and what is free.

    A mapping of names to `LoadedAdapter`; it changes only through the methods here.
    Every method either succeeds or raises and changes nothing.
    """

    def __init__(
        self, num_slots: int, num_pages: Mapping[str, int], max_rank: int
    ) -> None:
        """Make an empty table.

        Args:
          num_slots: adapters that can be loaded at one time.
          num_pages: module group -> rank pages that all adapters share.
          max_rank: greatest rank of any adapter.
        """
        sizes = {"num_slots": num_slots, "max_rank": max_rank}
        sizes |= {f"num_pages[{g!r}]": pages for g, pages in num_pages.items()}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._num_slots = num_slots
        self._num_pages = dict(num_pages)
        self._max_rank = max_rank
        self._loaded: dict[str, LoadedAdapter] = {}
        self._pending: dict[str, Placement] = {}
        self._versions = itertools.count(BASE_VERSION + 1)
        # Heaps: the lowest free number goes first, so placements are reproducible.
        self._free_slots = list(range(num_slots))
        self._free_pages = {g: list(range(pages)) for g, pages in num_pages.items()}

    def __getitem__(self, name: str) -> LoadedAdapter:
        """Return a loaded adapter.

        Raises:
          UnknownAdapterError: no loaded adapter has that name.
        """
        if not isinstance(name, str) or name not in self._loaded:
            raise UnknownAdapterError(
                f"no adapter named {name!r} is loaded; {self._known()}"
            )
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.snapshot())

    def snapshot(self) -> dict[str, LoadedAdapter]:
        """Return all of them as they are now; in any thread."""
        return self._loaded.copy()

    def __len__(self) -> int:
        return len(self._loaded)

    def __repr__(self) -> str:
        return f"AdapterTable({list(self)})"

    def __contains__(self, name: object) -> bool:
        return name in self._loaded

    def slot_of(self, name: str | None) -> int:
        """Return the slot for rows that use this adapter, -1 for None.

        Raises:
          UnknownAdapterError: no loaded adapter has that name.
        """
        return NO_SLOT if name is None else self[name].slot

    def version_of(self, name: str | None) -> int:
        """Return what stands for the weights that rows of this adapter meet.

        Raises:
          UnknownAdapterError: no loaded adapter has that name.
        """
        return BASE_VERSION if name is None else self[name].version

    def claim(self, name: str | None) -> Held:
        """Return what a sequence's rows need; whoever unloads sees that nobody runs.

        Raises:
          UnknownAdapterError: no loaded adapter has that name.
        """
        return Held(self.slot_of(name), self.version_of(name))

    def is_here(self, name: str | None) -> bool:
        """Say so: a loaded adapter takes no more room."""
        return True

    def lacks_room(self, name: str | None) -> bool:
        """Say no: a loaded adapter has it."""
        return False

    def share(self, resident: Any) -> Any:
        """Return it: a loaded adapter stays until it is unloaded."""
        return resident

    def release(self, resident: Any) -> None:
        """Do nothing: a loaded adapter stays until it is unloaded."""

    def forgo(self, name: str) -> None:
        """Do nothing, as `release`."""

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def num_free_pages(self, group: str) -> int:
        """Return how many rank pages of a module group nobody owns."""
        return len(self._free_pages[group])

    def can_allocate(self, name: str, num_pages: Mapping[str, int], rank: int) -> bool:
        """Tell whether `allocate` with these arguments would succeed."""
        return (
            bool(name)
            and name not in self._pending
            and self._why_not(name, num_pages, rank) is None
        )

    @property
    def num_pages(self) -> Mapping[str, int]:
        """Module group -> its rank pages."""
        return self._num_pages

    def why_never(self, num_pages: Mapping[str, int], rank: int) -> str | None:
        """Return why an adapter would not fit an empty table, None if it would."""
        if rank > self._max_rank:
            return (
                f"its rank is {rank}, above max_rank = {self._max_rank}; raise max_rank"
            )
        for group, count in num_pages.items():
            if count > self._num_pages[group]:
                return (
                    f"it needs {count} rank pages of group {group}, of which there are "
                    f"{self._num_pages[group]}; raise adapter_memory or num_slots"
                )
        return None

    def would_fit(
        self,
        num_pages: Mapping[str, int],
        leaving: Sequence[Placement],
        *,
        num_spare: int = 0,
    ) -> bool:
        """Tell whether a new adapter would fit if some placements were given back.

        Args:
          num_pages: see `allocate`.
          leaving: the placements.
          num_spare: slots that must be left free beside it.
        """
        return len(self._free_slots) + len(leaving) > num_spare and all(
            count
            <= self.num_free_pages(group)
            + sum(len(one.pages[group]) for one in leaving)
            for group, count in num_pages.items()
        )

    def allocate(self, name: str, num_pages: Mapping[str, int], rank: int) -> Placement:
        """Reserve a slot and pages; nothing is visible before `publish`.

        Args:
          name: the adapter's. If it is loaded, this begins its replacement.
          num_pages: module group -> rank pages that the adapter needs, 0 allowed.
          rank: the adapter's greatest rank.

        Returns:
          The room, with the replaced adapter's slot if there is one.

        Raises:
          AdapterCapacityError: the rank is above `max_rank`, or slots or pages are out.
          ValueError: the name is empty, or is being loaded already.
        """
        check_name(name)
        if name in self._pending:
            raise ValueError(f"adapter {name!r} is being loaded already")
        assert num_pages.keys() == self._num_pages.keys(), sorted(num_pages)
        if reason := self._why_not(name, num_pages, rank):
            raise AdapterCapacityError(f"adapter {name!r} does not fit: {reason}")
        old = self._loaded.get(name)
        slot = heapq.heappop(self._free_slots) if old is None else old.slot
        pages = {
            group: tuple(heapq.heappop(self._free_pages[group]) for _ in range(count))
            for group, count in num_pages.items()
        }
        placement = Placement(name, slot, MappingProxyType(pages))
        self._pending[name] = placement
        return placement

    def publish(
        self, placement: Placement, report: "AdapterReport"
    ) -> LoadedAdapter | None:
        """Make an allocated adapter visible under its name.

        Call it when the device's tables point at the new pages: the pages of the
        adapter that it replaces are free from here on.

        Returns:
          The replaced adapter, None if there was none.
        """
        self._take_pending(placement)
        name = placement.name
        old = self._loaded.get(name)
        if old is not None:
            self._give_back(old.pages)
        self._loaded[name] = LoadedAdapter(
            name, placement.slot, placement.pages, report, next(self._versions)
        )
        return old

    def cancel(self, placement: Placement) -> None:
        """Give back what `allocate` reserved; an adapter to be replaced stays."""
        self._take_pending(placement)
        self._give_back(placement.pages)
        if placement.name not in self._loaded:
            heapq.heappush(self._free_slots, placement.slot)

    def free(self, name: str) -> LoadedAdapter:
        """Forget a loaded adapter; its slot and pages are free from here on.

        Returns:
          The adapter, so that its slot's tables can be emptied.

        Raises:
          UnknownAdapterError: no loaded adapter has that name.
          ValueError: a replacement of it is being loaded.
        """
        adapter = self[name]
        if name in self._pending:
            raise ValueError(
                f"adapter {name!r} cannot be freed while it is being replaced"
            )
        del self._loaded[name]
        heapq.heappush(self._free_slots, adapter.slot)
        self._give_back(adapter.pages)
        return adapter

    def check_integrity(self) -> None:
        """Assert that every slot and page has exactly one owner, or is free."""
        owners = [*self._loaded.values(), *self._pending.values()]
        slots = {owner.name: owner.slot for owner in owners}
        for name in self._loaded.keys() & self._pending.keys():
            assert self._loaded[name].slot == self._pending[name].slot, name
        _check_partition("slots", self._num_slots, self._free_slots, slots.values())
        for group, count in self._num_pages.items():
            owned = [page for owner in owners for page in owner.pages[group]]
            _check_partition(f"{group} pages", count, self._free_pages[group], owned)

    def _why_not(
        self, name: str, num_pages: Mapping[str, int], rank: int
    ) -> str | None:
        """Return why an adapter cannot be placed, None if it can."""
        if reason := self.why_never(num_pages, rank):
            return reason
        replaces = name in self._loaded
        if not replaces and not self._free_slots:
            return (
                f"all {self._num_slots} slots are taken; unload an adapter or raise "
                f"num_slots; {self._known()}"
            )
        for group, count in num_pages.items():
            free, total = self.num_free_pages(group), self._num_pages[group]
            if count > free:
                beside = " (the one it replaces stays until it is ready)"
                return (
                    f"it needs {count} rank pages of group {group}, of which {free} of "
                    f"{total} are free{beside if replaces else ''}; unload an adapter "
                    f"or raise adapter_memory or num_slots; {self._known()}"
                )
        return None

    def _take_pending(self, placement: Placement) -> None:
        assert self._pending.get(placement.name) is placement, placement
        del self._pending[placement.name]

    def _give_back(self, pages: Mapping[str, tuple[int, ...]]) -> None:
        for group, numbers in pages.items():
            for page in numbers:
                heapq.heappush(self._free_pages[group], page)

    def _known(self) -> str:
        if not self._loaded:
            return "none is loaded"
        return f"loaded are {listed_names(self._loaded)}"


def _check_partition(
    what: str, count: int, free: Iterable[int], owned: Iterable[int]
) -> None:
    """Assert that free and owned numbers together are 0 to count - 1, each once."""
    numbers = sorted([*free, *owned])
    assert numbers == list(range(count)), f"{what}: free {free}, owned {list(owned)}"
