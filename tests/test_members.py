"""Which request is at which engine: the books of a cluster, without engines."""

import asyncio
import contextlib
import dataclasses
import random
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

import punica_jax as pj
from punica_jax.members import Members
from punica_jax.request_state import SampleState
from punica_jax.tickets import _LEAST_S, Ticket

STATE = pj.RequestState(
    prompt_token_ids=(1, 2),
    adapter=None,
    sampling=pj.SamplingParams(),
    terms=pj.Terms(),
    samples=(SampleState(seed=0, token_ids=()),),
)


def need(num_kv_pages=2, adapter=None, num_sequences=1):
    return pj.Need(
        num_sequences=num_sequences, num_kv_pages=num_kv_pages, adapter=adapter
    )


TERMS = pj.Terms()


def make_members(num_engines=2, placement=None):
    engines = [
        SimpleNamespace(
            config=pj.EngineConfig(max_seats=2, num_slots=2),
            gauges=pj.EngineGauges(
                num_waiting=0, num_open_kv_pages=10, has_ended=False
            ),
        )
        for _ in range(num_engines)
    ]
    return Members(engines, placement or pj.Consolidate()), engines


def change(engine, **fields):
    engine.gauges = dataclasses.replace(engine.gauges, **fields)


def enter(members, name, wanted=None):
    return members.enter(name, wanted or need(), TERMS)


def progress(*tickets, num_seated=1, num_kv_pages=2):
    return {
        ticket.at[1]: pj.RequestProgress(
            num_sequences=ticket.need.num_sequences,
            num_seated=num_seated,
            num_kv_pages=num_kv_pages,
        )
        for ticket in tickets
    }


def relieved(members, known):
    members.note_progress(known)
    return stayed(members.relieved(known))


def gathered(members, known):
    members.note_progress(known)
    return stayed(members.gathered(known))


def stayed(moves):
    """Return who should have moved, and where to; they could not be taken out."""
    for ticket, _, moving in moves:
        assert ticket.moving is moving
        ticket.moving = None
    return [move[:2] for move in moves]


def test_a_request_has_another_id_at_each_engine():
    members, _ = make_members()
    ticket = enter(members, "r")
    assert (ticket.at[0], members.num_at(0), len(members)) == (0, 1, 1)
    assert members.find("r") is ticket and members.find(3) is None
    first = ticket.at[1]
    members.move(ticket, 1)
    assert ticket.at[0] == 1 and ticket.at[1] != first and ticket.is_between
    assert (members.num_at(0), members.num_at(1)) == (0, 1)
    members.move(ticket, 0)
    assert ticket.at[1] != first and members.num_moves == 2
    members.leave(ticket)
    members.leave(ticket)
    assert not len(members) and members.find("r") is None and not members.num_at(0)


def test_an_id_is_one_requests_alone():
    members, _ = make_members()
    ticket = enter(members, "r")
    with pytest.raises(ValueError, match="a request with the id 'r' is under way"):
        enter(members, "r")
    members.leave(ticket)
    again = enter(members, "r")
    members.leave(ticket)  # the one that has left before
    assert members.find("r") is again


def test_who_does_not_sit_was_promised_its_pages():
    members, engines = make_members()
    ticket = enter(members, "r", need(3, "x"))
    [own, other] = members.loads()
    assert (own.num_sequences, own.num_open_pages, own.adapters) == (1, 7, {"x": 1})
    assert other == dataclasses.replace(
        own, num_sequences=0, num_open_pages=10, adapters={}
    )
    change(engines[0], num_open_kv_pages=7)  # it sits there now
    members.note_progress({0: progress(ticket, num_kv_pages=3)})
    assert members.loads()[0].num_open_pages == 7
    members.note_progress({0: progress(ticket, num_seated=0, num_kv_pages=4)})
    assert members.loads()[0].num_open_pages == 3
    members.note_begin(ticket, "elsewhere", is_seated=True)
    assert members.loads()[0].num_open_pages == 3
    again = enter(members, "s", need(2))
    members.note_begin(again, again.at[1], is_seated=False)
    assert again.has_begun and members.loads()[0].num_open_pages == 1
    members.note_begin(again, again.at[1], is_seated=True)
    assert members.loads()[0].num_open_pages == 3
    members.leave(ticket)
    assert members.loads()[0].num_open_pages == 7


def test_who_finds_no_room_waits_where_fewest_do():
    members, _ = make_members(placement=pj.Spread())
    places = [enter(members, str(number)).at[0] for number in range(7)]
    assert places == [0, 1, 0, 1, 0, 1, 0]


def test_completions_leave_one_by_one():
    members, _ = make_members()
    ticket = enter(members, "r", need(num_sequences=2))
    members.end_one(ticket)
    assert members.loads()[0].num_sequences == 1 and members.find("r") is ticket
    members.end_one(ticket)
    assert members.find("r") is None and members.loads()[0].num_sequences == 0
    # Its engine may have ended more of it than its caller knows.
    ticket = enter(members, "r", need(num_sequences=3))
    known = progress(ticket)[ticket.at[1]]
    known = {0: {ticket.at[1]: dataclasses.replace(known, num_sequences=1)}}
    members.note_progress(known)
    members.end_one(ticket)
    assert members.loads()[0].num_sequences == 1
    members.end_one(ticket)
    assert members.find("r") is ticket
    members.end_one(ticket)
    assert members.find("r") is None


def test_who_waits_is_relieved():
    members, _ = make_members()
    tickets = [enter(members, str(number)) for number in range(2)]
    one = enter(members, "other")
    assert one.at[0] == 1
    members.move(one, 0)  # now three for two seats
    waiting = progress(one, num_seated=0)
    known = {0: progress(*tickets) | waiting, 1: {}}
    assert relieved(members, known) == [(one, 1)]
    known[0] |= progress(one, num_seated=0, num_kv_pages=11)
    assert relieved(members, known) == [] and one.need.num_kv_pages == 11


def test_when_to_ask_who_waits():
    members, engines = make_members()
    assert not members.may_relieve()
    tickets = [enter(members, str(number)) for number in range(3)]
    assert not members.may_relieve()
    change(engines[0], num_waiting=1)
    assert members.may_relieve()  # the other has one of two seats free
    enter(members, "4")
    assert not members.may_relieve()
    members.leave(tickets[2])
    assert members.may_relieve()
    change(engines[1], has_ended=True)
    assert not members.may_relieve()
    change(engines[1], has_ended=False)
    change(engines[0], num_waiting=0)
    members.set_open(0, False)
    assert members.may_relieve()
    change(engines[0], has_ended=True)
    assert not members.may_relieve()


@pytest.mark.parametrize(
    "why", ["cancelled", "taken", "unknown", "other weights", "frozen"]
)
def test_who_stays(why):
    members, _ = make_members()
    for number in range(2):
        enter(members, str(number), need(adapter="x"))
    one = enter(members, "other", need(adapter="x"))
    known = {0: {}, 1: progress(one)}
    assert gathered(members, known) == []  # the others' seats are full
    members.leave(members.find("0"))
    assert relieved(members, known) == []
    assert gathered(members, known) == [(one, 0)]
    with contextlib.ExitStack() as stack:
        if why == "cancelled":
            one.is_cancelled = True
        elif why == "taken":
            one.moving = Future()
        elif why == "unknown":
            enter(members, "new", need(adapter="x"))
            members.move(members.find("new"), 1)
        elif why == "other weights":
            members.note_other_weights("x")
        else:
            stack.enter_context(members.frozen("x"))
            with members.frozen("x"):
                pass
        assert gathered(members, known) == []
    if why == "frozen":
        assert gathered(members, known) == [(one, 0)]


def test_under_new_weights_requests_may_move():
    members, _ = make_members()
    members.note_other_weights("x")
    enter(members, "0", need(adapter="x"))
    one = enter(members, "1", need(adapter="x"))
    members.move(one, 1)
    known = {0: {}, 1: progress(one)}
    assert gathered(members, known) == [(one, 0)]
    members.note_other_weights("y")
    assert gathered(members, known) == [(one, 0)]
    members.check_weights(one)
    members.note_other_weights("x")
    with pytest.raises(pj.RequestError, match="adapter 'x' got other weights while a"):
        members.check_weights(one)


def test_what_an_engine_has_no_more_is_over():
    """Whoever does not read its pieces holds nothing but these."""
    members, _ = make_members()
    one, other = enter(members, "1"), enter(members, "2")
    members.note_progress({0: {}})
    assert len(members) == 2  # they are not there yet
    members.note_progress({0: progress(one)})
    assert one.has_begun and not other.has_begun
    one.moving = Future()
    members.note_progress({0: {}, 1: {}})
    assert members.find("1") is one  # taken out
    one.moving = None
    members.note_progress({1: {}})
    assert members.find("1") is one  # its engine does not answer
    members.note_progress({0: {}})
    assert members.find("1") is None and members.num_at(0) == 1
    members.end_one(one)  # its caller gets the end of it
    assert members.loads()[0].num_sequences == 1
    other.sat_s -= 100  # nobody will ever read it
    members.note_progress({0: {}})
    assert not len(members)


def test_what_was_taken_out_and_is_never_read_is_forgotten():
    members, engines = make_members()
    one = enter(members, "1")
    moving = one.moving = Future()
    one.sat_s -= 100
    members.note_progress({0: {}})
    assert members.find("1") is one  # its engine has not answered
    members.move(one, 1)
    moving.set_result(STATE)
    members.note_progress({0: {}, 1: {}})
    assert members.find("1") is one and one.is_between  # it has just gone there
    one.sat_s -= 100
    members.note_progress({0: {}, 1: {}})
    assert not len(members) and not members.num_at(1)
    # An engine that has ended has nothing.
    other = enter(members, "2")
    members.note_progress({0: progress(other)})
    change(engines[0], has_ended=True)
    members.note_progress({})
    assert not len(members)


def test_a_placement_that_names_nobody_moves_nobody():
    class Wrong(pj.Consolidate):
        def gathered(self, loads, requests):
            [name] = requests[1]
            return [pj.Move(name, 1, 0), pj.Move("nobody", 1, 0)]

    members, _ = make_members(placement=Wrong())
    one = enter(members, "1")
    members.move(one, 1)
    with pytest.raises(KeyError, match="nobody"):
        members.gathered({0: {}, 1: progress(one)})
    assert one.moving is None


def test_what_could_not_be_taken_out_stays():
    members, _ = make_members()
    one = enter(members, "1")
    one.moving = Future()
    at = one.at
    members.move(one, None)
    assert one.moving is None and one.at == at and not members.num_moves


def test_a_placement_that_raises_leaves_requests_where_they_are():
    class Raising(pj.Consolidate):
        def place(self, loads, one):
            raise RuntimeError("a placement of the user's")

    members, engines = make_members()
    one = enter(members, "1")
    members.placement = Raising()
    change(engines[1], has_ended=True)
    members.move(one, 1)
    assert one.at[0] == 0 and members.num_at(0) == 1
    with pytest.raises(RuntimeError, match="a placement of the user's"):
        enter(members, "2")
    assert members.find("2") is None and members.num_at(0) == 1


def test_cancelled_ones_are_told_of_until_they_end():
    members, _ = make_members()
    one, other = enter(members, "1"), enter(members, "2")
    one.is_cancelled = True
    assert members.note_progress({0: progress(other)}) == []
    assert members.note_progress({0: progress(one, other)}) == [one.at]


def test_a_drained_engine_hands_on():
    members, engines = make_members()
    one = enter(members, "1")
    members.set_open(0, False)
    assert not members.loads()[0].is_open
    assert enter(members, "2").at[0] == 1
    known = {0: progress(one), 1: {}}
    assert relieved(members, known) == [(one, 1)]
    # One that does not answer is asked for nothing, and given nothing.
    assert relieved(members, {0: progress(one)}) == []
    with pytest.raises(ValueError, match="engine 1 is the last one that takes"):
        members.set_open(1, False)
    assert members.hands_on(0) and not members.hands_on(1)
    members.set_open(0, True)
    assert relieved(members, known) == [] and not members.hands_on(0)
    change(engines[1], has_ended=True)
    with pytest.raises(ValueError, match="engine 0 is the last one that takes"):
        members.set_open(0, False)


def test_an_engine_that_has_ended_gets_nothing():
    members, engines = make_members(3)
    one, other = enter(members, "1"), enter(members, "2")
    change(engines[0], has_ended=True)
    members.give_again(one)
    assert (one.at[0], members.alive) == (1, [1, 2])
    members.move(other, 0)  # it ended meanwhile
    assert other.at[0] == 1
    change(engines[1], has_ended=True)
    members.give_again(other)
    assert (other.at[0], members.alive) == (2, [2])
    change(engines[2], has_ended=True)
    with pytest.raises(pj.EngineClosedError, match="every engine of the cluster has"):
        members.give_again(other)
    with pytest.raises(pj.EngineClosedError, match="every engine of the cluster has"):
        enter(members, "3")
    assert members.find("3") is None


def test_who_finds_nobody_goes_on_where_it_was():
    members, engines = make_members()
    one = enter(members, "1")
    members.set_open(0, False)
    change(engines[1], has_ended=True)
    members.move(one, 1)
    assert one.at[0] == 0 and members.num_at(0) == 1 and not members.num_moves


def test_who_has_left_is_not_moved():
    members, _ = make_members()
    ticket = enter(members, "r")
    members.leave(ticket)
    members.move(ticket, 1)
    assert not members.num_at(1) and not members.num_moves


def test_a_state_is_one_askers():
    members, _ = make_members()
    ticket = enter(members, "r", need(adapter="x"))

    async def main():
        assert await members.state_of(ticket) is None
        moving = ticket.moving = Future()
        moving.set_running_or_notify_cancel()
        assert members.is_between("x") and not members.is_between("y")
        asked = [asyncio.create_task(members.state_of(ticket)) for _ in range(4)]
        await asyncio.sleep(0)
        asked.pop().cancel()  # it leaves the others what they ask for
        await asyncio.sleep(0)
        moving.set_result(STATE)
        return await asyncio.gather(*asked)

    assert sorted(map(bool, asyncio.run(main()))) == [False, False, True]
    assert ticket.moving is None and not members.is_between("x")


def test_a_state_that_somebody_was_slow_to_ask_for_is_not_the_next_one():
    members, _ = make_members()
    ticket = enter(members, "r")

    async def main():
        first = ticket.moving = Future()
        first.set_running_or_notify_cancel()
        slow = asyncio.create_task(members.state_of(ticket))
        await asyncio.sleep(0)
        first.set_result(STATE)
        ticket.moving = second = Future()  # it went on, and moves again
        assert await slow is None and ticket.moving is second

    asyncio.run(main())


def test_times_are_what_is_left_of_them():
    terms = pj.Terms(priority=3, deadline_s=5.0, first_token_s=1.0)
    ticket = Ticket("r", need(), terms, 0)
    ticket.sit(0)
    assert ticket.terms_left == terms
    ticket._arrived_s = time.monotonic() - 2
    for place in (1, 0, 1):  # each time of the whole way
        ticket.sit(place)
        left = ticket.terms_left
        assert left.deadline_s == pytest.approx(3, abs=0.5)
        assert left.first_token_s == _LEAST_S and left.priority == 3
    ticket.terms = TERMS
    assert ticket.terms_left == TERMS


def test_a_placement_may_look_at_the_loads():
    class Looking(pj.Consolidate):
        def place(self, loads, one):
            assert members.loads() == loads
            return super().place(loads, one)

    members, _ = make_members(placement=Looking())
    assert enter(members, "r").at[0] == 0


def test_many_threads_lose_nothing():
    members, _ = make_members(3)
    held, lock = {}, threading.Lock()

    def serve(seed):
        rng = random.Random(seed)
        own = {}
        for number in range(300):
            name = f"{seed}.{number}"
            wanted = need(rng.randrange(3), rng.choice([None, "x", "y"]))
            own[name] = enter(members, name, wanted)
            draw = rng.random()
            one = own[rng.choice(list(own))]
            if draw < 0.4:
                members.leave(own.pop(one.name))
            elif draw < 0.6:
                members.move(one, rng.randrange(3))
            elif draw < 0.8:
                members.note_begin(one, one.at[1], is_seated=True)
            else:
                members.note_progress({one.at[0]: progress(one)})
                for name in [name for name in own if members.find(name) is None]:
                    del own[name]
        with lock:
            held.update(own)

    threads = [threading.Thread(target=serve, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = {name: one for name, one in held.items() if members.find(name) is one}
    assert len(members) == len(left)
    for place, load in enumerate(members.loads()):
        mine = [one for one in left.values() if one.at[0] == place]
        assert members.num_at(place) == load.num_sequences == len(mine)
        promised = sum(one.need.num_kv_pages for one in mine if not one.need.is_seated)
        assert load.num_open_pages == 10 - promised
        names = [one.need.adapter for one in mine if one.need.adapter]
        assert load.adapters == {name: names.count(name) for name in set(names)}
