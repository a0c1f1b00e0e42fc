"""One request from engine to engine, where these are no engines but a few pieces."""

import asyncio
import contextlib
import dataclasses
from concurrent.futures import Future

import pytest

import punica_jax as pj
from punica_jax.journey import journey
from punica_jax.members import Members
from tests.engine_cases import run
from tests.test_members import STATE, need

DONE = pj.Completion(
    text="ab",
    token_ids=(1, 2),
    finish_reason="length",
    adapter=None,
    prompt_token_ids=(1,),
)
CUT = dataclasses.replace(DONE, finish_reason="exported")
CLOSED = pj.EngineClosedError("the engine has ended")


def piece(text="", completion=None, index=0):
    return pj.Piece(index, text, completion)


class Host:
    """Answers with what it is told to; waits where that is an event."""

    config = pj.EngineConfig()
    gauges = pj.EngineGauges(num_waiting=0, num_open_kv_pages=10, has_ended=False)

    def __init__(self, *answers):
        self._answers = list(answers)
        self.asked, self.cancelled = [], []

    async def _answer(self, *asked):
        self.asked.append(asked)
        for item in self._answers.pop(0):
            if isinstance(item, asyncio.Event):
                await item.wait()
            elif isinstance(item, Exception):
                if isinstance(item, pj.EngineClosedError):
                    self.gauges = dataclasses.replace(self.gauges, has_ended=True)
                raise item
            else:
                yield item

    def generate(self, prompt, *, request_id):
        return self._answer(prompt, request_id)

    def resume(self, state, *, request_id):
        return self._answer(state, request_id)

    def cancel(self, request_id):
        self.cancelled.append(request_id)


def begin(*hosts, terms=STATE.terms):
    members = Members(hosts, pj.Consolidate())
    ticket = members.enter("r", need(), terms)

    def start(engine, here, terms):
        return engine.generate("prompt", request_id=here)

    return members, ticket, journey(ticket, hosts, members, start)


def take_out(members, ticket, target=1, state=STATE):
    """Do what a mover does."""
    moving = ticket.moving = Future()
    moving.set_running_or_notify_cancel()
    members.move(ticket, target)
    moving.set_result(state)


async def collect(pieces):
    return [one async for one in pieces]


def test_a_request_that_stays():
    members, _, pieces = begin(Host([piece("a"), piece("b"), piece("", DONE)]))
    assert [one.text for one in run(collect(pieces))] == ["a", "b", ""]
    assert not len(members) and not members.num_at(0)


@pytest.mark.parametrize("end", [piece("", CUT), CLOSED], ids=["exported", "closed"])
def test_a_request_that_moves(end):
    """Also where its engine ends before it has said that the request was taken out."""

    async def main():
        go = asyncio.Event()
        hosts = Host([piece("a"), go, end]), Host([piece("b"), piece("", DONE)])
        members, ticket, pieces = begin(*hosts)
        assert (await anext(pieces)).text == "a"
        take_out(members, ticket)
        go.set()
        rest = await collect(pieces)
        assert [one.text for one in rest] == ["b", ""] and rest[-1].completion is DONE
        assert 1 in members.alive and not len(members)
        assert hosts[1].asked == [(STATE, "r #2")]

    run(main())


def test_completions_come_once():
    """One that has ended before is whole in the state, and ends there again."""
    ends = [piece("", DONE, 0), piece("", DONE, 1)]

    async def main():
        go = asyncio.Event()
        first = Host([piece("a"), ends[0], go, piece("", CUT, 1)])
        hosts = first, Host([ends[0], piece("b", None, 1), ends[1]])
        members = Members(hosts, pj.Consolidate())
        ticket = members.enter("r", need(num_sequences=2), STATE.terms)
        pieces = journey(
            ticket, hosts, members, lambda e, h, _: e.generate("", request_id=h)
        )
        got = [await anext(pieces), await anext(pieces)]
        take_out(members, ticket)
        assert members.loads()[1].num_sequences == 1
        go.set()
        got += await collect(pieces)
        assert [(one.index, one.text) for one in got] == [
            *((0, "a"), (0, "")),
            *((1, "b"), (1, "")),
        ]

    run(main())


def test_what_a_caller_takes_out_is_exported():
    members, _, pieces = begin(Host([piece("a"), piece("", CUT)]), Host())
    assert run(collect(pieces))[-1].completion is CUT
    assert not len(members)


@pytest.mark.parametrize("end", [piece("", CUT), CLOSED], ids=["exported", "closed"])
def test_what_a_caller_takes_out_amid_a_move_is_its_own(end):
    async def main():
        go = asyncio.Event()
        members, ticket, pieces = begin(Host([piece("a"), go, end]), Host())
        await anext(pieces)
        take_out(members, ticket)
        assert await members.state_of(ticket) is STATE
        go.set()
        if isinstance(end, Exception):
            with pytest.raises(pj.EngineClosedError):
                await collect(pieces)
        else:
            assert (await collect(pieces))[-1].completion is CUT
        # The other engine has not ended: it was never asked.
        assert 1 in members.alive and not len(members)

    run(main())


def test_an_engine_that_ends_before_a_request_begins():
    hosts = Host([CLOSED]), Host([piece("a"), piece("", DONE)])
    members, _, pieces = begin(*hosts)
    assert [one.text for one in run(collect(pieces))] == ["a", ""]
    assert members.alive == [1] and hosts[1].asked == [("prompt", "r #2")]


def test_an_engine_that_ends_amid_a_request():
    members, _, pieces = begin(Host([piece("a"), CLOSED]), Host())
    with pytest.raises(pj.EngineClosedError):
        run(collect(pieces))
    assert not len(members)


def test_an_engine_that_ends_before_a_request_goes_on_there():
    async def main():
        go = asyncio.Event()
        first = Host([piece("a"), go, piece("", CUT)])
        third = Host([piece("b"), piece("", DONE)])
        members, ticket, pieces = begin(first, Host([CLOSED]), third)
        await anext(pieces)
        members.set_open(0, False)
        take_out(members, ticket)
        go.set()
        assert [one.text for one in await collect(pieces)] == ["b", ""]
        assert third.asked == [(STATE, "r #3")]

    run(main())


def test_cancelling_before_an_engine_knows_of_it():
    async def main():
        go = asyncio.Event()
        host = Host([piece("a"), go, piece("b"), piece("", DONE)])
        _, ticket, pieces = begin(host)
        await anext(pieces)
        ticket.is_cancelled = True  # what its engine was told was too soon
        go.set()
        await collect(pieces)
        assert set(host.cancelled) == {"r #1"}

    run(main())


def test_what_an_engine_refuses_is_refused():
    full = pj.QueueFullError("too many wait")
    members, _, pieces = begin(Host([full]), Host())
    with pytest.raises(pj.QueueFullError, match="too many wait"):
        run(collect(pieces))
    assert not len(members)


def test_an_engine_that_says_only_what_is_known_and_ends():
    """Nothing new had come of it there: it goes on from the same state elsewhere."""

    async def main():
        go = asyncio.Event()
        ends = [piece("", DONE, 0), piece("", DONE, 1)]
        first = Host([piece("a"), ends[0], go, piece("", CUT, 1)])
        hosts = first, Host([ends[0], CLOSED]), Host([ends[0], ends[1]])
        members = Members(hosts, pj.Consolidate())
        ticket = members.enter("r", need(num_sequences=2), STATE.terms)
        pieces = journey(
            ticket, hosts, members, lambda e, h, _: e.generate("", request_id=h)
        )
        got = [await anext(pieces), await anext(pieces)]
        members.set_open(0, False)
        take_out(members, ticket)
        go.set()
        got += await collect(pieces)
        assert [one.index for one in got] == [0, 0, 1] and not len(members)

    run(main())


def test_a_deadline_is_the_callers():
    late = pj.DeadlineError("a request was not answered within its deadline of 0.001 s")
    terms = pj.Terms(deadline_s=30.0)

    async def main():
        go = asyncio.Event()
        first = Host([piece("a"), go, piece("", CUT)])
        hosts = first, Host([piece("b"), late])
        members, ticket, pieces = begin(*hosts, terms=terms)
        await anext(pieces)
        take_out(members, ticket)
        go.set()
        with pytest.raises(
            pj.DeadlineError, match="its deadline of 30 s; it has moved"
        ):
            await collect(pieces)
        [(state, _)] = hosts[1].asked
        assert 29 < state.terms.deadline_s < 30
        _, _, pieces = begin(Host([late]), terms=terms)
        with pytest.raises(pj.DeadlineError, match=r"deadline of 0.001 s"):
            await collect(pieces)

    run(main())


def test_weights_that_were_replaced_amid_the_way():
    async def main():
        go = asyncio.Event()
        hosts = Host([piece("a"), go, piece("", CUT)]), Host([])
        members, ticket, pieces = begin(*hosts)
        await anext(pieces)
        take_out(members, ticket)
        members.note_other_weights(ticket.need.adapter)
        go.set()
        with pytest.raises(pj.RequestError, match="got other weights while a request"):
            await collect(pieces)
        assert not hosts[1].asked and not len(members)

    run(main())


def test_leaving_amid_the_way():
    async def main():
        go = asyncio.Event()
        members, ticket, pieces = begin(
            Host([piece("a"), piece("b"), go]), Host([piece("", DONE)])
        )
        await anext(pieces)
        take_out(members, ticket)
        async with contextlib.aclosing(pieces):
            await anext(pieces)
        assert not len(members) and not members.num_at(1)

    run(main())
