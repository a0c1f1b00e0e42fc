"""Which adapters are on disk, in host memory and on the device, and who holds them.

Plain Python: knows names, versions, bytes and users. What reads files and what copies
to the device is given to it, and runs in other threads: steps go on meanwhile.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any

from punica_jax.adapters import AdapterTable
from punica_jax.placements import AdapterCapacityError, Held
from punica_jax.registry import AdapterRegistry
from punica_jax.versions import Device, HostAdapter, HostCache, Version

# Files that are read at one time, and copies: those that wait longest come first.
_MAX_READS = 4
_MAX_STAGED = 2
# Adapters whose digests and reports are not known yet: each of them is kept for that,
# and no further file is read before there are fewer.
_MAX_EXAMINED = 8


class AdapterResidence(AdapterRegistry):
    """The adapters that requests may name, wherever they are.

    Idle ones leave device and host when room is needed there, the one unused for
    longest first.
    """

    def __init__(
        self,
        table: AdapterTable,
        device: Device,
        executor: Executor,
        *,
        host_bytes: float,
        copier: Executor | None = None,
        examiner: Executor | None = None,
        num_spare: int = 0,
        wake: Callable[[], None] = lambda: None,
    ):
        """Begin with none.

        Args:
          table: the device's slots and rank pages, all of them free.
          device: copies adapters there.
          executor: runs what takes time, in other threads.
          host_bytes: most bytes of adapters in host memory, but for one that has just
            been read and is wanted on the device.
          copier: runs the copies to the device, where files must not hold them up.
          examiner: computes digests and reports, which must not hold up files.
          num_spare: slots that only a version takes that is to replace another one.
          wake: called, in any thread, when there is something to `poll`.
        """
        super().__init__()
        self._table = table
        self._device = device
        self._executor = executor
        self._wake = wake
        self._copier = copier or executor
        self._examiner = examiner or executor
        self._num_spare = num_spare
        self._on_host = HostCache(host_bytes)
        # In the order of last use.
        self._placed: dict[Version, None] = {}
        self._tasks: dict[Version, tuple[Callable[[Version, Any], None], Future]] = {}
        self._renames: list[tuple[Any, Any]] = []

    @property
    def host_bytes(self) -> int:
        """Bytes of adapters in host memory."""
        return self._on_host.nbytes

    @property
    def num_on_device(self) -> int:
        return len(self._placed)

    def claim(self, name: str | None) -> Version | Held | None:
        """Hold an adapter for a sequence; see `claims.Adapters`."""
        if name is None:
            return self._table.claim(None)
        version = self[name]
        if version.error is not None:
            raise version.error
        if version.placement is None and not self._place(version):
            return None
        version.num_users += 1
        self._placed[version] = self._placed.pop(version)  # the last one used
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

    def release(self, resident: Any) -> None:
        """Let go of what was claimed."""
        if isinstance(resident, Version):
            assert resident.num_users > 0, resident.key
            resident.num_users -= 1
            self._placed[resident] = self._placed.pop(resident)  # used until now
            self._settle(resident)

    def poll(self) -> None:
        """Take what other threads have brought, and start what follows."""
        num_staged = 0
        for version, (take, task) in list(self._tasks.items()):
            if not task.done():
                continue
            if take == self._take_staged:
                num_staged += 1
                if num_staged > 1:  # its launches would hold up the next step
                    self._wake()
                    continue
            del self._tasks[version]
            error = task.exception()
            if error is None:
                take(version, task.result())
            else:
                self._fail(version, error)
            self._settle(version)
        for version in list(self._wanted):
            if version.placement is None and version.error is None:
                try:
                    self._place(version)
                except AdapterCapacityError as error:
                    self._unwant(version, error)
            if version.placement is not None or version.error is not None:
                self._wanted.pop(version, None)

    def _unwant(self, version: Version, error: AdapterCapacityError) -> None:
        """Give up to bring a version that finds no room."""
        del self._wanted[version]
        version.is_pinned = False
        if version in self._candidates:
            self._fail(version, error)

    def give_up(self, error: Exception) -> None:
        """Let nobody wait for what will not come any more."""
        for version in [*self._current.values(), *self._retired, *self._candidates]:
            for done in (version.loaded, version.gone):
                if not done.done():
                    done.set_exception(error)

    def take_renames(self) -> list[tuple[Any, Any]]:
        """Return what weights were called, and are called now that they are known."""
        renames, self._renames = self._renames, []
        return renames

    def check_integrity(self) -> None:
        """Assert that what is where and who holds what fit together."""
        self._table.check_integrity()
        versions = {*self._current.values(), *self._retired, *self._candidates}
        assert not self._retired.keys() & set(self._current.values())
        assert {*self._on_host, *self._placed, *self._tasks, *self._wanted} <= versions
        for version in versions:
            assert (version.placement is not None) == (version in self._placed)
            assert (version.host is not None) == (version in self._on_host)
            assert version in self._placed or not (version.num_users or version.ready)
        for version in self._retired:
            assert version.num_users or version in self._tasks, version.key
        assert {one.key for one in self._placed if one.ready} == set(self._table)

    def _place(self, version: Version) -> bool:
        """Give a version its slot and pages, if it is read and there is room.

        Raises:
          AdapterCapacityError: there can never be, or pins leave none.
        """
        version.lacks_room = False
        if version.asked_s is None:
            version.asked_s = time.monotonic()
        if version in self._tasks:
            return False
        num_pages = version.num_pages
        if version.host is None:
            if (
                self._num_under_way(self._take_read) < _MAX_READS
                and self._num_under_way(self._take_examined) < _MAX_EXAMINED
            ):
                can_come = self._on_host.may_read(version)
                if can_come or self._idle_for(version, num_pages) is not None:
                    self._start(version, version.read, self._take_read)
                else:
                    version.lacks_room = True
            return False
        host = version.host
        if reason := self._table.why_never(num_pages, host.rank):
            text = f"adapter {version.name!r} does not fit: {reason}"
            self._fail(version, AdapterCapacityError(text))
            self._settle(version)
            raise AdapterCapacityError(text)
        if self._num_under_way(self._take_staged) >= _MAX_STAGED:
            return False
        leaving = self._idle_for(version, num_pages)
        if leaving is None:
            self._check_pins(version, num_pages)
            version.lacks_room = True
            return False
        for one in leaving:
            self._displace(one)
            one.stats.num_evictions += 1
        version.placement = self._table.allocate(version.key, num_pages, host.rank)
        self._placed[version] = None
        stage = self._device.stage
        self._start(version, lambda: (host, stage(host)), self._take_staged)
        return True

    def _idle_for(
        self, version: Version, num_pages: Mapping[str, int]
    ) -> list[Version] | None:
        """Return idle versions whose room would be enough; None if all are too few."""
        leaving: list[Version] = []
        idle = (one for one in self._placed if self._is_idle(one))
        while not self._would_fit(version, num_pages, leaving):
            one = next(idle, None)
            if one is None:
                return None
            leaving.append(one)
        return leaving

    def _check_pins(self, version: Version, num_pages: Mapping[str, int]) -> None:
        """Raise if those that are pinned leave no room, however long one waits."""
        pinned = [one for one in self._current.values() if one.is_pinned]
        others = [one for one in self._placed if one not in pinned]
        if not self._would_fit(version, num_pages, others):
            raise AdapterCapacityError(
                f"adapter {version.name!r} does not fit beside the {len(pinned)} that "
                "are pinned; unpin one, or raise num_slots or adapter_memory"
            )

    def _would_fit(
        self, version: Version, num_pages: Mapping[str, int], leaving: list[Version]
    ) -> bool:
        placements = [one.placement for one in leaving if one.placement is not None]
        num_spare = 0
        if version not in self._candidates:
            # What replaces and what is replaced are those that the spare ones are for.
            both = (*self._candidates, *self._retired)
            num_spare = self._num_spare - sum(one in self._placed for one in both)
        return self._table.would_fit(num_pages, placements, num_spare=max(num_spare, 0))

    def _num_under_way(self, take: Callable[[Version, Any], None]) -> int:
        return sum(one == take for one, _ in self._tasks.values())

    def _is_idle(self, version: Version) -> bool:
        return version.ready and not version.num_users and not version.is_pinned

    def _displace(self, version: Version) -> None:
        """Take a version off the device; no row of a step in flight names it."""
        assert version.placement is not None and not version.num_users
        if version.ready:
            self._table.free(version.key)
        else:
            self._table.cancel(version.placement)
        version.placement, version.ready = None, False
        del self._placed[version]

    def _start(
        self,
        version: Version,
        work: Callable[[], Any],
        take: Callable[[Version, Any], None],
    ) -> None:
        others = {
            self._take_staged: self._copier,
            self._take_examined: self._examiner,
        }
        task = others.get(take, self._executor).submit(work)
        self._tasks[version] = take, task
        task.add_done_callback(lambda _: self._wake())

    def _take_read(self, version: Version, host: HostAdapter) -> None:
        version.stats.num_reads += 1
        # Files may have changed since they were read before.
        version.weights = "version", f"{version.key} (read {version.stats.num_reads})"
        version.report = host.report
        version.num_pages = {one: host.num_pages(one) for one in self._table.groups}
        self._on_host.add(version, host)

    def _take_staged(self, version: Version, copied: tuple[HostAdapter, Any]) -> None:
        (host, staged), placement = copied, version.placement
        assert placement is not None
        pages = placement.pages
        version.is_finite = self._device.place(placement.slot, staged, pages)
        self._table.publish(placement, staged.report)
        version.ready, version.report = True, staged.report
        if not version.loaded.done():
            version.loaded.set_result(None)
        version.stats.num_loads += 1
        if version.asked_s is not None:
            version.stats.load_s.add(time.monotonic() - version.asked_s)
            version.asked_s = None
        self._on_host.trim()
        if version.weights[0] != "digest":
            # Nobody waits for it: pages of other versions can be shared from then on.
            self._start(version, lambda: _examine(host), self._take_examined)

    def _take_examined(self, version: Version, found: tuple[str, Any]) -> None:
        digest, version.report = found
        old, version.weights = version.weights, ("digest", digest)
        self._renames.append((old, version.weights))

    def _fail(self, version: Version, error: BaseException) -> None:
        """Note what is wrong; whoever holds it looks at that and lets go."""
        if not isinstance(error, ValueError):
            # A device that is full now may have room later.
            version.is_transient = version.placement is not None
            error = ValueError(f"adapter {version.name!r} cannot be loaded: {error}")
        version.error = error
        version.asked_s = None
        if not version.loaded.done():
            version.loaded.set_exception(error)
        version.stats.num_load_failures += 1

    def _settle(self, version: Version) -> None:
        """Free what a version has that is retired or bad, once nobody needs it."""
        is_retired = version in self._retired
        if version.num_users or version in self._tasks:
            return
        if is_retired or version.error is not None:
            self._on_host.drop(version)
            if version.placement is not None:
                self._displace(version)
        if version.is_transient:
            version.error, version.is_transient = None, False
        if is_retired:
            del self._retired[version]
            version.gone.set_result(None)


def _examine(host: HostAdapter) -> tuple[str, Any]:
    """Return an adapter's digest and its report, complete."""
    return host.digest(), host.report.complete()
