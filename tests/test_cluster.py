"""A cluster of engines: requests that move give what they give where they stay."""

import asyncio
import contextlib
import dataclasses
import gc
import random
import threading
import time
import weakref

import jax
import pytest

import punica_jax as pj
from punica_jax import cluster as cluster_module
from punica_jax import members, mover
from tests.engine_cases import (
    CONFIG,
    GREEDY,
    RANKS,
    Alone,
    assert_same,
    check_idle,
    completions,
    files,
    held,
    make_engine,
    quick,
    run,
    until,
)
from tests.test_engine import DRAWN, EXPORTED, LONG

LOOK_S = 0.002


@pytest.fixture(scope="module", autouse=True)
def _looks_often():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mover, "_LOOK_S", LOOK_S)
        yield


class Restless(pj.Consolidate):
    """Moves what it is told to, or all that it can, whenever it is asked."""

    def __init__(self):
        self.every_s = 0.0
        self.wanted: dict[str, int] | None = {}

    def gathered(self, loads, requests):
        moves = []
        for source, own in enumerate(requests):
            for here in own:
                name = here.rpartition(" #")[0]
                target = (source + 1) % len(loads)
                if self.wanted is not None:
                    target = self.wanted.get(name, source)
                if target != source and loads[target].is_open:
                    moves.append(pj.Move(here, source, target))
        return moves


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = files(tmp_path_factory)
    make_engine(root).close()  # its programs are everybody's
    return root


@pytest.fixture(scope="module")
def alone(root):
    return Alone(root)


def make_cluster(root, devices=(0, 0), placement=None, **changed):
    with quick():
        return pj.Cluster(
            root / "model",
            {name: root / "adapters" / name for name in RANKS},
            config=pj.EngineConfig(**CONFIG | changed),
            devices=[jax.devices()[device] for device in devices],
            placement=placement,
        )


@pytest.fixture(scope="module")
def restless(root):
    with make_cluster(root, placement=Restless()) as cluster:
        yield cluster


@pytest.fixture
def placement(restless):
    """What moves the requests of `restless`; nothing is left of them after a test."""
    placement = restless._members.placement
    yield placement
    placement.wanted = {}
    check_all_idle(restless)


def check_all_idle(cluster):
    run(until(lambda: not len(cluster._members)))
    assert not any(load.num_sequences for load in cluster.stats().loads)
    for engine in cluster.engines:
        check_idle(engine)


def ask(cluster, *request, **options):
    return run(completions(cluster.generate(*request, **options)))


def named(adapter, answers):
    """Return them as those of an adapter of another name."""
    return [dataclasses.replace(one, adapter=adapter) for one in answers]


@contextlib.contextmanager
def resuming_later(engine):
    """Have requests wait on their way to an engine until an event is set."""
    go = asyncio.Event()
    resume = engine.resume

    async def later(*args, **options):
        await go.wait()
        async for piece in resume(*args, **options):
            yield piece

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "resume", later)
        yield go


@contextlib.contextmanager
def slow(*engines):
    """Have steps take so long that a request does not end before it is looked for."""
    with pytest.MonkeyPatch.context() as patch:
        for engine in engines:
            step = engine._loop.step

            def stepping(step=step):
                time.sleep(0.005)
                return step()

            patch.setattr(engine._loop, "step", stepping)
        yield


@pytest.fixture
def slowly(restless):
    with slow(*restless.engines):
        yield


def place_of(cluster, name):
    """Return where a request is, which must be under way."""
    ticket = cluster._members.find(name)
    assert ticket is not None, "it has ended"
    return ticket.at[0]


async def at(cluster, name, place):
    """Wait until a request runs at an engine."""

    def is_there():
        ticket = cluster._members.find(name)
        return ticket and ticket.at[0] == place and ticket.has_begun

    await until(is_there)


@pytest.mark.parametrize("kind", EXPORTED)
def test_a_request_that_moves_all_the_time(restless, placement, alone, kind, compiles):
    prompt, adapter, sampling = EXPORTED[kind]
    if sampling.seed is None and sampling.temperature:
        sampling = dataclasses.replace(sampling, seed=7)
    want = alone(prompt, adapter, sampling)
    placement.wanted = None
    num_moves = restless.stats().num_moves
    with compiles:
        got = ask(restless, prompt, adapter, sampling)
    assert compiles.count == 0
    assert_same(got, want)
    assert restless.stats().num_moves > num_moves


def test_one_of_two_samples_may_have_ended(restless, placement, alone):
    sampling = dataclasses.replace(DRAWN, n=2, max_new_tokens=40, seed=12)
    want = alone("hello", "a", sampling)
    early = want[0].token_ids[3]
    assert early not in want[1].token_ids[:12]
    sampling = dataclasses.replace(sampling, stop_token_ids=[early])
    want = alone("hello", "a", sampling)
    placement.wanted = None
    num_moves = restless.stats().num_moves
    with slow(*restless.engines):
        assert_same(ask(restless, "hello", "a", sampling), want)
    # Some before, and many after the first has ended.
    assert restless.stats().num_moves > num_moves + 8


@pytest.mark.slow
def test_many_come_go_and_move(restless, placement, alone):
    rng = random.Random(0)
    adapters = (None, *"abcdefg")
    requests = [
        (
            [256, *(rng.randrange(256) for _ in range(rng.randrange(40)))],
            rng.choice(adapters),
            pj.SamplingParams(
                max_new_tokens=rng.randrange(1, 50),
                temperature=rng.choice([0.0, 1.0]),
                seed=number,
                ignore_eos=True,
            ),
        )
        for number in range(40)
    ]
    placement.wanted = None

    async def answer(number):
        name, seen = f"r{number}", []
        pieces = restless.generate(*requests[number], request_id=name)
        answer = asyncio.create_task(completions(pieces, seen))
        if number % 5 == 4:
            await until(lambda: answer.done() or len(seen) > number % 11)
            restless.cancel(name)
        return await answer

    async def main():
        async def after(number):
            await asyncio.sleep(0.01 * number)
            return await answer(number)

        return await asyncio.gather(*(after(number) for number in range(40)))

    num_cancelled = 0
    for request, [got] in zip(requests, run(main()), strict=True):
        [want] = alone(*request)
        if got.finish_reason == "cancelled":
            num_cancelled += 1
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
        else:
            assert got == want
    assert restless.stats().num_moves > 20 and num_cancelled


def test_a_text_is_a_prompt_too(restless, placement, alone, monkeypatch):
    monkeypatch.setattr(cluster_module, "_LONG", 3)
    assert_same(ask(restless, "hello", "a", GREEDY), alone("hello", "a"))
    assert_same(ask(restless, "hi", None, GREEDY), alone("hi"))


def test_requests_share_an_engine_and_the_last_one_joins_them(root, alone):
    """The paper's consolidation: an engine with little to do is emptied."""
    cluster = make_cluster(root, placement=pj.Consolidate(every_s=0.01))
    long = dataclasses.replace(LONG, max_new_tokens=90)

    async def main():
        def answer(number):
            pieces = cluster.generate("hi", "a", long, request_id=f"r{number}")
            return asyncio.create_task(completions(pieces))

        with held(cluster.engines[0]):  # so that nobody ends before
            first = [answer(number) for number in range(4)]
            await until(lambda: cluster._members.num_at(0) == 4)
            last = answer(4)
            await at(cluster, "r4", 1)
            cluster.cancel("r0")
        await first[0]
        await at(cluster, "r4", 0)
        assert cluster.stats().loads[1].num_sequences == 0
        return await asyncio.gather(*first[1:], last)

    with cluster, slow(*cluster.engines):
        answers = run(main())
        check_all_idle(cluster)
    want = alone("hi", "a", long)
    assert all(one == want for one in answers)
    assert cluster.stats().num_moves >= 1


def test_who_loses_its_seat_goes_where_pages_are(root, alone):
    """The paper's eviction: the newest is computed again where there is room."""
    cluster = make_cluster(root, placement=pj.Consolidate(every_s=100.0))
    long = dataclasses.replace(LONG, max_new_tokens=80)
    prompts = [[256, 1 + number] for number in range(4)]

    async def main():
        pieces = [cluster.generate(prompt, None, long) for prompt in prompts]
        return await asyncio.gather(*map(completions, pieces))

    with cluster, slow(*cluster.engines):
        answers = run(main())
        check_all_idle(cluster)
        stats = cluster.stats()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == alone(prompt, None, long)
    # All four began at the first one, whose ten pages are too few for them.
    assert stats.engines[0].num_preempted and stats.num_moves
    assert stats.engines[1].base.num_new_tokens > 0


def test_more_than_all_seats(root, alone):
    cluster = make_cluster(root, placement=pj.Spread())
    requests = [(f"hi {number}", "abc"[number % 3], GREEDY) for number in range(20)]

    async def main():
        pieces = [cluster.generate(*request) for request in requests]
        return await asyncio.gather(*map(completions, pieces))

    with cluster:
        answers = run(main())
        served = [one.num_steps for one in cluster.stats().engines]
    for request, answer in zip(requests, answers, strict=True):
        assert answer == alone(*request)
    assert all(served)


def test_a_drained_engine_is_given_back(root, alone):
    cluster = make_cluster(root)
    long = dataclasses.replace(LONG, max_new_tokens=90)

    async def main():
        pieces = cluster.generate("hi", "a", long, request_id="it")
        answer = asyncio.create_task(completions(pieces))
        await at(cluster, "it", 0)
        await cluster.drain(0)
        cluster.engines[0].close()
        for place in (1, 2, -1, "0"):
            with pytest.raises(ValueError, match=r"is the last one|place must be from"):
                await cluster.drain(place)
        return await answer

    with cluster:
        assert run(main()) == alone("hi", "a", long)
        assert ask(cluster, "hi", "b", GREEDY) == alone("hi", "b")
        assert [load.is_open for load in cluster.stats().loads] == [False, True]
        cluster.undrain(0)  # it has ended all the same
        cluster.register_adapter("new", root / "adapters" / "d")
        run(cluster.load_adapter("loaded", root / "adapters" / "e"))
        assert ask(cluster, "hi", "new", GREEDY) == named("new", alone("hi", "d"))
        run(cluster.pin_adapter("loaded"))
        run(cluster.pin_adapter("loaded", False))
        run(cluster.unload_adapter("loaded"))
        assert ask(cluster, "hi", "c", GREEDY) == alone("hi", "c")
        assert [load.is_open for load in cluster.stats().loads] == [False, True]
    with pytest.raises(pj.EngineClosedError, match="every engine of the cluster has"):
        ask(cluster, "hi")


def test_cancelling_on_the_way(restless, placement, alone, slowly):
    async def main():
        pieces = restless.generate("hi", "a", LONG, request_id="it")
        answer = asyncio.create_task(completions(pieces))
        await at(restless, "it", 0)
        with resuming_later(restless.engines[1]) as go:
            placement.wanted = {"it": 1}
            await until(lambda: place_of(restless, "it") == 1)
            restless.cancel("it")
            go.set()
            return await answer

    [got] = run(main())
    [want] = alone("hi", "a", LONG)
    assert got.finish_reason == "cancelled"
    assert got.token_ids == want.token_ids[: len(got.token_ids)]
    restless.cancel("it")
    restless.cancel("never")


@pytest.mark.parametrize("is_moving", [False, True])
def test_export_and_resume(restless, placement, alone, is_moving):
    seen, more = [], []

    async def main():
        pieces = restless.generate("hi", "a", LONG, request_id="it")
        answer = asyncio.create_task(completions(pieces, seen))
        await at(restless, "it", 0)
        if is_moving:
            placement.wanted = None
        state = await restless.export("it")
        [cut] = await answer
        assert cut.finish_reason == "exported"
        with pytest.raises(ValueError, match="no request under way has the id 'it'"):
            await restless.export("it")
        resumed = restless.resume(state, request_id="it")
        return await completions(resumed, more, is_whole=False)

    assert_same(run(main()), alone("hi", "a", LONG))
    text = "".join(piece.text for piece in seen + more)
    assert [text] == [one.text for one in alone("hi", "a", LONG)]


def test_export_of_one_that_nobody_reads(restless, placement, slowly):
    """Whoever asks first gets its state, also one that was taken out to be moved."""

    async def main():
        pieces = restless.generate("hi", "a", LONG, request_id="it")
        await anext(pieces)
        placement.wanted = {"it": 1}
        await until(lambda: place_of(restless, "it") == 1)
        state = await restless.export("it")
        # Its id is free at once, as at an engine.
        again = restless.resume(state, request_id="it")
        rest = [piece async for piece in pieces]
        assert rest[-1].completion.finish_reason == "exported"
        [whole] = await completions(again, is_whole=False)
        assert whole.token_ids[: len(rest[-1].completion.token_ids)] == (
            rest[-1].completion.token_ids
        )
        return state, rest[-1].completion

    state, cut = run(main())
    assert state.samples[0].token_ids == cut.token_ids


def test_what_has_all_its_tokens_is_not_exported(restless, placement, monkeypatch):
    monkeypatch.setattr(cluster_module, "_ON_ITS_WAY_S", 0.05)

    async def main():
        pieces = restless.generate("hi", None, GREEDY, request_id="it")
        await anext(pieces)
        await asyncio.to_thread(check_idle, restless.engines[0])
        with pytest.raises(ValueError, match="no request under way has the id 'it'"):
            await restless.export("it")
        return [piece async for piece in pieces]

    assert run(main())[-1].completion.finish_reason == "length"


def test_an_id_is_one_requests_alone(restless, placement):
    async def main():
        pieces = restless.generate("hi", None, GREEDY, request_id="it")
        await anext(pieces)
        with pytest.raises(ValueError, match="a request with the id 'it' is under"):
            await completions(restless.generate("hi", request_id="it"))
        async for piece in pieces:
            if piece.completion is not None:
                break  # all has come: the id is free
        again = restless.generate("hi", None, GREEDY, request_id="it")
        await completions(again)
        await pieces.aclose()

    run(main())
    with pytest.raises(ValueError, match="request_id must be a text, got 3"):
        ask(restless, "hi", request_id=3)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (("",), "prompt 0 is empty"),
        (([],), "prompt 0 is empty"),
        ((7,), "prompt 0 must be a text or a list"),
        (("hi", "nope"), "no adapter is named 'nope'"),
        (("hi", 3), "adapters must be one for all"),
        (("hi", None, "greedy"), "sampling must be one for all"),
        (([1] * 96,), "leaves no room for a new one"),
        (
            ("hi", None, pj.SamplingParams(n=10**9, temperature=1.0)),
            "n must be at most",
        ),
    ],
)
def test_bad_requests_fail_as_at_an_engine(restless, placement, request_, message):
    with pytest.raises(ValueError, match=message):
        ask(restless, *request_)
    with pytest.raises(ValueError, match="state must be a RequestState"):
        run(completions(restless.resume("state")))


def test_leaving_the_iterator_frees_all(restless, placement):
    async def main():
        placement.wanted = None
        for _ in range(3):
            async for _ in restless.generate("hi", "a", LONG):
                break

    run(main())


@pytest.mark.slow
def test_a_deadline_is_of_all_engines_together(restless, placement, alone):
    placement.wanted = None
    long = dataclasses.replace(LONG, max_new_tokens=90)

    num_moves = restless.stats().num_moves
    with slow(*restless.engines):
        start_s = time.monotonic()
        terms = pj.Terms(deadline_s=0.4)
        with pytest.raises(pj.DeadlineError, match=r"its deadline of 0\.4 s; it"):
            ask(restless, "h", "a", long, terms=terms)
        assert 0.4 <= time.monotonic() - start_s < 5
        # Moves take none of it.
        answer = ask(restless, "h", "a", LONG, terms=pj.Terms(deadline_s=30.0))
    assert answer == alone("h", "a", LONG)
    assert restless.stats().num_moves > num_moves + 5


@pytest.mark.slow
@pytest.mark.parametrize("who", ["reader", "exporter"])
def test_whoever_leaves_amid_a_move_harms_nobody(
    restless, placement, alone, who, slowly
):
    """Of several that wait for what was taken out."""

    async def main():
        def begin(name):
            pieces = restless.generate("hi", "a", LONG, request_id=name)
            return asyncio.create_task(completions(pieces))

        leaving, staying = begin("leaves"), begin("stays")
        await at(restless, "leaves", 0)
        await at(restless, "stays", 0)
        placement.wanted = None
        if who == "reader":
            await until(lambda: restless._members.find("leaves").moving is not None)
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
        else:
            for _ in range(20):
                with contextlib.suppress(TimeoutError, ValueError):
                    await asyncio.wait_for(restless.export("leaves"), 0.001)
            with contextlib.suppress(ValueError):
                await leaving
        return await staying

    assert run(main()) == alone("hi", "a", LONG)


@pytest.mark.slow
def test_a_full_queue_ends_nothing_that_was_let_in(root, alone):
    cluster = make_cluster(root, placement=Restless(), max_waiting=1)
    cluster._members.placement.wanted = None
    requests = [("hi", "abc"[number % 3], LONG) for number in range(10)]

    async def main():
        pieces = [cluster.generate(*request) for request in requests]
        return await asyncio.gather(*map(completions, pieces), return_exceptions=True)

    with cluster:
        answers = run(main())
        check_all_idle(cluster)
    assert cluster.stats().num_moves
    refused = [one for one in answers if isinstance(one, Exception)]
    assert all(isinstance(one, pj.QueueFullError) for one in refused)
    assert len(refused) < len(answers) - 4
    for request, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, Exception) or answer == alone(*request)


def test_a_reader_that_pauses_holds_up_nobody(restless, placement, root, monkeypatch):
    monkeypatch.setattr(mover, "_ASK_S", 0.01)
    monkeypatch.setattr(cluster_module, "_ON_ITS_WAY_S", 0.05)

    async def main():
        await restless.load_adapter("own", root / "adapters" / "e")
        pieces = restless.generate("hi", "own", GREEDY, request_id="it")
        await anext(pieces)
        await asyncio.to_thread(check_idle, restless.engines[0])
        await restless.drain(0)  # it has all its tokens, and nobody reads them
        restless.undrain(0)
        again = restless.generate("hi", "own", LONG, request_id="it")
        await anext(again)
        place = place_of(restless, "it")
        placement.wanted = {"it": 1 - place}
        await until(lambda: place_of(restless, "it") != place)
        await restless.unload_adapter("own", cancel=True)
        assert [piece async for piece in pieces][-1].completion.token_ids
        # It was at no engine then, for a caller that does not read.
        with pytest.raises(pj.UnknownAdapterError, match="no adapter is named 'own'"):
            [piece async for piece in again]

    run(main())


@pytest.mark.parametrize("is_moving", [False, True])
def test_an_event_loop_that_is_gone(
    restless, placement, monkeypatch, slowly, is_moving
):
    monkeypatch.setattr(mover, "_ASK_S", 0.01)
    monkeypatch.setattr(members, "_LOST_S", 0.2)
    loop = asyncio.new_event_loop()
    pieces = restless.generate("hi", "a", LONG, request_id="it")
    loop.run_until_complete(anext(pieces))
    if is_moving:
        placement.wanted = {"it": 1}
        run(until(lambda: place_of(restless, "it") == 1))
    loop.close()
    run(until(lambda: restless._members.find("it") is None))
    assert ask(restless, "hi", None, GREEDY, request_id="it")


@pytest.mark.slow
def test_two_event_loops_and_all_that_can_happen(restless, placement, alone, root):
    placement.wanted = None
    want = {name: alone("hi", name, LONG) for name in (None, "a", "e", "f")}
    failures = []

    async def one(rng, name):
        adapter = rng.choice([None, "a", "own"])
        asked = restless.generate("hi", adapter, LONG, request_id=name)
        task = asyncio.create_task(completions(asked, is_whole=False))
        draw = rng.random()
        await asyncio.sleep(0.03 * rng.random())
        if draw < 0.2:
            restless.cancel(name)
        elif draw < 0.3:
            task.cancel()
        elif draw < 0.5:
            with contextlib.suppress(ValueError):
                state = await restless.export(name)
                await task
                again = restless.resume(state, request_id=name)
                task = asyncio.create_task(completions(again, is_whole=False))
        [got] = await task
        rivals = [adapter] if adapter != "own" else ["e", "f"]
        whole = [want[rival][0].token_ids for rival in rivals]
        assert got.token_ids in [ids[: len(got.token_ids)] for ids in whole]
        if got.finish_reason not in ("cancelled", "exported"):
            assert len(got.token_ids) == 60

    async def replace(rng):
        for _ in range(6):
            await asyncio.sleep(0.03)
            source = root / "adapters" / rng.choice("ef")
            if rng.random() < 0.5:
                restless.register_adapter("own", source)
            else:
                await restless.load_adapter("own", source)

    def serve(seed):
        rng = random.Random(seed)

        async def main():
            tasks = [one(rng, f"{seed}.{number}") for number in range(12)]
            done = await asyncio.gather(*tasks, replace(rng), return_exceptions=True)
            for item in done:
                # Moved at the moment of a `register_adapter`, or left.
                mine = asyncio.CancelledError, pj.RequestError
                replaced = isinstance(item, ValueError) and "must have" in str(item)
                if isinstance(item, BaseException) and not isinstance(item, mine):
                    if not replaced:
                        failures.append(item)

        run(main())

    run(restless.load_adapter("own", root / "adapters" / "e"))
    threads = [threading.Thread(target=serve, args=[seed]) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    check_all_idle(restless)

    async def one_each():
        own = (
            completions(engine.generate("hi", "own", LONG))
            for engine in restless.engines
        )
        return await asyncio.gather(*own)

    first, second = run(one_each())
    assert first == second, "engines have other weights under one name"
    run(restless.unload_adapter("own"))


def test_an_engine_that_ends(root, alone, monkeypatch):
    cluster = make_cluster(root)
    first, _ = cluster.engines
    broken = threading.Event()
    step = first._loop.step

    def failing():
        if broken.is_set():
            raise RuntimeError("the device is gone")
        time.sleep(0.005)  # whoever has begun has not ended soon
        return step()

    monkeypatch.setattr(first._loop, "step", failing)

    async def main():
        pieces = cluster.generate("hi", "a", LONG, request_id="begun")
        seen = []
        begun = asyncio.create_task(completions(pieces, seen))
        await until(lambda: seen)
        with held(first):
            broken.set()
            other = asyncio.create_task(completions(cluster.generate("hi", "b", LONG)))
            await until(lambda: cluster._members.num_at(0) == 2)
        with pytest.raises(pj.EngineClosedError):
            await begun
        return await other

    with cluster:
        assert run(main()) == alone("hi", "b", LONG)
        assert ask(cluster, "hi", "c", GREEDY) == alone("hi", "c")
        cluster.register_adapter("new", root / "adapters" / "d")
        assert ask(cluster, "hi", "new", GREEDY) == named("new", alone("hi", "d"))
        cluster.engines[1].close()
        with pytest.raises(pj.EngineClosedError):
            ask(cluster, "hi")
        with pytest.raises(pj.EngineClosedError, match="all engines of the cluster"):
            cluster.register_adapter("new", root / "adapters" / "d")


@pytest.mark.parametrize("is_moving", [False, True])
def test_closing_ends_what_is_under_way(root, is_moving):
    cluster = make_cluster(root, placement=Restless())
    if is_moving:
        cluster._members.placement.wanted = None

    async def main():
        pieces = [cluster.generate("hi", "a", LONG) for _ in range(6)]
        answers = [asyncio.create_task(completions(one)) for one in pieces]
        await until(lambda: sum(one.num_running for one in cluster.stats().engines) > 4)
        await asyncio.to_thread(cluster.close)
        for answer in answers:
            with pytest.raises(pj.EngineClosedError):
                await answer

    with slow(*cluster.engines):
        run(main())
    cluster.close()
    assert not cluster._mover._thread.is_alive()


def test_a_cluster_that_is_dropped_ends(root):
    cluster = make_cluster(root)
    threads = [engine._thread._thread for engine in cluster.engines]
    threads.append(cluster._mover._thread)
    ask(cluster, "hi", "a", GREEDY)
    gone = weakref.ref(cluster)
    del cluster
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_mover_that_meets_an_error_goes_on(restless, placement, alone, caplog):
    calls = []

    def failing(loads, requests):
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("a policy of the user's")
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "gathered", failing)
        assert ask(restless, "hi", "a", LONG) == alone("hi", "a", LONG)
        run(until(lambda: len(calls) > 3 or not len(restless._members)))
    assert "requests stay where they are" in caplog.text


class TestAdapters:
    def test_registered_ones_are_everywhere(self, restless, placement, root, alone):
        restless.register_adapter("own", root / "adapters" / "e")
        placement.wanted = None
        assert ask(restless, "hi", "own", LONG) == named("own", alone("hi", "e", LONG))
        run(restless.unload_adapter("own"))
        with pytest.raises(pj.UnknownAdapterError, match="no adapter is named 'own'"):
            ask(restless, "hi", "own")
        with pytest.raises(pj.UnknownAdapterError, match="no adapter is named 'own'"):
            run(restless.unload_adapter("own"))

    def test_loaded_ones_replace_if_they_are_good(
        self, restless, placement, root, alone, tmp_path
    ):
        run(restless.load_adapter("own", root / "adapters" / "e"))
        with pytest.raises(ValueError):
            run(restless.load_adapter("own", tmp_path))
        placement.wanted = None
        assert ask(restless, "hi", "own", LONG) == named("own", alone("hi", "e", LONG))
        run(restless.load_adapter("own", root / "adapters" / "f"))
        assert ask(restless, "hi", "own", LONG) == named("own", alone("hi", "f", LONG))
        run(restless.unload_adapter("own"))

    def test_who_began_under_old_weights_stays(self, restless, placement, root, alone):
        async def main():
            await restless.load_adapter("own", root / "adapters" / "e")
            pieces = restless.generate("hi", "own", LONG, request_id="it")
            answer = asyncio.create_task(completions(pieces))
            await at(restless, "it", 0)
            restless.register_adapter("own", root / "adapters" / "f")
            num_moves = restless.stats().num_moves
            placement.wanted = None
            got = await answer
            assert restless.stats().num_moves == num_moves
            await restless.unload_adapter("own")
            return got

        assert run(main()) == named("own", alone("hi", "e", LONG))

    def test_unloading_waits_for_who_is_on_its_way(
        self, restless, placement, root, alone, slowly
    ):
        async def main():
            await restless.load_adapter("own", root / "adapters" / "e")
            pieces = restless.generate("hi", "own", LONG, request_id="it")
            answer = asyncio.create_task(completions(pieces))
            await at(restless, "it", 0)
            with resuming_later(restless.engines[1]) as go:
                placement.wanted = {"it": 1}
                await until(lambda: place_of(restless, "it") == 1)
                unloading = asyncio.create_task(restless.unload_adapter("own"))
                await asyncio.sleep(0.05)
                go.set()
                got = await answer
            await unloading
            return got

        assert run(main()) == named("own", alone("hi", "e", LONG))

    def test_pinned_ones_are_on_every_device(self, restless, placement):
        async def main():
            await restless.pin_adapter("d")
            await until(
                lambda: all(
                    one.tiers["d"] == "device" for one in restless.stats().engines
                )
            )
            await restless.pin_adapter("d", False)

        run(main())


def test_host_memory_is_divided(root):
    with make_cluster(root, host_adapter_memory=2**20) as cluster:
        shares = {engine.config.host_adapter_memory for engine in cluster.engines}
        assert shares == {2**19}
        assert cluster.max_model_len == CONFIG["max_model_len"]
        assert cluster.default_sampling == cluster.engines[0].default_sampling


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": []}, "devices must be at least one, got none"),
        ({"placement": "spread"}, r"placement must be a Placement, .* got 'spread'"),
        ({"config": 3}, "config must be an EngineConfig, got 3"),
        ({"adapters": {"": "x"}}, "name"),
    ],
)
def test_bad_clusters(root, options, message):
    with pytest.raises(ValueError, match=message):
        pj.Cluster(root / "model", **options)


def test_an_engine_that_cannot_be_made_ends_the_others(root, monkeypatch):
    made, lock = [], threading.Lock()

    def make(*args, **kwargs):
        with lock:
            if made:
                raise ValueError("its device is full")
            made.append(make_engine(root))
            return made[0]

    monkeypatch.setattr(cluster_module, "Engine", make)
    with pytest.raises(ValueError, match="its device is full"):
        make_cluster(root)
    with pytest.raises(pj.EngineClosedError):
        run(completions(made[0].generate("hi")))


@pytest.mark.slow
def test_each_engine_has_a_device_of_its_own(root, alone, compiles):
    cluster = make_cluster(root, (0, 1), Restless())
    cluster._members.placement.wanted = None
    with cluster:
        for device, engine in zip(jax.devices(), cluster.engines, strict=False):
            runner = engine._runner
            pools = runner.adapters.pools
            arrays = jax.tree.leaves((runner._weights, runner._cache, pools))
            assert all(array.devices() == {device} for array in arrays)
        with compiles, slow(*cluster.engines):
            assert ask(cluster, "hi", "a", LONG) == alone("hi", "a", LONG)
        assert cluster.stats().num_moves > 1 and not compiles.count
