"""What adapters are called, and which weights a name stands for now.

Plain Python: knows names and versions; where a version is, and who holds it, is
`residence`.
"""

import itertools
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView

from punica_jax.placements import UnknownAdapterError, listed_names
from punica_jax.stats import AdapterStats
from punica_jax.versions import HostAdapter, Version


class AdapterRegistry(Mapping[str, Version]):
    """The adapters that requests may name.

    A mapping of names to the versions that new requests get.

    Attributes:
      candidates: versions that nobody can claim yet.
      retired: those that a name stands for no longer; each goes when nobody holds it.
      pinned: those that are to be on the device, and to stay.
    """

    def __init__(self) -> None:
        self._current: dict[str, Version] = {}
        self.candidates: dict[Version, None] = {}
        self.retired: dict[Version, None] = {}
        self.pinned: dict[Version, None] = {}
        self._may_bring = False  # whether there may be room now for what is pinned
        self._numbers = itertools.count(1)

    def __getitem__(self, name: str) -> Version:
        """Return the version that new requests get.

        Raises:
          UnknownAdapterError: no adapter has that name.
        """
        version = self._current.get(name) if isinstance(name, str) else None
        if version is None:
            names = self.snapshot()
            listed = f"known are {listed_names(names)}" if names else "none is known"
            raise UnknownAdapterError(f"no adapter is named {name!r}; {listed}")
        return version

    def __iter__(self) -> Iterator[str]:
        return iter(self.snapshot())

    def snapshot(self) -> dict[str, Version]:
        """Return all of them as they are now; in any thread."""
        return self._current.copy()

    def items(self) -> ItemsView[str, Version]:
        """Return the names and versions of now, whatever other threads do meanwhile."""
        return self.snapshot().items()

    def values(self) -> ValuesView[Version]:
        """Return the versions of now."""
        return self.snapshot().values()

    def __len__(self) -> int:
        return len(self._current)

    def register(
        self,
        name: str,
        read: Callable[[], HostAdapter],
        is_remote: bool = False,
        *,
        allow_nan: bool = False,
        is_pinned: bool | None = None,
    ) -> Version:
        """Make an adapter known; it is read when somebody wants it.

        Where the name is known already, sequences that hold the old weights keep them,
        and others get the new ones. `read` is called in another thread; `is_remote`
        says that it may wait for a network. For `is_pinned` see `adopt`.
        """
        version = self.prepare(name, read, is_remote, allow_nan=allow_nan)
        self.adopt(version, is_pinned=is_pinned)
        return version

    def prepare(
        self,
        name: str,
        read: Callable[[], HostAdapter],
        is_remote: bool = False,
        *,
        allow_nan: bool = False,
    ) -> Version:
        """Make a version that nobody can claim yet: `adopt` or `discard` it."""
        # One for all that a name stands for, or will, or did for those who hold it: who
        # ends counts by its name.
        others = (v for v in (*self.candidates, *self.retired) if v.name == name)
        known = self._current.get(name) or next(others, None)
        version = Version(
            name,
            f"{name} (version {next(self._numbers)})",
            read,
            AdapterStats() if known is None else known.stats,
            is_remote=is_remote,
            allow_nan=allow_nan,
        )
        self.candidates[version] = None
        return version

    def want(self, version: Version) -> None:
        """Bring a version to the device when there is room, and keep it there."""
        version.forgive()
        self.pinned[version] = None
        self._may_bring = True

    def adopt(self, version: Version, *, is_pinned: bool | None = None) -> None:
        """Let requests from now on get a version that was prepared.

        Args:
          version: it.
          is_pinned: whether it stays on the device; None is as the one before it.
        """
        del self.candidates[version]
        old = self._current.get(version.name)
        if is_pinned is None:
            is_pinned = old in self.pinned
        self._current[version.name] = version
        self.pin(version.name, is_pinned)
        if old is not None:
            self._retire(old)

    def replaced(self, version: Version) -> Version | None:
        """Return what a version that was prepared is to replace, if anything."""
        return self._current.get(version.name)

    def discard(self, version: Version) -> None:
        """Let a version go that was prepared, unless it has been adopted."""
        if version in self.candidates:
            del self.candidates[version]
            self._retire(version)

    def unregister(self, name: str) -> Version:
        """Forget a name; its weights go when the last sequence that holds them ends.

        Raises:
          UnknownAdapterError: no adapter has that name.
        """
        version = self[name]
        del self._current[name]
        self._retire(version)
        return version

    def pin(self, name: str, is_pinned: bool = True) -> None:
        """Bring an adapter to the device and keep it there, or let it go again.

        While there is no room for it, it waits.

        Raises:
          UnknownAdapterError: no adapter has that name.
        """
        version = self[name]
        if is_pinned:
            self.want(version)
            return
        self._may_bring = True
        if version in self.pinned:
            del self.pinned[version]
            # Should a request wait, too, it asks again; the time before is the pin's.
            self.forgo(name)

    def _retire(self, version: Version) -> None:
        """Let a version go as soon as nobody holds it."""
        self.retired[version], version.is_replaced = None, True
        self.pinned.pop(version, None)
        self._settle(version)

    def forgo(self, name: str) -> None:
        """Take note that nobody waits for an adapter; see `claims.Adapters`."""
        raise NotImplementedError

    def _settle(self, version: Version) -> None:
        """Free what a version has that is retired, once nobody needs it."""
        raise NotImplementedError
