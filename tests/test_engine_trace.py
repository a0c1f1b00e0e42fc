"""Many requests at any time: each gets exactly what it gets alone, and nothing is left.

More adapters than slots, so that they come and go; few KV pages, so that sequences lose
their seats; prompts that begin alike, so that pages are shared.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import random
import threading
import weakref

import pytest

import punica_jax as pj
from punica_jax.sequence import SequenceState
from tests.engine_cases import (
    KV_PAGE_BYTES,
    NUM_KV_PAGES,
    Alone,
    assert_same,
    check_idle,
    completions,
    files,
    inside,
    make_engine,
    run,
    until,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A request, when it comes, and after how many pieces it is left, if it is."""

    prompt: tuple[int, ...]
    adapter: str | None
    sampling: pj.SamplingParams
    arrives: int
    leaves: int | None


def trace(seed: int, count: int, *, span: int, longest: int = 30) -> list[Case]:
    """Return random requests; `arrives` counts steps."""
    rng = random.Random(seed)
    beginnings = [
        tuple(rng.randrange(256) for _ in range(length)) for length in (16, 33, 40)
    ]
    cases = []
    for _ in range(count):
        beginning = rng.choice([(), (), *beginnings])
        end = tuple(rng.randrange(256) for _ in range(rng.randint(1, 12)))
        num_new = rng.randint(1, longest)
        sampling = pj.SamplingParams(
            max_new_tokens=num_new, ignore_eos=rng.random() < 0.7
        )
        if rng.random() < 0.5:
            sampling = dataclasses.replace(
                sampling,
                temperature=rng.choice([0.7, 1.0, 1.5]),
                seed=rng.randrange(1000),
                n=rng.choice([1, 1, 1, 2, 3]),
                top_k=rng.choice([None, 20]),
                frequency_penalty=rng.choice([0.0, 0.6]),
                repetition_penalty=rng.choice([1.0, 1.2]),
            )
        if rng.random() < 0.2:
            sampling = dataclasses.replace(sampling, logprobs=rng.randint(0, 4))
        if rng.random() < 0.1:
            sampling = dataclasses.replace(sampling, prompt_logprobs=1)
        if rng.random() < 0.1:
            sampling = dataclasses.replace(sampling, stop=["a", "\x19", "??"])
        cases.append(
            Case(
                beginning + end,
                rng.choice([None, *"aabcdefg"]),
                sampling,
                rng.randrange(span),
                rng.randint(0, 6) if rng.random() < 0.15 else None,
            )
        )
    return cases


@contextlib.contextmanager
def checked(engine):
    """Check the bookkeeping after every step; tell how often a prefix was known."""
    known = []
    step, sit = engine._loop.step, SequenceState.sit

    def checking():
        over = step()
        engine._loop.scheduler.check_integrity()
        engine._residence.check_integrity()
        return over

    def sitting(sequence, seat, pages, num_cached, **rest):
        known.append(num_cached)
        sit(sequence, seat, pages, num_cached, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._loop, "step", checking)
        patch.setattr(SequenceState, "sit", sitting)
        yield known


async def replay(engine, cases):
    """Send each request when so many steps have been; return what all of them got."""
    first = engine.stats().num_steps
    tasks = {}

    async def answer(number, case):
        name = f"case {number}"
        pieces = engine.generate(
            case.prompt, case.adapter, case.sampling, request_id=name
        )
        if case.leaves is None:
            return await completions(pieces)
        got, num_seen = [], 0
        if not case.leaves:
            engine.cancel(name)  # before it is there: nothing
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                num_seen += 1
                if num_seen == case.leaves:
                    if number % 2:
                        break
                    engine.cancel(name)
                if piece.completion is not None:
                    got.append(piece.completion)
        return got

    def may_come(case):
        # Steps stand still when there is nothing to do.
        come = engine._loop.num_steps - first >= case.arrives
        return come or all(task.done() for task in tasks.values())

    for number, case in sorted(enumerate(cases), key=lambda one: one[1].arrives):
        await until(functools.partial(may_come, case))
        tasks[number] = asyncio.create_task(answer(number, case))
    return await asyncio.gather(*(tasks[number] for number in range(len(cases))))


def assert_as_alone(alone, cases, answered):
    # One adapter after the other: they hardly ever have to be loaded.
    order = sorted(range(len(cases)), key=lambda i: str(cases[i].adapter))
    num_cut = 0
    for i in order:
        case, got = cases[i], answered[i]
        want = alone(case.prompt, case.adapter, case.sampling)
        if case.leaves is None:
            assert_same(got, want, case)
            continue
        for completion in got:
            whole = want[completion.sample_index]
            if completion.finish_reason != "cancelled":
                assert_same([completion], [whole], case)
                continue
            num_cut += 1
            count = len(completion.token_ids)
            assert completion.token_ids == whole.token_ids[:count], case
    return num_cut


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return files(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(root):
    return Alone(root)


def test_a_trace_gives_what_its_requests_get_alone(root, alone, compiles):
    cases = trace(0, 120, span=500)
    with make_engine(root) as engine:
        with checked(engine) as known, compiles:
            answered = run(replay(engine, cases))
        stats = engine.stats()
        check_idle(engine)
    assert compiles.count == 0
    assert_as_alone(alone, cases, answered)
    # The trace did what it is for.
    assert stats.num_preempted >= 3
    assert sum(one.num_evictions for one in stats.adapters.values()) >= 10
    assert sum(number > 0 for number in known) >= 5
    every = [stats.base, *stats.adapters.values()]
    assert sum(one.num_cancelled for one in every) >= 3
    num_sequences = sum(case.sampling.n for case in cases)
    assert sum(one.num_requests for one in every) == num_sequences
    ended = sum(one.num_finished + one.num_cancelled for one in every)
    assert ended == num_sequences and not any(one.num_failed for one in every)


def assert_nothing_held(engine):
    """Assert that an idle engine holds what its adapters need, and nothing else."""
    thread, residence = engine._thread, engine._residence
    assert not thread._commands and not thread._leaving
    loop = engine._loop
    assert not loop._timed and not loop._ending
    assert not loop.scheduler._claims and not loop.scheduler._overtaken
    assert len(loop.scheduler._policy) == 0
    assert not residence._tasks and not residence._pinned and not residence._renames
    assert residence.num_on_device <= 3
    assert residence.host_bytes <= residence._on_host.budget
    # Prefixes lie on pages that there are.
    assert len(loop.pages._prefix_of) <= NUM_KV_PAGES
    assert len(loop.pages._families) <= NUM_KV_PAGES


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing(root, alone, compiles):
    sequences = weakref.WeakSet()
    make = SequenceState.__init__

    def making(sequence, **arguments):
        make(sequence, **arguments)
        sequences.add(sequence)

    with (
        make_engine(root, host_adapter_memory=200_000) as engine,
        pytest.MonkeyPatch.context() as patch,
        compiles,
    ):
        patch.setattr(SequenceState, "__init__", making)
        num_threads = threading.active_count()
        counts = []
        for part in range(4):
            cases = trace(part + 1, 500, span=1200, longest=20)
            with checked(engine):
                answered = asyncio.run(replay(engine, cases))
            check_idle(engine)
            run(until(lambda: not engine._residence._tasks))
            inside(engine, lambda: None)
            assert_nothing_held(engine)
            assert_as_alone(alone, cases[::10], answered[::10])
            del answered
            gc.collect()
            assert not sequences, "nobody holds them any more"
            counts.append(len(gc.get_objects()))
            # They read, copy and examine.
            assert threading.active_count() <= num_threads + 5
        stats = engine.stats()
        assert stats.num_preempted > 20
        every = [stats.base, *stats.adapters.values()]
        assert sum(one.num_evictions for one in every) > 100
        assert sum(one.num_cancelled for one in every) > 50
        # The first part fills tables that stay.
        assert counts[-1] - counts[1] < 500, counts
        for name in list(engine.adapters):
            run(engine.unload_adapter(name))
        assert engine.stats().host_adapter_bytes == 0
        assert engine.stats().num_on_device == 0
    assert compiles.count == 0
    assert KV_PAGE_BYTES * NUM_KV_PAGES == engine._base.plan.kv_bytes
