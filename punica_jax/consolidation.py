"""Which engine of several a request goes to, and which ones go on elsewhere.

Punica, sections 5.1 and 5.3. Plain numbers: engines are places in a list, requests are
names; nothing of what they are, or of how they move.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from punica_jax.request import number_of

# Who finds nothing, of a thousand that wait: the others need much the same.
_MOST_VAIN = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request takes of an engine.

    Attributes:
      num_sequences: completions, a seat each.
      num_kv_pages: for the tokens that there are.
      adapter: its adapter's name, None for the base alone.
      is_seated: whether it has its seats where it is.
    """

    num_sequences: int
    num_kv_pages: int
    adapter: str | None = None
    is_seated: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine has been given, and what room it has.

    Attributes:
      num_sequences: of its requests, until they end.
      max_seats: sequences that run at one time.
      num_open_pages: KV pages that nobody has and nobody who waits there needs.
      adapters: those that its requests use -> of how many.
      num_slots: adapters on the device at one time.
      is_open: whether it may get requests; one that is not hands on those it has.
    """

    num_sequences: int
    max_seats: int
    num_open_pages: int
    adapters: Mapping[str, int]
    num_slots: int
    is_open: bool = True

    def has_room(self, need: Need) -> bool:
        """Tell whether a request could sit down at once, but for its adapter's way."""
        own = () if need.adapter is None else (need.adapter,)
        return (
            self.num_sequences + need.num_sequences <= self.max_seats
            and need.num_kv_pages <= self.num_open_pages
            and len(self.adapters.keys() | own) <= self.num_slots
        )

    def with_one(self, need: Need) -> "Load":
        """Return what it would be with a request more."""
        return self._changed(need, 1)

    def without(self, need: Need) -> "Load":
        """Return what it would be with one less."""
        return self._changed(need, -1)

    def _changed(self, need: Need, by: int) -> "Load":
        adapters = dict(self.adapters)
        if need.adapter is not None:
            adapters[need.adapter] = adapters.get(need.adapter, 0) + by
            if not adapters[need.adapter]:
                del adapters[need.adapter]
        return dataclasses.replace(
            self,
            num_sequences=self.num_sequences + by * need.num_sequences,
            num_open_pages=self.num_open_pages - by * need.num_kv_pages,
            adapters=adapters,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A request that is to go on at another engine: its name, and their places."""

    name: str
    source: int
    target: int


Requests = Sequence[Mapping[str, Need]]
"""Of each engine, in its order: those that have seats, then those that wait."""


@runtime_checkable
class Placement(Protocol):
    """Says who goes where.

    Attributes:
      every_s: how often `gathered` is asked, seconds; None is never.
    """

    @property
    def every_s(self) -> float | None: ...

    def place(self, loads: Sequence[Load], need: Need) -> int | None:
        """Return the place of an open engine with room for a request, if any has.

        Args:
          loads: of the engines, by their places.
          need: the request's.
        """
        ...

    def gathered(self, loads: Sequence[Load], requests: Requests) -> list[Move]:
        """Return which requests should move though they have what they need.

        Args:
          loads: of the engines, by their places.
          requests: of each engine, by their names, those that may move: first those
            that have seats, then the others in the order in which they get them.
        """
        ...


@dataclasses.dataclass(eq=False)
class Consolidate:
    """As few engines as can be: a request goes to the busiest one that has room.

    And now and then the one with least to do hands all that it has to busier ones, if
    they have room. So engines run at full batches, or are idle (and may be given back:
    `Cluster.drain`).

    Attributes:
      every_s: how often an engine may be emptied, seconds, above 0. What moves is
        computed again where it goes.

    Raises:
      ValueError: it is no such number.
    """

    every_s: float = 10.0

    def __post_init__(self) -> None:
        self.every_s = number_of("every_s", self.every_s, 0, math.inf, above=True)

    def place(self, loads: Sequence[Load], need: Need) -> int | None:
        """Return the busiest one with room, of equals the first; see `Placement`."""
        return _best(loads, need, lambda load: -load.num_sequences)

    def gathered(self, loads: Sequence[Load], requests: Requests) -> list[Move]:
        """Return what empties the engine with least to do; see `Placement`.

        Nothing, if not all of it can move.
        """
        busy = [
            place
            for place, load in enumerate(loads)
            if load.is_open and load.num_sequences
        ]
        if len(busy) < 2:
            return []
        # Of equals the last is emptied: the first ones are where requests come to.
        source = min(busy, key=lambda place: (loads[place].num_sequences, -place))
        going = sum(need.num_sequences for need in requests[source].values())
        if going < loads[source].num_sequences:
            return []  # some of it cannot move
        after = [
            load if place in busy and place != source else _closed(load)
            for place, load in enumerate(loads)
        ]
        moves = []
        for name, need in requests[source].items():
            target = self.place(after, need)
            if target is None:
                return []
            after[target] = after[target].with_one(need)
            moves.append(Move(name, source, target))
        return moves


@dataclasses.dataclass(eq=False)
class Spread:
    """As little to do for each as can be: a request goes to the idlest engine.

    For a fixed number of devices, where nothing is gained by leaving one idle.
    """

    @property
    def every_s(self) -> None:
        """Never; see `Placement`."""

    def place(self, loads: Sequence[Load], need: Need) -> int | None:
        """Return the idlest one with room, of equals the first; see `Placement`."""
        return _best(loads, need, lambda load: load.num_sequences)

    def gathered(self, loads: Sequence[Load], requests: Requests) -> list[Move]:
        """Return nothing; see `Placement`."""
        return []


def least_queue(loads: Sequence[Load]) -> int | None:
    """Return the open engine before which fewest wait, for a request without room."""
    open_ones = [place for place, load in enumerate(loads) if load.is_open]
    return min(
        open_ones,
        key=lambda place: loads[place].num_sequences - loads[place].max_seats,
        default=None,
    )


def relief(
    placement: Placement, loads: Sequence[Load], requests: Requests
) -> list[Move]:
    """Return where requests should go that have no room where they are.

    That is who waits for a seat, for KV pages (also one that had to give up its seat,
    the newest: Punica's eviction) or for room for its adapter; not who waits for its
    adapter's way to the device. An engine that is not open hands on who runs, too.

    Args:
      placement: says where to.
      loads: of the engines.
      requests: theirs.
    """
    after, moves, num_vain = list(loads), [], 0
    for source, own in enumerate(requests):
        for name, need in own.items():
            if num_vain == _MOST_VAIN or not has_seats_beside(after, source):
                break
            left = after[source].without(need)
            if loads[source].is_open and (need.is_seated or left.has_room(need)):
                continue
            others = [*after]
            others[source] = _closed(left)
            target = placement.place(others, need)
            if target is not None:
                after[source] = left
                after[target] = after[target].with_one(need)
                moves.append(Move(name, source, target))
            num_vain += target is None
    return moves


def has_seats_beside(loads: Sequence[Load], source: int) -> bool:
    """Tell whether another engine could take any request."""
    return any(
        load.is_open and load.num_sequences < load.max_seats
        for place, load in enumerate(loads)
        if place != source
    )


def _best(
    loads: Sequence[Load], need: Need, key: Callable[[Load], float]
) -> int | None:
    places = [
        place
        for place, load in enumerate(loads)
        if load.is_open and load.has_room(need)
    ]
    return min(places, key=lambda place: key(loads[place]), default=None)


def _closed(load: Load) -> Load:
    return dataclasses.replace(load, is_open=False)
