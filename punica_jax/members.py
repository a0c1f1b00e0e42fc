"""The engines of a cluster, and which request is at which of them.

Knows what a request takes, and names; nothing of how it runs or moves. All of it may be
called from any thread.
"""

import asyncio
import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

from punica_jax.consolidation import (
    Load,
    Move,
    Need,
    Placement,
    has_seats_beside,
    least_queue,
    relief,
)
from punica_jax.engine_request import EngineClosedError
from punica_jax.request import RequestError, Terms
from punica_jax.request_state import RequestState
from punica_jax.stats import RequestProgress
from punica_jax.tickets import Capacity, Member, Ticket

Progress = Mapping[int, Mapping[str, RequestProgress]]
"""An engine's place -> what it says of its requests, by their ids there.

One without is asked for nothing, and given nothing.
"""
_LOST_S = 60.0  # more than a request takes from the cluster to its engine


Moving = tuple[Ticket, int, "Future[RequestState | None]"]
"""A request that is to be taken out, the place it goes to, and what tells its state."""


class Members:
    """Engines and their requests; says where a new one goes, and which should move.

    Attributes:
      placement: decides that.
      num_moves: requests that went on at another engine so far.
    """

    def __init__(self, engines: Sequence[Capacity], placement: Placement):
        self.placement = placement
        self.num_moves = 0
        self._members = [Member(engine) for engine in engines]
        self._tickets: dict[str, Ticket] = {}
        self._versions: collections.Counter[str | None] = collections.Counter()
        self._frozen: collections.Counter[str | None] = collections.Counter()
        self._lock = threading.RLock()  # a placement may look at the loads

    def __len__(self) -> int:
        """Return how many requests are under way."""
        return len(self._tickets)

    @property
    def alive(self) -> list[int]:
        """Places of the engines that have not ended."""
        return [i for i, one in enumerate(self._members) if not one.has_ended]

    def find(self, name: object) -> Ticket | None:
        """Return the request of an id, if it is under way."""
        return self._tickets.get(name) if isinstance(name, str) else None

    def enter(self, name: str, need: Need, terms: Terms) -> Ticket:
        """Give a new request to an engine.

        Raises:
          ValueError: one under way has its id.
          EngineClosedError: no engine is left.
        """
        with self._lock:
            if name in self._tickets:
                raise ValueError(f"a request with the id {name!r} is under way")
            ticket = Ticket(name, need, terms, self._versions[need.adapter])
            self._add(ticket, self._place_of(ticket))
            self._tickets[name] = ticket
            return ticket

    def note_begin(self, ticket: Ticket, here: str, *, is_seated: bool) -> None:
        """Take note that something has come of a request, if it is still there."""
        if not (ticket.has_begun and ticket.need.is_seated):
            with self._lock:
                if ticket.at[1] == here:
                    ticket.has_begun = True
                    self._note_need(ticket, is_seated=is_seated)

    def end_one(self, ticket: Ticket) -> None:
        """Take note that a caller has got a completion; with the last one it leaves."""
        with self._lock:
            ticket.num_left -= 1
            num = min(ticket.need.num_sequences, ticket.num_left)
            self._note_need(ticket, num_sequences=num)
            if not ticket.num_left:
                self.leave(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Forget a request; a second time is nothing."""
        with self._lock:
            self._members[ticket.at[0]].remove(ticket)
            if self._tickets.get(ticket.name) is ticket:
                del self._tickets[ticket.name]

    def give_again(self, ticket: Ticket) -> None:
        """Give a request that its engine did not take to one that is left.

        Raises:
          EngineClosedError: none is.
        """
        with self._lock:
            self._members[ticket.at[0]].remove(ticket)
            self._add(ticket, self._place_of(ticket))

    def move(self, ticket: Ticket, target: int | None) -> None:
        """Have a request that was to be taken out be at another engine.

        Where that has ended meanwhile or is drained it is another one, or the old one.

        Args:
          ticket: the request.
          target: the engine's place; None if it could not be taken out.
        """
        with self._lock:
            if target is None:
                ticket.moving = None
                return
            if self._tickets.get(ticket.name) is not ticket:
                return  # whoever asked has left
            source = ticket.at[0]
            if not self._members[target].load.is_open:
                try:
                    target = self._place_of(ticket)
                except Exception:  # also of a placement of the user's
                    target = source
            self._members[source].remove(ticket)
            self._add(ticket, target)
            self.num_moves += target != source

    async def state_of(self, ticket: Ticket) -> RequestState | None:
        """Return from what a request goes on that was taken out, to one who asks."""
        if (moving := ticket.moving) is None:
            return None
        state = await asyncio.wrap_future(moving)
        with self._lock:
            if ticket.moving is not moving:
                return None  # somebody else was sooner
            ticket.moving = None
        return state

    def check_weights(self, ticket: Ticket) -> None:
        """Raise RequestError if a request's adapter was replaced while it moved."""
        if ticket.version != self._versions[ticket.need.adapter]:
            raise RequestError(
                f"adapter {ticket.need.adapter!r} got other weights while a request "
                "that began under the old ones moved between engines; send the prompt "
                "anew"
            )

    @contextlib.contextmanager
    def frozen(self, adapter: str) -> Iterator[None]:
        """Have an adapter's requests stay where they are."""
        with self._lock:
            self._frozen[adapter] += 1
        try:
            yield
        finally:
            with self._lock:
                self._frozen[adapter] -= 1

    def version_of(self, adapter: str) -> int:
        """Return which weights an adapter's name stands for now."""
        return self._versions[adapter]

    def note_other_weights(self, adapter: str) -> None:
        """Take note that a name stands for others now: who began before stays."""
        with self._lock:
            self._versions[adapter] += 1

    def is_between(self, adapter: str) -> bool:
        """Tell whether a request of an adapter is at no engine now."""
        with self._lock:
            return any(
                ticket.need.adapter == adapter and ticket.is_between
                for ticket in self._tickets.values()
            )

    def set_open(self, place: int, is_open: bool) -> None:
        """Have an engine get requests, or hand on those that it has.

        Raises:
          ValueError: it is the last one that gets any.
        """
        with self._lock:
            own = self._members[place]
            others = [one for one in self._members if one is not own]
            if not is_open and not any(one.load.is_open for one in others):
                raise ValueError(
                    f"engine {place} is the last one that takes requests; undrain "
                    "another one first, or close the cluster"
                )
            own.is_open = is_open

    def num_at(self, place: int) -> int:
        """Return how many requests an engine has."""
        return len(self._members[place].tickets)

    def hands_on(self, place: int) -> bool:
        """Tell whether an engine that is drained has requests still."""
        member = self._members[place]
        return bool(member.tickets) and not member.is_open and not member.has_ended

    def loads(self) -> list[Load]:
        """Return what each has to do."""
        with self._lock:
            return [member.load for member in self._members]

    def may_relieve(self) -> bool:
        """Tell whether somebody may lack what another engine has, without asking."""
        with self._lock:
            loads = [member.load for member in self._members]
            wants = [
                bool(member.tickets)
                and not member.has_ended
                and (not member.is_open or member.engine.gauges.num_waiting > 0)
                for member in self._members
            ]
        return any(
            wanting and has_seats_beside(loads, source)
            for source, wanting in enumerate(wants)
        )

    def note_progress(self, progress: Progress) -> list[tuple[int, str]]:
        """Take note of what engines say of their requests.

        What an engine had and has no more is over, whether or not its caller reads it.

        Returns:
          Where cancelled ones are still under way: their engines may have heard of that
          before they had them.
        """
        found, lost_s = [], time.monotonic() - _LOST_S
        with self._lock:
            for place, member in enumerate(self._members):
                known = {} if member.has_ended else progress.get(place)
                if known is None:
                    continue
                for here, ticket in list(member.tickets.items()):
                    if (own := known.get(here)) is not None:
                        ticket.has_begun = ticket.was_listed = True
                        self._note_need(
                            ticket,
                            num_sequences=own.num_sequences,
                            num_kv_pages=own.num_kv_pages,
                            is_seated=own.num_seated > 0,
                        )
                        if ticket.is_cancelled:
                            found.append((place, here))
                    elif ticket.sat_s < lost_s and not ticket.is_being_taken:
                        self.leave(ticket)  # nobody reads it
                    elif ticket.was_listed and ticket.moving is None:
                        self.leave(ticket)
        return found

    def relieved(self, progress: Progress) -> list[Moving]:
        """Return who lacks what another engine has; they are moving from then on."""
        with self._lock:
            loads, requests = self._view(progress)
            return self._begun(relief(self.placement, loads, requests))

    def gathered(self, progress: Progress) -> list[Moving]:
        """Return who should move for the placement's reasons; they do from then on."""
        with self._lock:
            return self._begun(self.placement.gathered(*self._view(progress)))

    # With the lock.

    def _view(self, progress: Progress) -> tuple[list[Load], list[Mapping[str, Need]]]:
        """Return the engines' loads, and of each what may move, in its order."""
        loads, requests = [], []
        for place, member in enumerate(self._members):
            load, known = member.load, progress.get(place)
            if known is None:
                load = dataclasses.replace(load, is_open=False)
            found = ((here, member.tickets.get(here)) for here in known or ())
            loads.append(load)
            requests.append(
                {
                    here: ticket.need
                    for here, ticket in found
                    if ticket is not None and self._can_move(ticket)
                }
            )
        return loads, requests

    def _can_move(self, ticket: Ticket) -> bool:
        adapter = ticket.need.adapter
        is_wanted = not ticket.is_cancelled and ticket.moving is None
        # Others know other weights by that name.
        is_known = ticket.version == self._versions[adapter]
        return is_wanted and is_known and not self._frozen[adapter]

    def _begun(self, moves: Sequence[Move]) -> list[Moving]:
        # All are found before one is marked: a placement of the user's may err.
        tickets = [self._members[move.source].tickets[move.name] for move in moves]
        found: list[Moving] = []
        for move, ticket in zip(moves, tickets, strict=True):
            ticket.moving = moving = Future()
            moving.set_running_or_notify_cancel()  # whoever awaits it may leave
            found.append((ticket, move.target, moving))
        return found

    def _place_of(self, ticket: Ticket) -> int:
        """Return who takes a request: by the placement, or the shortest queue."""
        loads = [member.load for member in self._members]
        place = self.placement.place(loads, ticket.need)
        if place is None:
            place = least_queue(loads)
        if place is None:
            raise EngineClosedError(
                "every engine of the cluster has ended or is drained"
            )
        return place

    def _add(self, ticket: Ticket, place: int) -> None:
        ticket.sit(place)
        self._members[place].add(ticket)

    def _note_need(self, ticket: Ticket, **changed: int) -> None:
        need = dataclasses.replace(ticket.need, **changed)
        if need == ticket.need:
            return
        member = self._members[ticket.at[0]]
        is_there = ticket.at[1] in member.tickets
        member.remove(ticket)
        ticket.need = need
        if is_there:
            member.add(ticket)
