"""Adapters between disk, host and device, under any sequence of calls."""

import itertools
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from punica_jax.adapters import AdapterTable
from punica_jax.placements import AdapterCapacityError, UnknownAdapterError
from punica_jax.residence import RETRY_S, AdapterResidence
from punica_jax.stats import AdapterStats
from punica_jax.tasks import Tasks
from punica_jax.versions import Version

HOST_BYTES = 30
NUM_SLOTS = 3
PAGES = {"qkv": 6, "o": 4}
MAX_RANK = 64


class FakeReport:
    """Says whether it is complete."""

    def __init__(self) -> None:
        self.is_complete = False
        self.known: Sequence[str] = ()

    @property
    def rows(self) -> list[str]:
        return ["a norm"]

    def complete(self, known: Sequence[str] = ()) -> "FakeReport":
        self.is_complete, self.known = True, known
        return self


class FakeHost:
    """Weights that are nothing but a content, and how much room they take."""

    def __init__(
        self,
        content: str,
        pages: tuple[int, int] = (1, 1),
        *,
        rank: int = 8,
        nbytes: int = 10,
        is_finite: bool = True,
        is_examinable: bool = True,
    ):
        self.content = content
        self.pages = dict(zip(PAGES, pages, strict=True))
        self.rank = rank
        self.nbytes = nbytes
        self.is_finite = is_finite
        self.is_examinable = is_examinable
        self.report = FakeReport()

    def num_pages(self, group: str) -> int:
        return self.pages[group]

    @property
    def meaning(self) -> str:
        return f"digest of {self.content}"

    def digest(self) -> str:
        if not self.is_examinable:
            raise MemoryError("no digest")
        return self.meaning


class FakeDevice:
    """Notes what each slot has.

    Attributes:
      slots: slot -> what was placed there last.
      full: errors of copies that are to begin next.
      broken: errors of those that are waited for next.
    """

    def __init__(self) -> None:
        self.slots: dict[int, FakeHost] = {}
        self.full: list[Exception] = []
        self.broken: list[Exception] = []

    def stage(
        self, adapter: FakeHost, slot: int, pages: Mapping[str, Sequence[int]]
    ) -> Any:
        if self.full:
            raise self.full.pop()
        assert {group: len(own) for group, own in pages.items()} == adapter.pages
        return slot, adapter

    def wait(self, staged: Any) -> float:
        if self.broken:
            raise self.broken.pop()
        return time.monotonic()

    def place(self, staged: Any) -> Callable[[], bool]:
        slot, adapter = staged
        self.slots[slot] = adapter
        return lambda: adapter.is_finite


class FakeExecutor(Executor):
    """Runs what is submitted when it is told to, in any order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((work, future))
        return future

    def finish(self, index: int = 0) -> None:
        work, future = self.waiting.pop(index)
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)


class Setting:
    """A residence among fakes."""

    def __init__(
        self,
        host_bytes: float = HOST_BYTES,
        num_slots: int = NUM_SLOTS,
        num_spare: int = 0,
        fetcher: FakeExecutor | None = None,
    ):
        self.table = AdapterTable(num_slots + num_spare, PAGES, MAX_RANK)
        self.device = FakeDevice()
        self.executor = FakeExecutor()
        self.num_wakes = 0
        self.tasks = Tasks(self.executor, fetcher=fetcher, wake=self._wake)
        self.residence = AdapterResidence(
            self.table,
            self.device,
            self.tasks,
            host_bytes=host_bytes,
            num_spare=num_spare,
        )

    def _wake(self) -> None:
        self.num_wakes += 1

    def add(self, name: str, host: FakeHost | None = None, **options: Any) -> Version:
        host = FakeHost(name) if host is None else host
        return self.residence.register(name, lambda: host, **options)

    def wait(self) -> None:
        """Let so much time pass that what has failed is tried again."""
        for version in self.residence.values():
            version.failed_s -= RETRY_S

    def settle(self) -> None:
        """Do all that is under way, and all that follows."""
        for _ in range(100):
            num_wakes = self.num_wakes
            self.residence.poll()
            if self.executor.waiting:
                self.executor.finish()
            elif self.num_wakes == num_wakes:
                break
        assert not self.executor.waiting, "it never comes to rest"
        self.residence.check_integrity()

    def hold(self, name: str) -> Version:
        """Claim an adapter, and again until there is what was claimed."""
        for _ in range(4):
            held = self.residence.claim(name)
            self.settle()
            if held is not None:
                assert isinstance(held, Version)
                return held
        raise AssertionError(f"{name} is not to be had")

    def hold_unexamined(self, name: str) -> None:
        """Claim an adapter, and do all that is under way but for its digest."""
        for _ in range(2):  # its file, its copy
            self.residence.claim(name)
            self.executor.finish()
            self.residence.poll()

    def use(self, name: str) -> Version:
        held = self.hold(name)
        self.residence.release(held)
        return held


@pytest.fixture
def place() -> Setting:
    return Setting()


def test_an_adapter_comes_from_disk_over_host_to_the_device(place: Setting):
    version = place.add("x")
    assert version.tier == "disk" and not version.ready
    residence = place.residence
    assert residence.claim("x") is None  # it is being read
    assert residence.claim("x") is None and len(place.executor.waiting) == 1
    place.executor.finish()
    assert place.num_wakes == 1 and version.tier == "disk"
    residence.poll()
    assert version.tier == "host" and residence.host_bytes == 10
    assert residence.claim("x") is version and not version.ready
    assert residence.num_on_device == 1
    place.executor.finish()
    residence.poll()
    assert version.ready and version.tier == "device" and version.loaded.done()
    assert place.device.slots[version.slot].content == "x"
    assert version.weights == ("version", "x (version 1) (read 1)")
    assert not version.report.is_complete
    place.executor.finish()  # its digest, and the report
    residence.poll()
    assert version.report.is_complete
    assert version.weights == ("digest", "digest of x")
    assert residence.take_renames() == [
        (("version", "x (version 1) (read 1)"), ("digest", "digest of x"))
    ]
    assert residence.take_renames() == []
    residence.release(version)
    assert version.tier == "device", "it stays while nobody needs the room"
    stats = version.stats
    assert (stats.num_reads, stats.num_loads, stats.num_evictions) == (1, 1, 0)
    assert stats.load_s.count == 1


def test_time_in_which_nobody_wants_it_is_not_its_loads(place: Setting):
    version, pinned = place.add("x"), place.add("y", is_pinned=True)
    residence = place.residence
    assert residence.claim("x") is None
    residence.poll()
    assert version.asked_s is not None and pinned.asked_s is not None
    for name in ("x", "y", "gone by now"):
        residence.forgo(name)
    assert version.asked_s is None and pinned.asked_s is not None
    place.executor.finish()
    residence.poll()
    held = residence.claim("x")
    residence.release(held)
    residence.forgo("x")
    assert version.asked_s is not None, "it is on its way and will have been loaded"
    place.settle()
    assert version.stats.load_s.count == pinned.stats.load_s.count == 1


def test_time_since_a_pin_that_was_taken_back_is_not_its_loads(place: Setting):
    version, other = place.add("x", is_pinned=True), place.add("y", is_pinned=True)
    unpinned = place.add("z")
    residence = place.residence
    residence.claim("z")
    residence.poll()
    assert version.asked_s is not None and other.asked_s is not None
    residence.pin("x", False)
    residence.pin("z", False)
    assert version.asked_s is None and other.asked_s is not None
    assert unpinned.asked_s is not None
    place.settle()
    assert (version.tier, other.tier) == ("host", "device")
    began_s = time.monotonic()
    residence.claim("x")
    place.settle()
    assert version.tier == "device"
    assert version.stats.load_s.max_s <= time.monotonic() - began_s


def test_what_is_not_complete_holds_no_weights_beside_the_host(place: Setting):
    """A report that nobody measured has the weights: it goes with them."""
    residence = place.residence
    for name in "ab":
        place.add(name, FakeHost(name, nbytes=20))
        residence.claim(name)
        place.executor.finish()
        residence.poll()
    a, b = residence["a"], residence["b"]
    assert (a.tier, b.tier) == ("disk", "host")
    assert a.report is None and b.report is not None
    residence.claim("b")
    place.executor.finish()  # the copy
    residence.claim("a")
    place.executor.finish()  # the digest
    place.settle()
    assert (a.tier, b.tier) == ("host", "device") and b.host is None
    assert b.report.is_complete


@pytest.mark.parametrize("host_bytes", [0, 30, 300])
def test_digests_hold_up_files_only_where_host_memory_is_full(host_bytes: int):
    """Whose digest is missing keeps its weights, budget or not."""
    place = Setting(host_bytes, num_slots=50)
    residence = place.residence
    most = host_bytes // 10 + 1
    for n in range(most + 1):
        place.add(f"a{n}", FakeHost(f"a{n}", (0, 0)))
        for _ in range(2):  # its file, its copy; its digest is not computed
            if residence.claim(f"a{n}") is None and n == most:
                assert len(place.executor.waiting) == most
                break
            place.executor.finish(-1)
            residence.poll()
    last = residence[f"a{most}"]
    assert not residence.lacks_room(last.name), "it will come"
    place.executor.finish()  # a digest
    residence.poll()
    residence.claim(last.name)
    assert len(place.executor.waiting) == most  # all digests but one, and a file
    place.settle()
    assert last.tier == "host" and residence.host_bytes <= max(host_bytes, 10)


def test_what_is_displaced_comes_back_while_its_digest_is_computed(place: Setting):
    version = place.add("x")
    place.hold_unexamined("x")
    place.residence.release(version)
    (digest,) = place.executor.waiting
    place.executor.waiting.clear()
    for name in "abc":
        place.add(name, FakeHost(name, nbytes=40))
        place.use(name)
    place.executor.waiting.append(digest)
    assert version.tier == "host" and place.residence.host_bytes == 10
    assert place.residence.claim("x") is version
    place.executor.finish(1)  # the copy
    place.residence.poll()
    assert version.ready and not version.report.is_complete
    (_,) = place.executor.waiting  # one digest, still
    place.settle()
    assert version.weights == ("digest", "digest of x")
    assert version.report.is_complete and version.stats.num_reads == 1


def test_a_digest_that_cannot_be_computed(place: Setting):
    host = FakeHost("x", is_examinable=False)
    version = place.add("x", host, is_pinned=True)
    place.settle()
    assert version.ready and version.error is None
    assert version.weights == ("version", "x (version 1) (read 1)")
    host.is_examinable = True
    place.residence.pin("x", False)
    for name in "abcx":
        if name != "x":
            place.add(name, FakeHost(name, nbytes=0))
        place.use(name)
    assert version.ready and version.stats.num_reads == 1
    assert version.weights == ("digest", "digest of x"), "it is tried again"


def test_room_is_free_before_the_digest_is_known(place: Setting):
    version = place.add("x")
    place.hold_unexamined("x")
    place.residence.unregister("x")
    assert version.ready, "it is in use"
    place.residence.release(version)
    assert not version.ready and place.residence.num_on_device == 0
    assert place.residence.host_bytes == 10 and not version.gone.done()
    place.settle()
    assert place.residence.host_bytes == 0 and version.gone.done()


def test_norms_are_computed_once_for_the_same_weights():
    place = Setting(host_bytes=0, num_slots=1)
    contents = iter(["first", "first", "second", "first"])
    version = place.residence.register("x", lambda: FakeHost(next(contents)))
    place.add("other")
    known = []
    for _ in range(4):
        place.use("x")
        assert version.report.is_complete
        known.append(version.report.known)
        place.use("other")
        assert version.tier == "disk"
    assert known == [(), ["a norm"], (), ()]


def test_the_one_unused_for_longest_leaves(place: Setting):
    for name in "abcd":
        place.add(name)
    a = place.hold("a")
    for name in "bc":
        place.use(name)
    place.residence.release(a)  # used until now, though claimed first
    place.use("d")
    on_device = {name for name, one in place.residence.items() if one.ready}
    assert on_device == {"a", "c", "d"}
    assert place.residence["b"].stats.num_evictions == 1
    place.use("c")
    place.use("b")
    on_device = {name for name, one in place.residence.items() if one.ready}
    assert on_device == {"b", "c", "d"}


def test_nobody_leaves_in_vain(place: Setting):
    place.add("held", FakeHost("held", (5, 1)))
    place.add("idle", FakeHost("idle", (1, 1)))
    place.add("big", FakeHost("big", (3, 1)))
    held = place.hold("held")
    place.use("idle")
    # Even without `idle` only one page of qkv would be free.
    assert place.residence.claim("big") is None
    place.settle()
    assert place.residence.claim("big") is None
    assert place.residence["idle"].ready
    place.residence.release(held)
    place.use("idle")
    assert place.use("big").ready and place.residence["idle"].ready
    assert not place.residence["held"].ready


def test_pinned_ones_come_and_stay(place: Setting):
    for name in "abcd":
        place.add(name, is_pinned=name in "ab")
    place.settle()
    assert [one.ready for one in place.residence.values()] == [True, True, False, False]
    for name in "cdcd":
        place.use(name)
    assert place.residence["a"].ready and place.residence["b"].ready
    place.residence.pin("a", False)
    place.use("c")
    assert not place.residence["a"].ready
    place.residence.pin("a")
    place.settle()
    assert place.residence["a"].ready
    with pytest.raises(UnknownAdapterError, match="no adapter is named 'z'; known are"):
        place.residence.pin("z")


def test_a_pinned_one_waits_for_room(place: Setting):
    held = [place.hold(name) for name in "abc" if place.add(name)]
    place.add("d", is_pinned=True)
    place.settle()
    assert place.residence["d"].tier == "disk", "it is not even read"
    place.residence.release(held[1])
    place.settle()
    assert place.residence["d"].ready


def test_pins_without_room_cost_nothing(monkeypatch: pytest.MonkeyPatch):
    """Neither reading nor looking, until there may be room; and little then."""
    place = Setting(host_bytes=10_000)
    residence = place.residence
    looks: list[Any] = []

    def watch(owner: Any, name: str) -> None:
        look = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **kw: looks.append(name) or look(*args, **kw)
        )

    watch(place.table, "would_fit")
    watch(place.tasks, "is_moving")
    place.add("held")
    held = place.hold("held")
    for n in range(500):
        place.add(f"p{n}", is_pinned=True)
    residence.poll()
    assert len(place.executor.waiting) == 4
    place.settle()
    assert [one.name for one in residence.values() if one.ready] == ["held", "p0", "p1"]
    assert sum(one.stats.num_reads for one in residence.values()) < 10
    looks.clear()
    for _ in range(10):  # steps, in which nobody comes or goes
        residence.poll()
    assert not looks and not place.executor.waiting
    residence.claim("held")
    residence.release(held)  # another one that uses it has ended
    residence.poll()
    assert 0 < len(looks) < 10 and not place.executor.waiting
    residence.release(held)
    place.settle()
    assert [one.name for one in residence.values() if one.ready] == ["p0", "p1", "p2"]


def test_a_large_pin_does_not_hold_up_small_ones(place: Setting):
    """Those that need as much as one that waits are not tried, nor read again."""
    for name in "abc":
        place.add(name, FakeHost(name, (4, 0)), is_pinned=True)
    place.add("small", FakeHost("small", (2, 0)), is_pinned=True)
    place.settle()
    assert [one.ready for one in place.residence.values()] == [True, False, False, True]
    place.residence.pin("a", False)
    place.settle()
    assert [one.ready for one in place.residence.values()] == [False, True, False, True]
    assert [one.stats.num_reads for one in place.residence.values()] == [1] * 4


def test_pins_that_leave_no_room_are_told():
    place = Setting(num_slots=2)
    for name in "abcd":
        place.add(name, is_pinned=name in "ab")
    place.settle()
    with pytest.raises(AdapterCapacityError, match="beside the 2 that are pinned"):
        place.hold("c")
    d = place.residence["d"]
    place.residence.pin("d")  # there is no room for it either: it waits
    place.settle()
    assert d.tier == "disk" and d.error is None
    place.residence.pin("a", False)
    assert place.use("c").ready, "nothing of the refusal is left"
    place.settle()
    assert d.ready and not place.residence["c"].ready


def test_a_pin_that_found_no_room_is_one_still():
    place = Setting()
    a = place.add("a", FakeHost("a", (0, 3)), is_pinned=True)
    place.settle()
    b = place.residence.prepare("b", lambda: FakeHost("b", (0, 2)))
    place.residence.adopt(b, is_pinned=True)
    place.settle()
    assert a.ready and b.tier == "host" and b.error is None
    place.residence.unregister("a")
    place.settle()
    assert b.ready
    for name in "cdec":
        if name not in place.residence:
            place.add(name)
        place.use(name)
    assert b.ready, "others do not displace it"


def test_what_waits_for_room_is_read_once(place: Setting):
    place.add("a", FakeHost("a", (0, 3)), is_pinned=True)
    waiting = place.add("b", FakeHost("b", (0, 2)), is_pinned=True)
    place.settle()
    for name in "cdefcdef":
        if name not in place.residence:
            place.add(name)
        place.use(name)
    assert waiting.tier == "host" and waiting.stats.num_reads == 1


def test_a_pinned_one_that_was_not_copied_comes_when_it_is_asked_for(place: Setting):
    residence = place.residence
    version = residence.prepare("x", lambda: FakeHost("x"))
    residence.want(version)
    place.device.broken.append(OSError("the device is full"))
    for _ in range(2):  # its file, its copy
        residence.poll()
        place.executor.finish()
    residence.adopt(version, is_pinned=True)
    place.settle()
    # It is not tried again and again.
    assert str(version.error) == "adapter 'x' cannot be loaded: the device is full"
    assert version.tier == "disk" and version.stats.num_load_failures == 1
    version.read = lambda: FakeHost("another file")
    place.wait()
    assert residence.claim("x") is None  # its file is being read; nobody comes again
    place.settle()
    assert version.ready and version.error is None
    for name in "abcd":
        place.add(name)
        place.use(name)
    assert version.ready


def test_what_cannot_fit_beside_pins_is_refused_also_before_it_is_read_again():
    place = Setting(num_slots=1, host_bytes=FakeHost("x").nbytes)
    place.add("pinned", is_pinned=True)
    place.settle()
    names = ("x", "y")
    for name in names:
        place.add(name)
    for name in names * 3:
        with pytest.raises(AdapterCapacityError, match="does not fit beside the 1"):
            place.hold(name)
    large = place.add("large", FakeHost("large", nbytes=1000))
    for _ in range(3):
        with pytest.raises(AdapterCapacityError, match="does not fit beside the 1"):
            place.hold("large")
        place.add("z")  # pushes it out of host memory
        with pytest.raises(AdapterCapacityError, match="does not fit beside the 1"):
            place.hold("z")
    assert large.host is None and large.nbytes == 1000


def test_the_spare_slot_is_for_what_replaces_one_that_is_there():
    place = Setting(num_slots=2, num_spare=1)
    for name in "abc":
        place.add(name, is_pinned=name < "c")
    place.settle()
    for name in ("new", "c"):  # one of a name that is not known, or not there
        version = place.residence.prepare(name, lambda: FakeHost("new"))
        place.residence.want(version)
        place.settle()
        assert version.placement is None
        place.residence.discard(version)
    version = place.residence.prepare("a", lambda: FakeHost("new"))
    place.residence.want(version)
    place.settle()
    assert version.ready
    place.residence.adopt(version)
    place.settle()
    assert place.residence.num_on_device == 2


@pytest.mark.parametrize("is_adopted", [False, True])
def test_pinning_again_tries_again(place: Setting, is_adopted: bool):
    version = place.residence.prepare("x", lambda: FakeHost("x"))
    place.residence.want(version)
    place.residence.poll()
    if is_adopted:
        place.residence.adopt(version, is_pinned=True)
    place.device.broken.append(OSError("the device is full"))
    place.settle()
    assert version.error is not None
    if is_adopted:
        place.residence.pin("x")
    else:
        place.residence.adopt(version, is_pinned=True)
    place.settle()
    assert version.ready and version.error is None


def test_all_that_a_name_stands_for_counts_together():
    residence = Setting(num_slots=2).residence
    first, second = (residence.prepare("a", lambda: FakeHost("a")) for _ in range(2))
    third = residence.register("a", lambda: FakeHost("b"))
    assert first.stats is second.stats is third.stats
    residence.discard(second)
    residence.adopt(first)
    assert residence["a"] is first and first.stats is third.stats
    other = residence.prepare("b", lambda: FakeHost("c"))
    assert other.stats is not first.stats


def test_who_holds_what_a_name_stood_for_counts_with_it():
    place = Setting(num_slots=2)
    place.add("a")
    old = place.hold("a")
    assert place.residence.unregister("a") is old
    new = place.residence.register("a", lambda: FakeHost("new"))
    assert new.stats is old.stats and not old.gone.done()
    place.residence.unregister("a")
    place.residence.release(old)
    assert old.gone.done()
    another = place.residence.register("a", lambda: FakeHost("newer"))
    assert another.stats is not old.stats, "nobody knew it any more"


def test_a_spare_slot_is_for_what_replaces_another():
    place = Setting(num_slots=2, num_spare=1)
    held = [place.hold(name) for name in "ab" if place.add(name)]
    place.add("c")
    for _ in range(3):  # read, and then without room
        assert place.residence.claim("c") is None
        place.settle()
    assert place.residence.lacks_room("c") and not place.residence.is_here("c")
    new = place.residence.prepare("a", lambda: FakeHost("new"))
    place.residence.want(new)
    place.settle()
    assert new.ready, "it comes while all others are in use"
    place.residence.adopt(new)
    assert place.hold("a") is new and place.residence.claim("c") is None
    place.residence.release(held[0])  # the old one goes, its slot is the spare one
    assert held[0].gone.done() and place.residence.claim("c") is None
    place.residence.release(new)
    assert place.hold("c").ready
    assert not new.ready and place.residence["b"].ready, "two slots are two adapters"


def test_few_files_are_read_at_one_time():
    place = Setting(host_bytes=1000)
    names = "abcdefgh"
    for name in names:
        place.add(name)
        assert place.residence.claim(name) is None
        assert not place.residence.lacks_room(name), "it is on its way, or will be"
    assert len(place.executor.waiting) == 4
    place.settle()
    assert [one.tier for one in place.residence.values()] == ["host"] * 4 + ["disk"] * 4


def test_a_network_holds_up_no_file():
    network = FakeExecutor()
    place = Setting(host_bytes=1000, fetcher=network)
    names = "abcdefgh"
    for name in names:
        place.add(name, is_remote=True, is_pinned=True)
    near = place.add("near", is_pinned=True)
    place.settle()
    assert near.ready and len(network.waiting) == 4
    for num_waiting in (4, 3):  # one more while there is a slot for it
        network.finish()
        place.settle()
        assert len(network.waiting) == num_waiting
    assert [place.residence[name].ready for name in "abcd"] == [
        True,
        True,
        False,
        False,
    ]


def test_what_is_fetched_already_waits_for_no_network():
    network = FakeExecutor()
    place = Setting(host_bytes=1000, fetcher=network)
    here = place.add("here", is_remote=True)
    assert place.residence.claim("here") is None
    network.finish()
    place.settle()
    assert here.tier == "host"
    for name in "abcd":
        place.add(name, is_remote=True, is_pinned=True)
    place.settle()
    assert len(network.waiting) == 4
    place.residence.pin("here")
    place.settle()
    assert here.ready and len(network.waiting) == 4


def test_threads_that_load_take_short_turns(place: Setting):
    before = sys.getswitchinterval()
    try:
        for interval, expected in ((5e-3, 1e-4), (5e-5, 5e-5)):
            sys.setswitchinterval(interval)
            tasks = Tasks.threads(lambda: None)
            assert sys.getswitchinterval() == pytest.approx(interval, rel=0.05)
            tasks.start(place.add("x"), "read", lambda: None)
            assert sys.getswitchinterval() == pytest.approx(expected, rel=0.05)
            tasks.shutdown()
            assert sys.getswitchinterval() == pytest.approx(interval, rel=0.05)
    finally:
        sys.setswitchinterval(before)


def test_what_no_thread_can_do_any_more_fails_alone(place: Setting):
    """As while the interpreter ends, when others' threads still ask."""
    tasks = Tasks.threads(lambda: None)
    tasks.shutdown()
    version, before = place.add("x"), sys.getswitchinterval()
    tasks.start(version, "read", lambda: None)
    assert sys.getswitchinterval() == before, "nobody would give them back"
    [(failed, kind, task)] = tasks.take()
    assert (failed, kind) == (version, "read")
    assert isinstance(task.exception(), RuntimeError)


def test_turns_that_others_set_are_left(place: Setting):
    before = sys.getswitchinterval()
    tasks = Tasks.threads(lambda: None)
    tasks.start(place.add("x"), "read", lambda: None)
    try:
        sys.setswitchinterval(2e-3)
        tasks.shutdown()
        assert sys.getswitchinterval() == pytest.approx(2e-3, rel=0.05)
    finally:
        sys.setswitchinterval(before)


def test_turns_stay_short_until_nobody_loads(place: Setting):
    before = sys.getswitchinterval()
    one, other = Tasks.threads(lambda: None), Tasks.threads(lambda: None)
    for tasks in (one, other):
        tasks.start(place.add("x"), "read", lambda: None)
    one.shutdown()
    assert sys.getswitchinterval() == pytest.approx(1e-4, rel=0.05)
    other.shutdown()
    other.shutdown()
    assert sys.getswitchinterval() == pytest.approx(before, rel=0.05)


def test_replacing_keeps_what_is_in_use(place: Setting):
    old = place.add("x", FakeHost("old"))
    assert place.hold("x") is old
    new = place.add("x", FakeHost("new"))
    assert place.residence["x"] is new and place.hold("x") is new
    assert old.ready and new.ready and old.slot != new.slot
    assert place.device.slots[old.slot].content == "old"
    assert old.stats is new.stats and not old.gone.done()
    place.residence.release(old)
    assert old.gone.done() and old.tier == "disk"
    place.residence.release(new)
    assert place.residence.num_on_device == 1 and place.residence.host_bytes == 10


def test_a_candidate_is_claimed_by_nobody_before_it_is_adopted(place: Setting):
    old = place.add("x", FakeHost("old"))
    residence = place.residence
    new = residence.prepare("x", lambda: FakeHost("new"))
    residence.want(new)
    place.settle()
    assert new.ready and place.use("x") is old
    residence.adopt(new)
    assert place.use("x") is new and old.gone.done()
    residence.discard(new)  # too late: nothing
    assert place.use("x") is new
    other = residence.prepare("x", lambda: FakeHost("other"))
    residence.want(other)
    residence.poll()
    residence.discard(other)  # while it is read
    assert not other.gone.done()
    place.settle()
    assert other.gone.done() and place.use("x") is new
    assert residence.host_bytes == 10
    for name in "abc":
        place.add(name)
        place.use(name)
    assert not new.ready, "it is not pinned any more"


def test_forgotten_ones_go_when_their_users_have(place: Setting):
    version = place.add("x")
    place.hold("x")
    assert place.residence.unregister("x") is version
    assert len(place.residence) == 0 and not version.gone.done()
    with pytest.raises(UnknownAdapterError, match=r"'x'; none is known$"):
        place.residence.claim("x")
    with pytest.raises(UnknownAdapterError, match=r"'x'; none is known$"):
        place.residence.unregister("x")
    place.residence.release(version)
    assert version.gone.done()
    assert place.residence.host_bytes == place.residence.num_on_device == 0
    assert place.table.num_free_slots == NUM_SLOTS


def test_what_nobody_awaits_any_more_may_be_cancelled(place: Setting):
    # The futures' users leave as they like; that must not meet who resolves them.
    version = place.add("x", is_pinned=True)
    assert not version.loaded.cancel() and not version.gone.cancel()
    place.settle()
    place.residence.unregister("x")
    assert version.loaded.done() and version.gone.done()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("its file is broken"), "^its file is broken$"),
        (OSError("no such disk"), "^adapter 'x' cannot be loaded: no such disk$"),
        (MemoryError("too much"), "^adapter 'x' cannot be loaded: too much$"),
    ],
)
@pytest.mark.parametrize("is_told", [False, True])
def test_files_that_cannot_be_read(
    place: Setting, error: Exception, text: str, is_told: bool
):
    def read() -> FakeHost:
        raise error

    version = place.residence.register("x", read)
    assert place.residence.claim("x") is None
    place.settle()
    for _ in range(2):  # those that wait, and a flood of others
        with pytest.raises(ValueError, match=text):
            place.residence.claim("x")
        assert not place.executor.waiting, "nobody has looked again so soon"
    with pytest.raises(ValueError, match=text):
        version.loaded.result(0)
    assert version.stats.num_load_failures == 1
    if is_told:  # registered again: at once
        mended = place.add("x")
        assert version.gone.done() and place.use("x") is mended
        return
    place.wait()
    assert place.residence.claim("x") is None, "it is read again"
    place.settle()
    with pytest.raises(ValueError, match=text):
        place.residence.claim("x")
    assert version.stats.num_load_failures == 2
    version.read = lambda: FakeHost("mended")
    place.wait()
    assert place.use("x") is version and version.error is None


@pytest.mark.parametrize("when", ["full", "broken"])
def test_what_cannot_be_copied(place: Setting, when: str):
    version = place.add("x")
    place.residence.claim("x")
    place.executor.finish()
    place.residence.poll()
    getattr(place.device, when).append(OSError("the device is full"))
    held = place.residence.claim("x")
    assert held is version
    place.settle()
    text = "adapter 'x' cannot be loaded: the device is full"
    assert version.error is not None and str(version.error) == text
    assert version.tier == "host"  # its user is to look
    place.residence.release(held)
    assert version.tier == "disk" and place.residence.num_on_device == 0
    # There may be room for it later.
    place.wait()
    assert place.use("x") is version and version.error is None


def test_a_copy_may_be_used_before_it_is_through(place: Setting):
    residence, version = place.residence, place.add("x")
    residence.claim("x")
    assert not residence.hasten()  # it is being read
    place.executor.finish()
    residence.poll()
    held = residence.claim("x")
    assert not version.ready and residence.hasten() and version.ready
    assert place.device.slots[version.slot].content == "x"
    assert not residence.hasten()
    assert not version.stats.load_s.count  # it is not there
    residence.check_integrity()
    place.settle()
    assert (version.stats.num_loads, version.num_users) == (1, 1)
    assert version.stats.load_s.count == 1 and version.asked_s is None
    residence.release(held)
    assert version.ready


def test_a_copy_that_nobody_waits_for_takes_its_time(place: Setting):
    residence, version = place.residence, place.add("x")
    residence.pin("x")
    residence.poll()
    place.executor.finish()
    residence.poll()
    assert version.staged is not None and not residence.hasten() and not version.ready
    place.settle()
    assert version.ready


def test_one_that_was_used_before_its_copy_failed(place: Setting):
    """Of a device that outlives that; a GPU's pools would be gone, and the engine."""
    residence, version = place.residence, place.add("x")
    residence.claim("x")
    place.executor.finish()
    residence.poll()
    held = residence.claim("x")
    residence.hasten()
    place.device.broken.append(OSError("the device is gone"))
    place.settle()
    with pytest.raises(ValueError, match="cannot be loaded: the device is gone"):
        residence.claim("x")
    residence.release(held)
    assert version.tier == "disk" and residence.num_on_device == 0
    place.wait()
    assert place.use("x") is version and version.error is None


@pytest.mark.parametrize("copy_turns", [0, 3])
@pytest.mark.parametrize("kind", ["candidate", "pinned"])
@pytest.mark.parametrize("host_bytes", [20, 1000])
def test_one_that_is_to_stay_gets_its_room_while_others_come_and_go(
    kind: str, copy_turns: int, host_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(PAGES, "qkv", 12)
    place = Setting(host_bytes=host_bytes, num_slots=8, num_spare=1)
    residence, rng = place.residence, random.Random(0)
    for number in range(20):
        place.add(f"a{number}", FakeHost(f"a{number}", (2, 0)))
        place.use(f"a{number}")
    names = itertools.cycle(residence.snapshot())
    held = [place.hold(next(names)) for _ in range(6)]
    large = FakeHost("large", (8, 0))
    if kind == "pinned":
        version = place.add("large", large, is_pinned=True)
    else:
        version = residence.prepare("large", lambda: large)
        residence.want(version)
    waiting = [next(names) for _ in range(6)]

    def turn() -> None:
        if place.executor.waiting and rng.randrange(copy_turns + 1) == 0:
            place.executor.finish()
        residence.poll()
        ready = [one for one in held if one.ready]
        if ready and rng.random() < 0.3:
            held.remove(one := rng.choice(ready))
            residence.release(one)
        for name in list(waiting):
            claimed: Any = residence.claim(name)
            if claimed is not None:
                held.append(claimed)
                waiting.remove(name)
                waiting.append(next(names))
            elif residence.lacks_room(name):
                break
        residence.check_integrity()

    turns = 0
    while not version.ready:
        turns += 1
        assert turns < 1500
        turn()
    assert turns > 30  # others are not kept waiting at once
    first = waiting[0]
    while first in waiting[:1]:  # nor for ever
        turns += 1
        assert turns < 2000
        turn()


def test_a_pin_that_cannot_come_is_logged(
    place: Setting, caplog: pytest.LogCaptureFixture
):
    def read() -> FakeHost:
        raise OSError("no such file")

    place.residence.register("x", read, is_pinned=True)
    place.settle()
    assert "adapter 'x' cannot be loaded: no such file" in caplog.text
    assert "digest" not in caplog.text
    place.add("y", FakeHost("y", is_examinable=False))
    place.use("y")
    assert "y (version 2) has no digest, so no shared pages" in caplog.text


def test_one_that_is_to_stay_gets_the_room_of_those_that_are_always_in_use():
    place = Setting(host_bytes=1000, num_spare=1)
    residence = place.residence
    for name in "abc":
        place.add(name, FakeHost(name, (2, 0)))
    held: dict[str, Any] = {name: place.hold(name) for name in "abc"}
    version = place.add("large", FakeHost("large", (4, 0)), is_pinned=True)
    for number in range(1000):
        # The next request for each comes before the last one has ended.
        name = "abc"[number % 3]
        newer = residence.claim(name)
        if (older := held[name]) is not None:
            residence.release(older)
        held[name] = newer
        place.settle()
        if version.ready:
            break
    assert version.ready


def test_what_never_fits_beside_the_pinned_keeps_nobody_waiting():
    place = Setting(host_bytes=1000, num_slots=4)
    place.add("p", FakeHost("p", (4, 0)), is_pinned=True)
    place.settle()
    place.add("q", FakeHost("q", (4, 0)), is_pinned=True)
    for number in range(100):
        place.add(f"a{number}", FakeHost(f"a{number}", (2, 0)))
        place.use(f"a{number}")


def test_what_never_fits_says_why_though_it_has_left_host_memory(place: Setting):
    version = place.add("x", FakeHost("x", (7, 1), nbytes=HOST_BYTES + 1))
    assert place.residence.claim("x") is None
    place.settle()
    place.add("a")
    place.use("a")
    assert version.host is None
    with pytest.raises(AdapterCapacityError, match="it needs 7 rank pages of group qk"):
        place.residence.claim("x")


@pytest.mark.parametrize(
    ("host", "text"),
    [
        (
            FakeHost("x", rank=65),
            "adapter 'x' does not fit: its rank is 65, above max_rank = 64",
        ),
        (
            FakeHost("x", (7, 1)),
            "adapter 'x' does not fit: it needs 7 rank pages of group qkv, of which "
            "there are 6; raise adapter_memory or num_slots",
        ),
    ],
)
@pytest.mark.parametrize("is_pinned", [False, True])
def test_what_is_too_large_for_the_device(
    place: Setting, host: FakeHost, text: str, is_pinned: bool
):
    version = place.add("x", host, is_pinned=is_pinned)
    if not is_pinned:
        assert place.residence.claim("x") is None
    place.settle()
    place.wait()  # in vain
    with pytest.raises(AdapterCapacityError, match=text):
        place.residence.claim("x")
    with pytest.raises(AdapterCapacityError, match=text):
        version.loaded.result(0)
    assert version.tier == "disk" and place.residence.host_bytes == 0
    place.residence.unregister("x")
    assert version.gone.done()


def test_weights_that_are_not_finite(place: Setting):
    bad = FakeHost("bad", is_finite=False)
    version = place.add("x", bad)
    held = place.hold("x")
    assert version.error is None, "nobody has waited for the device"
    error = held.verify()
    assert error is version.error and isinstance(error, ValueError)
    assert str(error) == (
        "adapter 'x' has weights that are NaN or infinite; all must be finite "
        "(allow_nan=True takes them all the same)"
    )
    assert held.verify() is error
    assert version.stats.num_load_failures == 1
    place.residence.release(held)
    assert place.residence.num_on_device == 0
    place.wait()  # in vain
    with pytest.raises(ValueError, match="NaN or infinite"):
        place.residence.claim("x")
    place.add("x", bad, allow_nan=True)
    held = place.hold("x")
    assert held.verify() is None and place.residence["x"].ready
    place.residence.release(held)


def test_host_memory_has_a_budget(place: Setting):
    for name in "abcd":
        place.add(name)
    for name in "abcad":
        place.use(name)
        assert place.residence.host_bytes <= HOST_BYTES
    on_host = {name for name, one in place.residence.items() if one.host}
    assert on_host == {"a", "c", "d"}
    assert [place.residence[name].stats.num_reads for name in "abcd"] == [1, 1, 1, 1]
    big = place.add("big", FakeHost("big", nbytes=HOST_BYTES + 1))
    held = place.hold("big")  # larger than the budget: it is there while it is copied
    assert big.host is None and big.ready and place.residence.host_bytes == 0
    place.residence.release(held)


@pytest.mark.parametrize("host_bytes", [0, 10, 20])
def test_those_that_wait_do_not_read_for_ever(host_bytes: int):
    # They push one another out of host memory while there is no slot for them.
    place = Setting(host_bytes, num_slots=1)
    for name in "abcd":
        place.add(name)
    held = place.hold("a")
    for name in "bcd":
        place.residence.pin(name)
    place.settle()
    for _ in range(20):
        assert not any(place.residence.claim(name) for name in "bcd")
        place.settle()
    assert sum(one.stats.num_reads for one in place.residence.values()) <= 8
    for name in "bcd":
        place.residence.pin(name, False)
    place.residence.release(held)
    for name in "bcda":
        assert place.use(name).ready


def test_files_that_change_have_other_weights():
    place = Setting(host_bytes=0, num_slots=1)
    contents = iter(["first", "second", "first"])
    version = place.residence.register("x", lambda: FakeHost(next(contents)))
    place.add("other")
    seen = []
    for _ in range(3):
        assert place.residence.claim("x") is None
        place.executor.finish()
        place.residence.poll()
        held = place.residence.claim("x")
        assert held is version
        before = version.weights  # of rows that come before the digest is known
        place.settle()
        seen.append((before, version.weights))
        place.residence.release(held)
        place.use("other")
        assert not version.ready
    assert len({before for before, _ in seen}) == 3
    assert seen[0][1] == seen[2][1] != seen[1][1]


def test_the_base_alone(place: Setting):
    held = place.residence.claim(None)
    assert held is not None and held.slot == -1 and held.ready
    place.residence.release(held)


def test_unknown_names_are_told_from_known_ones(place: Setting):
    with pytest.raises(UnknownAdapterError, match=r"named 'x'; none is known$"):
        place.residence["x"]
    for number in range(10):
        place.add(f"n{number}")
    with pytest.raises(
        UnknownAdapterError, match=r"named \['x'\]; known are 'n0', .*'n7' and 2 more$"
    ):
        place.residence[["x"]]  # pyright: ignore[reportArgumentType]
    assert "x" not in place.residence and "n3" in place.residence


def test_an_end_leaves_nobody_waiting(place: Setting):
    place.add("read")
    place.residence.claim("read")
    used = place.add("used")
    place.hold("used")
    place.residence.unregister("used")
    candidate = place.residence.prepare("new", lambda: FakeHost("new"))
    place.residence.give_up(lambda: RuntimeError("it is over"))
    for version in (used, candidate, place.residence["read"]):
        with pytest.raises(RuntimeError, match="it is over"):
            version.gone.result(0)


NAMES = st.sampled_from("abcde")
CONTENTS = st.sampled_from(["red", "green", "blue"])
MAY_BE = st.sampled_from([None, False, True])
FAILURES = st.sampled_from([ValueError("broken"), OSError("gone"), None, None, None])


class AnySequence(RuleBasedStateMachine):
    """Any calls in any order, held against what each version's weights are.

    Tasks end when the machine says so. Where a task begins, files may be other ones
    than before.
    """

    num_evictions = 0

    def __init__(self) -> None:
        super().__init__()
        self.place = Setting()
        self.residence = self.place.residence
        self.files: dict[Version, Callable[[], FakeHost]] = {}
        self.current: dict[str, Version] = {}
        self.candidates: list[Version] = []
        self.left: list[Version] = []
        self.held: list[Version] = []
        self.pinned: set[str] = set()
        self.uses: dict[Version, int] = {}
        self.clock = itertools.count()
        self.meaning: dict[Any, str] = {}
        self.renamed: dict[Any, Any] = {}

    def read(self, data: Any) -> Callable[[], FakeHost]:
        content = data.draw(CONTENTS)
        pages = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        if rare := data.draw(st.integers(0, 9)) == 0:
            pages = (7, 1)
        failure = data.draw(FAILURES)
        host = FakeHost(
            f"{content} {pages}",
            pages,
            rank=data.draw(st.sampled_from([8, 8, 8, 65])) if rare else 8,
            nbytes=data.draw(st.sampled_from([0, 10, 25, 40])),
            is_finite=data.draw(st.integers(0, 5)) > 0,
            is_examinable=data.draw(st.integers(0, 5)) > 0,
        )

        def read() -> FakeHost:
            if failure is not None:
                raise failure
            return host

        return read

    @rule(
        name=NAMES,
        data=st.data(),
        is_remote=st.booleans(),
        is_pinned=MAY_BE,
        nan=st.booleans(),
    )
    def register(self, name, data, is_remote, is_pinned, nan):
        is_pinned = is_pinned and len(self.pinned) < NUM_SLOTS - 1
        version = self.residence.register(
            name, self.read(data), is_remote, is_pinned=is_pinned, allow_nan=nan
        )
        self.replace(name, version, is_pinned)

    def replace(self, name: str, version: Version, is_pinned: bool | None) -> None:
        if is_pinned is None:
            is_pinned = name in self.pinned
        if name in self.current:
            self.left.append(self.current[name])
        self.current[name] = version
        (self.pinned.add if is_pinned else self.pinned.discard)(name)

    @initialize(data=st.data())
    def begin(self, data):
        for name in "abcde":
            self.register(name, data, False, False, True)

    @rule(name=NAMES, data=st.data())
    def change_files(self, name, data):
        for version in [*self.current.values(), *self.candidates]:
            if version.name == name:
                version.read = self.read(data)

    @rule(name=NAMES)
    def unregister(self, name):
        if name not in self.current:
            with pytest.raises(
                UnknownAdapterError, match=f"no adapter is named '{name}"
            ):
                self.residence.unregister(name)
            return
        self.left.append(self.current.pop(name))
        self.pinned.discard(name)
        assert self.residence.unregister(name) is self.left[-1]

    @rule(name=NAMES, data=st.data(), is_wanted=st.booleans())
    def prepare(self, name, data, is_wanted):
        if len(self.candidates) < 2:
            version = self.residence.prepare(name, self.read(data))
            self.candidates.append(version)
            if is_wanted:
                self.residence.want(version)

    @precondition(lambda self: self.candidates)
    @rule(data=st.data(), is_pinned=MAY_BE)
    def adopt(self, data, is_pinned):
        version = data.draw(st.sampled_from(self.candidates))
        self.candidates.remove(version)
        is_pinned = is_pinned and len(self.pinned) < NUM_SLOTS - 1
        self.residence.adopt(version, is_pinned=is_pinned)
        self.replace(version.name, version, is_pinned)

    @precondition(lambda self: self.candidates)
    @rule(data=st.data())
    def discard(self, data):
        version = data.draw(st.sampled_from(self.candidates))
        self.candidates.remove(version)
        self.residence.discard(version)
        self.left.append(version)

    @rule(name=NAMES, is_pinned=st.booleans())
    def pin(self, name, is_pinned):
        if name in self.current and len(self.pinned) < NUM_SLOTS - 1:
            self.residence.pin(name, is_pinned)
            (self.pinned.add if is_pinned else self.pinned.discard)(name)

    @rule(name=NAMES)
    def claim(self, name):
        before = {one: one.ready for one in self.residence.values()}
        try:
            held: Any = self.residence.claim(name)
        except UnknownAdapterError:
            assert name not in self.current
            return
        except ValueError as error:
            known = self.current[name].error
            if known is not None or not self.pinned:
                assert str(error) == str(known)
            else:
                assert "does not fit beside the" in str(error)
            return
        if held is not None:
            assert held is self.current[name] and held.placement is not None
            self.held.append(held)
            self.uses[held] = next(self.clock)
        self.check_evictions(before)

    @rule(name=NAMES)
    def use(self, name):
        """Claim, and do all that is under way, until it is there and ready."""
        version = self.current.get(name)
        if version is None or (version.error and not version.is_transient):
            return
        self.place.wait()
        for _ in range(3):
            count = len(self.held)
            self.claim(name)
            if len(self.held) > count:
                break
            self.settle()
        self.settle()

    @rule(names=st.lists(NAMES, min_size=3))
    def use_several(self, names):
        for name in names:
            count = len(self.held)
            self.use(name)
            if len(self.held) > count:
                self.release_one(self.held[-1])

    def settle(self) -> None:
        for _ in range(100):
            num_wakes = self.place.num_wakes
            self.poll()
            if self.place.executor.waiting:
                self.place.executor.finish()
            elif self.place.num_wakes == num_wakes:
                return
        raise AssertionError("it never comes to rest")

    def check_evictions(self, before: dict[Version, bool]) -> None:
        """Who left was idle, and unused for longer than all idle ones that stayed."""
        gone = [one for one, was in before.items() if was and not one.ready]
        stayed = [one for one in before if one.ready and not one.num_users]
        AnySequence.num_evictions += len(gone)
        for one in gone:
            assert not one.num_users and one.name not in self.pinned
            for other in stayed:
                if other.name not in self.pinned and before[other]:
                    assert self.uses.get(one, -1) < self.uses.get(other, -1) or (
                        # Brought by a pin and never used: as old as its arrival.
                        other not in self.uses or one not in self.uses
                    )

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.release_one(data.draw(st.sampled_from(self.held)))

    def release_one(self, version: Version) -> None:
        self.held.remove(version)
        self.residence.release(version)
        self.uses[version] = next(self.clock)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def verify(self, data):
        version = data.draw(st.sampled_from(self.held))
        if version.ready:
            content = self.place.device.slots[version.slot]
            is_bad = not content.is_finite and not version.allow_nan
            assert (version.verify() is not None) == is_bad

    @precondition(lambda self: not self.place.device.full)
    @rule()
    def fill(self):
        self.place.device.full.append(OSError("the device is full"))

    @rule()
    def hasten(self):
        wanted = [one for one in self.all() if one.num_users]
        was_staged = any(one.staged is not None for one in wanted)
        assert self.residence.hasten() == was_staged
        assert all(one.staged is None for one in wanted)

    @precondition(lambda self: self.place.executor.waiting)
    @rule(data=st.data(), is_broken=st.integers(0, 9))
    def finish(self, data, is_broken):
        count = len(self.place.executor.waiting)
        if not is_broken:
            self.place.device.broken.append(OSError("copy failed"))
        self.place.executor.finish(data.draw(st.integers(0, count - 1)))
        self.place.device.broken.clear()

    @rule()
    def poll(self):
        before = {one: one.ready for one in self.residence.values()}
        self.residence.poll()
        self.check_evictions(before)
        for old, new in self.residence.take_renames():
            assert self.renamed.setdefault(old, new) == new
            assert self.meaning.setdefault(old, new[1]) == new[1]

    @invariant()
    def whole(self):
        residence = self.residence
        residence.check_integrity()
        assert dict(residence) == self.current
        on_host = [one for one in self.all() if one.host is not None]
        nbytes = sum(one.host.nbytes for one in on_host if one.host is not None)
        assert residence.host_bytes == nbytes
        for version in self.held:
            assert version.placement is not None
        for version in self.all():
            assert version.num_users == self.held.count(version)
            if version.ready:
                host = self.place.device.slots[version.slot]
                # Who has the same name for weights has the same weights.
                meaning = host.meaning
                if version.weights[0] == "digest":
                    assert version.weights[1] == meaning
                assert self.meaning.setdefault(version.weights, meaning) == meaning
        stats: dict[str, AdapterStats] = {}
        for version in self.all():
            if not version.gone.done():
                assert version.stats is stats.setdefault(version.name, version.stats)
        slots = [one.slot for one in self.all() if one.placement is not None]
        assert len(slots) == len(set(slots)) == residence.num_on_device

    def all(self) -> list[Version]:
        return [*self.current.values(), *self.candidates, *self.left]

    def teardown(self):
        """Let all go: nothing may be left, and nobody may wait."""
        for version in self.held:
            self.residence.release(version)
        self.place.settle()
        self.whole_without_users()
        for name in list(self.current):
            self.left.append(self.residence.unregister(name))
        for version in self.candidates:
            self.residence.discard(version)
        self.place.settle()
        assert all(version.gone.done() for version in self.left + self.candidates)
        assert self.residence.host_bytes == self.residence.num_on_device == 0
        assert len(self.residence) == len(self.place.table) == 0
        assert self.place.table.num_free_slots == NUM_SLOTS
        for group, count in PAGES.items():
            assert self.place.table.num_free_pages(group) == count

    def whole_without_users(self):
        """With nobody there, all that is pinned and can be there is there."""
        on_host = [one for one in self.all() if one.host is not None]
        assert self.residence.host_bytes <= HOST_BYTES or len(on_host) == 1
        for name in self.pinned:
            version = self.current[name]
            assert version.ready or version.error is not None or not self.fits(version)
        contents: dict[str, Any] = {}
        for version in self.all():
            if version.ready and version.error is None:
                host = self.place.device.slots[version.slot]
                assert (version.weights[0] == "digest") == host.is_examinable
                if host.is_examinable:
                    weights = contents.setdefault(host.meaning, version.weights)
                    assert weights == version.weights, "the same weights share"

    def fits(self, version: Version) -> bool:
        """Whether it would fit, as far as is known, beside what is pinned and there."""
        current = [self.current[name] for name in self.pinned]
        pinned = [one for one in current + self.candidates if one.ready]
        if len(pinned) >= NUM_SLOTS:
            return False
        return all(
            version.num_pages.get(group, 0)
            + sum(len(self.table_pages(one, group)) for one in pinned)
            <= count
            for group, count in PAGES.items()
        )

    def table_pages(self, version: Version, group: str) -> Sequence[int]:
        assert version.placement is not None
        return version.placement.pages[group]


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=80, stateful_step_count=40)
