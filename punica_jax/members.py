"""The engines of a cluster, and which request is at which of them.

Knows what a request takes, and names; nothing of how it runs or moves. All of it may be
called from any thread.
"""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from punica_jax.consolidation import (
    Load,
    Move,
    Need,
    Placement,
    least_queue,
    relief,
)
from punica_jax.engine_config import EngineConfig
from punica_jax.engine_request import EngineClosedError
from punica_jax.request_state import RequestState
from punica_jax.stats import RequestProgress


class Capacity(Protocol):
    """What is asked of an engine here."""

    config: EngineConfig

    @property
    def num_open_kv_pages(self) -> int: ...


class Ticket:
    """A request of a cluster, wherever it is.

    Attributes:
      name: its id.
      need: what it takes of an engine, as far as anybody knows.
      version: which of the weights that its adapter's name stood for it came under.
      arrived_s: when it came; by `time.monotonic`.
      place: its engine's place among the members.
      here: its id at that engine, another one at each.
      has_begun: whether something has come of it there.
      state: while it is taken out of there: what it goes on from, or None if it ended.
      is_cancelled: whether nobody wants it any more.
    """

    def __init__(self, name: str, need: Need, version: int):
        self.name, self.need, self.version = name, need, version
        self.arrived_s = time.monotonic()
        self.place, self.here = -1, ""
        self.has_begun = self.is_cancelled = False
        self.state: Future[RequestState | None] | None = None
        self._num_places = 0

    def sit(self, place: int) -> None:
        """Take note of where it is now."""
        self._num_places += 1
        self.place, self.here = place, f"{self.name} #{self._num_places}"
        self.has_begun = False

    @property
    def is_moving(self) -> bool:
        """Whether it has left an engine, and not come to another one."""
        return self.state is not None or (self._num_places > 1 and not self.has_begun)

    def end_one(self) -> bool:
        """Take note that a completion has ended; return whether it was the last."""
        left = self.need.num_sequences - 1
        self.need = dataclasses.replace(self.need, num_sequences=left)
        return not left


@dataclasses.dataclass(slots=True)
class _Member:
    """An engine, and the requests that it was given: by their ids there."""

    engine: Capacity
    tickets: dict[str, Ticket] = dataclasses.field(default_factory=dict)
    is_open: bool = True
    has_ended: bool = False

    def load(self, progress: Mapping[str, RequestProgress] | None = None) -> Load:
        """Return what it has to do; who sits there is known with `progress` only."""
        config, tickets = self.engine.config, self.tickets
        waiting = (
            ticket.need.num_kv_pages
            for here, ticket in tickets.items()
            if not (ticket.has_begun if progress is None else _sits(progress, here))
        )
        names = (ticket.need.adapter for ticket in tickets.values())
        return Load(
            num_sequences=sum(one.need.num_sequences for one in tickets.values()),
            max_seats=config.max_seats,
            num_open_pages=self.engine.num_open_kv_pages - sum(waiting),
            adapters=frozenset(name for name in names if name is not None),
            num_slots=config.num_slots,
            is_open=self.is_open and not self.has_ended,
        )


class Members:
    """Engines and their requests; says where a new one goes, and which should move.

    Attributes:
      placement: decides that.
      num_moves: requests that went on at another engine so far.
    """

    def __init__(self, engines: Sequence[Capacity], placement: Placement):
        self.placement = placement
        self.num_moves = 0
        self._members = [_Member(engine) for engine in engines]
        self._tickets: dict[str, Ticket] = {}
        self._versions: dict[str | None, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many requests are under way."""
        return len(self._tickets)

    @property
    def alive(self) -> list[int]:
        """Places of the engines that have not ended."""
        return [i for i, one in enumerate(self._members) if not one.has_ended]

    def find(self, name: object) -> Ticket | None:
        """Return the request of an id, if it is under way."""
        with self._lock:
            return self._tickets.get(name) if isinstance(name, str) else None

    def enter(self, name: str, need: Need) -> Ticket:
        """Give a new request to an engine.

        Raises:
          ValueError: one under way has its id.
          EngineClosedError: no engine is left.
        """
        with self._lock:
            if name in self._tickets:
                raise ValueError(f"a request with the id {name!r} is under way")
            version = self._versions.get(need.adapter, 0)
            ticket = self._tickets[name] = Ticket(name, need, version)
            try:
                self._give(ticket)
            except EngineClosedError:
                del self._tickets[name]
                raise
            return ticket

    def note_begin(self, ticket: Ticket, here: str) -> None:
        """Take note that something has come of a request, if it is still there."""
        if not ticket.has_begun:
            with self._lock:
                ticket.has_begun = ticket.here == here

    def leave(self, ticket: Ticket) -> None:
        """Forget a request; a second time is nothing."""
        with self._lock:
            if self._tickets.get(ticket.name) is ticket:
                del self._tickets[ticket.name]
                self._take(ticket)

    def note_end(self, ticket: Ticket) -> None:
        """Forget an engine that has ended, and give its request, not begun, to another.

        Raises:
          EngineClosedError: none is left.
        """
        with self._lock:
            self._members[ticket.place].has_ended = True
            self._take(ticket)
            self._give(ticket)

    def move(self, ticket: Ticket, target: int, state: RequestState) -> None:
        """Have a request that was taken out be at another engine, if that still is."""
        with self._lock:
            if self._tickets.get(ticket.name) is not ticket:
                return  # whoever asked has left
            self._take(ticket)
            if self._members[target].has_ended:
                self._give(ticket)
            else:
                self._put(ticket, target)
            self.num_moves += 1

    async def taken(self, ticket: Ticket) -> RequestState | None:
        """Return from what a request goes on that was taken out, to one who asks."""
        if (moving := ticket.state) is None:
            return None
        state = await asyncio.wrap_future(moving)
        with self._lock:
            is_there, ticket.state = ticket.state is not None, None
        return state if is_there else None

    def is_moving(self, adapter: str) -> bool:
        """Tell whether a request of an adapter is at no engine now."""
        with self._lock:
            return any(
                ticket.need.adapter == adapter and ticket.is_moving
                for ticket in self._tickets.values()
            )

    def note_other_weights(self, name: str) -> None:
        """Take note that an adapter's name stands for others: who began stays."""
        with self._lock:
            self._versions[name] = self._versions.get(name, 0) + 1

    def set_open(self, place: int, is_open: bool) -> None:
        """Have an engine get requests, or hand on those that it has.

        Raises:
          ValueError: it is the last one that gets any.
        """
        with self._lock:
            own = self._members[place]
            others = [one for one in self._members if one is not own]
            if not is_open and not any(one.is_open for one in others):
                raise ValueError(
                    f"engine {place} is the last one that takes requests; undrain "
                    "another one first, or close the cluster"
                )
            own.is_open = is_open

    def num_at(self, place: int) -> int:
        """Return how many requests an engine has."""
        with self._lock:
            return len(self._members[place].tickets)

    def loads(self) -> list[Load]:
        """Return what each has to do."""
        with self._lock:
            return [member.load() for member in self._members]

    def plan(
        self,
        progress: Mapping[int, Mapping[str, RequestProgress]],
        *,
        gathers: bool,
    ) -> list[tuple[Ticket, int]]:
        """Return which requests should go where.

        Args:
          progress: of the engines' requests, by the engines' places; one without gets
            nothing, and hands on nothing.
          gathers: whether those may move that have what they need.
        """
        with self._lock:
            loads, requests = [], []
            for place, member in enumerate(self._members):
                known = progress.get(place, {})
                load = member.load(known)
                if place not in progress:
                    load = dataclasses.replace(load, is_open=False)
                loads.append(load)
                requests.append(self._movable(member, known))
            moves = relief(self.placement, loads, requests)
            if gathers and not moves:
                moves = self.placement.gathered(loads, requests)
            return [(self._ticket(move), move.target) for move in moves]

    # With the lock.

    def _movable(
        self, member: _Member, progress: Mapping[str, RequestProgress]
    ) -> dict[str, Need]:
        """Return what can be taken out of an engine, in the engine's order."""
        needs = {}
        for here, known in progress.items():
            ticket = member.tickets.get(here)
            if ticket is None or ticket.is_cancelled or ticket.state is not None:
                continue
            if ticket.version != self._versions.get(ticket.need.adapter, 0):
                continue  # others know other weights by that name
            ticket.need = dataclasses.replace(
                ticket.need, num_kv_pages=known.num_kv_pages
            )
            needs[here] = dataclasses.replace(
                ticket.need,
                num_sequences=known.num_sequences,
                is_seated=known.num_seated > 0,
            )
        return needs

    def _ticket(self, move: Move) -> Ticket:
        return self._members[move.source].tickets[move.name]

    def _give(self, ticket: Ticket) -> None:
        """Give a request to whom the placement says, or who has the shortest queue."""
        loads = [member.load() for member in self._members]
        place = self.placement.place(loads, ticket.need)
        if place is None:
            place = least_queue(loads)
        if place is None:
            raise EngineClosedError(
                "every engine of the cluster has ended or is drained"
            )
        self._put(ticket, place)

    def _put(self, ticket: Ticket, place: int) -> None:
        ticket.sit(place)
        self._members[place].tickets[ticket.here] = ticket

    def _take(self, ticket: Ticket) -> None:
        self._members[ticket.place].tickets.pop(ticket.here, None)


def _sits(progress: Mapping[str, RequestProgress], here: str) -> bool:
    known = progress.get(here)
    return known is not None and known.num_seated > 0
