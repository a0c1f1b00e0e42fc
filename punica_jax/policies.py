"""In which order those that wait are served.

Plain Python; knows what a sequence says of itself, nothing of seats, pages or devices.
"""

import bisect
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from punica_jax.request import number_of
from punica_jax.sequence import SequenceState


@runtime_checkable
class Policy(Protocol):
    """A queue of those that wait.

    A sequence that loses its seat is added again. Nothing is added or removed while the
    queue is walked.

    Attributes:
      max_prompt_rows: most rows of prompts in a step in which others decode.
    """

    @property
    def max_prompt_rows(self) -> float: ...

    def key(self, sequence: SequenceState) -> Any:
        """Return what sorts prompts that have seats, and the next one that waits.

        The least gets rows first; of equal ones, who has a seat.
        """
        ...

    def add(self, sequence: SequenceState) -> None: ...

    def remove(self, sequence: SequenceState) -> None: ...

    def charge(self, rows: Mapping[SequenceState, int]) -> None:
        """Take note of how many rows a step has of whom."""
        ...

    def observe(self, num_prompt_rows: int, step_s: float) -> None:
        """Take note of how long a step took in which somebody decoded."""
        ...

    def __iter__(self) -> Iterator[SequenceState]:
        """Yield those that wait, the next one to be served first."""
        ...

    def __len__(self) -> int: ...


class FirstComeFirstServed:
    """The highest priority first; of one priority, who came first."""

    max_prompt_rows = math.inf

    def __init__(self) -> None:
        self._queue: list[tuple[Any, SequenceState]] = []  # each behind its key

    def key(self, sequence: SequenceState) -> Any:
        """Return what sorts; it never changes, and no two sequences have the same."""
        return _place(sequence)

    def add(self, sequence: SequenceState) -> None:
        """Let a sequence wait; see `Policy`."""
        bisect.insort(self._queue, (self.key(sequence), sequence))

    def remove(self, sequence: SequenceState) -> None:
        """Take out one that waits; see `Policy`."""
        index = bisect.bisect_left(self._queue, (self.key(sequence),))
        assert self._queue[index][1] is sequence
        del self._queue[index]

    def charge(self, rows: Mapping[SequenceState, int]) -> None:
        """Take note of a step's rows; see `Policy`."""

    def observe(self, num_prompt_rows: int, step_s: float) -> None:
        """Take note of a step's time; see `Policy`."""

    def __iter__(self) -> Iterator[SequenceState]:
        return map(operator.itemgetter(1), self._queue)

    def __len__(self) -> int:
        return len(self._queue)


class LatencyTargets(FirstComeFirstServed):
    """Who must have its first token soonest goes first, and tokens come evenly.

    A request's own target is `Terms.first_token_s`. The earliest deadline goes first,
    before prompts that are computed already, too; one without a free seat waits for it.
    Higher priorities go first whatever their targets.

    Prompts lengthen the steps of those that decode beside them. Where such a step takes
    longer than `token_s`, the prompts' rows in the next ones are halved; while it takes
    less, they grow by an eighth.
    """

    _LEAST_ROWS = 16

    def __init__(self, first_token_s: float = 1.0, token_s: float | None = None):
        """Begin.

        Args:
          first_token_s: the target of requests that name none, seconds.
          token_s: target for the time between two tokens, seconds; None is none.
        """
        super().__init__()
        self._first_token_s = _positive("first_token_s", first_token_s)
        self._token_s = math.inf if token_s is None else _positive("token_s", token_s)

    def key(self, sequence: SequenceState) -> Any:
        target = sequence.terms.first_token_s
        target = self._first_token_s if target is None else target
        due_s = sequence.arrived_s + target
        return -sequence.terms.priority, due_s, sequence.arrival

    def observe(self, num_prompt_rows: int, step_s: float) -> None:
        """Take note of a step's time; see `Policy`."""
        if not num_prompt_rows:
            return
        if step_s > self._token_s:
            # A step launched before the last halving may have had more.
            halved = max(num_prompt_rows // 2, self._LEAST_ROWS)
            self.max_prompt_rows = min(self.max_prompt_rows, halved)
        elif num_prompt_rows >= self.max_prompt_rows:
            self.max_prompt_rows += self.max_prompt_rows // 8 + 1


class FairShare:
    """Each tenant gets its share of the rows; of one tenant, who came first.

    A virtual counter for each tenant grows by the rows that it gets, divided by its
    weight; of one priority, the tenant with the least is served next (Sheng et al.,
    "Fairness in Serving Large Language Models", OSDI'24). A clock grows by the rows
    that all get, divided by the weights of all that wait or run: as the counters of
    all would if each had just its share (Demers et al., "Analysis and Simulation of a
    Fair Queueing Algorithm", SIGCOMM'89), and is never behind all that wait. One that
    has had nothing to serve for a while begins at the clock, or at its own counter if
    that is ahead, as in start-time fair queueing (Goyal et al., SIGCOMM'96): it cannot
    save up, and those that always wait are not overtaken again and again by tenants
    that have just come.
    """

    max_prompt_rows = math.inf

    def __init__(self, weights: Mapping[str, float] | None = None):
        """Begin with nobody.

        Args:
          weights: gives tenants more than the 1 that all others have.

        Raises:
          ValueError: it is no mapping, or a weight is not above 0.
        """
        if not isinstance(weights, Mapping | None):
            raise ValueError(f"weights must be a mapping of tenants, got {weights!r}")
        self._weights = {
            tenant: _positive(f"the weight of tenant {tenant!r}", weight)
            for tenant, weight in (weights or {}).items()
        }
        # Of each tenant: priorities with the sign changed, arrivals, costs, sequences.
        self._queues: dict[str, list[tuple[int, int, float, SequenceState]]] = {}
        self._num_waiting = 0
        self._served: dict[str, float] = {}
        self._clock = 0.0  # what tenants have whose counter is forgotten
        self._num_kept = 0  # counters, when some were forgotten last

    def key(self, sequence: SequenceState) -> int:
        """Sort by priority; a tenant's prompt that has a seat is not interrupted."""
        return -sequence.terms.priority

    def add(self, sequence: SequenceState) -> None:
        """Let a sequence wait; see `Policy`."""
        tenant = sequence.terms.tenant
        if tenant not in self._queues:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._clock)
            self._queues[tenant] = []
            if len(self._served) > 2 * self._num_kept:
                self._forget()
        cost = len(sequence.tokens) / self._weights.get(tenant, 1.0)
        bisect.insort(self._queues[tenant], (*_place(sequence), cost, sequence))
        self._num_waiting += 1

    def remove(self, sequence: SequenceState) -> None:
        """Take out one that waits; see `Policy`."""
        tenant = sequence.terms.tenant
        queue = self._queues[tenant]
        index = bisect.bisect_left(queue, _place(sequence))
        assert queue[index][-1] is sequence
        del queue[index]
        if not queue:
            del self._queues[tenant]
        self._num_waiting -= 1

    def charge(self, rows: Mapping[SequenceState, int]) -> None:
        """Take note of a step's rows; see `Policy`."""
        by_tenant: dict[str, int] = {}
        for sequence, count in rows.items():
            tenant = sequence.terms.tenant
            by_tenant[tenant] = by_tenant.get(tenant, 0) + count
        served, weight = self._served, self._weights.get
        for tenant, count in by_tenant.items():
            before = served.get(tenant, self._clock)
            served[tenant] = before + count / weight(tenant, 1.0)
        if rows:
            active = self._queues.keys() | by_tenant.keys()
            weights = sum([weight(tenant, 1.0) for tenant in active])
            self._clock += sum(by_tenant.values()) / weights
        if self._queues:
            # Others that run may have left some of their share to those that wait.
            least = min(map(self._served.__getitem__, self._queues))
            self._clock = max(self._clock, least)

    def observe(self, num_prompt_rows: int, step_s: float) -> None:
        """Take note of a step's time; see `Policy`."""

    def __iter__(self) -> Iterator[SequenceState]:
        # Whoever is seated in one walk is charged after it: as if each of them got as
        # many rows as its prompt has, the walk goes to the tenant with the least.
        order: list[tuple[int, float, SequenceState]] = []
        append = order.append  # a step walks thousands of them
        for tenant, queue in self._queues.items():
            served = self._served[tenant]
            for priority, _, cost, sequence in queue:
                append((priority, served, sequence))
                served += cost
        # Stable: of tenants that have as much, the one that has waited longest.
        order.sort(key=operator.itemgetter(1))
        order.sort(key=operator.itemgetter(0))
        return map(operator.itemgetter(2), order)

    def __len__(self) -> int:
        return self._num_waiting

    def _forget(self) -> None:
        """Drop the counters that say no more than the clock."""
        self._served = {
            tenant: served
            for tenant, served in self._served.items()
            if tenant in self._queues or served > self._clock
        }
        self._num_kept = len(self._served)


def _place(sequence: SequenceState) -> tuple[int, int]:
    return -sequence.terms.priority, sequence.arrival


def _positive(name: str, value: float) -> float:
    return number_of(name, value, 0, math.inf, above=True)
