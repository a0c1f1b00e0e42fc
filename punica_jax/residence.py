"""Which adapters are on disk, in host memory and on the device, and who holds them.

Plain Python: knows names, versions, bytes and users. What reads files and what copies
to the device is given to it; other threads read and wait, and steps go on meanwhile.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from punica_jax.adapters import AdapterTable
from punica_jax.device_tier import DeviceTier
from punica_jax.placements import AdapterCapacityError, Held
from punica_jax.registry import AdapterRegistry
from punica_jax.tasks import Kind, Tasks
from punica_jax.versions import Device, HostAdapter, HostCache, Version, examine

_log = logging.getLogger(__name__)
# At one time, from files and from the hub each, and copies: oldest wishes first.
_MAX_READS = 4
MAX_STAGED = 2
# A flood of requests for an adapter that cannot be had is refused without a look at its
# files; a request that comes later finds them mended.
RETRY_S = 1.0
# Claims of others while one that is to stay waits for room that they have: they may
# take what becomes free, or keep what they have, and never leave enough.
_MAX_OVERTAKES = 64


class AdapterResidence(AdapterRegistry):
    """The adapters that requests may name, wherever they are.

    Idle ones leave device and host when room is needed there, the one unused for
    longest first.
    """

    def __init__(
        self,
        table: AdapterTable,
        device: Device,
        tasks: Tasks,
        *,
        host_bytes: float,
        num_spare: int = 0,
    ):
        """Begin with none.

        Args:
          table: the device's slots and rank pages, all of them free.
          device: copies adapters there.
          tasks: what other threads do; they wake whoever is to `poll`.
          host_bytes: most bytes of adapters in host memory, but for one that has just
            been read and is wanted, and those being read, copied or examined.
          num_spare: slots that only a version takes that is to replace another one.
        """
        super().__init__()
        self._table = table
        self._device = device
        self._on_host = HostCache(host_bytes)
        self._placed = DeviceTier(table, self, num_spare)
        self._tasks = tasks
        self._takes: dict[Kind, Any] = dict.fromkeys(("fetch", "read"), self._take_read)
        self._takes |= {"stage": self._take_copied, "examine": self._take_examined}
        self._renames: list[tuple[Any, Any]] = []
        self._lacking: set[Version] = set()  # that are to stay, and found no room
        self._is_short = False  # whether others' users have that room
        self._num_overtakes = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of adapters in host memory."""
        return self._on_host.nbytes

    @property
    def num_on_device(self) -> int:
        return len(self._placed)

    @property
    def num_rank_pages(self) -> dict[str, int]:
        """Module group -> rank pages on the device."""
        return dict(self._table.num_pages)

    @property
    def num_free_rank_pages(self) -> dict[str, int]:
        """Module group -> those that no adapter has."""
        return {one: self._table.num_free_pages(one) for one in self._table.num_pages}

    def claim(self, name: str | None) -> Version | Held | None:
        """Hold an adapter for a sequence; see `claims.Adapters`."""
        if name is None:
            return self._table.claim(None)
        version = self[name]
        version.forgive(after_s=RETRY_S)
        if version.error is not None:
            raise version.error
        makes_way = self._is_short and version not in self.pinned
        if makes_way and self._num_overtakes >= _MAX_OVERTAKES:
            version.lacks_room = True
            return None
        if version.placement is None and not self._place(version):
            return None
        self._num_overtakes += makes_way
        version.num_users += 1
        self._placed.touch(version)
        self._on_host.touch(version)
        return version

    def is_here(self, name: str | None) -> bool:
        """Tell whether a claim takes no more room; see `claims.Adapters`."""
        version = None if name is None else self._current.get(name)
        return version is None or version.placement is not None

    def lacks_room(self, name: str | None) -> bool:
        """Tell whether that is why the last claim got nothing."""
        version = None if name is None else self._current.get(name)
        return version is not None and version.lacks_room

    def share(self, resident: Any) -> Any:
        """Hold once more what is held; see `claims.Adapters`."""
        if isinstance(resident, Version):
            assert resident.num_users > 0, resident.key
            resident.num_users += 1
        return resident

    def release(self, resident: Any) -> None:
        """Let go of what was claimed or shared."""
        if isinstance(resident, Version):
            assert resident.num_users > 0, resident.key
            resident.num_users -= 1
            self._placed.touch(resident)
            self._settle(resident)

    def forgo(self, name: str) -> None:
        """Take note that nobody waits for an adapter; see `claims.Adapters`."""
        version = self._current.get(name)
        if version and not version.placement and version not in self.pinned:
            version.asked_s = None

    def poll(self) -> None:
        """Take what other threads have brought, and start what follows."""
        for version, kind, task in self._tasks.take():
            error = task.exception()
            if error is None:
                self._takes[kind](version, task.result())
            elif kind != "examine":
                self._fail(version, error)
            else:
                _log.warning(
                    "%s has no digest, so no shared pages: %r", version.key, error
                )
            self._settle(version)
            just_read = {version} if kind in ("fetch", "read") else set()
            self._on_host.trim(keep=self._tasks.versions | just_read)
        if self._may_bring:
            self._bring_pinned()

    def hasten(self) -> bool:
        """Let rows use what is being copied for them: the next step waits for it."""
        copying = [one for one in self._tasks.of("stage") if one.staged is not None]
        wanted = [one for one in copying if one.num_users]
        for version in wanted:
            self._write(version)
        return bool(wanted)

    def give_up(self, error: Callable[[], Exception]) -> None:
        """End all work, and let nobody wait for it; `error` makes each one's own."""
        self._tasks.shutdown()
        for version in [*self._current.values(), *self.retired, *self.candidates]:
            for done in (version.loaded, version.gone):
                if not done.done():
                    done.set_exception(error())

    def take_renames(self) -> list[tuple[Any, Any]]:
        """Return what weights were called, and are called now that they are known."""
        renames, self._renames = self._renames, []
        return renames

    def check_integrity(self) -> None:
        """Assert that what is where and who holds what fit together."""
        self._table.check_integrity()
        versions = {*self._current.values(), *self.retired, *self.candidates}
        in_work = self._tasks.versions
        assert {*self._on_host, *self._placed, *in_work, *self.pinned} <= versions
        assert self.retired.keys().isdisjoint({*self._current.values(), *self.pinned})
        for version in in_work:
            assert (version.host is None) == self._tasks.is_read(version), version.key
        num_kept = sum(one not in in_work for one in self._on_host)
        assert self._on_host.nbytes <= self._on_host.budget or num_kept <= 1
        for version in versions:
            assert version.staged is None or version in self._tasks.of("stage")
            assert (version.placement is not None) == (version in self._placed)
            assert (version.host is not None) == (version in self._on_host)
            assert version in self._placed or not (version.num_users or version.ready)
        for version in self.retired:
            assert version.num_users or version in in_work, version.key
        assert {one.key for one in self._placed if one.ready} == set(self._table)

    def _bring_pinned(self) -> None:
        """Bring what is pinned and absent, in its order, as far as there is room.

        Thousands may wait: once somebody lacks a slot, or room for so many pages, no
        other is tried, or read, that needs as much.
        """
        self._may_bring = False
        for version in filter(self._is_absent, list(self.candidates)):
            try:
                if version in self.pinned:
                    self._place(version)
            except AdapterCapacityError as error:
                if version.error is None:  # who loads it is told
                    self._fail(version, error)
        lacking: list[Mapping[str, int]] = []
        for version in filter(self._is_absent, list(self.pinned)):
            if version in self.candidates or version.num_pages in lacking:
                continue
            is_far = version.is_remote and version.host is None
            if is_far and len(self._tasks.of("fetch")) >= _MAX_READS:
                continue  # a network must not hold up files
            if self._placed.idle_for(version, {}) is None:
                self._lacking.add(version)
                break  # no slot: nor is there one for those that follow
            with contextlib.suppress(AdapterCapacityError):  # until there are fewer
                self._place(version, reads_ahead=False)
            if self._is_absent(version):
                if not version.lacks_room:
                    break  # enough are on their way: they come before
                lacking.append(version.num_pages)
        self._lacking = {
            version
            for version in self._lacking & self.pinned.keys()
            if version.placement is None and version.error is None
        }
        self._is_short = any(map(self._placed.fits_beside_pinned, self._lacking))
        if not self._is_short:
            self._num_overtakes = 0

    def _is_absent(self, version: Version) -> bool:
        """Tell whether a good version is neither on the device nor on its way."""
        is_there = version.placement is not None or version.error is not None
        return not is_there and not self._tasks.is_moving(version)

    def _place(self, version: Version, *, reads_ahead: bool = True) -> bool:
        """Give a version its slot and pages, if it is read and there is room.

        Args:
          version: the version; if it is not in host memory, it is read.
          reads_ahead: read it even if there is no room for it yet.

        Raises:
          AdapterCapacityError: pins leave none.
        """
        version.lacks_room = False
        if version.asked_s is None:
            version.asked_s = time.monotonic()
        if self._tasks.is_moving(version):
            return False
        num_pages = version.num_pages
        if version.host is None:
            # Who is examined keeps its weights: digests must not hold up files sooner.
            may_grow = self._on_host.may_grow(self._tasks.of("examine"))
            kind: Kind = "fetch" if version.is_remote else "read"
            if len(self._tasks.of(kind)) < _MAX_READS and may_grow:
                can_come = reads_ahead and self._on_host.may_read(version)
                if can_come or self._placed.idle_for(version, num_pages) is not None:
                    self._tasks.start(version, kind, version.read)
                else:
                    version.lacks_room = True
                    self._placed.check_pins(version)
            return False
        if len(self._tasks.of("stage")) >= MAX_STAGED:
            return False
        leaving = self._placed.idle_for(version, num_pages)
        if leaving is None:
            self._on_host.touch(version)  # it would only be read again
            version.lacks_room = True
            if version in self.pinned:
                self._lacking.add(version)
            self._placed.check_pins(version)
            return False
        for one in leaving:
            self._placed.remove(one)
            one.stats.num_evictions += 1
        placed = self._placed.add(version, version.host.rank)
        try:
            staged = self._device.stage(version.host, placed.slot, placed.pages)
        except Exception as error:
            self._tasks.fail(version, "stage", error)
        else:
            version.staged = staged
            wait = functools.partial(self._device.wait, staged)
            self._tasks.start(version, "stage", wait)
        return True

    def _take_read(self, version: Version, host: HostAdapter) -> None:
        version.stats.num_reads += 1
        # Files may have changed since they were read before.
        version.weights = "version", f"{version.key} (read {version.stats.num_reads})"
        version.report = host.report
        version.num_pages = {one: host.num_pages(one) for one in self._table.num_pages}
        self._on_host.add(version, host)
        # Now: it may leave host memory before there is a copy to begin.
        if reason := self._table.why_never(version.num_pages, host.rank):
            text = f"adapter {version.name!r} does not fit: {reason}"
            self._fail(version, AdapterCapacityError(text))

    def _take_copied(self, version: Version, through_s: float) -> None:
        """Have it written to its pages, if that was not hastened."""
        if version.staged is not None:
            self._write(version)
            through_s = time.monotonic()
        version.note_copied(through_s)

    def _write(self, version: Version) -> None:
        """Have what is staged written to its pages: rows can use it."""
        host, placement = version.host, version.placement
        assert host is not None and placement is not None
        is_finite = self._device.place(version.staged)
        self._table.publish(placement, host.report)
        version.note_written(host.report, is_finite)
        if version.weights[0] != "digest" and version not in self._tasks.of("examine"):
            # Nobody waits for it: pages of other versions can be shared from then on.
            work = functools.partial(examine, host, version.examined)
            self._tasks.start(version, "examine", work)

    def _take_examined(self, version: Version, found: tuple[str, Any]) -> None:
        digest, version.report = version.examined = found
        old, version.weights = version.weights, ("digest", digest)
        self._renames.append((old, version.weights))

    def _fail(self, version: Version, error: BaseException) -> None:
        """Note what is wrong; whoever holds it looks at that and lets go."""
        # Files may be mended, and a full device have room later.
        version.is_transient = not isinstance(error, AdapterCapacityError)
        if not isinstance(error, ValueError):
            error = ValueError(f"adapter {version.name!r} cannot be loaded: {error}")
        _log.warning("%s", error)  # one that is pinned may be nobody's request
        version.error, version.failed_s = error, time.monotonic()
        version.asked_s = version.staged = None
        if not version.loaded.done():
            version.loaded.set_exception(error)
        version.stats.num_load_failures += 1

    def _settle(self, version: Version) -> None:
        """Free what a version has that is retired or bad, once nobody needs it."""
        self._may_bring = True
        is_retired = version in self.retired
        if version.num_users or self._tasks.is_moving(version):
            return
        if is_retired or version.error is not None:
            if version.placement is not None:
                self._placed.remove(version)
            if version in self._tasks.of("examine"):  # its digest is computed
                return
            self._on_host.drop(version)
        if is_retired:
            del self.retired[version]
            version.gone.set_result(None)
