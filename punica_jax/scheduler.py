"""Who has a seat, and how many rows each sequence gets in the next step.

Plain Python: knows sequences, seats, pages and adapters as numbers and names, nothing
of devices or of what a step computes.
"""

import collections
from collections.abc import Hashable, Iterable, Sequence

from punica_jax.claims import Adapters, Claims, Resident
from punica_jax.pages import KvPages
from punica_jax.policies import Policy
from punica_jax.sequence import SequenceState

# Of all pages: those that are left to the running when another one sits down, or it
# would soon lose its seat to them. What vLLM's scheduler calls its watermark.
_SPARE_SHARE = 0.01


class Scheduler:
    """The sequences of one device: those that wait, and those that have a seat.

    A step's rows go to the sequences that decode, one each, so that prompts never stall
    them; then to prompts, those that have a seat in chunks and those that can sit, as
    the policy orders them. Who waits for an adapter is overtaken by those whose adapter
    is there; where it is room that its adapter lacks, only `max_overtakes` times: then
    nobody claims one before it does.

    KV pages are taken as they are needed. Where they run out, the sequence that came
    last, of those of the least priority, gives up its seat and is computed again later.

    Attributes:
      running: the sequences that have a seat.
      max_seats: most of them.
      max_rows: most rows of a step.
      refused: those that wait for an adapter that cannot be had; whoever releases
        them empties the list.
      num_preempted: how often a sequence had to give up its seat.
    """

    def __init__(
        self,
        pages: KvPages,
        adapters: Adapters,
        *,
        max_seats: int,
        max_rows: int,
        policy: Policy,
        max_overtakes: int | None = None,
    ):
        """Begin with nobody.

        Args:
          pages: the KV pages, all of them free.
          adapters: where adapters come from.
          max_seats: most sequences in flight, at most `max_rows`.
          max_rows: most rows of a step.
          policy: the queue of those that wait.
          max_overtakes: None means four for each seat.
        """
        assert max_seats <= max_rows
        self._pages = pages
        self._num_spare = int(_SPARE_SHARE * pages.num_pages)
        self._claims = Claims(adapters)
        self._policy = policy
        self._max_overtakes = 4 * max_seats if max_overtakes is None else max_overtakes
        self.max_seats = max_seats
        self.max_rows = max_rows
        self.running: list[SequenceState] = []
        self.num_preempted = 0
        self._free_seats = list(reversed(range(max_seats)))
        self.refused: list[SequenceState] = []
        self._sequences: dict[SequenceState, None] = {}
        self._num_arrived = 0
        self._overtaken: dict[SequenceState, int] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._policy)

    @property
    def num_free_seats(self) -> int:
        return len(self._free_seats)

    @property
    def waiting(self) -> list[SequenceState]:
        """Those without a seat, in the order in which they are to get one."""
        return list(self._policy)

    @property
    def num_open_pages(self) -> int:
        """KV pages that whoever sits down next may have."""
        return self._pages.num_free - (self._num_spare if self.running else 0)

    @property
    def busy(self) -> bool:
        """Whether a sequence waits or has a seat."""
        return bool(self.running or len(self._policy))

    @property
    def sequences(self) -> list[SequenceState]:
        """All of them, in the order in which they came."""
        return list(self._sequences)

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Let sequences wait for a seat: all of them, or none if the policy raises."""
        added: list[SequenceState] = []
        try:
            for sequence in sequences:
                sequence.arrival = self._num_arrived
                self._num_arrived += 1
                self._policy.add(sequence)
                added.append(sequence)
        except BaseException:
            for sequence in added:
                self._policy.remove(sequence)
            raise
        for sequence in added:
            self._sequences[sequence] = None
            self._claims.add(sequence)

    def schedule(self, *, may_preempt: bool) -> list[tuple[SequenceState, int]] | None:
        """Choose the rows of the next step, and seat who can sit.

        Args:
          may_preempt: whether a sequence may lose its seat; not while a step in flight
            writes to its pages.

        Returns:
          Sequences and their numbers of rows, each at least 1; nothing where all wait
          for adapters, or only for steps in flight. None if a sequence would have to
          lose its seat and may not.
        """
        scheduled: dict[SequenceState, int] = {}
        for sequence in list(self.running):
            # Who lost its seat in this very loop is not running any more.
            if sequence.num_left == 1 and sequence.seat >= 0:
                if not self._make_room(sequence, scheduled, may_preempt):
                    return None
                if sequence.seat >= 0:
                    scheduled[sequence] = 1
        budget = self.max_rows - len(scheduled)
        if scheduled:
            budget = int(min(budget, self._policy.max_prompt_rows))
        prompts = [s for s in self.running if s not in scheduled and s.num_left > 1]
        self._admit(scheduled, budget, sorted(prompts, key=self._policy.key))
        self._policy.charge(scheduled)
        return list(scheduled.items())

    def observe(self, num_prompt_rows: int, step_s: float) -> None:
        """Take note of how long a step took in which somebody decoded."""
        self._policy.observe(num_prompt_rows, step_s)

    def error_of(self, sequence: SequenceState) -> Exception | None:
        """Return what is wrong with the adapter that a sequence holds, if anything."""
        resident = self._claims.get(sequence)
        return None if resident is None else resident.verify()

    def release(self, sequence: SequenceState) -> None:
        """Forget a sequence that is over and in no step in flight."""
        assert not sequence.num_in_flight
        if sequence.seat >= 0:
            self._leave_seat(sequence)
        else:
            self._policy.remove(sequence)
        self._claims.remove(sequence)
        self._overtaken.pop(sequence, None)
        del self._sequences[sequence]

    def check_integrity(self) -> None:
        """Assert that every seat, page and claim has exactly the users it should."""
        self._pages.check_integrity()
        waiting = list(self._policy)
        assert len(waiting) == len(self._policy)
        assert {*waiting, *self.running} == self._sequences.keys()
        assert len(waiting) + len(self.running) == len(self._sequences)
        seats = [sequence.seat for sequence in self.running]
        assert sorted([*seats, *self._free_seats]) == list(range(self.max_seats))
        assert all(s.seat < 0 and not s.pages for s in waiting)
        self._claims.check_integrity(self._sequences, self.running)
        assert self._overtaken.keys() <= set(waiting)
        users = [page for sequence in self.running for page in sequence.pages]
        assert self._pages.num_uses == len(users)
        for sequence in self._sequences:
            num_full = len(sequence.tokens) // self._pages.page_size
            assert len(sequence.page_digests) == num_full

    def _make_room(
        self,
        sequence: SequenceState,
        scheduled: dict[SequenceState, int],
        may_preempt: bool,
    ) -> bool:
        """Give a sequence the page of its next token, whoever has to leave for it.

        Returns False if somebody would have to leave and may not.
        """
        num_tokens = sequence.num_cached + 1
        if num_tokens <= len(sequence.pages) * self._pages.page_size:
            return True  # mostly
        while not self._pages.can_grow(sequence.pages, num_tokens):
            if not may_preempt:
                return False
            last = max(self.running, key=_dispensability)
            assert last is not sequence or len(self.running) > 1, "one always fits"
            scheduled.pop(last, None)
            self._preempt(last)
            if last is sequence:
                return True
        sequence.pages = self._pages.grow(sequence.pages, num_tokens)
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        # It keeps its adapter: it goes on with the weights that it began with.
        self._leave_seat(sequence)
        sequence.stand()
        self._policy.add(sequence)
        self.num_preempted += 1

    def _leave_seat(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._free_seats.append(sequence.seat)
        self._pages.free(sequence.pages)

    def _admit(
        self,
        scheduled: dict[SequenceState, int],
        budget: int,
        prompts: Sequence[SequenceState],
    ) -> None:
        """Seat those that can sit; claim adapters for those that can sit soon.

        `prompts` have seats, and pages to fill that others may share; each gets rows
        before those that the policy puts behind it.
        """
        begun = collections.deque(prompts)
        seated: list[SequenceState] = []
        short: SequenceState | None = None  # the first one whose adapter lacks room
        is_closed = False
        num_left = len(self._free_seats)  # seats that are meant for nobody yet
        coming: dict[Hashable, set[bytes]] = collections.defaultdict(set)
        for num_seen, sequence in enumerate(self._policy):
            may_sit = num_left > 0 and budget > 0
            if not may_sit and num_seen >= self.max_seats:
                break
            held = self._claims.get(sequence)
            has_what_it_needs = held and held.error is None and not held.is_replaced
            if has_what_it_needs and not (may_sit or is_closed):
                continue  # mostly: it has its adapter, and waits for a seat
            if sequence.is_over:
                continue  # whoever ended it releases it; it may have lost its seat
            if is_closed and sequence.adapter and not self._claims.has_begun(sequence):
                self._claims.let_go(sequence)
                continue
            # Adapters are brought for the first in the queue, and in its order.
            may_bring = short is None and num_seen < self.max_seats
            resident = self._claims.claim(sequence, may_bring)
            if sequence.is_over:
                self.refused.append(sequence)
            elif resident is None:
                if may_bring and self._claims.lacks_room(sequence):
                    short = sequence
                    # From here on only those sit that need no adapter or had a seat
                    # before: when these are through, every adapter can make room.
                    is_closed = self._overtaken.get(short, 0) >= self._max_overtakes
            elif resident.ready and may_sit:
                place = self._policy.key(sequence)
                while begun and self._policy.key(begun[0]) <= place:
                    budget -= _give_rows(begun[0], scheduled, budget)
                    # Who is passed may take long: nobody waits for its pages.
                    self._note_coming(begun.popleft(), coming)
                if not budget:
                    continue
                num_left -= 1
                digests, weights = sequence.page_digests, resident.weights
                most = self._num_sharable(sequence)
                num_shared = self._pages.num_known(digests, most, weights)
                if num_shared < most and digests[num_shared] in coming[weights]:
                    continue  # it sits when it can share that page too
                if not self._seat(sequence, resident, num_shared):
                    break
                seated.append(sequence)
                self._note_coming(sequence, coming)
                budget -= _give_rows(sequence, scheduled, budget)
                if short is not None:
                    self._overtaken[short] = self._overtaken.get(short, 0) + 1
        # Not while the policy was walked.
        for sequence in seated:
            self._policy.remove(sequence)
            self._overtaken.pop(sequence, None)
        for sequence in begun:
            budget -= _give_rows(sequence, scheduled, budget)

    def _seat(
        self, sequence: SequenceState, resident: Resident, num_shared: int
    ) -> bool:
        """Seat a sequence that shares its first pages; False if too few are free."""
        digests, weights = sequence.page_digests, resident.weights
        shared = self._pages.find(digests, num_shared, weights)
        num_tokens = len(sequence.tokens) + 1
        num_spare = self._num_spare if self.running else 0
        if not self._pages.can_allocate(num_tokens, shared, num_spare):
            return False
        sequence.sit(
            self._free_seats.pop(),
            self._pages.allocate(num_tokens, shared),
            num_shared * self._pages.page_size,
            slot=resident.slot,
            weights=weights,
        )
        self.running.append(sequence)
        self._claims.begin(sequence)
        return True

    def _num_sharable(self, sequence: SequenceState) -> int:
        """Return how many pages a sequence need not compute itself."""
        if sequence.wants_prompt_logprobs:
            return 0
        # Not one with its last token: a step must have a row to give logits.
        return (len(sequence.tokens) - 1) // self._pages.page_size

    def _note_coming(
        self, sequence: SequenceState, coming: dict[Hashable, set[bytes]]
    ) -> None:
        """Add the pages that a sequence with a seat has yet to fill with its tokens."""
        num_full = sequence.num_known_cached // self._pages.page_size
        further = sequence.page_digests[num_full:]
        coming[sequence.weights].update(further)


def _give_rows(
    sequence: SequenceState, scheduled: dict[SequenceState, int], budget: int
) -> int:
    """Give a prompt the rows that it needs, as far as there are; returns how many."""
    rows = min(sequence.num_left, budget)
    if rows:
        scheduled[sequence] = rows
    return rows


def _dispensability(sequence: SequenceState) -> tuple[int, int]:
    return -sequence.terms.priority, sequence.arrival
