"""What other threads do for adapters: fetch, read, wait for copies, examine.

Plain Python: knows that there is work for a version; what it is, and what follows from
it, is `residence`.
"""

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, KeysView
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

from punica_jax.versions import Version

Kind: TypeAlias = Literal["fetch", "read", "stage", "examine"]

_NUM_READERS = _NUM_EXAMINERS = 2
_NUM_FETCHERS = 4  # they wait for a network, minutes perhaps
# Python's own is 5 ms, for which a thread that loads may keep the one that launches
# steps from each of its turns. On one H200, beside 31 sequences of a 7B model, the
# slowest step while adapters came from the host's memory was 2.0 times the median;
# with 0.5 ms 1.5, so 1.4. (From disk 2.8, 1.8, and 1.6 or, beside a compiler, 3.7.)
_SWITCH_INTERVAL_S = 1e-4


class _ShortTurns:
    """Python's threads take short turns while at least one engine wants them to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_wanting = 0
        self._before_s = self._own_s = 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._num_wanting:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, _SWITCH_INTERVAL_S))
                self._own_s = sys.getswitchinterval()
            self._num_wanting += 1

    def end(self) -> None:
        with self._lock:
            self._num_wanting -= 1
            # Else somebody has set it meanwhile.
            if not self._num_wanting and sys.getswitchinterval() == self._own_s:
                sys.setswitchinterval(self._before_s)


_short_turns = _ShortTurns()


class Tasks:
    """Work under way, at most one of each kind for a version."""

    def __init__(
        self,
        reader: Executor,
        *,
        fetcher: Executor | None = None,
        copier: Executor | None = None,
        examiner: Executor | None = None,
        wake: Callable[[], None] = lambda: None,
        shortens_turns: bool = False,
    ):
        """Begin with none.

        Args:
          reader: runs what takes time, in other threads.
          fetcher: reads what a network may have to bring, which must not hold up files.
          copier: waits for copies to the device, which files must not hold up.
          examiner: computes digests and reports, which must not hold up files.
          wake: called, in any thread, when there is something to take.
          shortens_turns: all of the process's threads take short turns, from the first
            work until `shutdown`, or that of the last of several.
        """
        self._shortens_turns = shortens_turns
        self._has_shortened = False
        self._executors: dict[Kind, Executor] = {
            "fetch": fetcher or reader,
            "read": reader,
            "stage": copier or reader,
            "examine": examiner or reader,
        }
        self._wake = wake
        self._futures: dict[Kind, dict[Version, Future[Any]]]
        self._futures = {kind: {} for kind in self._executors}
        self._done: deque[tuple[Version, Kind]] = deque()  # as they end, in any thread

    @classmethod
    def threads(cls, wake: Callable[[], None]) -> "Tasks":
        """Begin with none, and with threads for each kind, as an engine has them.

        From the first work until `shutdown` all of the process's threads take shorter
        turns; see `sys.setswitchinterval`.

        Args:
          wake: called, in any thread, when there is something to take.
        """
        return cls(
            ThreadPoolExecutor(_NUM_READERS, "punica-jax-adapters"),
            fetcher=ThreadPoolExecutor(_NUM_FETCHERS, "punica-jax-downloads"),
            copier=ThreadPoolExecutor(1, "punica-jax-copies"),
            examiner=ThreadPoolExecutor(_NUM_EXAMINERS, "punica-jax-digests"),
            wake=wake,
            shortens_turns=True,
        )

    def __len__(self) -> int:
        return sum(map(len, self._futures.values()))

    def of(self, kind: Kind) -> KeysView[Version]:
        """Return the versions for which there is work of a kind."""
        return self._futures[kind].keys()

    @property
    def versions(self) -> set[Version]:
        """Those for which there is any."""
        return set(itertools.chain(*self._futures.values()))

    def is_read(self, version: Version) -> bool:
        """Tell whether a version is on its way to host memory."""
        return version in self.of("fetch") or version in self.of("read")

    def is_moving(self, version: Version) -> bool:
        """Tell whether a version is on its way to host memory or to the device."""
        return self.is_read(version) or version in self.of("stage")

    def start(self, version: Version, kind: Kind, work: Callable[[], Any]) -> None:
        """Have a thread do something."""

        try:
            future = self._executors[kind].submit(work)
        except RuntimeError as error:  # the interpreter is ending: this load fails
            self.fail(version, kind, error)
            return
        if self._shortens_turns and not self._has_shortened:
            self._has_shortened = True
            _short_turns.begin()
        self._note(version, kind, future)

    def fail(self, version: Version, kind: Kind, error: Exception) -> None:
        """Take note of work that could not begin, as of one that has failed."""
        future: Future[Any] = Future()
        future.set_exception(error)
        self._note(version, kind, future)

    def _note(self, version: Version, kind: Kind, future: Future[Any]) -> None:
        def note(_: Future[Any]) -> None:
            self._done.append((version, kind))
            self._wake()

        self._futures[kind][version] = future
        future.add_done_callback(note)

    def take(self) -> Iterator[tuple[Version, Kind, Future[Any]]]:
        """Yield what is done, and forget it; of copies one alone.

        What writes a copied adapter to its pages would hold up the next step.
        """
        num_copied = 0
        for _ in range(len(self._done)):
            version, kind = self._done.popleft()
            num_copied += kind == "stage"
            if kind == "stage" and num_copied > 1:
                self._done.append((version, kind))
                self._wake()
            else:
                yield version, kind, self._futures[kind].pop(version)

    def shutdown(self) -> None:
        """End the threads, once they are through with what they do now."""
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        if self._has_shortened:
            self._has_shortened = False
            _short_turns.end()
