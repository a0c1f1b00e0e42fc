"""Which adapters are on disk, in host memory and on the device, and who holds them.

Plain Python: knows names, versions, bytes and users. What reads files and what copies
to the device is given to it, and runs in other threads: steps go on meanwhile.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, TypeAlias

from punica_jax.adapters import AdapterTable
from punica_jax.placements import AdapterCapacityError, Held
from punica_jax.registry import AdapterRegistry
from punica_jax.versions import Device, HostAdapter, HostCache, Version

_Take: TypeAlias = Callable[[Version, Any], None]
# Files that are read at one time, and copies: those that wait longest come first.
_MAX_READS = 4
_MAX_STAGED = 2
# Adapters whose digests and reports are not known yet: they stay in host memory, and no
# further file is read before there are fewer.
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
            been read and is wanted on the device, and those that are being copied or
            whose digests are being computed.
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
        self._tasks: dict[tuple[Version, _Take], Future] = {}
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
        version.forgive()
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
        for (version, take), task in list(self._tasks.items()):
            if not task.done():
                continue
            if take == self._take_staged:
                num_staged += 1
                if num_staged > 1:  # its launches would hold up the next step
                    self._wake()
                    continue
            del self._tasks[version, take]
            error = task.exception()
            if error is None:
                take(version, task.result())
            elif take != self._take_examined:  # without a digest it shares no pages
                self._fail(version, error)
            self._settle(version)
            just_read = {version} if take == self._take_read else set()
            self._on_host.trim(keep=self._in_work | just_read)
        for version in list(self._pinned):
            if version.placement is None and version.error is None:
                try:
                    self._place(version)
                except AdapterCapacityError as error:
                    # Who loads it is told; else it waits until there are fewer pins.
                    if version in self._candidates and version.error is None:
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
        in_work = self._in_work
        assert {*self._on_host, *self._placed, *in_work, *self._pinned} <= versions
        assert not self._retired.keys() & self._pinned.keys()
        for version, take in self._tasks:
            assert (version.host is None) == (take == self._take_read), version.key
        num_kept = sum(one not in in_work for one in self._on_host)
        assert self._on_host.nbytes <= self._on_host.budget or num_kept <= 1
        for version in versions:
            assert (version.placement is not None) == (version in self._placed)
            assert (version.host is not None) == (version in self._on_host)
            assert version in self._placed or not (version.num_users or version.ready)
        for version in self._retired:
            assert version.num_users or version in in_work, version.key
        assert {one.key for one in self._placed if one.ready} == set(self._table)

    def _place(self, version: Version) -> bool:
        """Give a version its slot and pages, if it is read and there is room.

        Raises:
          AdapterCapacityError: there can never be, or pins leave none.
        """
        version.lacks_room = False
        if version.asked_s is None:
            version.asked_s = time.monotonic()
        if self._is_moving(version):
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
            self._on_host.touch(version)  # it would only be read again
            self._check_pins(version, num_pages)
            version.lacks_room = True
            return False
        for one in leaving:
            self._displace(one)
            one.stats.num_evictions += 1
        version.placement = self._table.allocate(version.key, num_pages, host.rank)
        self._placed[version] = None
        self._start(version, lambda: self._device.stage(host), self._take_staged)
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
        pinned = (self._pinned.keys() & self._placed.keys()) - self._candidates.keys()
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

    @property
    def _in_work(self) -> set[Version]:
        return {version for version, _ in self._tasks}

    def _is_moving(self, version: Version) -> bool:
        takes = self._take_read, self._take_staged
        return any((version, take) in self._tasks for take in takes)

    def _num_under_way(self, take: _Take) -> int:
        return sum(one == take for _, one in self._tasks)

    def _is_idle(self, version: Version) -> bool:
        return version.ready and not version.num_users and version not in self._pinned

    def _displace(self, version: Version) -> None:
        """Take a version off the device; no row of a step in flight names it."""
        assert version.placement is not None and not version.num_users
        if version.ready:
            self._table.free(version.key)
        else:
            self._table.cancel(version.placement)
        version.placement, version.ready = None, False
        del self._placed[version]

    def _start(self, version: Version, work: Callable[[], Any], take: _Take) -> None:
        others = {
            self._take_staged: self._copier,
            self._take_examined: self._examiner,
        }
        task = others.get(take, self._executor).submit(work)
        self._tasks[version, take] = task
        task.add_done_callback(lambda _: self._wake())

    def _take_read(self, version: Version, host: HostAdapter) -> None:
        version.stats.num_reads += 1
        # Files may have changed since they were read before.
        version.weights = "version", f"{version.key} (read {version.stats.num_reads})"
        version.report = host.report
        version.num_pages = {one: host.num_pages(one) for one in self._table.groups}
        self._on_host.add(version, host)

    def _take_staged(self, version: Version, staged: Any) -> None:
        host, placement = version.host, version.placement
        assert host is not None and placement is not None
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
        is_examined = (version, self._take_examined) in self._tasks
        if version.weights[0] != "digest" and not is_examined:
            # Nobody waits for it: pages of other versions can be shared from then on.
            known = version.examined
            self._start(version, lambda: _examine(host, known), self._take_examined)

    def _take_examined(self, version: Version, found: tuple[str, Any]) -> None:
        version.examined = found
        digest, version.report = found
        old, version.weights = version.weights, ("digest", digest)
        self._renames.append((old, version.weights))

    def _fail(self, version: Version, error: BaseException) -> None:
        """Note what is wrong; whoever holds it looks at that and lets go."""
        if not isinstance(error, ValueError):
            # A device that is full now may have room later.
            version.is_transient = version.host is not None
            error = ValueError(f"adapter {version.name!r} cannot be loaded: {error}")
        version.error = error
        version.asked_s = None
        if not version.loaded.done():
            version.loaded.set_exception(error)
        version.stats.num_load_failures += 1

    def _settle(self, version: Version) -> None:
        """Free what a version has that is retired or bad, once nobody needs it."""
        is_retired = version in self._retired
        if version.num_users or self._is_moving(version):
            return
        if is_retired or version.error is not None:
            if version.placement is not None:
                self._displace(version)
            if version in self._in_work:  # its digest is computed
                return
            self._on_host.drop(version)
        if is_retired:
            del self._retired[version]
            version.gone.set_result(None)


def _examine(host: HostAdapter, known: tuple[str, Any] | None) -> tuple[str, Any]:
    """Return an adapter's digest and its report, complete.

    Norms are not computed again if these are the weights whose report is known.
    """
    digest = host.digest()
    rows = known[1].rows if known is not None and known[0] == digest else ()
    return digest, host.report.complete(rows)
