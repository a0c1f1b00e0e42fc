"""Who sits, who waits and who gets rows, over a device that notices every mix-up."""

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
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

from punica_jax.loop import StepLoop
from punica_jax.policies import FairShare, FirstComeFirstServed, LatencyTargets
from punica_jax.request_state import SampleState
from punica_jax.sequence import SequenceState
from punica_jax.sizes import Sizes
from tests.scheduler_cases import (
    VOCAB,
    FakeAdapters,
    FakeRunner,
    Simulation,
    answer,
    make_sequence,
    soak,
)

# Prompts begin with a piece of one of these, so that many share pages.
BEGINNINGS = ((1, 1, 2, 2, 3, 3, 1, 1), (1, 1, 2, 2, 1, 1))
NAMES = ("a", "b", "c", "d")
POLICIES = (FirstComeFirstServed, FairShare, lambda: LatencyTargets(20.0, 8.0))


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go; there is too little of everything."""

    @initialize(
        num_pages=st.integers(3, 10),
        page_size=st.sampled_from([2, 4]),
        max_seats=st.integers(1, 4),
        extra_rows=st.integers(0, 6),
        num_slots=st.integers(1, 3),
        read_steps=st.integers(0, 3),
        load_steps=st.integers(0, 3),
        max_overtakes=st.sampled_from([None, 0, 2]),
        policy=st.sampled_from(POLICIES),
    )
    def start(
        self,
        num_pages,
        page_size,
        max_seats,
        extra_rows,
        num_slots,
        read_steps,
        load_steps,
        max_overtakes,
        policy,
    ):
        self.adapters = FakeAdapters(
            NAMES, num_slots, read_steps=read_steps, load_steps=load_steps
        )
        self.simulation = Simulation(
            num_pages=num_pages,
            page_size=page_size,
            max_seats=max_seats,
            max_rows=max_seats + extra_rows,
            policy=policy,
            adapters=self.adapters,
            max_overtakes=max_overtakes,
        )
        self.max_len = num_pages * page_size
        self.sequences = []
        self.cancelled = set()
        self.bad_names = set()

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        num_shared=st.integers(0, 8),
        rest=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=3),
        adapter=st.sampled_from([None, *NAMES]),
        num_new=st.integers(1, 12),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1]),
        tenant=st.sampled_from("xyz"),
        first_token_s=st.sampled_from([None, 5.0, 50.0]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        count=st.sampled_from([1, 1, 3]),
    )
    def arrive(self, beginning, num_shared, rest, adapter, num_new, count, **how):
        prompt = [*beginning[:num_shared], *rest][: self.max_len - 1]
        group = object() if count > 1 else None
        new = [
            make_sequence(
                prompt,
                adapter,
                num_new,
                max_len=self.max_len,
                page_size=self.simulation.pages.page_size,
                group=group,
                **how,
            )
            for _ in range(count)
        ]
        self.sequences += new
        self.simulation.add(*new)

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            for sequence in self.simulation.step():
                assert sequence.is_over and not sequence.num_in_flight
            self.simulation.scheduler.check_integrity()

    @precondition(lambda self: any(not s.is_over for s in self.sequences))
    @rule(data=st.data())
    def cancel(self, data):
        left = [s for s in self.sequences if not s.is_over]
        sequence = left[data.draw(st.integers(0, len(left) - 1))]
        self.cancelled.add(sequence)
        self.simulation.cancel(sequence)

    @rule(name=st.sampled_from(NAMES))
    def replace_adapter(self, name):
        self.adapters.replace(name)

    @rule(
        name=st.sampled_from(NAMES), kind=st.sampled_from(["broken", "lost", "faulty"])
    )
    def spoil_adapter(self, name, kind):
        getattr(self.adapters, kind).add(name)
        self.bad_names.add(name)

    @rule()
    def mend_adapters(self):
        for names in (self.adapters.broken, self.adapters.lost, self.adapters.faulty):
            names.clear()

    @invariant()
    def everything_is_in_one_place(self):
        if hasattr(self, "simulation"):
            self.simulation.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "simulation"):
            return
        self.simulation.run()
        self.simulation.check_idle()
        of_group = {s.group: s.weights for s in self.sequences if s.weights is not None}
        for sequence in self.sequences:
            if sequence.group is not None and sequence.weights is not None:
                assert sequence.weights == of_group[sequence.group]
            self.simulation.check_tokens(sequence)
            reason = sequence.finish_reason
            if sequence in self.cancelled:
                assert reason == "cancelled"
            elif sequence.adapter not in self.bad_names:
                assert reason in ("stop", "length")
            else:
                assert reason is not None


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40)


def rows_of(simulation):
    """Return the rows of each sequence in the last step."""
    return dict(simulation.scheduled)


def seatings(simulation, *, steps=1000, arrive=lambda number: ()):
    """Step; returns the sequences in the order of their (first) seats.

    `arrive` gives what comes before each step; None ends it all.
    """
    seen = {}
    for number in range(steps):
        more = arrive(number)
        if more is None:
            break
        simulation.add(*more)
        if not simulation.busy:
            break
        simulation.step()
        simulation.scheduler.check_integrity()
        seen |= dict.fromkeys(simulation.scheduler.running)
        # One that had a single token to give may be gone already.
        seen |= dict.fromkeys(sequence for sequence, _ in simulation.scheduled)
    return list(seen)


class TestRows:
    def test_decode_rows_come_first_and_prompts_share_the_rest(self):
        simulation = Simulation(max_seats=5, max_rows=8)
        decoding = [make_sequence([number], num_new=20) for number in (1, 2, 3)]
        simulation.add(*decoding)
        simulation.step()
        long, short = make_sequence([1] * 12), make_sequence([2] * 4)
        simulation.add(long, short)
        simulation.step()
        assert rows_of(simulation) == {**dict.fromkeys(decoding, 1), long: 5}
        simulation.step()
        assert rows_of(simulation) == {**dict.fromkeys(decoding, 1), long: 5}
        simulation.step()
        assert rows_of(simulation) == {
            **dict.fromkeys(decoding, 1),
            long: 2,
            short: 3,
        }
        # A prompt's last row is a step's like any other, and the first new token.
        simulation.step()
        assert rows_of(simulation) == dict.fromkeys([*decoding, long, short], 1)
        simulation.run()

    @pytest.mark.parametrize(
        ("policy", "how"),
        [
            (LatencyTargets, {"first_token_s": 1e-6}),
            (LatencyTargets, {"priority": 1}),
            (FirstComeFirstServed, {"priority": 1}),
            (FairShare, {"priority": 1}),
        ],
    )
    def test_who_goes_first_does_so_before_prompts_that_have_begun(self, policy, how):
        adapters = FakeAdapters("a", 1, read_steps=3)
        simulation = Simulation(
            num_pages=100, max_seats=4, max_rows=8, policy=policy, adapters=adapters
        )
        long = make_sequence([1] * 99, first_token_s=1e9)
        simulation.add(long)
        simulation.step()
        hurried = make_sequence([2] * 10, "a", **how)
        simulation.add(hurried, make_sequence([3] * 9, first_token_s=2e9))
        for _ in range(3):
            simulation.step()
            # Its adapter is not there: neither is it waited for, nor is `long` passed.
            assert rows_of(simulation) == {long: 8}
        rows = []
        for _ in range(3):
            simulation.step()
            rows.append(rows_of(simulation))
        assert rows == [{hurried: 8}, {hurried: 2, long: 6}, {hurried: 1, long: 7}]
        simulation.run()
        simulation.check_idle()

    def test_who_came_later_waits_for_prompts_that_have_begun(self):
        for policy in POLICIES:
            simulation = Simulation(max_seats=4, max_rows=8, policy=policy)
            first, second = make_sequence([1] * 20), make_sequence([2] * 4)
            simulation.add(first)
            simulation.step()
            simulation.add(second)
            simulation.step()
            assert rows_of(simulation) == {first: 8}
            simulation.step()
            assert rows_of(simulation) == {first: 4, second: 4}
            simulation.run()

    def test_a_prompt_is_cut_where_the_rows_end(self):
        simulation = Simulation(max_seats=2, max_rows=16)
        sequence = make_sequence(range(40), num_new=2)
        simulation.add(sequence)
        rows = []
        while simulation.busy:
            simulation.step()
            rows.append(rows_of(simulation).get(sequence, 0))
        assert rows == [16, 16, 8, 1, 0]

    def test_every_seat_decodes_where_there_are_no_more_rows_than_seats(self):
        simulation = Simulation(max_seats=3, max_rows=3)
        sequences = [make_sequence([1, number], num_new=5) for number in range(4)]
        simulation.add(*sequences)
        simulation.run(30)
        for sequence in sequences:
            simulation.check_tokens(sequence)

    def test_slow_steps_halve_the_rows_of_prompts_beside_decoding_ones(self):
        # A step takes as many seconds as it has rows.
        policy = LatencyTargets(token_s=40.0)
        simulation = Simulation(
            num_pages=600, max_seats=2, max_rows=128, policy=lambda: policy
        )
        simulation.add(make_sequence([1], num_new=60))
        simulation.step()
        prompt = make_sequence(range(1000), num_new=1)
        simulation.add(prompt)
        rows = []
        while not prompt.is_over:
            simulation.step()
            rows.append(rows_of(simulation).get(prompt, 0))
        # What is launched is not read yet: each change shows two steps later.
        assert rows[:5] == [127, 127, 63, 63, 31]
        late = rows[5 : rows.index(0) - 2]
        assert late and all(16 <= count <= 45 for count in late)
        assert max(late) > 39

    def test_prompts_alone_are_not_limited(self):
        policy = LatencyTargets(token_s=1.0)
        simulation = Simulation(num_pages=600, max_rows=64, policy=lambda: policy)
        simulation.add(decoding := make_sequence([1], num_new=8))
        simulation.step()
        simulation.add(prompt := make_sequence(range(1000), num_new=1))
        while not decoding.is_over:
            simulation.step()
        assert policy.max_prompt_rows == 16
        simulation.step()
        assert rows_of(simulation) == {prompt: 64}
        simulation.run()


class TestSeats:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_higher_priorities_sit_first_then_who_came_first(self, policy):
        simulation = Simulation(max_seats=1, policy=policy)
        first = make_sequence([1])
        simulation.add(first)
        simulation.step()
        others = [
            make_sequence([1], priority=priority, tenant=f"tenant {index}")
            for index, priority in enumerate((0, 2, 1, 2, -1, 0))
        ]
        simulation.add(*others)
        order = seatings(simulation)
        assert order == [first, *(others[index] for index in (1, 3, 2, 0, 5, 4))]

    def test_the_next_one_waits_for_pages_and_is_not_overtaken(self):
        simulation = Simulation(num_pages=6, page_size=2, max_seats=3)
        first = make_sequence([1] * 7, num_new=1)
        large, small = make_sequence([2] * 9, num_new=1), make_sequence([3], num_new=1)
        simulation.add(first, large, small)
        assert seatings(simulation) == [first, large, small]

    def test_nobody_sits_without_room_for_its_first_token(self):
        simulation = Simulation(num_pages=4, page_size=2, max_seats=2)
        first, second = make_sequence([1], num_new=2), make_sequence([2] * 6, num_new=2)
        simulation.add(first, second)
        while not first.is_over:
            assert second.seat < 0
            simulation.step()
        simulation.run()
        assert not simulation.scheduler.num_preempted

    @pytest.mark.parametrize("by", ["arrival", "priority"])
    def test_the_last_that_came_of_the_least_priority_gives_up_its_seat(self, by):
        policy, how = LatencyTargets, [{}, {"first_token_s": 9.0}, {}]
        if by == "priority":
            policy, how = FirstComeFirstServed, [{}, {"priority": 1}, {"priority": 1}]
        simulation = Simulation(num_pages=6, page_size=2, max_seats=3, policy=policy)
        old, middle, newest = (
            make_sequence([n, n], num_new=9, **terms)
            for n, terms in enumerate(how, start=1)
        )
        simulation.add(old, middle, newest)
        scheduler = simulation.scheduler
        lost = []
        while simulation.busy:
            before = list(scheduler.running)
            simulation.step()
            scheduler.check_integrity()
            running = scheduler.running
            lost += [s for s in before if s not in running and not s.is_over]
            if simulation.num_steps == 1:
                # Not in the order in which they came.
                assert running != sorted(running, key=lambda one: one.arrival)
        assert scheduler.num_preempted == len(lost)
        first, never = (newest, old) if by == "arrival" else (old, middle)
        assert lost[0] is first and never not in lost
        for sequence in (old, middle, newest):
            simulation.check_tokens(sequence)
            assert len(sequence.new_tokens) == 9

    def test_one_that_lost_its_seat_comes_back_before_later_ones(self):
        simulation = Simulation(num_pages=4, page_size=2, max_seats=2)
        first, second = (make_sequence([n, n], num_new=6) for n in (1, 2))
        third = make_sequence([3], num_new=1)
        simulation.add(first, second, third)
        while not simulation.scheduler.num_preempted:
            simulation.step()
        assert list(simulation.policy) == [second, third]
        assert simulation.scheduler.running == [first]
        while third.seat < 0 and not third.is_over:
            simulation.step()
            assert third.seat < 0 or second.seat >= 0 or second.is_over
        simulation.run()
        for sequence in (first, second, third):
            simulation.check_tokens(sequence)

    def test_pages_to_spare_save_many_from_losing_their_seats(self):
        def serve(has_spare):
            rng = random.Random(0)
            simulation = Simulation(num_pages=800, max_seats=64, max_rows=128)
            assert simulation.scheduler._num_spare == 8
            if not has_spare:
                simulation.scheduler._num_spare = 0
            for _ in range(150):
                prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(5, 20))]
                simulation.add(make_sequence(prompt, None, rng.randint(10, 40)))
            simulation.run()
            simulation.check_idle()
            return simulation.scheduler.num_preempted, simulation.num_steps

        (num_preempted, num_steps), (most_preempted, least_steps) = map(serve, (1, 0))
        assert 0 < num_preempted < 0.8 * most_preempted
        assert num_steps < 1.01 * least_steps

    def test_one_sequence_can_have_every_page(self):
        simulation = Simulation(num_pages=4, page_size=2, max_seats=3)
        whole = make_sequence([1, 2], num_new=99, max_len=8)
        others = [make_sequence([n, n], num_new=99, max_len=8) for n in (3, 4)]
        simulation.add(whole, *others)
        simulation.run(200)
        simulation.check_idle()
        for sequence in (whole, *others):
            assert len(sequence.tokens) == 8
            simulation.check_tokens(sequence)

    def test_one_that_is_over_and_loses_its_seat_is_released_once(self):
        # Found by the machine above, when what a step in flight gave was read between
        # two calls of the scheduler and those that it ended were still there.
        simulation = Simulation(num_pages=4, page_size=2, max_seats=2)
        first, last = (make_sequence([n, n, n], num_new=5, max_len=8) for n in (1, 2))
        simulation.add(first, last)
        scheduler = simulation.scheduler
        schedule = scheduler.schedule

        def schedule_late(*, may_preempt):
            if may_preempt and simulation.num_steps:
                simulation.cancel(last)
            return schedule(may_preempt=may_preempt)

        scheduler.schedule = schedule_late
        simulation.run(30)
        simulation.check_idle()
        assert last.finish_reason == "cancelled" and scheduler.num_preempted == 1
        assert len(first.new_tokens) == 5


class TestSharing:
    def test_one_prompt_is_computed_once(self):
        simulation = Simulation(page_size=2, max_seats=4, max_rows=32)
        prompt = [1, 2, 3, 4, 5, 6, 1]
        sequences = [make_sequence(prompt, num_new=3) for _ in range(3)]
        simulation.add(*sequences)
        simulation.step()
        assert rows_of(simulation) == {sequences[0]: 7}
        simulation.step()
        assert rows_of(simulation) == dict.fromkeys(sequences, 1)
        assert len({s.pages[:3] for s in sequences}) == 1
        simulation.run()
        for sequence in sequences:
            simulation.check_tokens(sequence)

    def test_one_waits_for_what_another_has_begun(self):
        simulation = Simulation(page_size=2, max_rows=4)
        first, second = (make_sequence([1, 2, 3, 4, 5, 6, 1]) for _ in range(2))
        simulation.add(first)
        simulation.step()
        simulation.add(second)
        simulation.step()
        # There is a row left, which would be of a page that `first` fills just now.
        assert rows_of(simulation) == {first: 3}
        simulation.step()
        assert rows_of(simulation) == {first: 1, second: 1}
        simulation.run()

    def test_who_sits_down_has_its_digests(self, monkeypatch):
        simulation = Simulation()
        first, second = (make_sequence([1, 2, 3, 4, 5], num_new=9) for _ in range(2))
        simulation.add(first)
        simulation.step()
        simulation.add(second)
        monkeypatch.setattr("hashlib.blake2b", None)
        scheduled = simulation.scheduler.schedule(may_preempt=False)
        assert dict(scheduled or ()) == {first: 1, second: 1}

    @pytest.mark.parametrize("policy", POLICIES)
    def test_nobody_waits_for_a_page_of_one_that_all_pass(self, policy):
        simulation = Simulation(
            num_pages=2000, max_seats=64, max_rows=64, policy=policy
        )
        urgent = make_sequence([1] * 200, num_new=1, priority=2)
        simulation.add(make_sequence([1] * 1000, num_new=1, first_token_s=1e9))
        simulation.step()
        simulation.add(urgent)
        for number in range(20):
            others = [[3 + number % 3, 3 + n] * 40 for n in range(2)]
            simulation.add(*[make_sequence(o, num_new=1, priority=1) for o in others])
            simulation.step()
        assert urgent.is_over
        simulation.run()
        simulation.check_idle()

    def test_seats_are_kept_for_those_that_wait_for_a_page(self):
        """Else each step would ask all who wait, and others would take their seats."""
        simulation = Simulation(num_pages=400, max_seats=6, max_rows=100)
        prompt = [1 + number % 5 for number in range(120)]
        leader, *others = (make_sequence(prompt, num_new=9) for _ in range(40))
        late = make_sequence([6, 6, 6], num_new=9)
        simulation.add(leader, *others, late)
        num_known, num_asked = simulation.pages.num_known, Counter()

        def count(*arguments):
            num_asked[simulation.num_steps] += 1
            return num_known(*arguments)

        simulation.pages.num_known = count
        simulation.step()
        assert rows_of(simulation) == {leader: 100}
        simulation.step()
        # Five seats are free, and rows are left.
        assert rows_of(simulation) == {leader: 20}
        assert num_asked[1] <= 5 + 1
        simulation.step()
        assert rows_of(simulation) == dict.fromkeys(others[:5], 2) | {leader: 1}
        simulation.run()

    def test_pages_of_other_weights_are_not_shared(self):
        adapters = FakeAdapters("ab", 2)
        simulation = Simulation(page_size=2, max_rows=64, adapters=adapters)
        prompt = [1, 2, 3, 4, 5]
        alone = {}
        for adapter in (None, "a", "b"):
            alone[adapter] = answer(
                prompt, adapters.weights_of(adapter), 6, ignore_eos=True
            )
        assert len(set(map(tuple, alone.values()))) == 3
        sequences = [
            make_sequence(prompt, name, 6) for name in (None, "a", "b", None, "a", "b")
        ]
        simulation.add(*sequences)
        simulation.step()
        assert rows_of(simulation) == dict.fromkeys(sequences[:3], 5)
        simulation.run()
        for sequence in sequences:
            assert sequence.new_tokens == alone[sequence.adapter]
        adapters.replace("a")
        newer = make_sequence(prompt, "a", 6)
        simulation.add(newer)
        simulation.step()
        assert rows_of(simulation) == {newer: 5}
        simulation.run()
        simulation.check_tokens(newer)
        assert newer.new_tokens != alone["a"]

    def test_one_goes_on_with_the_weights_that_it_began_with(self):
        # `next` would take the only slot as soon as nobody holds it.
        adapters = FakeAdapters("az", 1)
        simulation = Simulation(
            num_pages=4, page_size=2, max_seats=2, adapters=adapters
        )
        first = make_sequence([1, 1], None, 6, priority=1)
        second = make_sequence([2, 2], "a", 6)
        weights = adapters.weights_of("a")
        simulation.add(first, second)
        simulation.step()
        simulation.add(make_sequence([3], "z", 1, priority=1))
        while not simulation.scheduler.num_preempted:
            simulation.step()
        adapters.replace("a")
        simulation.run()
        simulation.check_idle()
        assert second.new_tokens == answer([2, 2], weights, 6, ignore_eos=True)

    def test_samples_of_a_prompt_have_the_weights_of_the_first(self):
        adapters = FakeAdapters("az", 1)
        simulation = Simulation(max_seats=2, adapters=adapters, max_overtakes=0)
        group = object()
        samples = [make_sequence([1, 1], "a", 3, group=group) for _ in range(5)]
        other = make_sequence([1, 1], "a", 3)
        weights = adapters.weights_of("a")
        simulation.add(*samples[:4], make_sequence([2], "z", 1), samples[4], other)
        simulation.step()
        adapters.replace("a")
        simulation.cancel(samples[1])
        while not all(sample.is_over for sample in samples[:2]):
            simulation.step()
        # Of those that sat nobody is left, and `z` waits for the slot that they hold.
        simulation.run()
        simulation.check_idle()
        assert {sample.weights for sample in samples} == {weights}
        assert samples[-1].new_tokens == answer([1, 1], weights, 3, ignore_eos=True)
        assert other.weights == adapters.weights_of("a") != weights

    def test_samples_that_never_sat_hold_nothing(self):
        adapters = FakeAdapters("ab", 1)
        simulation = Simulation(max_seats=1, adapters=adapters)
        first = make_sequence([1, 1], "a", 3)
        samples = [make_sequence([1, 2], "b", 3, group=0) for _ in range(2)]
        simulation.add(first, *samples)
        simulation.step()
        for sample in samples:
            simulation.cancel(sample)
        simulation.run()
        simulation.check_idle()

    def test_prompt_logprobs_need_every_row(self):
        simulation = Simulation(page_size=2, max_rows=32)
        prompt = [1, 2, 3, 4, 5]
        simulation.add(make_sequence(prompt, num_new=1))
        simulation.run()
        asking = make_sequence(prompt, num_new=1, prompt_logprobs=0)
        simulation.add(asking)
        simulation.step()
        assert rows_of(simulation) == {asking: 5}
        simulation.run()


class TestAdapters:
    def test_others_go_on_while_an_adapter_is_on_its_way(self):
        adapters = FakeAdapters("ab", 2, load_steps=5)
        simulation = Simulation(adapters=adapters)
        waits, base = make_sequence([1], "a", 2), make_sequence([1], None, 2)
        simulation.add(waits, base)
        simulation.step()
        assert rows_of(simulation) == {base: 1}
        simulation.run(20)
        simulation.check_tokens(waits)

    def test_a_slow_file_holds_up_nobody_else(self):
        adapters = FakeAdapters("az", 2, read_steps=400)
        adapters._reading[adapters.weights_of("a")] = 0
        simulation = Simulation(max_seats=2, adapters=adapters, max_overtakes=3)
        slow = make_sequence([1], "z", 2)
        simulation.add(slow)
        for _ in range(100):
            simulation.add(make_sequence([2], "a", 2))
            simulation.step()
            simulation.step()
        assert not slow.is_over and simulation.scheduler.num_waiting < 10

    def test_adapters_are_brought_while_all_seats_are_taken(self):
        adapters = FakeAdapters("ab", 2, load_steps=3)
        simulation = Simulation(max_seats=1, adapters=adapters)
        first, second = make_sequence([1], None, 8), make_sequence([1], "a", 1)
        simulation.add(first, second)
        while not first.is_over:
            simulation.step()
        simulation.step()
        assert rows_of(simulation) == {second: 1}

    @pytest.mark.parametrize("load_steps", [0, 3])
    def test_who_has_not_begun_gets_what_its_name_stands_for(self, load_steps):
        adapters = FakeAdapters("a", 2, load_steps=load_steps)
        simulation = Simulation(max_seats=1, adapters=adapters)
        begun = make_sequence([1], "a", 8)
        waiting = [make_sequence([number], "a", 2) for number in range(3)]
        simulation.add(begun, *waiting)
        while not rows_of(simulation):
            simulation.step()
        old = adapters.weights_of("a")
        adapters.replace("a")
        new = adapters.weights_of("a")
        drawn_by = simulation.device.drawn_by
        seen = {one: set() for one in (begun, *waiting)}
        while not all(one.is_over for one in waiting):
            simulation.step()
            for one, weights in drawn_by.items():
                seen[one] |= set(weights)
        assert seen == {begun: {old}, **{one: {new} for one in waiting}}

    @pytest.mark.parametrize("digest", [None, "its own"])
    def test_who_began_elsewhere_keeps_what_it_has(self, digest):
        adapters = FakeAdapters("a", 2)
        simulation = Simulation(max_seats=1, adapters=adapters)
        first, moved = make_sequence([1], None, 8), make_sequence([2], "a", 6)
        tokens = () if digest else tuple(answer([2], adapters.weights_of("a"), 2))
        moved.replay(SampleState(seed=1, token_ids=tokens, adapter_digest=digest))
        simulation.add(first, moved)
        while not rows_of(simulation):
            simulation.step()
        simulation.step()
        held = simulation.scheduler._claims.get(moved)
        assert held is not None
        adapters.replace("a")
        while not first.is_over:
            simulation.step()
        simulation.step()
        assert simulation.scheduler._claims.get(moved) is held

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("num_slots", [1, 2])
    def test_a_stream_for_adapters_that_are_there_starves_nobody(
        self, policy, num_slots
    ):
        max_overtakes, max_seats = 6, 3
        adapters = FakeAdapters("abz", num_slots, read_steps=1, load_steps=2)
        simulation = Simulation(
            max_seats=max_seats,
            adapters=adapters,
            policy=policy,
            max_overtakes=max_overtakes,
        )
        there = "ab"[:num_slots]
        simulation.add(*(make_sequence([1], name, 5) for name in there * 2))
        for _ in range(5):
            simulation.step()
        starved = make_sequence([2], "z", 2)
        simulation.add(starved)

        def arrive(number):
            # Never an idle moment of any of the adapters that are there.
            return (
                None
                if starved.is_over
                else [make_sequence([3, number], name, 4) for name in there]
            )

        order = seatings(simulation, arrive=arrive, steps=200)
        assert starved.is_over
        # Some sat before it came; all that still held its claim may go before it.
        before = order.index(starved)
        assert max_overtakes <= before <= 2 * num_slots + max_overtakes + 2 * max_seats
        simulation.run()
        simulation.check_idle()

    def test_one_that_waits_too_long_is_not_kept_by_claims_of_a_long_queue(self):
        # All of them hold the adapter while it is on its way, before any of them sits.
        adapters = FakeAdapters("az", 1, load_steps=5)
        simulation = Simulation(
            num_pages=400, max_seats=8, adapters=adapters, max_overtakes=4
        )
        first, starved = make_sequence([3], "a", 9), make_sequence([2], "z", 1)
        crowd = [make_sequence([1, n], "a", 1) for n in range(100)]
        simulation.add(first, starved, *crowd)
        simulation.step()
        assert adapters.num_claims == 101
        order = seatings(simulation)
        assert 4 <= order.index(starved) <= 4 + 8
        simulation.check_idle()

    def test_the_base_alone_waits_for_no_slot(self):
        adapters = FakeAdapters("az", 1)
        simulation = Simulation(max_seats=2, adapters=adapters, max_overtakes=0)
        holder = make_sequence([1], "a", 30)
        simulation.add(holder)
        simulation.step()
        starved, base = make_sequence([2], "z", 1), make_sequence([3], None, 1)
        simulation.add(starved, base)
        simulation.step()
        assert rows_of(simulation) == {holder: 1, base: 1}
        simulation.run()
        simulation.check_idle()

    def test_claims_of_those_that_wait_keep_nobody_for_ever(self):
        # `low` holds the only slot and waits for a seat; `high` goes before it.
        adapters = FakeAdapters("az", 1)
        for max_overtakes in (0, 1, None):
            simulation = Simulation(
                max_seats=1, adapters=adapters, max_overtakes=max_overtakes
            )
            running = make_sequence([1], None, 4)
            low, high = (
                make_sequence([1], "a", 1),
                make_sequence([1], "z", 1, priority=1),
            )
            simulation.add(running, low)
            simulation.step()
            simulation.step()
            assert adapters.num_claims == 2
            simulation.add(high)
            simulation.run(40)
            simulation.check_idle()

    def test_who_has_adapters_is_told_when_nobody_wants_one_any_more(self):
        adapters = FakeAdapters("az", 1)
        simulation = Simulation(max_seats=4, adapters=adapters)
        holder = make_sequence([1], "a", 20)
        waiting = [make_sequence([2], "z") for _ in range(2)]
        simulation.add(holder, *waiting, make_sequence([1], None, 1))
        for sequence in waiting:
            simulation.step()
            assert adapters.forgone == []
            simulation.cancel(sequence)
        simulation.step()
        assert adapters.forgone == ["z"]
        simulation.run()
        assert adapters.forgone == ["z", "a"]

    def test_a_refused_adapter_ends_its_own_requests_only(self):
        adapters = FakeAdapters("ab", 1)
        adapters.broken.add("b")
        simulation = Simulation(adapters=adapters)
        good = [make_sequence([1, n], "a", 3) for n in (1, 2)]
        bad, unknown = make_sequence([1], "b"), make_sequence([1], "nobody")
        simulation.add(good[0], bad, unknown, good[1])
        assert set(simulation.step()) == {bad, unknown}
        assert str(unknown.error) == "there is no 'nobody'"
        assert bad.finish_reason == unknown.finish_reason == "error"
        simulation.run()
        simulation.check_idle()
        for sequence in good:
            assert len(sequence.new_tokens) == 3
            simulation.check_tokens(sequence)

    def test_all_that_wait_for_an_adapter_that_is_lost_are_told(self):
        adapters = FakeAdapters("ab", 1, load_steps=3)
        adapters.lost.add("a")
        simulation = Simulation(adapters=adapters)
        lost = [make_sequence([1], "a") for _ in range(3)]
        simulation.add(*lost)
        simulation.run(10)
        simulation.check_idle()
        assert {str(s.error) for s in lost} == {"it could not be copied"}

    def test_what_a_faulty_adapter_gave_counts_and_is_kept_for_nobody(self):
        adapters = FakeAdapters("ab", 2)
        adapters.faulty.add("a")
        simulation = Simulation(adapters=adapters)
        prompt = [1, 2, 3, 4, 5]
        faulty, good = (make_sequence(prompt, name, 3) for name in "ab")
        simulation.add(faulty, good)
        simulation.run()
        simulation.check_idle()
        assert faulty.finish_reason == "error" and not faulty.new_tokens
        num_known = simulation.pages.num_known
        assert num_known(faulty.page_digests, 2, adapters.weights_of("a")) == 0
        assert num_known(good.page_digests, 2, adapters.weights_of("b")) == 2
        simulation.check_tokens(good)


class TestCancelling:
    def test_one_that_waits(self):
        simulation = Simulation(max_seats=1, adapters=FakeAdapters("a", 1))
        running, waiting = make_sequence([1], None, 9), make_sequence([1], "a")
        simulation.add(running, waiting)
        simulation.step()
        simulation.step()
        assert simulation.adapters.num_claims == 2
        simulation.cancel(waiting)
        assert simulation.step() == [waiting]
        assert simulation.adapters.num_claims == 1
        assert simulation.scheduler.num_waiting == 0

    def test_one_that_runs(self):
        simulation = Simulation(max_seats=1, adapters=FakeAdapters("a", 1))
        running, waiting = make_sequence([1], "a", 9), make_sequence([2], None, 2)
        simulation.add(running, waiting)
        for _ in range(3):
            simulation.step()
        assert running.num_in_flight == 1
        simulation.cancel(running)
        assert simulation.step() == [running]
        assert simulation.adapters.num_claims == 1 and not simulation.pages.num_uses
        simulation.run()
        simulation.check_idle()
        simulation.check_tokens(running)
        simulation.check_tokens(waiting)

    def test_all_of_them_at_once(self):
        simulation = Simulation(num_pages=8, adapters=FakeAdapters("ab", 1))
        sequences = [
            make_sequence([1] * 5, name, 9) for name in (None, "a", "b", "a", None)
        ]
        simulation.add(*sequences)
        simulation.step()
        for sequence in sequences:
            simulation.cancel(sequence)
            simulation.cancel(sequence)
        assert set(simulation.step()) == set(sequences)
        simulation.check_idle()


SIZES = Sizes(
    max_model_len=96,
    max_seats=3,
    num_slots=2,
    max_rank=16,
    page_size=16,
    max_kv_pages=7,
    max_step_rows=40,
)


def make_loop(adapters):
    runner: Any = FakeRunner(SIZES.page_size, adapters)
    return StepLoop(runner, SIZES, adapters)


def test_a_policy_that_raises_lets_none_of_a_request_wait():
    class ByQuota(FirstComeFirstServed):
        def key(self, sequence):
            return {"known": 0}[sequence.terms.tenant], sequence.arrival

    simulation = Simulation(policy=ByQuota)
    known, unknown = (make_sequence([1], tenant=name) for name in ("known", "unknown"))
    with pytest.raises(KeyError, match="unknown"):
        simulation.scheduler.add([known, unknown])
    simulation.scheduler.check_integrity()
    assert not simulation.scheduler.num_waiting
    simulation.add(make_sequence([1], tenant="known"))
    simulation.run()
    simulation.check_idle()


def test_a_launch_that_raises_leaves_no_known_page():
    loop = make_loop(FakeAdapters())
    prompt = list(range(40))
    loop.add([sequence := make_sequence(prompt, page_size=16)])

    def launch(*operands):
        raise RuntimeError("no room")

    loop._runner.launch, launch = launch, loop._runner.launch
    with pytest.raises(RuntimeError, match="no room"):
        loop.step()
    digests, weights = sequence.page_digests, sequence.weights
    assert len(digests) == 2 and loop.pages.num_known(digests, 2, weights) == 0
    loop.reset()
    loop._runner.launch = launch
    loop.add([again := make_sequence(prompt, page_size=16)])
    loop.step()
    assert loop.pages.num_known(again.page_digests, 2, again.weights) == 2


def test_deadlines_are_looked_at_one_by_one(monkeypatch):
    loop = make_loop(FakeAdapters())
    many = [
        make_sequence([1, 2], page_size=16, deadline_s=3600.0 - number)
        for number in range(50)
    ]
    loop.add(many)
    loop.add([late := make_sequence([3, 4], page_size=16, deadline_s=1e-9)])
    assert loop.step() == [late]
    assert "deadline of 1e-09 s; 0 tokens had come" in str(late.error)
    is_over, asked = SequenceState.is_over, []

    def count(sequence):
        asked.append(sequence)
        return is_over.fget(sequence)

    with monkeypatch.context() as patch:
        patch.setattr(SequenceState, "is_over", property(count))
        loop._end_late()
    assert not asked
    for sequence in many[:40]:
        loop.cancel(sequence)
    loop.step()
    # Those that are over are not kept until their deadlines would have passed.
    loop.add([make_sequence([5], page_size=16, deadline_s=1.0)])
    assert len(loop._timed) <= 2 * 11
    loop.clear()
    assert not loop._timed


@pytest.mark.parametrize("cancels", [False, True])
def test_an_idle_loop_keeps_nobody_who_had_a_deadline(cancels):
    loop = make_loop(FakeAdapters())
    loop.add(make_sequence([1, 2], page_size=16, deadline_s=3600.0) for _ in range(9))
    if cancels:
        for sequence in list(loop.scheduler.sequences):
            loop.cancel(sequence)
    while loop.busy:
        loop.step()
    assert not loop.busy and not loop._timed


@pytest.mark.parametrize("seed", range(8))
def test_the_simulation_steps_as_the_loop_does(seed):
    rng = random.Random(seed)
    sizes = SIZES

    def make_adapters():
        return FakeAdapters("abcd", sizes.num_slots, read_steps=1, load_steps=2)

    simulation = Simulation(
        num_pages=sizes.num_kv_pages,
        page_size=sizes.page_size,
        max_seats=sizes.max_seats,
        max_rows=sizes.max_rows,
        adapters=make_adapters(),
    )
    adapters = make_adapters()
    loop = make_loop(adapters)
    schedule, scheduled = loop.scheduler.schedule, []

    def record(*, may_preempt):
        rows = schedule(may_preempt=may_preempt)
        scheduled[:] = rows or []
        return rows

    loop.scheduler.schedule = record
    pairs, steps = [], 0
    while steps < 150 or loop.busy:
        if steps < 150 and rng.random() < 0.3:
            prompt = [1 + number % 3 for number in range(rng.randrange(60))]
            prompt.append(rng.randrange(VOCAB))
            name, num_new = rng.choice([None, *"abcd"]), rng.randint(1, 30)
            how: Any = {
                "max_len": 96,
                "ignore_eos": rng.random() < 0.8,
                "priority": rng.randrange(2),
                "page_size": sizes.page_size,
            }
            pairs.append([make_sequence(prompt, name, num_new, **how) for _ in "12"])
            simulation.add(pairs[-1][0])
            loop.add(pairs[-1][1:])
        if rng.random() < 0.03 and pairs:
            one, other = rng.choice(pairs)
            simulation.cancel(one)
            loop.cancel(other)
        over = simulation.step()
        adapters.pass_step()
        assert [s.arrival for s in loop.step()] == [s.arrival for s in over]
        assert [(s.arrival, rows) for s, rows in scheduled] == [
            (s.arrival, rows) for s, rows in simulation.scheduled
        ]
        steps += 1
    simulation.check_idle()
    assert simulation.scheduler.num_preempted == loop.scheduler.num_preempted > 0
    for one, other in pairs:
        simulation.check_tokens(one)
        assert one.completion() == other.completion()


@pytest.mark.parametrize(
    "num_events", [4_000, pytest.param(100_000, marks=pytest.mark.slow)]
)
def test_soak(num_events):
    start_s = time.thread_time()
    counts = soak(num_events)
    assert time.thread_time() - start_s < 60
    assert counts["arrived"] + counts["steps"] + counts["over"] >= num_events
    # All of it happened: none of this is a walk through an empty house.
    for what in ("preempted", "shared", "cancelled", "refused", "waited"):
        assert counts[what] > num_events // 2000, (what, counts)


def test_no_jax_is_needed():
    """The simulation runs where JAX cannot be imported."""
    root = Path(__file__).parents[1]
    script = f"""
import sys, types
for name in ("jax", "jaxlib", "flax"):
    sys.modules[name] = None  # importing it raises ImportError
package = types.ModuleType("punica_jax")  # its own __init__ imports all of it
package.__path__ = [{str(root / "punica_jax")!r}]
sys.modules["punica_jax"] = package
from tests.scheduler_cases import soak
soak(300)
"""
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)
