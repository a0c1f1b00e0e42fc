"""Queues: whose turn it is, whatever came and went before."""

import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from punica_jax.policies import FairShare, FirstComeFirstServed, LatencyTargets
from punica_jax.request import Terms
from tests.scheduler_cases import FakeAdapters, Simulation, make_sequence

POLICIES = {
    "first_come": FirstComeFirstServed,
    "latency": lambda: LatencyTargets(2.0),
    "fair_share": lambda: FairShare({"y": 3.0}),
}


class _Sequence(SimpleNamespace):
    __hash__ = object.__hash__


def make(arrival: int, num_tokens: int = 4, arrived_s: float = 0.0, **terms) -> Any:
    """Make as much of a sequence as a policy looks at."""
    return _Sequence(
        arrival=arrival,
        arrived_s=arrived_s,
        tokens=range(num_tokens),
        terms=Terms(**terms),
    )


def serve(policy, sequence, rows=None):
    """Let the policy see what the scheduler shows it of one that is seated."""
    policy.remove(sequence)
    policy.charge({sequence: len(sequence.tokens) if rows is None else rows})


class PolicyMachine(RuleBasedStateMachine):
    """Sequences come, are served, come back, and leave, in any order."""

    @initialize(name=st.sampled_from(sorted(POLICIES)))
    def start(self, name):
        self.name, self.policy = name, POLICIES[name]()
        self.waiting, self.running = [], []
        self.num_arrived = 0

    @rule(
        num_tokens=st.integers(1, 50),
        arrived_s=st.integers(0, 9),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("xyz"),
        first_token_s=st.sampled_from([None, 0.5, 2.0, 8.0]),
    )
    def come(self, num_tokens, arrived_s, **terms):
        self.num_arrived += 1
        sequence = make(self.num_arrived, num_tokens, float(arrived_s), **terms)
        self.waiting.append(sequence)
        self.policy.add(sequence)

    @precondition(lambda self: self.waiting)
    @rule(count=st.integers(1, 4))
    def sit(self, count):
        for sequence in list(self.policy)[:count]:
            self.waiting.remove(sequence)
            self.running.append(sequence)
            serve(self.policy, sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def come_back(self, data):
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.waiting.append(sequence)
        self.policy.add(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data):
        sequence = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(sequence)
        self.policy.remove(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def decode(self, data):
        self.policy.charge({data.draw(st.sampled_from(self.running)): 1})

    @invariant()
    def all_that_wait_are_walked_once(self):
        if not hasattr(self, "policy"):
            return
        walked = list(self.policy)
        assert len(self.policy) == len(walked) == len(self.waiting)
        assert Counter(map(id, walked)) == Counter(map(id, self.waiting))
        assert walked == list(self.policy), "a walk changes nothing"

        def first_come(sequence):
            return -sequence.terms.priority, sequence.arrival

        priorities = [sequence.terms.priority for sequence in walked]
        assert priorities == sorted(priorities, reverse=True)
        if self.name == "first_come":
            assert walked == sorted(self.waiting, key=first_come)
        if self.name == "latency":
            assert walked == sorted(
                self.waiting,
                key=lambda s: (
                    -s.terms.priority,
                    s.arrived_s + (s.terms.first_token_s or 2.0),
                    s.arrival,
                ),
            )
        if self.name == "fair_share":
            for tenant in "xyz":
                own = [s for s in walked if s.terms.tenant == tenant]
                assert own == sorted(own, key=first_come)


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=60, stateful_step_count=30)


class TestLatencyTargets:
    def test_who_must_answer_soonest_goes_first(self):
        policy = LatencyTargets(first_token_s=1.0)
        calm = make(0, arrived_s=0.0, first_token_s=10.0)
        usual = make(1, arrived_s=5.0)
        hasty = make(2, arrived_s=5.5, first_token_s=0.1)
        urgent = make(3, arrived_s=90.0, priority=1)
        for sequence in (calm, usual, hasty, urgent):
            policy.add(sequence)
        assert list(policy) == [urgent, hasty, usual, calm]
        policy.add(late := make(4, arrived_s=9.5))
        assert list(policy) == [urgent, hasty, usual, calm, late]

    def test_no_target_no_limit(self):
        policy = LatencyTargets()
        policy.observe(2000, 99.0)
        assert policy.max_prompt_rows == math.inf

    def test_rows_halve_while_steps_are_slow_and_grow_while_they_are_not(self):
        policy = LatencyTargets(token_s=0.1)
        policy.observe(0, 9.0)
        policy.observe(1000, 0.1)
        assert policy.max_prompt_rows == math.inf
        limits = []
        for _ in range(8):
            policy.observe(int(min(policy.max_prompt_rows, 1000)), 0.2)
            limits.append(policy.max_prompt_rows)
        assert limits == [500, 250, 125, 62, 31, 16, 16, 16]
        # A step that did not use its rows says nothing of more.
        policy.observe(15, 0.01)
        assert policy.max_prompt_rows == 16
        for _ in range(4):
            policy.observe(int(policy.max_prompt_rows), 0.01)
            limits.append(policy.max_prompt_rows)
        assert limits[8:] == [19, 22, 25, 29]

    @given(
        steps=st.lists(st.tuples(st.integers(0, 3000), st.floats(0, 1)), max_size=40)
    )
    def test_a_slow_step_never_raises_the_limit_and_no_limit_stops_prompts(self, steps):
        policy = LatencyTargets(token_s=0.5)
        for rows, step_s in steps:
            before = policy.max_prompt_rows
            policy.observe(rows, step_s)
            if step_s > 0.5:
                assert policy.max_prompt_rows <= before
            assert policy.max_prompt_rows >= 16

    @pytest.mark.parametrize("value", [0, -1, math.nan, "x", 10**400])
    def test_targets_are_above_0(self, value):
        for name in ("first_token_s", "token_s"):
            message = f"{name} must be a number above 0, got"
            with pytest.raises(ValueError, match=message):
                LatencyTargets(**{name: value})


class TestFairShare:
    @given(
        weights=st.dictionaries(
            st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 4.0]), max_size=3
        ),
        costs=st.lists(st.integers(1, 100), min_size=3, max_size=3),
        num_rounds=st.integers(1, 60),
    )
    def test_shares_differ_by_no_more_than_one_request(
        self, weights, costs, num_rounds
    ):
        policy = FairShare(weights)
        cost = dict(zip("abc", costs, strict=True))
        served = dict.fromkeys("abc", 0.0)
        arrivals = iter(range(10_000))
        for tenant in "abc" * 2:
            policy.add(make(next(arrivals), cost[tenant], tenant=tenant))
        for _ in range(num_rounds):
            sequence = next(iter(policy))
            tenant = sequence.terms.tenant
            serve(policy, sequence)
            served[tenant] += cost[tenant] / weights.get(tenant, 1.0)
            # Its backlog never ends.
            policy.add(make(next(arrivals), cost[tenant], tenant=tenant))
        most = max(cost[t] / weights.get(t, 1.0) for t in "abc")
        assert max(served.values()) - min(served.values()) <= most + 1e-6

    @pytest.mark.parametrize("max_seats", [1, 8])
    def test_a_device_is_shared_by_weight(self, max_seats):
        """Prompts are chunked, answers differ in length, and all is mixed in steps."""
        weights = {"a": 1.0, "b": 2.0, "c": 1.0}
        rng = random.Random(0)
        simulation = Simulation(
            num_pages=400,
            page_size=4,
            max_seats=max_seats,
            max_rows=24,
            policy=lambda: FairShare(weights),
        )
        # Tenant c asks for as much at once as others do in ten requests.
        sizes = {"a": (3, 9), "b": (9, 3), "c": (60, 60)}

        def arrive(tenant):
            num_prompt, num_new = sizes[tenant]
            prompt = [rng.randrange(1, 7) for _ in range(num_prompt)]
            return make_sequence(prompt, None, num_new, page_size=4, tenant=tenant)

        for tenant in weights:
            simulation.add(*(arrive(tenant) for _ in range(20)))
        rows = Counter()
        for _ in range(1500):
            for sequence in simulation.step():
                simulation.add(arrive(sequence.terms.tenant))
            for sequence, count in simulation.scheduled:
                rows[sequence.terms.tenant] += count
        shares = {tenant: rows[tenant] / weights[tenant] for tenant in weights}
        # All seats may be one tenant's for the length of its largest request.
        spread = max(shares.values()) - min(shares.values())
        assert spread <= max_seats * 120
        assert spread < min(shares.values()) / 2, "the bound says something"

    def test_an_idle_tenant_cannot_save_up(self):
        policy = FairShare()
        for number in range(100):
            policy.add(make(number, 10, tenant="busy"))
        for _ in range(50):
            serve(policy, next(iter(policy)))
        for number in range(100, 150):
            policy.add(make(number, 10, tenant="idle"))
        first = [sequence.terms.tenant for sequence in policy][:40]
        assert abs(first.count("idle") - 20) <= 1
        served = []
        for _ in range(40):
            sequence = next(iter(policy))
            served.append(sequence.terms.tenant)
            serve(policy, sequence)
        assert served == first

    def test_one_that_comes_back_still_owes_what_it_had(self):
        policy = FairShare()
        for number in range(20):
            policy.add(make(number, 10, tenant="modest"))
        policy.add(greedy := make(20, 1000, tenant="greedy"))
        serve(policy, greedy)
        policy.add(make(21, 10, tenant="new"))  # a count at 0 is forgotten, no other
        policy.add(make(22, 1000, tenant="greedy"))
        assert [s.terms.tenant for s in policy].index("greedy") == 21

    def test_rows_count_of_one_that_runs_while_its_count_is_forgotten(self):
        policy = FairShare()
        numbers = iter(range(10_000))
        for _ in range(200):
            policy.add(make(next(numbers), 10, tenant="steady"))
        policy.add(long := make(next(numbers), 10, tenant="long"))
        policy.remove(long)
        for _ in range(100):
            policy.remove(steady := next(iter(policy)))
            policy.charge({steady: 10, long: 3})
            # Newcomers, at which counts are forgotten that are below the clock.
            policy.add(new := make(next(numbers), 10, tenant=f"{next(numbers)}"))
            policy.remove(new)
        assert len(policy._served) < 10
        # It had less than its share, and saves up nothing: it is as far as `steady`.
        policy.add(late := make(next(numbers), 10, tenant="long"))
        assert policy._served["long"] == policy._served["steady"]
        policy.remove(late)
        policy.charge({long: 1000})
        policy.add(late)
        assert policy._served["long"] >= policy._clock + 500
        behind = (policy._served["long"] - policy._served["steady"]) / 10
        index = [s.terms.tenant for s in policy].index("long")
        assert behind <= index <= behind + 1

    def test_who_uses_what_others_leave_owes_nothing_for_it(self):
        policy = FairShare()
        numbers = iter(range(100_000))
        running = make(next(numbers), 10, tenant="light")
        seated = Counter()

        def go(steps, tenants):
            for _ in range(steps):
                for tenant in tenants:
                    policy.add(make(next(numbers), 10, tenant=tenant))
                policy.remove(first := next(iter(policy)))
                policy.charge({first: 10, running: 1})
                seated[first.terms.tenant] += 1

        go(500, ["busy"] * 2)
        seated.clear()
        go(100, ["busy", "new"])
        assert abs(seated["busy"] - seated["new"]) <= 1

    @pytest.mark.parametrize(
        ("weights", "expected"), [({}, "abcabcabc"), ({"b": 2.0}, "abcbabcb")]
    )
    def test_one_walk_serves_many_tenants(self, weights, expected):
        policy = FairShare(weights)
        for number in range(12):
            policy.add(make(number, 10, tenant="abc"[number // 4]))
        tenants = "".join(sequence.terms.tenant for sequence in policy)
        assert tenants.startswith(expected)

    def test_tenants_that_are_gone_are_forgotten(self):
        policy = FairShare()
        policy.add(make(0, 10, tenant="steady"))
        numbers = iter(range(1, 100_000))
        most = 0
        for _ in range(2000):
            policy.add(make(next(numbers), 10, tenant=f"tenant {next(numbers)}"))
            # There is time for it and one request of the one that always waits.
            for _ in range(2):
                serve(policy, next(iter(policy)))
            policy.add(make(next(numbers), 10, tenant="steady"))
            most = max(most, len(policy._served))
        assert most < 10

    @pytest.mark.parametrize("weight", [1.0, 3.0])
    @pytest.mark.parametrize("num_new", [2, 20])
    def test_newcomers_do_not_starve_one_that_always_waits(self, weight, num_new):
        """Each of them asks once, and never comes again."""
        policy = FairShare({"steady": weight})
        numbers = iter(range(100_000))
        for _ in range(5):
            policy.add(make(next(numbers), 10, tenant="steady"))
        for _ in range(num_new):
            policy.add(make(number := next(numbers), 10, tenant=f"{number}"))
        most, num_served = 0, 0
        for num_seated in range(1, 2001):
            serve(policy, sequence := next(iter(policy)))
            tenant = sequence.terms.tenant
            num_served += tenant == "steady"
            number = next(numbers)
            tenant = tenant if tenant == "steady" else f"{number}"
            policy.add(make(number, 10, tenant=tenant))
            most = max(most, len(policy._served))
            # Its share of what all have, but for the request of each that may be first.
            share = weight / (weight + num_new)
            assert abs(num_served - share * num_seated) <= 1 + weight
        assert most <= 4 * (num_new + 2)

    def test_who_comes_while_others_always_wait_is_served_in_its_turn(self):
        policy = FairShare()
        numbers = iter(range(100_000))
        for tenant in "ab" * 200:
            policy.add(make(next(numbers), 10, tenant=tenant))
        for num_rounds in range(100):
            policy.add(new := make(next(numbers), 10, tenant=f"new {num_rounds}"))
            waited = 0
            while (sequence := next(iter(policy))) is not new:
                serve(policy, sequence)
                waited += 1
            serve(policy, new)
            assert waited <= 2 * len("ab")
            serve(policy, next(iter(policy)))

    @pytest.mark.parametrize("value", [0, -2.0, math.nan])
    def test_weights_are_above_0(self, value):
        with pytest.raises(
            ValueError, match="the weight of tenant 'x' must be a number above 0, got"
        ):
            FairShare({"x": value})

    def test_weights_are_of_tenants(self):
        with pytest.raises(ValueError, match="weights must be a mapping of tenants"):
            FairShare(["x"])


def test_a_tenant_that_waits_for_its_adapter_keeps_its_claim_to_a_share():
    adapters = FakeAdapters("a", 1, load_steps=25)
    simulation = Simulation(max_seats=1, policy=FairShare, adapters=adapters)
    waits = [make_sequence([1], "a", 4, tenant="waits") for _ in range(10)]
    others = [make_sequence([1], None, 4, tenant="other") for _ in range(40)]
    simulation.add(*waits, *others)
    for _ in range(25):
        simulation.step()
    over = sum(sequence.is_over for sequence in others)
    assert over >= 4 and not any(sequence.is_over for sequence in waits)
    # Now it is served alone, until it has had as much.
    for _ in range(5 * over):
        simulation.step()
    more = sum(sequence.is_over for sequence in others) - over
    assert sum(sequence.is_over for sequence in waits) >= over - 1 and more <= 2
    simulation.run()
    simulation.check_idle()
