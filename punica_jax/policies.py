"""In which order those that wait are served.

Plain Python; knows what a sequence says of itself, nothing of seats, pages or devices.
"""

import bisect
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from punica_jax.sequence import SequenceState


class Policy(Protocol):
    """A queue of those that wait.

    A sequence that loses its seat is added again. Nothing is added or removed while the
    queue is walked.

    Attributes:
      max_prompt_rows: most rows of prompts in a step in which others decode.
    """

    @property
    def max_prompt_rows(self) -> float: ...

    def add(self, sequence: SequenceState) -> None: ...

    def remove(self, sequence: SequenceState) -> None: ...

    def charge(self, sequence: SequenceState, rows: int) -> None:
        """Take note that a sequence gets so many rows in a step."""
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
        self._queue: list[SequenceState] = []

    def key(self, sequence: SequenceState) -> Any:
        """Return what sorts; it never changes, and no two sequences have the same."""
        return -sequence.terms.priority, sequence.arrival

    def add(self, sequence: SequenceState) -> None:
        """Let a sequence wait; see `Policy`."""
        bisect.insort(self._queue, sequence, key=self.key)

    def remove(self, sequence: SequenceState) -> None:
        """Take out one that waits; see `Policy`."""
        index = bisect.bisect_left(self._queue, self.key(sequence), key=self.key)
        assert self._queue[index] is sequence
        del self._queue[index]

    def charge(self, sequence: SequenceState, rows: int) -> None:
        """Take note of rows that one gets; see `Policy`."""

    def observe(self, num_prompt_rows: int, step_s: float) -> None:
        """Take note of a step's time; see `Policy`."""

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)


class LatencyTargets(FirstComeFirstServed):
    """Who must have its first token soonest goes first, and tokens come evenly.

    A request's own target is `Terms.first_token_s`. Earliest deadline first: if any
    order lets all be in time on one device, this one does. Higher priorities go first
    whatever their targets.

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
    weight; the tenant with the least is served next. One that had nothing to serve for
    a while begins at the least of the others: it cannot save up (Sheng et al.,
    "Fairness in Serving Large Language Models", OSDI'24, algorithm 2).
    """

    max_prompt_rows = math.inf

    def __init__(self, weights: Mapping[str, float] | None = None):
        """Begin; `weights` gives tenants more than the 1 that all others have."""
        self._weights = {
            tenant: _positive(f"the weight of tenant {tenant!r}", weight)
            for tenant, weight in (weights or {}).items()
        }
        self._queues: dict[str, FirstComeFirstServed] = {}
        self._served: dict[str, float] = {}
        self._least = 0.0  # what tenants have whose count is forgotten

    def add(self, sequence: SequenceState) -> None:
        """Let a sequence wait; see `Policy`."""
        tenant = sequence.terms.tenant
        if tenant not in self._queues:
            others = [self._served[other] for other in self._queues]
            least = min(others, default=max(self._served.values(), default=0.0))
            mine = max(self._served.get(tenant, 0.0), least)
            # A count at or below the least says no more than that.
            self._least = least
            self._served = {
                other: served
                for other, served in self._served.items()
                if other in self._queues or served > least
            }
            self._served[tenant] = mine
            self._queues[tenant] = FirstComeFirstServed()
        self._queues[tenant].add(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Take out one that waits; see `Policy`."""
        tenant = sequence.terms.tenant
        self._queues[tenant].remove(sequence)
        if not len(self._queues[tenant]):
            del self._queues[tenant]

    def charge(self, sequence: SequenceState, rows: int) -> None:
        """Take note of rows that one gets; see `Policy`."""
        tenant = sequence.terms.tenant
        weight = self._weights.get(tenant, 1.0)
        self._served[tenant] = self._served.get(tenant, self._least) + rows / weight

    def observe(self, num_prompt_rows: int, step_s: float) -> None:
        """Take note of a step's time; see `Policy`."""

    def __iter__(self) -> Iterator[SequenceState]:
        # Whoever is seated in one walk is charged after it: as if each of them got as
        # many rows as its prompt has, the walk goes to the tenant with the least.
        order: list[tuple[float, SequenceState]] = []
        for tenant, queue in self._queues.items():
            walk, served = iter(queue), self._served[tenant]
            order.append((served, before := next(walk)))
            for sequence in walk:
                served += len(before.tokens) / self._weights.get(tenant, 1.0)
                order.append((served, before := sequence))
        # Stable: of tenants that have as much, the one that has waited longest.
        order.sort(key=operator.itemgetter(0))
        return (sequence for _, sequence in order)

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))  # in any thread


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value!r}")
    return float(value)
