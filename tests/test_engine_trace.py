"""Many requests at any time: each gets exactly what it gets alone, and nothing is left.

More adapters than slots, so that they come and go; few KV pages, so that sequences lose
their seats; prompts that begin alike, so that pages are shared.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import pickle
import random
import threading
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import pytest

import punica_jax as pj
from punica_jax import device_pools, tiny
from punica_jax.request import MAX_LOGPROBS
from punica_jax.sampling import _gumbel, _random_halves
from punica_jax.sequence import SequenceState
from tests.engine_cases import (
    KV_PAGE_BYTES,
    NUM_KV_PAGES,
    PAGE_SIZE,
    Alone,
    assert_same,
    check_idle,
    completions,
    files,
    inside,
    make_engine,
    own_programs,
    run,
    until,
)

# Log-probabilities of the model that ships. In bfloat16 they lie up to 0.5 from those
# in float32; among those under another adapter is one that lies 3 away, or more.
NEAR = {"float32": 1e-3, "bfloat16": 0.75}


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
    # Those that other tests compiled would stand in for some that are not warmed up.
    with own_programs(), make_engine(root) as engine:
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


def plain(case):
    """Return a request whose log-probabilities say why it got its tokens."""
    asked, names = case.sampling, [*tiny.adapter_dirs()]
    sampling = pj.SamplingParams(
        max_new_tokens=asked.max_new_tokens,
        ignore_eos=True,
        temperature=asked.temperature,
        seed=asked.seed,
        n=asked.n,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=asked.prompt_logprobs,
    )
    adapter = case.adapter and names["abcdefg".index(case.adapter)]
    return dataclasses.replace(case, adapter=adapter, sampling=sampling)


def score(completion, place, sampling):
    """Return what the token at a place had most of: its log-probability, and noise."""
    logprob = completion.logprobs[place].logprob
    if not sampling.temperature:
        return logprob
    position = len(completion.prompt_token_ids) + place
    seed, token = sampling.seed + completion.sample_index, completion.token_ids[place]
    half = 264 // 2  # of the vocabulary
    bits = jnp.hstack(_random_halves(jnp.uint32([seed]), jnp.int32([position]), half))
    return logprob + sampling.temperature * float(_gumbel(bits)[0, token])


def assert_as_likely(one, other, tolerance):
    """Assert that the most likely tokens are, and how much so."""
    for mine, others in ((one.top, other.top), (other.top, one.top)):
        least = min(others.values())
        for token, logprob in mine.items():
            assert logprob <= others.get(token, least) + tolerance


def assert_near(got, want, sampling, tolerance):
    """Assert that tokens are the same until two of them tie; tell whether any do.

    Until then, and there, all that came before is the same: so are log-probabilities.
    """
    is_whole = got.finish_reason != "cancelled"
    prompts = got.prompt_logprobs or (), want.prompt_logprobs or ()
    for one, other in [*zip(*prompts, strict=is_whole)][1:]:
        assert_as_likely(one, other, tolerance)
    for place, tokens in enumerate(zip(got.token_ids, want.token_ids, strict=False)):
        assert_as_likely(got.logprobs[place], want.logprobs[place], tolerance)
        mine, others = (score(one, place, sampling) for one in (got, want))
        assert abs(mine - others) <= tolerance
        if len(set(tokens)) > 1:
            return True
    assert len(got.token_ids) == len(want.token_ids) or not is_whole
    return False


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        pytest.param("float32", "xla", marks=pytest.mark.slow),
        pytest.param("bfloat16", "xla", marks=pytest.mark.slow),
        pytest.param("bfloat16", "pallas_triton", marks=pytest.mark.gpu),
    ],
)
def test_tokens_are_those_alone_until_two_tie(
    dtype, implementation, tmp_path, monkeypatch
):
    (tmp_path / "model").symlink_to(tiny.model_dir())
    (tmp_path / "adapters").symlink_to(tiny.model_dir() / "adapters")
    if implementation == "xla":  # a GPU's engine takes locked pages by itself
        monkeypatch.setattr(device_pools, "locked_bytes", lambda most, _: most // 2)
    kv_page_bytes = 2 * 4 * 2 * PAGE_SIZE * 32 * jnp.dtype(dtype).itemsize
    options = {
        "dtype": dtype,
        "implementation": implementation,
        "kv_memory": NUM_KV_PAGES * kv_page_bytes,
    }
    cases = [plain(case) for case in trace(0, 60, span=200)]
    with own_programs():
        with make_engine(
            tmp_path,
            adapters=tiny.adapter_dirs(),
            host_adapter_memory=3_000_000,
            **options,
        ) as engine:
            locked = engine._sources.empty.__self__
            num_locked = locked.num_free
            assert min(num_locked.values()) > 0
            with checked(engine) as known:
                answered = run(replay(engine, cases))
            check_idle(engine)
            stats = engine.stats()
            assert min(locked.num_free.values()) < min(num_locked.values())
        alone = Alone(tmp_path, **options)
        num_parted = 0
        for case, got in zip(cases, answered, strict=True):
            want = alone(case.prompt, case.adapter, case.sampling)
            assert case.leaves is not None or len(got) == len(want)
            for one in got:
                whole = want[one.sample_index]
                num_parted += assert_near(one, whole, case.sampling, NEAR[dtype])
    assert not num_parted or dtype != "float32"
    assert stats.num_preempted >= 3
    assert sum(one.num_evictions for one in stats.adapters.values()) >= 5
    assert sum(number > 0 for number in known) >= 5


def assert_nothing_held(engine):
    """Assert that an idle engine holds what its adapters need, and nothing else."""
    thread, residence = engine._thread, engine._residence
    assert not thread._commands and not thread.requests._leaving
    loop = engine._loop
    assert not loop._timed and not loop._ending
    assert not loop.scheduler.sequences and not loop.scheduler._overtaken
    assert len(loop.scheduler._policy) == 0
    assert not residence._tasks and not residence.pinned and not residence._renames
    assert residence.num_on_device <= 3
    assert residence.host_bytes <= residence._on_host.budget
    # Prefixes lie on pages that there are.
    assert len(loop.pages._prefix_of) <= NUM_KV_PAGES
    assert len(loop.pages._families) <= NUM_KV_PAGES


@pytest.fixture
def host_bytes():
    """Return what tells how many bytes there are that were made since, arrays too."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_requests_leave_nothing(
    root, tmp_path, alone, compiles, host_bytes
):
    parts = [trace(seed, 500, span=1200, longest=20) for seed in range(1, 5)]
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
        held = []
        for part, cases in enumerate(parts):
            with checked(engine):
                answered = asyncio.run(replay(engine, cases))
            check_idle(engine)
            run(until(lambda: not engine._residence._tasks))
            inside(engine, lambda: None)
            assert_nothing_held(engine)
            (tmp_path / str(part)).write_bytes(pickle.dumps(answered))
            del answered
            gc.collect()
            assert not sequences, "nobody holds them any more"
            device_bytes = sum(array.nbytes for array in jax.live_arrays())
            held.append((len(gc.get_objects()), host_bytes(), device_bytes))
            # They read, copy and examine.
            assert threading.active_count() <= num_threads + 5
        stats = engine.stats()
        assert stats.num_preempted > 20
        every = [stats.base, *stats.adapters.values()]
        assert sum(one.num_evictions for one in every) > 100
        assert sum(one.num_cancelled for one in every) > 50
        # The first part fills tables that stay.
        grown = [last - then for then, last in zip(held[1], held[-1], strict=True)]
        num_objects, num_host_bytes, num_device_bytes = grown
        assert num_objects < 500, held
        assert num_host_bytes < 2**20, held
        assert num_device_bytes == 0, held
        for name in list(engine.adapters):
            run(engine.unload_adapter(name))
        assert engine.stats().host_adapter_bytes == 0
        assert engine.stats().num_on_device == 0
        tracemalloc.stop()  # all is measured, and what follows is quicker without
        for part, cases in enumerate(parts):
            answered = pickle.loads((tmp_path / str(part)).read_bytes())
            assert_as_alone(alone, cases, answered)
    assert compiles.count == 0
    assert KV_PAGE_BYTES * NUM_KV_PAGES == engine._base.plan.kv_bytes
