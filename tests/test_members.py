"""Which request is at which engine: the books of a cluster, without engines."""

import asyncio
import dataclasses
import random
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

import punica_jax as pj
from punica_jax.members import Members
from punica_jax.request_state import SampleState

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


def make_members(num_engines=2, placement=None):
    engines = [
        SimpleNamespace(
            config=pj.EngineConfig(max_seats=2, num_slots=2), num_open_kv_pages=10
        )
        for _ in range(num_engines)
    ]
    return Members(engines, placement or pj.Consolidate()), engines


def progress(ticket, num_seated=1, num_kv_pages=2):
    return {
        ticket.here: pj.RequestProgress(
            num_sequences=1, num_seated=num_seated, num_kv_pages=num_kv_pages
        )
    }


def test_a_request_has_another_id_at_each_engine():
    members, _ = make_members()
    ticket = members.enter("r", need())
    assert (ticket.place, members.num_at(0), len(members)) == (0, 1, 1)
    assert members.find("r") is ticket and members.find(3) is None
    first = ticket.here
    members.move(ticket, 1, STATE)
    assert ticket.place == 1 and ticket.here != first and ticket.is_moving
    assert (members.num_at(0), members.num_at(1)) == (0, 1)
    members.move(ticket, 0, STATE)
    assert ticket.here != first and members.num_moves == 2
    members.leave(ticket)
    members.leave(ticket)
    assert not len(members) and members.find("r") is None and not members.num_at(0)


def test_an_id_is_one_requests_alone():
    members, _ = make_members()
    ticket = members.enter("r", need())
    with pytest.raises(ValueError, match="a request with the id 'r' is under way"):
        members.enter("r", need())
    members.leave(ticket)
    again = members.enter("r", need())
    members.leave(ticket)  # the one that has left before
    assert members.find("r") is again and members.num_at(0) == 1


def test_who_has_not_begun_was_promised_its_pages():
    members, _ = make_members()
    ticket = members.enter("r", need(3, "x"))
    [own, other] = members.loads()
    assert (own.num_sequences, own.num_open_pages, own.adapters) == (1, 7, {"x"})
    assert other == dataclasses.replace(
        own, num_sequences=0, num_open_pages=10, adapters=frozenset()
    )
    ticket.has_begun = True  # the engine's own number has them from here on
    assert members.loads()[0].num_open_pages == 10
    more = [members.enter(str(number), need(5)).place for number in range(3)]
    assert more == [0, 1, 1]


def test_who_finds_no_room_waits_where_fewest_do():
    members, _ = make_members(placement=pj.Spread())
    places = [members.enter(str(number), need()).place for number in range(7)]
    assert places == [0, 1, 0, 1, 0, 1, 0]


def test_completions_leave_one_by_one():
    members, _ = make_members()
    ticket = members.enter("r", need(num_sequences=2))
    assert not ticket.end_one() and members.loads()[0].num_sequences == 1
    assert ticket.end_one()


def test_who_waits_is_planned_to_move():
    members, _ = make_members()
    tickets = [members.enter(str(number), need()) for number in range(2)]
    one = members.enter("other", need())
    assert one.place == 1
    members.move(one, 0, STATE)  # now three for two seats
    known = {
        0: progress(tickets[0]) | progress(tickets[1]) | progress(one, 0),
        1: {},
    }
    assert members.plan(known, gathers=False) == [(one, 1)]
    assert one.need.num_kv_pages == 2
    grown = known | {0: known[0] | progress(one, 0, num_kv_pages=11)}
    assert members.plan(grown, gathers=False) == [] and one.need.num_kv_pages == 11


@pytest.mark.parametrize("why", ["cancelled", "taken", "unknown", "other weights"])
def test_who_stays(why):
    members, _ = make_members()
    for number in range(2):
        members.enter(str(number), need(adapter="x"))
    one = members.enter("other", need(adapter="x"))
    known = {0: {}, 1: progress(one)}
    assert members.plan(known, gathers=True) == []  # the others' seats are full
    members.leave(members.find("0"))
    assert members.plan(known, gathers=False) == []
    assert members.plan(known, gathers=True) == [(one, 0)]
    if why == "cancelled":
        one.is_cancelled = True
    elif why == "taken":
        one.state = Future()
    elif why == "unknown":
        known = {0: {}, 1: {}}
    else:
        members.note_other_weights("x")
    assert members.plan(known, gathers=True) == []


def test_under_new_weights_requests_may_move():
    members, _ = make_members()
    members.note_other_weights("x")
    members.enter("0", need(adapter="x"))
    one = members.enter("1", need(adapter="x"))
    members.move(one, 1, STATE)
    assert members.plan({0: {}, 1: progress(one)}, gathers=True) == [(one, 0)]
    members.note_other_weights("y")
    assert members.plan({0: {}, 1: progress(one)}, gathers=True) == [(one, 0)]


def test_a_drained_engine_hands_on():
    members, _ = make_members()
    one = members.enter("1", need())
    members.set_open(0, False)
    assert not members.loads()[0].is_open
    assert members.enter("2", need()).place == 1
    known = {0: progress(one), 1: {}}
    assert members.plan(known, gathers=False) == [(one, 1)]
    # One that does not answer is asked for nothing, and given nothing.
    assert members.plan({0: progress(one)}, gathers=False) == []
    with pytest.raises(ValueError, match="engine 1 is the last one that takes"):
        members.set_open(1, False)
    members.set_open(0, True)
    assert members.plan(known, gathers=False) == []


def test_an_engine_that_has_ended_gets_nothing():
    members, _ = make_members(3)
    one, other = members.enter("1", need()), members.enter("2", need())
    members.note_end(one)
    assert (one.place, members.alive) == (1, [1, 2])
    members.move(other, 0, STATE)  # it ended meanwhile
    assert other.place == 1
    members.note_end(other)
    assert (other.place, members.alive) == (2, [2])
    with pytest.raises(pj.EngineClosedError, match="every engine of the cluster has"):
        members.note_end(other)
    with pytest.raises(pj.EngineClosedError, match="every engine of the cluster has"):
        members.enter("3", need())
    assert members.find("3") is None


def test_who_has_left_is_not_moved():
    members, _ = make_members()
    ticket = members.enter("r", need())
    members.leave(ticket)
    members.move(ticket, 1, STATE)
    assert not members.num_at(1) and not members.num_moves


def test_a_state_is_one_askers():
    members, _ = make_members()
    ticket = members.enter("r", need(adapter="x"))

    async def main():
        assert await members.taken(ticket) is None
        moving = ticket.state = Future()
        assert members.is_moving("x") and not members.is_moving("y")
        asked = [asyncio.create_task(members.taken(ticket)) for _ in range(3)]
        await asyncio.sleep(0)
        moving.set_result(STATE)
        return await asyncio.gather(*asked)

    assert sorted(map(bool, asyncio.run(main()))) == [False, False, True]
    assert ticket.state is None and not members.is_moving("x")


def test_many_threads_lose_nothing():
    members, _ = make_members(3)
    held, lock = {}, threading.Lock()

    def serve(seed):
        rng = random.Random(seed)
        own = {}
        for number in range(300):
            name = f"{seed}.{number}"
            own[name] = members.enter(name, need(rng.randrange(3)))
            if rng.random() < 0.6:
                members.leave(own.pop(rng.choice(list(own))))
            elif own:
                one = own[rng.choice(list(own))]
                members.move(one, rng.randrange(3), STATE)
        with lock:
            held.update(own)

    threads = [threading.Thread(target=serve, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(members) == len(held)
    assert sum(members.num_at(place) for place in range(3)) == len(held)
    loads = members.loads()
    for place, load in enumerate(loads):
        assert load.num_sequences == sum(one.place == place for one in held.values())
