"""The adapters on the device: who is idle there, and who leaves for another one.

Plain Python: knows versions, slots and rank pages; how they are copied, and who waits
for them, is `residence`'s business.
"""

from collections.abc import Iterable, Iterator, Mapping

from punica_jax.adapters import AdapterTable
from punica_jax.placements import AdapterCapacityError, Placement
from punica_jax.registry import AdapterRegistry
from punica_jax.versions import Version


class DeviceTier:
    """The versions that have slots and pages, in the order of their last use."""

    def __init__(self, table: AdapterTable, registry: AdapterRegistry, num_spare: int):
        """Begin with none.

        Args:
          table: the device's slots and rank pages, all of them free.
          registry: knows who is pinned, and what is to replace what.
          num_spare: slots that only a version takes that is to replace another one.
        """
        self._table = table
        self._registry = registry
        self._num_spare = num_spare
        self._versions: dict[Version, None] = {}

    def __contains__(self, version: object) -> bool:
        return version in self._versions

    def __iter__(self) -> Iterator[Version]:
        return iter(self._versions)

    def __len__(self) -> int:
        return len(self._versions)

    @property
    def pinned(self) -> set[Version]:
        """Those that stay; not those that are to replace another one."""
        registry = self._registry
        pinned = registry.pinned.keys() & self._versions.keys()
        return pinned - registry.candidates.keys()

    def touch(self, version: Version) -> None:
        """Take note that a version is used."""
        self._versions[version] = self._versions.pop(version)

    def add(self, version: Version, rank: int) -> Placement:
        """Give a version its slot and pages; there must be room for it."""
        placed = self._table.allocate(version.key, version.num_pages, rank)
        version.placement, self._versions[version] = placed, None
        return placed

    def remove(self, version: Version) -> None:
        """Take a version off the device; no row of a step in flight names it."""
        assert version.placement is not None and not version.num_users
        if version.ready:
            self._table.free(version.key)
        else:
            self._table.cancel(version.placement)
        version.placement, version.ready = None, False
        del self._versions[version]

    def idle_for(
        self, version: Version, num_pages: Mapping[str, int]
    ) -> list[Version] | None:
        """Return idle versions whose room would be enough; None if all are too few."""
        leaving: list[Version] = []
        idle = (one for one in self._versions if self._is_idle(one))
        while not self._would_fit(version, num_pages, leaving):
            one = next(idle, None)
            if one is None:
                return None
            leaving.append(one)
        return leaving

    def fits_beside_pinned(self, version: Version) -> bool:
        """Tell whether there is room for a version once all others are idle."""
        others = self._versions.keys() - self.pinned
        return self._would_fit(version, version.num_pages, others)

    def check_pins(self, version: Version) -> None:
        """Raise `AdapterCapacityError` if pins leave no room, whoever else leaves."""
        if not self.fits_beside_pinned(version):
            raise AdapterCapacityError(
                f"adapter {version.name!r} does not fit beside the "
                f"{len(self.pinned)} that are pinned; unpin one, or raise num_slots or "
                "adapter_memory"
            )

    def _would_fit(
        self, version: Version, num_pages: Mapping[str, int], leaving: Iterable[Version]
    ) -> bool:
        placements = [one.placement for one in leaving if one.placement is not None]
        num_spare, registry = 0, self._registry
        replacing = [
            one for one in registry.candidates if registry.replaced(one) in self
        ]
        if version not in replacing:
            # What replaces and what is replaced are those that the spare ones are for.
            both = (*replacing, *registry.retired)
            num_spare = self._num_spare - sum(one in self._versions for one in both)
        return self._table.would_fit(num_pages, placements, num_spare=max(num_spare, 0))

    def _is_idle(self, version: Version) -> bool:
        is_pinned = version in self._registry.pinned
        return version.ready and not version.num_users and not is_pinned
