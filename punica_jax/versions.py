"""One adapter's weights and where they are; the host memory of many.

Plain Python: knows a name, users and bytes; what moves them is `residence`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from punica_jax.placements import Placement
from punica_jax.stats import AdapterStats

Tier = Literal["disk", "host", "device"]


class HostAdapter(Protocol):
    """An adapter in host memory: `punica_jax.models.Adapter`."""

    @property
    def rank(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def report(self) -> Any: ...

    def num_pages(self, group: str) -> int: ...

    def digest(self) -> str: ...


class Device(Protocol):
    """What copies adapters to the device: `DevicePools`."""

    def stage(self, adapter: Any, slot: int, pages: Mapping[str, Sequence[int]]) -> Any:
        """Begin to copy an adapter, which stays as it is, for a slot and pages."""
        ...

    def wait(self, staged: Any) -> float:
        """Wait for a copy, in any thread; return `time.monotonic()` of its end."""
        ...

    def place(self, staged: Any) -> Callable[[], bool]:
        """Write what is staged to its pages, and point its slot at them.

        Does not wait, not for the copy either. Returns what waits, and tells whether
        all values are finite.
        """
        ...


class Version:
    """One adapter's weights, as a name stood for them for a time.

    It is known; then read into host memory; then placed: a slot and rank pages are its
    own and the copy is under way; then ready.

    Attributes:
      name: the adapter's.
      key: its own name in the table of what is on the device.
      stats: those of the name.
      is_remote: whether reading it may have to wait for a network.
      weights: stands for these weights and for no others ever.
      num_users: sequences that hold it.
      host: its weights, while they are in host memory.
      num_pages: module group -> rank pages, and nbytes: bytes on the host; as they were
        when it was read last.
      placement: its slot and pages, while it has them.
      staged: what is being copied there, until it is written to its pages.
      ready: whether rows can use it.
      lacks_room: whether room is what it waited for when it was wanted last.
      is_replaced: whether its name stands for others by now, or for none.
      is_transient: whether its error may be gone when it is asked for again.
      failed_s: when that error came.
      report: which modules it changes and by how much, once it has been read; None
        again if it left host memory before its digest was known.
      examined: the digest and the complete report of what was read before, if any.
      loaded: done when it was ready for the first time, or failed.
      gone: done when nothing of it is left on host and device.
      error: what is wrong with it, as far as that is known.
    """

    def __init__(
        self,
        name: str,
        key: str,
        read: Callable[[], HostAdapter],
        stats: AdapterStats,
        *,
        is_remote: bool,
        allow_nan: bool,
    ):
        self.name = name
        self.key = key
        self.read = read
        self.stats = stats
        self.weights: Any = ("version", key)
        self.is_remote = is_remote
        self.allow_nan = allow_nan
        self.num_users = 0
        self.host: HostAdapter | None = None
        self.num_pages: Mapping[str, int] = {}
        self.nbytes: int | None = None
        self.placement: Placement | None = None
        self.staged: Any = None
        self.ready = False
        self.lacks_room = False
        self.is_replaced = False
        self.is_transient = False
        self.failed_s = 0.0
        self.report: Any = None
        self.examined: tuple[str, Any] | None = None
        self.loaded: Future[None] = Future()
        self.gone: Future[None] = Future()
        for future in (self.loaded, self.gone):
            future.set_running_or_notify_cancel()  # who awaits them may leave
        self.error: Exception | None = None
        self.asked_s: float | None = None  # since when it is wanted and not copied
        self.is_finite: Callable[[], bool] | None = None  # None once that was looked at

    @property
    def slot(self) -> int:
        assert self.placement is not None, self.key
        return self.placement.slot

    def note_written(self, report: Any, is_finite: Callable[[], bool]) -> None:
        """Take note that it is in its pages, with what tells whether it is finite."""
        self.staged, self.is_finite = None, is_finite
        self.ready, self.report = True, report
        if not self.loaded.done():
            self.loaded.set_result(None)
        self.stats.num_loads += 1

    def note_copied(self, end_s: float) -> None:
        """Take note of when it was on the device, if somebody wanted it."""
        if self.asked_s is not None:
            self.stats.load_s.add(end_s - self.asked_s)
            self.asked_s = None

    def verify(self) -> Exception | None:
        """Return what is wrong with it; a step that used it must be through."""
        if self.is_finite is not None:
            if not self.is_finite() and not self.allow_nan:
                self.error = ValueError(
                    f"adapter {self.name!r} has weights that are NaN or infinite; all "
                    "must be finite (allow_nan=True takes them all the same)"
                )
                self.stats.num_load_failures += 1
            self.is_finite = None
        return self.error

    def forgive(self, *, after_s: float = 0.0) -> None:
        """Forget an error that may not come again, once nobody is to look at it.

        Args:
          after_s: not before so long after it came.
        """
        if self.is_transient and not self.num_users:
            if time.monotonic() - self.failed_s >= after_s:
                self.error, self.is_transient = None, False

    @property
    def tier(self) -> Tier:
        """The nearest place to the device where rows or copies can have it."""
        if self.ready:
            return "device"
        return "disk" if self.host is None else "host"


def examine(host: HostAdapter, known: tuple[str, Any] | None) -> tuple[str, Any]:
    """Return an adapter's digest and its report, complete.

    Norms are not computed again if these are the weights whose report is known.
    """
    digest = host.digest()
    rows = known[1].rows if known is not None and known[0] == digest else ()
    return digest, host.report.complete(rows)


class HostCache:
    """The adapters in host memory, in the order of their last use.

    Attributes:
      budget: most bytes, but for those that are being kept.
      nbytes: bytes that they take.
    """

    def __init__(self, budget: float):
        self.budget = budget
        self.nbytes = 0
        self._versions: dict[Version, None] = {}

    def __contains__(self, version: object) -> bool:
        return version in self._versions

    def __iter__(self) -> Iterator[Version]:
        return iter(self._versions)

    def add(self, version: Version, host: HostAdapter) -> None:
        """Take what was read of a version."""
        version.host, version.nbytes = host, host.nbytes
        self.nbytes += host.nbytes
        self._versions[version] = None

    def may_read(self, version: Version) -> bool:
        """Tell whether a version may come before there is room for it on the device.

        Not again, if those that wait for room would push one another out for ever.
        """
        if version.nbytes is None:
            return True
        waiting = [one for one in self._versions if one.asked_s and not one.placement]
        nbytes = sum(one.nbytes or 0 for one in waiting)
        return nbytes + version.nbytes <= self.budget

    def may_grow(self, kept: Iterable[Version]) -> bool:
        """Tell whether those that have to stay are not more than the budget."""
        return sum(one.nbytes or 0 for one in kept) <= self.budget

    def touch(self, version: Version) -> None:
        """Take note that a version is used, if it is here."""
        if version in self._versions:
            del self._versions[version]
            self._versions[version] = None

    def drop(self, version: Version) -> None:
        """Let a version's weights go, if they are here."""
        if version.host is not None:
            self.nbytes -= version.host.nbytes
            version.host = None
            if version.weights[0] != "digest":
                version.report = None  # it holds the weights until it is complete
            del self._versions[version]

    def trim(self, keep: Collection[Version]) -> None:
        """Let others go while it is too much, the one unused for longest first."""
        for version in list(self._versions):
            if self.nbytes <= self.budget:
                return
            if version not in keep:
                self.drop(version)
