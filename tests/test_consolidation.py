"""Where requests go and move: properties of the placements, in plain numbers."""

import collections
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import punica_jax as pj
from punica_jax.consolidation import least_queue, relief

EMPTY = pj.Load(
    num_sequences=0,
    max_seats=4,
    num_open_pages=10,
    adapters={},
    num_slots=2,
)


def load(num_sequences, num_open_pages=10, adapters="", **fields):
    return dataclasses.replace(
        EMPTY,
        num_sequences=num_sequences,
        num_open_pages=num_open_pages,
        adapters=dict(collections.Counter(adapters)),
        **fields,
    )


def need(num_sequences=1, num_kv_pages=1, adapter=None, is_seated=False):
    return pj.Need(
        num_sequences=num_sequences,
        num_kv_pages=num_kv_pages,
        adapter=adapter,
        is_seated=is_seated,
    )


SEATED = need(is_seated=True)


@pytest.mark.parametrize(
    ("own", "wanted", "has_room"),
    [
        (load(3), need(), True),
        (load(4), need(), False),
        (load(2), need(2), True),
        (load(3), need(2), False),
        (load(0, 3), need(1, 3), True),
        (load(0, 3), need(1, 4), False),
        (load(2, adapters="a"), need(adapter="b"), True),
        (load(2, adapters="ab"), need(adapter="c"), False),
        (load(2, adapters="ab"), need(adapter="b"), True),
        (load(2, adapters="ab"), need(), True),
        (load(2, adapters="abc"), need(adapter="a"), False),  # somebody waits for one
    ],
)
def test_room_is_of_seats_pages_and_slots(own, wanted, has_room):
    assert own.has_room(wanted) is has_room


def test_a_load_with_one_more_and_without_it():
    more = load(2, 6, "a").with_one(need(2, 3, "b"))
    assert more == load(4, 3, "ab")
    assert more.without(need(2, 3, "b")) == load(2, 6, "a")
    # Its adapter may be somebody else's.
    assert load(4, 3, "abb").without(need(2, 3, "b")) == load(2, 6, "ab")


@pytest.mark.parametrize(
    ("loads", "consolidated", "spread"),
    [
        ([load(0), load(2), load(1)], 1, 0),
        ([load(4), load(2), load(3)], 2, 1),
        ([load(0), load(0)], 0, 0),
        ([load(2), load(2)], 0, 0),
        ([load(4), load(4)], None, None),
        ([load(3, is_open=False), load(1)], 1, 1),
        ([load(3, 0), load(1, 1), load(0)], 1, 2),
    ],
)
def test_where_a_request_goes(loads, consolidated, spread):
    assert pj.Consolidate().place(loads, need()) == consolidated
    assert pj.Spread().place(loads, need()) == spread


def test_who_finds_no_room_goes_where_fewest_wait():
    assert least_queue([load(9), load(7), load(7)]) == 1
    assert least_queue([load(9), load(9, max_seats=8)]) == 1
    assert least_queue([load(9), load(4, is_open=False)]) == 0
    assert least_queue([load(9, is_open=False)]) is None


def gathered(loads, requests):
    return pj.Consolidate().gathered(loads, requests)


def test_the_idlest_is_emptied_into_busier_ones():
    loads = [load(2), load(1), load(0), load(3)]
    requests = [{"a": SEATED, "b": SEATED}, {"c": SEATED}, {}, {"d": SEATED}]
    assert gathered(loads, requests) == [pj.Move("c", 1, 3)]
    # Two do not fit the busiest: the next one gets the other.
    loads = [load(2), load(2), load(3)]
    requests = [{}, {"c": SEATED, "d": SEATED}, {}]
    moves = [pj.Move("c", 1, 2), pj.Move("d", 1, 0)]
    assert gathered(loads, requests) == moves
    # A closed one is nobody's target, and hands on by itself.
    loads = [load(3, is_open=False), load(1), load(2)]
    assert gathered(loads, [{}, {"c": SEATED}, {}]) == [pj.Move("c", 1, 2)]


@pytest.mark.parametrize(
    ("loads", "requests"),
    [
        ([load(1), load(0)], [{"a": SEATED}, {}]),  # nobody else is busy
        ([load(3), load(2)], [{}, {"a": SEATED, "b": SEATED}]),  # half of it fits
        ([load(4), load(1)], [{}, {"a": SEATED}]),
        ([load(2), load(1)], [{}, {}]),  # it may not move
        ([load(2), load(2)], [{}, {"a": SEATED}]),  # one of them may not
        ([load(2, 0), load(1)], [{}, {"a": SEATED}]),
        ([load(2, is_open=False), load(1)], [{}, {"a": SEATED}]),
    ],
)
def test_what_would_not_empty_it_stays(loads, requests):
    assert gathered(loads, requests) == []


def test_nothing_is_gathered_where_requests_are_spread():
    loads = [load(2), load(1)]
    assert pj.Spread().gathered(loads, [{"a": SEATED}, {"b": SEATED}]) == []
    assert pj.Spread().every_s is None and pj.Consolidate(0.5).every_s == 0.5


def relieved(loads, requests, placement=None):
    return relief(placement or pj.Consolidate(), loads, requests)


def test_who_waits_for_a_seat_goes_where_one_is():
    queue = {"a": SEATED, "b": need(), "c": need()}
    full = load(6)
    assert relieved([full, load(2)], [queue, {}]) == [
        pj.Move("b", 0, 1),
        pj.Move("c", 0, 1),
    ]
    # One place is the first one's; with one that leaves, the other has a seat here.
    assert relieved([load(5), load(3)], [queue, {}]) == [pj.Move("b", 0, 1)]
    assert relieved([full, load(3)], [queue, {}]) == [pj.Move("b", 0, 1)]
    assert relieved([full, load(4)], [queue, {}]) == []


def test_who_waits_for_pages_goes_where_some_are():
    # Its own are among those that are wanted here.
    own = load(2, -2)
    assert relieved([own, load(1)], [{"a": need(1, 3)}, {}]) == [pj.Move("a", 0, 1)]
    assert relieved([own, load(1, 2)], [{"a": need(1, 3)}, {}]) == []
    assert relieved([load(2, 0), load(1)], [{"a": need(1, 3)}, {}]) == []


def test_who_waits_for_its_adapter_alone_stays():
    queue = {"a": need(adapter="x")}
    assert relieved([load(1, adapters="x"), load(2)], [queue, {}]) == []


def test_who_waits_for_room_for_its_adapter_goes_where_some_is():
    running = {name: need(adapter=name, is_seated=True) for name in "ab"}
    queue = running | {"c": need(adapter="c")}
    moves = [pj.Move("c", 0, 1)]
    assert relieved([load(3, adapters="abc"), load(0)], [queue, {}]) == moves
    assert relieved([load(3, adapters="abc"), load(1, adapters="c")], [queue, {}]) == (
        moves
    )
    elsewhere = load(2, adapters="xy")
    assert relieved([load(3, adapters="abc"), elsewhere], [queue, {}]) == []
    # Two that wait for the same one do not hide each other.
    queue["d"] = need(adapter="c")
    both = [*moves, pj.Move("d", 0, 1)]
    assert relieved([load(4, adapters="abcc"), load(0)], [queue, {}]) == both


def test_a_thousand_that_find_nothing_are_not_all_looked_at(monkeypatch):
    queue = {str(number): need(1, 11) for number in range(1000)}
    asked = []

    class Counting(pj.Consolidate):
        def place(self, loads, one):
            asked.append(one)
            return super().place(loads, one)

    placement = Counting()
    assert relieved([load(1000, -11000), load(1)], [queue, {}], placement) == []
    assert 0 < len(asked) < 100
    asked.clear()
    assert relieved([load(1000, -11000), load(4)], [queue, {}], placement) == []
    assert not asked


def test_who_is_to_leave_may_run():
    running = {"a": SEATED, "b": need(2, is_seated=True)}
    closed = load(3, is_open=False)
    assert relieved([closed, load(3), load(1)], [running, {}, {}]) == [
        pj.Move("a", 0, 1),
        pj.Move("b", 0, 2),
    ]
    assert relieved([closed, load(3)], [running, {}]) == [pj.Move("a", 0, 1)]
    assert relieved([closed, load(4)], [running, {}]) == []
    spread = relieved([closed, load(1), load(0)], [running, {}, {}], pj.Spread())
    assert spread == [pj.Move("a", 0, 2), pj.Move("b", 0, 1)]


@st.composite
def clusters(draw):
    """Draw engines, what they have, and which of it may move."""
    loads, requests = [], []
    for place in range(draw(st.integers(1, 5))):
        own, held = EMPTY, {}
        own = dataclasses.replace(own, is_open=draw(st.booleans()) or place == 0)
        for number in range(draw(st.integers(0, 7))):
            one = need(
                draw(st.integers(1, 2)),
                draw(st.integers(1, 4)),
                draw(st.sampled_from([None, "a", "b", "c"])),
            )
            fits = dataclasses.replace(own, is_open=True).has_room(one)
            one = dataclasses.replace(one, is_seated=fits and draw(st.booleans()))
            own = own.with_one(one)
            if draw(st.integers(0, 9)):
                held[f"{place}.{number}"] = one
        loads.append(own)
        requests.append(held)
    return loads, requests


@settings(max_examples=300, deadline=None)
@given(clusters(), st.sampled_from([pj.Consolidate(), pj.Spread()]))
def test_moves_keep_the_rules(cluster, placement):
    loads, requests = cluster
    for moves in (
        relief(placement, loads, requests),
        placement.gathered(loads, requests),
    ):
        after = list(loads)
        assert len({move.name for move in moves}) == len(moves)
        for move in moves:
            source, target = move.source, move.target
            one = requests[source][move.name]
            assert source != target and loads[target].is_open
            assert after[target].has_room(one), "it sits down at once"
            after[source] = after[source].without(one)
            after[target] = after[target].with_one(one)
    # What is gathered, which was last, leaves nothing behind, and wakes nobody.
    sources = {move.source for move in moves}
    assert len(sources) <= 1 and not any(after[one].num_sequences for one in sources)
    for before, then in zip(loads, after, strict=True):
        assert before.num_sequences or not then.num_sequences
        assert then.num_sequences <= max(before.num_sequences, then.max_seats)


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_who_may_be_relieved_is(cluster):
    """Whoever waits without room has none elsewhere, once the moves are made."""
    loads, requests = cluster
    placement = pj.Consolidate()
    moves = relief(placement, loads, requests)
    moved = {move.name for move in moves}
    after = list(loads)
    for move in moves:
        one = requests[move.source][move.name]
        after[move.source] = after[move.source].without(one)
        after[move.target] = after[move.target].with_one(one)
    for source, own in enumerate(requests):
        for name, one in own.items():
            left = after[source].without(one)
            if name in moved or one.is_seated or left.has_room(one):
                continue
            others = [load for place, load in enumerate(after) if place != source]
            # Room that later moves have made is found when it is looked for again.
            before = [load for place, load in enumerate(loads) if place != source]
            assert placement.place(others, one) is None or (
                placement.place(before, one) is None
            )


@pytest.mark.parametrize("every_s", [0, -1, float("nan"), "1", None, True])
def test_what_is_no_time(every_s):
    with pytest.raises(ValueError, match="every_s must be a number above 0, got"):
        pj.Consolidate(every_s)
