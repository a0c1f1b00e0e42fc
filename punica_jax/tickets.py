"""A request of a cluster, and the requests that one engine has.

Plain numbers and names; whoever changes them holds their members' lock.
"""

import dataclasses
import time
from concurrent.futures import Future
from typing import Protocol

from punica_jax.consolidation import Load, Need
from punica_jax.engine_config import EngineConfig
from punica_jax.request import Terms
from punica_jax.request_state import RequestState
from punica_jax.stats import EngineGauges

_LEAST_S = 1e-3  # of what is left of a deadline: it passes where the request goes on


class Capacity(Protocol):
    """What is asked of an engine here."""

    config: EngineConfig

    @property
    def gauges(self) -> EngineGauges: ...


class Ticket:
    """A request of a cluster, wherever it is.

    Attributes:
      name: its id.
      need: what it takes of its engine, as far as anybody knows.
      terms: how it is treated among others, as its caller said.
      version: which of the weights that its adapter's name stood for it came under.
      at: its engine's place among the members, and its id there: another one at each.
      has_begun: whether its engine has it.
      was_listed: whether its engine has said so.
      num_left: completions that its caller has not got the end of.
      num_hops: how often it was given to an engine.
      moving: while it is taken out of its engine, and until it is asked for: from what
        it goes on; None if it had ended.
      is_cancelled: whether nobody wants it any more.
    """

    def __init__(self, name: str, need: Need, terms: Terms, version: int):
        self.name, self.need, self.terms, self.version = name, need, terms, version
        self.num_left = need.num_sequences
        self.at, self.num_hops = (-1, ""), 0
        self.has_begun = self.was_listed = self.is_cancelled = False
        self.moving: Future[RequestState | None] | None = None
        self._arrived_s = self.sat_s = time.monotonic()

    def sit(self, place: int) -> None:
        """Take note of where it is now."""
        self.num_hops += 1
        self.at = place, f"{self.name} #{self.num_hops}"
        self.has_begun = self.was_listed = False
        self.need = dataclasses.replace(self.need, is_seated=False)
        self.sat_s = time.monotonic()

    @property
    def is_being_taken(self) -> bool:
        """Whether its engine was asked for its state, and has not answered."""
        return self.moving is not None and not self.moving.done()

    @property
    def is_between(self) -> bool:
        """Whether it has left an engine, and another one does not have it yet."""
        return self.moving is not None or (self.num_hops > 1 and not self.has_begun)

    @property
    def terms_left(self) -> Terms:
        """Its terms with what is left of their times, which begin anew elsewhere."""
        if self.num_hops < 2:
            return self.terms
        age_s = time.monotonic() - self._arrived_s
        left = {
            name: max(value - age_s, _LEAST_S)
            for name in ("first_token_s", "deadline_s")
            if (value := getattr(self.terms, name)) is not None
        }
        return dataclasses.replace(self.terms, **left)


class Member:
    """An engine, and the requests that it was given, by their ids there.

    What they need is added up as they come and go.
    """

    def __init__(self, engine: Capacity):
        self.engine = engine
        self.tickets: dict[str, Ticket] = {}
        self.is_open = True
        config = engine.config
        self._given = Load(
            num_sequences=0,
            max_seats=config.max_seats,
            num_open_pages=0,
            adapters={},
            num_slots=config.num_slots,
        )

    @property
    def has_ended(self) -> bool:
        return self.engine.gauges.has_ended

    def add(self, ticket: Ticket) -> None:
        self.tickets[ticket.at[1]] = ticket
        self._given = self._given.with_one(_promised(ticket.need))

    def remove(self, ticket: Ticket) -> None:
        """Forget a request, if it is there."""
        if self.tickets.pop(ticket.at[1], None) is not None:
            self._given = self._given.without(_promised(ticket.need))

    @property
    def load(self) -> Load:
        gauges = self.engine.gauges
        return dataclasses.replace(
            self._given,
            num_open_pages=gauges.num_open_kv_pages + self._given.num_open_pages,
            is_open=self.is_open and not gauges.has_ended,
        )


def _promised(need: Need) -> Need:
    """Return a need without the pages that its engine counts itself: of who sits."""
    return dataclasses.replace(need, num_kv_pages=0) if need.is_seated else need
