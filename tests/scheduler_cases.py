"""A simulated device under the real scheduler: what it computes shows any mix-up.

No JAX here. A row's key and value are a number that stands for the weights and for all
tokens up to it; a step asserts that the pages hold the right numbers before its rows.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from punica_jax.claims import Resident
from punica_jax.pages import KvPages
from punica_jax.policies import (
    FairShare,
    FirstComeFirstServed,
    LatencyTargets,
    Policy,
)
from punica_jax.request import SamplingParams, Terms, TokenLogprobs
from punica_jax.scheduler import Scheduler
from punica_jax.sequence import Chunk, SequenceState

VOCAB = 7
STOP = 0  # ends a sequence that does not ignore it
BASE = (-1, 0)


def histories(weights: Hashable, tokens: Sequence[int]) -> list[int]:
    """Return what a device keeps for each of the tokens."""
    numbers, number = [], hash(weights)
    for token in tokens:
        numbers.append(number := hash((number, token)))
    return numbers


def answer(
    prompt: Sequence[int], weights: Hashable, num_new: int, *, ignore_eos: bool = False
) -> list[int]:
    """Return the new tokens that a prompt alone gets."""
    number, new = histories(weights, prompt)[-1], []
    while len(new) < num_new:
        new.append(token := number % VOCAB)
        if token == STOP and not ignore_eos:
            break
        number = hash((number, token))
    return new


class FakeTokenizer:
    """As much of a tokenizer as a sequence needs."""

    eos_token_ids = frozenset({STOP})
    decoder_fields = None

    def token(self, token_id):
        return str(token_id)


_TOKENIZER: Any = FakeTokenizer()


def make_sequence(
    prompt: Sequence[int],
    adapter: str | None = None,
    num_new: int = 4,
    *,
    max_len: int = 1 << 30,
    ignore_eos: bool = True,
    prompt_logprobs: int | None = None,
    page_size: int = 2,
    group: Hashable = None,
    **terms: Any,
) -> SequenceState:
    return SequenceState(
        index=0,
        prompt_index=0,
        sample_index=0,
        prompt=list(prompt),
        adapter=adapter,
        sampling=SamplingParams(
            max_new_tokens=num_new,
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
        ),
        tokenizer=_TOKENIZER,
        max_model_len=max_len,
        page_size=page_size,
        on_token=None,
        terms=Terms(**terms),
        group=group,
    )


@dataclasses.dataclass(eq=False, slots=True)
class FakeResident:
    """One version of an adapter: on its way to a slot, or there."""

    slot: int
    weights: Hashable
    num_steps_left: int = 0
    num_users: int = 0
    is_lost: bool = False
    is_faulty: bool = False
    is_replaced: bool = False
    error: Exception | None = None

    @property
    def ready(self) -> bool:
        return not self.num_steps_left and self.error is None

    def verify(self) -> Exception | None:
        if self.is_faulty:
            self.error = ValueError("its weights are not finite")
        return self.error

    def pass_step(self) -> None:
        self.num_steps_left = max(0, self.num_steps_left - 1)
        if self.is_lost and not self.num_steps_left:
            self.error = ValueError("it could not be copied")


class FakeAdapters:
    """Adapters that take a few steps to be read and to be loaded, and some slots.

    Idle ones stay until their slot is needed, the one unused for longest goes first.

    Attributes:
      slots: the weights in each slot.
      broken: names whose claims are refused.
      lost: names that never arrive, which is known when they should have.
      faulty: names whose rows turn out to be worth nothing.
      num_claims: claims that are not released.
      forgone: names that nobody wanted any more, in order.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        num_slots: int = 1,
        *,
        read_steps: int = 0,
        load_steps: int = 0,
    ):
        self.slots: list[Hashable] = [None] * num_slots
        self.broken: set[str] = set()
        self.lost: set[str] = set()
        self.faulty: set[str] = set()
        self.num_claims = 0
        self.forgone: list[str] = []
        self._weights = {name: (number, 0) for number, name in enumerate(names)}
        self._read_steps, self._load_steps = read_steps, load_steps
        self._reading: dict[Hashable, int] = {}
        # By weights, the one unused for longest first.
        self._residents: dict[Hashable, FakeResident] = {}

    @property
    def names(self) -> list[str]:
        return list(self._weights)

    def weights_of(self, name: str | None) -> Hashable:
        return BASE if name is None else self._weights[name]

    def replace(self, name: str) -> None:
        """Let a name mean other weights from now on; it may be a new name."""
        number, version = self._weights.get(name, (len(self._weights), -1))
        if (old := self._residents.get((number, version))) is not None:
            old.is_replaced = True
        self._weights[name] = number, version + 1

    def claim(self, name: str | None) -> Resident | None:
        if name is None:
            self.num_claims += 1
            return FakeResident(-1, BASE, num_users=1)
        if name in self.broken or name not in self._weights:
            raise ValueError(f"there is no {name!r}")
        weights = self._weights[name]
        if self._reading.setdefault(weights, self._read_steps):
            return None
        resident = self._residents.pop(weights, None)
        if resident is None:
            slot = self._free_slot()
            if slot is None:
                return None
            resident = FakeResident(slot, weights, self._load_steps)
            resident.is_lost = name in self.lost
            resident.is_faulty = name in self.faulty
            self.slots[slot] = weights
        self._residents[weights] = resident
        if resident.error is not None:
            raise resident.error
        resident.num_users += 1
        self.num_claims += 1
        return resident

    def is_here(self, name: str | None) -> bool:
        weights = None if name is None else self._weights.get(name)
        return weights is None or weights in self._residents

    def lacks_room(self, name: str | None) -> bool:
        return not self.is_here(name) and not self._reading[self.weights_of(name)]

    def forgo(self, name: str) -> None:
        self.forgone.append(name)

    def share(self, resident: Any) -> Any:
        assert resident.num_users > 0
        resident.num_users += 1
        self.num_claims += 1
        return resident

    def release(self, resident: Any) -> None:
        assert resident.num_users > 0
        resident.num_users -= 1
        self.num_claims -= 1

    def pass_step(self) -> None:
        """Bring everything on its way one step nearer."""
        for weights, steps in self._reading.items():
            self._reading[weights] = max(0, steps - 1)
        for resident in self._residents.values():
            resident.pass_step()

    def _free_slot(self) -> int | None:
        if None in self.slots:
            return self.slots.index(None)
        for weights, resident in self._residents.items():
            if not resident.num_users:
                del self._residents[weights]
                return resident.slot
        return None


class FakeDevice:
    """Pages and seats, and what rows make of them.

    Attributes:
      drawn_by: for each sequence the weights that gave each of its new tokens.
    """

    def __init__(self, num_pages: int, page_size: int, adapters: FakeAdapters):
        self.drawn_by: dict[SequenceState, list[Hashable]] = {}
        self._size = page_size
        self._adapters = adapters
        self._pages: list[list[int | None]] = [
            [None] * page_size for _ in range(num_pages)
        ]
        self._kept: dict[int, int] = {}  # seat -> its newest token
        self._known: dict[SequenceState, tuple[Hashable, list[int], list[int]]] = {}

    def run(self, rows: Sequence[tuple[SequenceState, Chunk]]) -> list[int]:
        """Run a step; returns the next token of each chunk."""
        num_users = Counter(page for _, chunk in rows for page in chunk.pages)
        expected = [self._expect(*row) for row in rows]
        for (_, chunk), numbers in zip(rows, expected, strict=True):
            self._check_cached(chunk, numbers)
        # A step reads only what the steps before it wrote.
        tokens = []
        for (sequence, chunk), numbers in zip(rows, expected, strict=True):
            for index in range(chunk.kv_len - len(chunk.tokens), chunk.kv_len):
                page = chunk.pages[index // self._size]
                assert num_users[page] == 1, "a shared page is written"
                self._pages[page][index % self._size] = numbers[index]
            tokens.append(self._draw(sequence, chunk, numbers))
        return tokens

    def forget(self, sequence: SequenceState) -> None:
        self._known.pop(sequence, None)
        self.drawn_by.pop(sequence, None)

    def _expect(self, sequence: SequenceState, chunk: Chunk) -> list[int]:
        """Check a chunk's own numbers; returns what each token's history is."""
        weights, tokens, numbers = self._known.get(sequence, (None, None, []))
        if tokens is None:
            tokens = list(sequence.tokens)
        if weights != sequence.weights:
            numbers = histories(sequence.weights, tokens)
        self._known[sequence] = sequence.weights, tokens, numbers
        slot_weights = BASE if chunk.slot < 0 else self._adapters.slots[chunk.slot]
        assert slot_weights == sequence.weights, "the slot holds another adapter"
        given = list(chunk.tokens)
        if chunk.is_kept:
            given[-1] = self._kept[chunk.seat]
        assert given == tokens[chunk.kv_len - len(given) : chunk.kv_len]
        assert chunk.ends == (chunk.kv_len == len(tokens))
        return numbers

    def _check_cached(self, chunk: Chunk, numbers: list[int]) -> None:
        num_cached = chunk.kv_len - len(chunk.tokens)
        for i, first in enumerate(range(0, num_cached, self._size)):
            end = min(first + self._size, num_cached)
            page = self._pages[chunk.pages[i]]
            assert page[: end - first] == numbers[first:end], "a page holds other rows"

    def _draw(self, sequence: SequenceState, chunk: Chunk, numbers: list[int]) -> int:
        token = numbers[chunk.kv_len - 1] % VOCAB
        if chunk.ends:
            _, tokens, _ = self._known[sequence]
            tokens.append(token)
            numbers.append(hash((numbers[-1], token)))
            self._kept[chunk.seat] = token
            self.drawn_by.setdefault(sequence, []).append(sequence.weights)
        return token


class FakeRunner:
    """What `StepLoop` asks of a `Runner`: the same numbers, made of arrays alone."""

    vocab_size = VOCAB

    def __init__(self, page_size: int, adapters: FakeAdapters):
        self._size = page_size
        self._adapters = adapters
        self._pages: dict[tuple[int, int], int] = {}
        self._kept: dict[int, int] = {}

    def launch(self, batch: Any, wanted: Any, feed: Any) -> SimpleNamespace:
        next_tokens = []
        for i, kv_len in enumerate(batch.seqs.kv_lens):
            rows = range(batch.seqs.bounds[i], batch.seqs.bounds[i + 1])
            number = 0
            for row, index in zip(rows, range(kv_len - len(rows), kv_len), strict=True):
                token = int(batch.tokens[row])
                if feed.kept[i] and row == rows[-1]:
                    token = self._kept[feed.seats[i]]
                number = hash((self._before(batch, i, row, index), token))
                self._pages[self._place(batch, i, index)] = number
            next_tokens.append(number % VOCAB)
        for seat, token in zip(feed.seats, next_tokens, strict=True):
            self._kept[seat] = token
        tokens = np.asarray(next_tokens)
        return SimpleNamespace(tokens=tokens, logprobs=None, prompt_logprobs={})

    def collect(self, launched: SimpleNamespace) -> SimpleNamespace:
        return launched

    def _before(self, batch: Any, i: int, row: int, index: int) -> int:
        if index:
            return self._pages[self._place(batch, i, index - 1)]
        slot = batch.slots[row]
        return hash(BASE if slot < 0 else self._adapters.slots[slot])

    def _place(self, batch: Any, i: int, index: int) -> tuple[int, int]:
        return int(batch.seqs.page_table[i, index // self._size]), index % self._size


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    rows: list[tuple[SequenceState, Chunk]]
    num_prompt_rows: int
    tokens: list[int]


class Simulation:
    """`StepLoop` on a simulated device: a step is launched before the one before it is
    read.

    Attributes:
      now_s: a clock: a step takes as many seconds as it has rows.
      num_steps: steps, those included that had no rows.
      scheduled: the last step's sequences and rows.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 2,
        max_seats: int = 4,
        max_rows: int = 16,
        policy: Callable[[], Policy] = FirstComeFirstServed,
        adapters: FakeAdapters | None = None,
        max_overtakes: int | None = None,
    ):
        self.adapters = FakeAdapters() if adapters is None else adapters
        self.pages = KvPages(num_pages, page_size)
        self.policy = policy()
        self.scheduler = Scheduler(
            self.pages,
            self.adapters,
            max_seats=max_seats,
            max_rows=max_rows,
            policy=self.policy,
            max_overtakes=max_overtakes,
        )
        self.device = FakeDevice(num_pages, page_size, self.adapters)
        self.now_s = 0.0
        self.num_steps = 0
        self.scheduled: list[tuple[SequenceState, int]] = []
        self._flight: _Flight | None = None
        self._ending: list[SequenceState] = []
        self._over: list[SequenceState] = []
        self._decoding: list[SequenceState] = []

    @property
    def busy(self) -> bool:
        return self._flight is not None or self.scheduler.busy

    def add(self, *sequences: SequenceState) -> None:
        for sequence in sequences:
            sequence.arrived_s = self.now_s
        self.scheduler.add(sequences)

    def cancel(self, sequence: SequenceState) -> None:
        if not sequence.is_over:
            sequence.cancel()
            self._ending.append(sequence)

    def step(self) -> list[SequenceState]:
        """Do as `StepLoop.step` does; returns those that hold nothing any more."""
        self.adapters.pass_step()
        self._emit()
        flight = self._run(self._schedule())
        self._collect()
        self._flight = flight
        self.num_steps += 1
        self._emit()
        over, self._over = self._over, []
        return over

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.busy:
                return
            self.step()
        raise AssertionError(f"not over after {max_steps} steps")

    def check_idle(self) -> None:
        """Assert that nobody holds anything."""
        self.scheduler.check_integrity()
        assert not self.busy and not self.scheduler.sequences and not self._ending
        assert self.pages.num_uses == 0
        assert self.pages.num_free == self.pages.num_pages
        assert self.adapters.num_claims == 0

    def check_tokens(self, sequence: SequenceState) -> None:
        """Assert that a sequence's tokens are those that it gets alone.

        All of them are of the weights that it began with, whatever came meanwhile.
        """
        drawn_by = self.device.drawn_by.get(sequence, [])
        if not drawn_by:
            assert not sequence.new_tokens
            return
        assert len(set(drawn_by)) == 1
        alone = answer(
            sequence.tokens[: sequence.num_prompt],
            drawn_by[0],
            sequence.max_len - sequence.num_prompt,
            ignore_eos=sequence.sampling.ignore_eos,
        )
        if sequence.finish_reason in ("stop", "length"):
            assert sequence.new_tokens == alone
            logprobs = sequence.completion().prompt_logprobs or (None,)
            prompt = list(sequence.tokens[: sequence.num_prompt])
            told = [-entry.logprob for entry in logprobs if entry is not None]
            assert told == prompt[1:] or sequence.sampling.prompt_logprobs is None
        else:
            assert sequence.new_tokens == alone[: len(sequence.new_tokens)]

    def _schedule(self) -> list[tuple[SequenceState, int]]:
        # Who sits already and has one row to come; who sits down now is a prompt.
        self._decoding = [one for one in self.scheduler.running if one.num_left == 1]
        scheduled = self.scheduler.schedule(may_preempt=self._flight is None)
        if scheduled is None:
            self._collect()
            self._emit()
            self._decoding = [one for one in self._decoding if one.num_left == 1]
            scheduled = self.scheduler.schedule(may_preempt=True)
            assert scheduled is not None
        self._ending += self.scheduler.refused
        self.scheduler.refused.clear()
        self.scheduled = scheduled
        self._check_rows(dict(scheduled))
        return scheduled

    def _check_rows(self, rows: dict[SequenceState, int]) -> None:
        """Assert that a step is within its limits, and no smaller than it must be."""
        scheduler = self.scheduler
        assert len(rows) == len(self.scheduled)
        assert rows.keys() <= set(scheduler.running)
        assert all(1 <= count <= one.num_left for one, count in rows.items())
        assert all(one in rows for one in scheduler.running if one.num_left == 1)
        for one in rows:
            assert len(one.pages) * self.pages.page_size >= one.num_cached + rows[one]
        decoding = [one for one in self._decoding if one in rows]
        limit = scheduler.max_rows - len(decoding)
        if decoding:
            limit = min(limit, self.policy.max_prompt_rows)
        num_prompt_rows = sum(rows.values()) - len(decoding)
        assert num_prompt_rows <= limit
        if num_prompt_rows < int(limit):
            assert all(
                rows[one] == one.num_left for one in scheduler.running if one.num_left
            )

    def _run(self, scheduled: list[tuple[SequenceState, int]]) -> _Flight | None:
        num_rows = sum(rows for _, rows in scheduled)
        assert num_rows <= self.scheduler.max_rows
        self.now_s += max(num_rows, 1)
        if not scheduled:
            return None
        chunks, num_prompt_rows = [], 0
        for sequence, rows in scheduled:
            chunks.append((sequence, sequence.launch(rows)))
            num_prompt_rows += rows if rows > 1 else 0
            num_full = sequence.num_known_cached // self.pages.page_size
            if num_full > sequence.num_published:
                digests, weights = sequence.page_digests, sequence.weights
                self.pages.publish(sequence.pages, digests, num_full, weights)
                sequence.num_published = num_full
        return _Flight(chunks, num_prompt_rows, self.device.run(chunks))

    def _collect(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if any(len(chunk.tokens) == 1 for _, chunk in flight.rows):
            num_rows = sum(len(chunk.tokens) for _, chunk in flight.rows)
            self.scheduler.observe(flight.num_prompt_rows, float(num_rows))
        for (sequence, chunk), token in zip(flight.rows, flight.tokens, strict=True):
            error = self.scheduler.error_of(sequence)
            if error is not None:
                self.pages.forget(sequence.pages)
                sequence.fail(error)
            # A prompt's log-probabilities say which token they are of.
            targets = [
                TokenLogprobs(logprob=-target, rank=1, top={})
                for target in chunk.targets
            ]
            sequence.collect(chunk, token, None, targets)
        self._ending += self._ended([sequence for sequence, _ in flight.rows])

    def _ended(self, sequences: Sequence[SequenceState]) -> list[SequenceState]:
        known = set(self._ending)
        return [one for one in sequences if one.is_over and one not in known]

    def _emit(self) -> None:
        over = [one for one in self._ending if not one.num_in_flight]
        if over:
            self._ending = [one for one in self._ending if one.num_in_flight]
            for sequence in over:
                self.scheduler.release(sequence)
            self._over += over


def soak(num_events: int, *, seed: int = 0, check_every: int = 100) -> Counter[str]:
    """Serve a crowd under each policy; returns how often what happened.

    An event is an arrival, a step or an end.
    """
    counts: Counter[str] = Counter()
    policies = (FirstComeFirstServed, FairShare, lambda: LatencyTargets(50.0, 60.0))
    for number, policy in enumerate(policies):
        target = num_events * (number + 1) // len(policies)
        crowd = _Crowd(random.Random(seed + number), policy)
        while counts["arrived"] + counts["steps"] + counts["over"] < target:
            counts += crowd.step()
            if not counts["steps"] % check_every:
                crowd.simulation.scheduler.check_integrity()
        counts["over"] += crowd.leave()
        counts["preempted"] += crowd.simulation.scheduler.num_preempted
    return counts


class _Crowd:
    """Requests that keep a simulated device busy, with too little room for them."""

    _NUM_SEATS = 12
    _MOST_WAITING = 40
    _PROMPT = tuple(1 + (number * number) % 5 for number in range(24))

    def __init__(self, rng: random.Random, policy: Callable[[], Policy]):
        self._rng = rng
        self._names = [f"adapter {number}" for number in range(30)]
        adapters = FakeAdapters(self._names, 6, read_steps=2, load_steps=3)
        adapters.broken = set(self._names[-3:])
        self.simulation = Simulation(
            num_pages=55,
            page_size=4,
            max_seats=self._NUM_SEATS,
            max_rows=64,
            policy=policy,
            adapters=adapters,
        )
        self._left: dict[SequenceState, None] = {}

    def step(self) -> Counter[str]:
        rng, simulation = self._rng, self.simulation
        counts: Counter[str] = Counter(steps=1)
        for _ in range(rng.randrange(5)):
            if simulation.scheduler.num_waiting < self._MOST_WAITING:
                sequence = self._arrive()
                counts["arrived"] += 1
                self._left[sequence] = None
        if rng.random() < 0.02 and self._left:
            simulation.cancel(rng.choice(list(self._left)))
        over = simulation.step()
        for sequence in over:
            del self._left[sequence]
            simulation.check_tokens(sequence)
            simulation.device.forget(sequence)
            counts["over"] += 1
            counts["cancelled"] += sequence.finish_reason == "cancelled"
            counts["refused"] += sequence.finish_reason == "error"
        for sequence, rows in simulation.scheduled:
            # Its first rows in this seat are not its first tokens.
            counts["shared"] += 0 < sequence.num_cached - rows < sequence.num_prompt
        scheduler = simulation.scheduler
        has_seats = len(scheduler.running) < self._NUM_SEATS
        counts["waited"] += has_seats and scheduler.num_waiting > 0
        return counts

    def leave(self) -> int:
        """Let all that are left end; returns how many there were."""
        num_left = len(self._left)
        self.simulation.run()
        self.simulation.check_idle()
        for sequence in self._left:
            self.simulation.check_tokens(sequence)
        return num_left

    def _arrive(self) -> SequenceState:
        rng = self._rng
        prompt = [
            *self._PROMPT[: rng.randrange(len(self._PROMPT))],
            *(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 8))),
        ]
        # The first names are asked for most.
        name = self._names[min(int(rng.expovariate(0.15)), len(self._names) - 1)]
        sequence = make_sequence(
            prompt,
            rng.choice([None, name, name, name]),
            rng.randint(1, 16),
            ignore_eos=rng.random() < 0.5,
            page_size=self.simulation.pages.page_size,
            priority=rng.choice([0, 0, 0, 1]),
            tenant=rng.choice("uvwxyz"),
        )
        self.simulation.add(sequence)
        return sequence
