"""Requests of an engine: how they come, how they end, and what is left of them."""

import asyncio
import contextlib
import dataclasses
import gc
import queue
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

import punica_jax as pj
from punica_jax import prompts
from punica_jax.engine_request import own_copy
from punica_jax.request_state import SampleState
from punica_jax.request_table import RequestTable
from punica_jax.stops import StopStrings
from tests.engine_cases import (
    CONFIG,
    GREEDY,
    NUM_KV_PAGES,
    Alone,
    Pause,
    assert_same,
    check_idle,
    completions,
    export_amid,
    files,
    has_tokens,
    held,
    inside,
    make_engine,
    own_programs,
    run,
    until,
)

LONG = pj.SamplingParams(max_new_tokens=60, ignore_eos=True)
DRAWN = pj.SamplingParams(
    max_new_tokens=14,
    temperature=1.0,
    seed=3,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    ignore_eos=True,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return files(tmp_path_factory)


@pytest.fixture(scope="module")
def engine(root):
    with make_engine(root) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(root):
    return Alone(root)


@pytest.fixture(autouse=True)
def leaves_it_idle(engine):
    yield
    check_idle(engine)


@pytest.fixture
def other(root):
    """An engine that a test may spoil."""
    with make_engine(root) as other:
        yield other


def ask(engine, *request, **options):
    return run(completions(engine.generate(*request, **options)))


@pytest.mark.parametrize(
    ("prompt", "adapter", "sampling"),
    [
        ("hello", None, GREEDY),
        ("hello", "a", DRAWN),
        (
            [256, *range(50)],
            "c",
            dataclasses.replace(DRAWN, n=3, logprobs=2, prompt_logprobs=1),
        ),
        ("stop", "b", dataclasses.replace(LONG, stop=["\x19\ufffd", "b"])),
    ],
)
def test_pieces_add_up_and_equal_an_llm(engine, alone, prompt, adapter, sampling):
    want = alone(prompt, adapter, sampling)
    assert_same(ask(engine, prompt, adapter, sampling), want)


def test_the_default_sampling_is_the_checkpoints(engine, alone):
    [got] = ask(engine, "hello")
    assert got.finish_reason in ("stop", "length")
    assert [got] == alone("hello", None, engine.default_sampling)


def test_many_tasks_on_two_event_loops(engine, alone):
    adapters = (None, "a", "b", "c", "d")
    requests = [(f"hi {i % 7}", adapters[i % 5]) for i in range(24)]
    answers = {}

    def serve(part):
        async def main():
            return await asyncio.gather(
                *(completions(engine.generate(*one, GREEDY)) for one in requests[part])
            )

        answers[part.start] = run(main())

    threads = [
        threading.Thread(target=serve, args=[slice(start, None, 2)])
        for start in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start, answered in answers.items():
        for request, got in zip(requests[start::2], answered, strict=True):
            assert got == alone(*request), request
    assert answers.keys() == {0, 1}


def steps_after_end(engine, monkeypatch):
    """Return a list that gets, after each step from an end on, whether all is free."""
    is_free, has_ended = [], threading.Event()
    step, end = engine._loop.step, engine._thread.requests.end

    def stepping():
        over = step()
        if has_ended.is_set():
            scheduler = engine._loop.scheduler
            is_free.append(not scheduler.sequences and not engine._loop.pages.num_uses)
        return over

    def ending(*arguments):
        has_ended.set()
        end(*arguments)

    monkeypatch.setattr(engine._loop, "step", stepping)
    monkeypatch.setattr(engine._thread.requests, "end", ending)
    return is_free


@pytest.mark.parametrize("how", ["aclose", "break", "task", "raise"])
def test_leaving_the_iterator_frees_all_within_one_step(engine, monkeypatch, how):
    is_free = steps_after_end(engine, monkeypatch)
    sampling = dataclasses.replace(DRAWN, n=2, max_new_tokens=80)

    async def leave(pause):
        pieces = engine.generate("hello", "a", sampling)
        if how == "aclose":
            await anext(pieces)
            await pause.reached()
            await pieces.aclose()
        elif how == "task":
            task = asyncio.create_task(completions(pieces))
            await pause.reached()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            async for _ in pieces:
                await pause.reached()
                if how == "break":
                    break
                raise ZeroDivisionError

    async def main():
        with Pause(engine, has_tokens(engine, 4)) as pause:
            with contextlib.suppress(ZeroDivisionError):
                await leave(pause)
            await until(lambda: bool(engine._thread._commands))
            pause.go()
            await until(lambda: bool(is_free))

    run(main())
    assert is_free[0] is True


def test_a_task_cancelled_at_any_moment_harms_nobody(engine, alone):
    async def main():
        for turns in range(12):
            task = asyncio.create_task(completions(engine.generate("hi", "a", GREEDY)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with held(engine):  # while the engine has not answered yet
                task = asyncio.create_task(completions(engine.generate("x", "a")))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        return await completions(engine.generate("hi", "a", GREEDY))

    assert run(main()) == alone("hi", "a")


def test_cancelling_by_id(engine, alone):
    [whole] = alone("hello", "a", LONG)

    async def main():
        with Pause(engine, has_tokens(engine, 5)) as pause:
            answer = asyncio.create_task(
                completions(engine.generate("hello", "a", LONG, request_id="it"))
            )
            await pause.reached()
            engine.cancel("it")
            engine.cancel("it")
            engine.cancel("nobody")
            # Its id may be used again at once.
            again = asyncio.create_task(
                completions(engine.generate("hello", "a", LONG, request_id="it"))
            )
            await until(lambda: len(engine._thread._commands) == 4)
            pause.go()
            return await answer, await again

    [got], again = run(main())
    assert again == [whole]
    assert got.finish_reason == "cancelled" and got.error is None
    assert 5 <= len(got.token_ids) <= 6
    assert got.token_ids == whole.token_ids[: len(got.token_ids)]
    assert got.text == engine.tokenizer.decode(got.token_ids)
    for name in (3, ["it"], None):
        engine.cancel(name)  # nobody has it
        with pytest.raises(ValueError, match="no request under way has the id"):
            run(engine.export(name))


def test_cancelling_who_waits(engine):
    async def main():
        with held(engine):
            answers = [
                asyncio.create_task(
                    completions(engine.generate("hello", "a", GREEDY, request_id=name))
                )
                for name in "abcdef"
            ]
            await asyncio.sleep(0)
            await until(lambda: len(engine._thread._commands) == 6)
            engine.cancel("f")
        return await asyncio.gather(*answers)

    *others, [last] = run(main())
    assert (last.finish_reason, last.token_ids, last.text) == ("cancelled", (), "")
    assert all(len(got.token_ids) == 12 for [got] in others)


def test_a_deadline(engine):
    before = engine.stats().base.num_failed
    text = "a request was not answered within its deadline of 1e-09 s; 0 tokens had"
    with pytest.raises(pj.DeadlineError, match=text):
        ask(engine, "hello", None, LONG, terms=pj.Terms(deadline_s=1e-9))
    assert engine.stats().base.num_failed == before + 1
    [got] = ask(engine, "hello", None, GREEDY, terms=pj.Terms(deadline_s=1e9))
    assert got.finish_reason == "length"


def test_a_deadline_amid_an_answer(engine, monkeypatch):
    async def main():
        with Pause(engine, has_tokens(engine, 3)) as pause:
            terms = pj.Terms(deadline_s=1000.0)
            answer = asyncio.create_task(
                completions(engine.generate("hello", "a", LONG, terms=terms))
            )
            beside = asyncio.create_task(completions(engine.generate("x", "a", GREEDY)))
            await pause.reached()
            # So long after they came.
            late = SimpleNamespace(monotonic=lambda: time.monotonic() + 2000)
            monkeypatch.setattr("punica_jax.loop.time", late)
            pause.go()
            with pytest.raises(pj.DeadlineError, match=r"of 1000 s; [34] tokens had"):
                await answer
            return await beside

    assert len(run(main())[0].token_ids) == 12


def test_a_full_queue(root):
    # Four seats, and three that may wait.
    with make_engine(root, max_waiting=3) as engine:

        async def main():
            with held(engine):
                answers = [
                    asyncio.create_task(completions(engine.generate("x", "a", GREEDY)))
                    for _ in range(9)
                ]
                await until(lambda: len(engine._thread._commands) == 9)
            return await asyncio.gather(*answers, return_exceptions=True)

        *answered, one, two = run(main())
        assert all(isinstance(got, list) for got in answered)
        for error in (one, two):
            assert isinstance(error, pj.QueueFullError)
            assert str(error) == (
                "7 sequences wait already, and the request would bring 1 more; 7 may "
                "now: max_waiting = 3, and 4 for free seats; try again later or raise "
                "max_waiting"
            )
        with pytest.raises(ValueError, match="n must be at most 7 here, got 8"):
            ask(engine, "x", "a", dataclasses.replace(DRAWN, n=8))
        assert ask(engine, "x", "a", GREEDY) == answered[0]
        stats = engine.stats().adapters["a"]
        assert (stats.num_requests, stats.num_finished) == (8, 8)
        check_idle(engine)


def test_lengths_beyond_any_integer_of_the_device_are_a_requests_own(engine, alone):
    async def main():
        most = 1 << 40
        huge = pj.SamplingParams(max_new_tokens=most, min_new_tokens=most)
        beside = completions(engine.generate("hello", "a", GREEDY))
        return await asyncio.gather(
            completions(engine.generate("x", None, huge)), beside
        )

    [[long], beside] = run(main())
    assert long.finish_reason == "length"
    assert len(long.token_ids) + len(long.prompt_token_ids) == engine.max_model_len
    assert beside == alone("hello", "a", GREEDY)


def test_only_what_takes_long_leaves_its_event_loop(engine, monkeypatch):
    seen, make = [], engine._prompts.sequences

    def making(*args, **kwargs):
        seen.append(threading.current_thread() is threading.main_thread())
        return make(*args, **kwargs)

    monkeypatch.setattr(engine._prompts, "sequences", making)
    ask(engine, "x", "a", GREEDY)
    with pytest.raises(
        ValueError, match=r"prompt 0 has .* tokens, which leaves no room"
    ):
        ask(engine, "ab " * 10_000, "a", GREEDY)
    monkeypatch.setattr(prompts, "_LONG", 600)
    few = dataclasses.replace(DRAWN, max_new_tokens=1)
    for num_samples in (3, 4):
        ask(engine, [5] * 30, "a", dataclasses.replace(few, n=num_samples))
    # Each sample takes some time, however short the prompt.
    monkeypatch.setattr(prompts, "_LONG", 500)
    for num_samples in (3, 4):
        ask(engine, [5], "a", dataclasses.replace(few, n=num_samples))
    assert seen == [True, False, True, False, True, False]


def test_an_id_that_was_made_is_nobodys(root):
    with make_engine(root) as engine:

        async def main():
            ids = [f"request {number}" for number in range(4)]
            with Pause(engine, has_tokens(engine, 1)) as pause:
                named = asyncio.gather(
                    *(
                        completions(engine.generate("x", "a", GREEDY, request_id=one))
                        for one in ids
                    )
                )
                await pause.reached()
                others = asyncio.gather(
                    *(completions(engine.generate("x", "a", GREEDY)) for _ in range(3))
                )
                await asyncio.sleep(0)
                pause.go()
                return [*await named, *await others]

        assert len({got.text for [got] in run(main())}) == 1


@pytest.mark.parametrize(
    "option",
    [
        "device",
        pytest.param("precision", marks=pytest.mark.slow),
        pytest.param("rank", marks=pytest.mark.slow),
        pytest.param("x64", marks=pytest.mark.slow),
    ],
)
def test_its_thread_has_the_configuration_of_who_made_it(root, compiles, option):
    """Weights, cache and programs are where and what they were made to be."""
    last = jax.devices()[-1]
    options = {
        "device": jax.default_device(last),
        "precision": jax.default_matmul_precision("highest"),
        "rank": jax.numpy_rank_promotion("warn"),
        "x64": jax.enable_x64(True),
    }
    sampling = pj.SamplingParams(max_new_tokens=4, ignore_eos=True)
    with own_programs(), options[option]:
        engine = make_engine(root, max_seats=1, max_step_rows=8)
    with engine, compiles:
        for adapter in (None, "a", "b"):
            ask(engine, "hello", adapter, sampling)
        runner = engine._runner
        arrays = runner._weights, runner._cache, runner.adapters.pools
        devices = {next(iter(one.devices())) for one in jax.tree.leaves(arrays)}
    assert compiles.count == 0
    assert len(jax.devices()) > 1
    assert devices == {last if option == "device" else jax.devices()[0]}


_NOT_CLOSED = """
import asyncio, sys
import punica_jax as pj
from tests.engine_cases import CONFIG

LONG_ENOUGH = pj.SamplingParams(max_new_tokens=60, ignore_eos=True)
engine = pj.Engine(sys.argv[1], config=pj.EngineConfig(**CONFIG | {"warm_up": False}))

async def answer():
    async for _ in engine.generate("hello", None, LONG_ENOUGH):
        pass

async def main():
    await answer()
    async with asyncio.timeout(0.3):
        while True:
            await asyncio.gather(*(answer() for _ in range(4)))

try:
    asyncio.run(main())
except TimeoutError:
    print("the script ends")
"""


@pytest.mark.slow
@pytest.mark.parametrize("_", range(3))
def test_a_script_may_end_amid_a_step(root, _):
    done = subprocess.run(
        [sys.executable, "-c", _NOT_CLOSED, str(root / "model")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "the script ends\n"), done.stderr


def test_an_id_is_one_requests_alone(engine, alone):
    async def main():
        with Pause(engine, has_tokens(engine, 1)) as pause:
            first = completions(engine.generate("x", "a", GREEDY, request_id="same"))
            answer = asyncio.create_task(first)
            await pause.reached()
            second = completions(engine.generate("x", "a", GREEDY, request_id="same"))
            refused = asyncio.create_task(second)
            await until(lambda: bool(engine._thread._commands))
            pause.go()
            with pytest.raises(
                ValueError, match="a request with the id 'same' is under way"
            ):
                await refused
            return await answer

    assert run(main()) == alone("x", "a")
    assert ask(engine, "x", "a", GREEDY, request_id="same") == alone("x", "a")


@pytest.mark.parametrize(
    ("request_", "options", "message"),
    [
        ([""], {}, "prompt 0 is empty"),
        ([[5, 264]], {}, "prompt 0 has token 264; tokens must be integers from 0 to"),
        ([[7] * 96], {}, "prompt 0 has 96 tokens, .* max_model_len is 96; shorten it"),
        (["x", "nope"], {}, "no adapter is named 'nope'; known are|none is known"),
        (["x", b"a"], {}, "adapters must be one .* each, a str or None: got b'a'"),
        (["x", [["a"]]], {}, r"no adapter is named \['a'\]"),
        (["x", None, {}], {}, "sampling .*, a SamplingParams or None: got {}"),
        (["x", None, [3]], {}, "sampling 0 must be a SamplingParams, got 3"),
        (["x"], {"terms": {"priority": 1}}, r"terms must be a Terms, got {'priority'"),
        (["x"], {"request_id": 5}, "request_id must be a text, got 5"),
        (["x"], {"request_id": ["a"]}, r"request_id must be a text, got \['a'\]"),
    ],
)
def test_bad_requests_fail_alone(engine, alone, request_, options, message):
    async def main():
        async def bad():
            with pytest.raises(ValueError, match=message):
                await completions(engine.generate(*request_, **options))

        return await asyncio.gather(
            completions(engine.generate("hello", "a", GREEDY)), bad()
        )

    assert run(main())[0] == alone("hello", "a")


def test_closing_ends_what_is_under_way(root):
    engine = make_engine(root)

    async def main():
        with Pause(engine, has_tokens(engine, 3)) as pause:
            answers = [
                asyncio.create_task(completions(engine.generate("x", "a", LONG)))
                for _ in range(6)  # two of them wait
            ]
            await pause.reached()
            closing = asyncio.create_task(asyncio.to_thread(engine.close))
            await until(lambda: engine._thread._is_closing)
            late = asyncio.create_task(completions(engine.generate("x", "a", GREEDY)))
            await until(lambda: bool(engine._thread._commands))
            pause.go()
            await closing
        return await asyncio.gather(*answers, late, return_exceptions=True)

    errors = run(main())
    assert len({id(error) for error in errors}) == len(errors) == 7
    for error in errors:
        assert isinstance(error, pj.EngineClosedError)
        assert str(error) == "the engine has ended" and error.__cause__ is None
    engine.close()
    engine.cancel("x")  # as one that is not known any more
    assert not engine._thread._thread.is_alive()
    for call in (
        lambda: ask(engine, "x"),
        lambda: run(engine.export("x")),
        lambda: engine.register_adapter("x", root),
        lambda: run(engine.load_adapter("x", root)),
        lambda: run(engine.unload_adapter("a")),
        lambda: run(engine.pin_adapter("a")),
    ):
        with pytest.raises(pj.EngineClosedError, match="the engine has ended"):
            call()
    assert engine.stats().num_kv_pages == NUM_KV_PAGES


def test_closing_never_misses_its_thread(root):
    # It comes when the thread has nothing to do, and is about to sleep.
    engine = make_engine(root, warm_up=False)
    closing = threading.Thread(target=engine.close)
    awake, awake_before = queue.SimpleQueue(), engine._thread._awake

    def is_empty_late():
        if awake.empty() and not closing.is_alive():
            closing.start()
            awake.put(awake.get(timeout=10))  # `close` has told it
        return awake.empty()

    awake.put(None)
    engine._thread._awake = cast(
        Any, SimpleNamespace(empty=is_empty_late, get=awake.get, put=awake.put)
    )
    awake_before.put(None)
    engine._thread._thread.join(10)
    assert not engine._thread._thread.is_alive()
    closing.join(10)


def test_a_context_manager_closes(root):
    with make_engine(root) as engine:
        assert ask(engine, "hello", "a", GREEDY)
    with pytest.raises(pj.EngineClosedError):
        ask(engine, "hello", "a", GREEDY)


def test_an_error_in_the_thread_ends_all_with_its_cause(root, monkeypatch):
    engine = make_engine(root)
    launch, error = engine._runner.launch, RuntimeError("the device is lost")
    launched = []

    def fail(*arguments):
        launched.append(arguments)
        if len(launched) > 5:
            raise error
        return launch(*arguments)

    monkeypatch.setattr(engine._runner, "launch", fail)

    async def main():
        return await asyncio.gather(
            *(completions(engine.generate("x", "a", LONG)) for _ in range(6)),
            return_exceptions=True,
        )

    for got in run(main()):
        assert isinstance(got, pj.EngineClosedError) and got.__cause__ is error
    with pytest.raises(pj.EngineClosedError) as caught:
        ask(engine, "x")
    assert caught.value.__cause__ is error
    engine.close()


@pytest.mark.parametrize("how", ["push", "finish"])
def test_an_error_in_a_text_is_one_requests(engine, alone, monkeypatch, how):
    original = getattr(StopStrings, how)

    def fail(stops, *arguments, **options):
        if stops._stops == ("never",):
            raise RuntimeError("this text is broken")
        return original(stops, *arguments, **options)

    sampling = dataclasses.replace(LONG, stop="never")

    async def main():
        with Pause(engine, has_tokens(engine, 3)) as pause:
            answers = [
                asyncio.create_task(
                    completions(engine.generate("hello", "a", params, request_id=name))
                )
                for name, params in {"bad": sampling, "good": GREEDY}.items()
            ]
            await pause.reached()
            with monkeypatch.context() as patch:
                patch.setattr(StopStrings, how, fail)
                if how == "finish":
                    engine.cancel("bad")  # all is shown that was held back
                pause.go()
                return await asyncio.gather(*answers, return_exceptions=True)

    bad, good = run(main())
    assert isinstance(bad, RuntimeError) and str(bad) == "this text is broken"
    assert good == alone("hello", "a")


def test_every_asker_gets_an_error_of_its_own(engine, tmp_path):
    engine.register_adapter("missing", tmp_path / "nothing")
    mine = []

    class Variable:
        pass

    async def caller():
        variable = Variable()
        mine.append(weakref.ref(variable))
        await completions(engine.generate("hello", "missing", GREEDY))

    async def main():
        return await asyncio.gather(*(caller() for _ in "ab"), return_exceptions=True)

    errors = run(main())
    assert all(isinstance(error, pj.HubError) for error in errors)
    assert errors[0] is not errors[1] and str(errors[0]) == str(errors[1])
    del errors
    # What hands errors over may still name them; it has ended before the next answer.
    run(completions(engine.generate("hello", None, GREEDY)))
    gc.collect()
    assert [variable() for variable in mine] == [None, None]
    # Nor do its own frames gather there.
    error = engine.adapters["missing"].error
    assert error is not None and error.__traceback__ is None
    run(engine.unload_adapter("missing"))


def error_classes():
    modules = [m for name, m in sys.modules.items() if name.startswith("punica_jax")]
    classes = {v for m in modules for v in vars(m).values() if isinstance(v, type)}
    ours = [one for one in classes if one.__module__.startswith("punica_jax")]
    return sorted(
        (one for one in ours if issubclass(one, Exception)), key=lambda one: str(one)
    )


@pytest.mark.parametrize("error_class", error_classes())
def test_errors_can_be_copied(error_class):
    several = {pj.UnsupportedConfigError: ("rope", [1, 2], "it must be None")}
    error = error_class(*several.get(error_class, ("it is wrong",)))
    error.__cause__ = OSError(2, "gone")
    error.add_note("a note")
    copied = own_copy(error)
    assert copied is not error and type(copied) is error_class
    assert str(copied) == str(error) and vars(copied) == vars(error)
    assert copied.__cause__ is error.__cause__


def test_all_our_errors_are_among_them():
    names = {name for name in pj.__all__ if name.endswith("Error")}
    assert names <= {one.__name__ for one in error_classes()}


def test_an_error_that_cannot_be_copied():
    class Odd(ValueError):
        def __init__(self, one, two):
            super().__init__(one + two)

    copied = own_copy(Odd("so", " odd"))
    assert type(copied) is pj.RequestError and str(copied) == "Odd: so odd"


def test_an_engine_that_is_dropped_ends(root, engine):
    dropped = make_engine(root, warm_up=False)  # its programs are those of `engine`
    ask(dropped, "hello", "a", GREEDY)
    thread = dropped._thread._thread
    held = [dropped, dropped._residence, *dropped._runner._weights]
    held = [weakref.ref(one) for one in held]
    del dropped
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    gc.collect()
    assert {one() for one in held} == {None}


def test_a_request_under_way_keeps_its_engine(root):
    async def main():
        engine = make_engine(root, warm_up=False)
        pieces = engine.generate("hello", "a", LONG)
        await anext(pieces)
        thread = engine._thread._thread
        del engine
        gc.collect()
        await anext(pieces)
        assert thread.is_alive()
        [got] = await completions(pieces, is_whole=False)
        assert got.finish_reason == "length"  # the thread may have left by now
        return thread

    thread = run(main())
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_event_loop_that_is_gone(engine, alone):
    loop = asyncio.new_event_loop()
    pieces = engine.generate("hello", "a", LONG, request_id="left")
    with Pause(engine, has_tokens(engine, 3)) as pause:
        first = loop.create_task(anext(pieces))
        loop.run_until_complete(pause.reached())
        first.cancel()
        loop.close()  # with all that it had to do
        pause.go()
    assert ask(engine, "hello", "a", GREEDY) == alone("hello", "a")
    check_idle(engine)
    del first, pieces


def test_an_event_loop_that_is_gone_before_its_request_is_refused(engine, alone):
    commands = engine._thread._commands

    async def leave_both():
        twins = [engine.generate("x", "a", LONG, request_id="it") for _ in range(2)]
        tasks = [asyncio.create_task(completions(twin)) for twin in twins]
        await until(lambda: len(commands) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with held(engine):
        run(leave_both())  # its loop is closed then, and the second one refused
        assert len(commands) == 4
    assert ask(engine, "hello", "a", GREEDY) == alone("hello", "a")
    check_idle(engine)


def test_what_has_been_served_is_counted(root):
    with make_engine(root) as engine:
        fresh = engine.stats()
        assert (fresh.num_steps, fresh.num_adapters) == (0, 7)
        assert set(fresh.tiers.values()) == {"disk"}
        for _ in range(2):
            ask(engine, "hello", "a", GREEDY)
        ask(engine, "hello", None, dataclasses.replace(DRAWN, n=2))
        for name in "bcd":
            ask(engine, "hello", name, GREEDY)
        with pytest.raises(pj.DeadlineError):
            ask(engine, "x", "b", GREEDY, terms=pj.Terms(deadline_s=1e-9))

        async def cancel():
            with Pause(engine, has_tokens(engine, 2)) as pause:
                request = engine.generate("hello", "d", LONG, request_id="it")
                answer = asyncio.create_task(completions(request))
                await pause.reached()
                now = engine.stats()
                assert (now.num_running, now.num_waiting) == (1, 0)
                assert (now.num_step_sequences, now.num_step_rows) == (1, 1)
                assert now.num_free_kv_pages == NUM_KV_PAGES - 1
                engine.cancel("it")
                pause.go()
                return await answer

        [cut] = run(cancel())
        # Digests are computed after their adapters are ready.
        run(until(lambda: not engine._residence._tasks))
        stats = engine.stats()
        assert stats.num_steps > 0 and stats.num_preempted == 0
        assert (stats.num_step_sequences, stats.num_step_rows) == (0, 0)
        assert (stats.num_slots, stats.num_on_device, stats.num_adapters) == (3, 3, 7)
        tiers = ["host", *["device"] * 3, *["disk"] * 3]
        assert stats.tiers == dict(zip("abcdefg", tiers, strict=True))
        assert stats.host_adapter_bytes == sum(
            engine._residence[name].nbytes or 0 for name in "abcd"
        )
        a, b, d = (stats.adapters[name] for name in "abd")
        assert (a.num_requests, a.num_finished, a.num_failed) == (2, 2, 0)
        assert (a.num_prompt_tokens, a.num_new_tokens) == (2 * 6, 2 * 12)
        assert (a.num_reads, a.num_loads, a.num_evictions) == (1, 1, 1)
        assert a.load_s.count == 1 and 0 < a.load_s.mean_s < 60
        assert a.queue_s.count == a.first_token_s.count == a.token_s.count == 2
        assert 0 < a.queue_s.total_s <= a.first_token_s.total_s
        assert (b.num_requests, b.num_finished, b.num_failed) == (2, 1, 1)
        assert b.num_evictions == 0 and b.first_token_s.count == 1
        assert (d.num_requests, d.num_finished, d.num_cancelled) == (2, 1, 1)
        assert d.num_new_tokens == 12 + len(cut.token_ids)
        base = stats.base
        assert (base.num_requests, base.num_finished) == (2, 2)  # one of each sample
        assert (base.num_prompt_tokens, base.num_new_tokens) == (2 * 6, 2 * 14)
        assert base.num_reads == base.num_loads == 0
        check_idle(engine)


def finished_in_order(engine, requests):
    """Have all requests wait at once; return their numbers as they end."""
    order = []

    async def one(number, adapter, terms):
        sampling = dataclasses.replace(GREEDY, max_new_tokens=4)
        await completions(engine.generate("hello", adapter, sampling, terms=terms))
        order.append(number)

    async def main():
        with held(engine):
            answers = [
                asyncio.create_task(one(number, *request))
                for number, request in enumerate(requests)
            ]
            await until(lambda: len(engine._thread._commands) == len(requests))
        await asyncio.gather(*answers)

    run(main())
    return order


def test_higher_priorities_go_first(engine):
    ask(engine, "hello", "a", GREEDY)
    requests = [("a", pj.Terms(priority=int(i == 11))) for i in range(12)]
    order = finished_in_order(engine, requests)
    assert order.index(11) < 4 and order[4:] == sorted(order[4:])


@pytest.mark.parametrize(
    ("policy", "last"),
    [
        (pj.LatencyTargets, pj.Terms(first_token_s=0.001)),
        (pj.FairShare, pj.Terms(tenant="small")),
        (lambda: pj.FairShare({"small": 2.0}), pj.Terms(tenant="small")),
        (pj.FirstComeFirstServed, None),
    ],
)
def test_policies(root, alone, policy, last):
    with make_engine(root, policy=policy) as engine:
        assert ask(engine, "hello", "a", GREEDY) == alone("hello", "a")
        first = pj.Terms(tenant="large")
        requests = [*[("a", first)] * 11, ("a", last or first)]
        order = finished_in_order(engine, requests)
        assert sorted(order) == list(range(12))
        assert (order.index(11) < 4) == (last is not None)
        check_idle(engine)


class Choosy(pj.FirstComeFirstServed):
    """Takes nobody of one tenant."""

    def add(self, sequence):
        if sequence.terms.tenant == "unwanted":
            raise RuntimeError("not you")
        super().add(sequence)


def test_what_a_policy_raises_is_its_requests_alone(root, alone):
    with make_engine(root, policy=Choosy) as engine:
        with pytest.raises(RuntimeError, match="not you"):
            ask(engine, "hello", "a", GREEDY, terms=pj.Terms(tenant="unwanted"))
        assert ask(engine, "hello", "a", GREEDY) == alone("hello", "a")
        check_idle(engine)


EXPORTED = {
    "greedy": ("hello", "a", LONG),
    "drawn": ("hello", "b", dataclasses.replace(DRAWN, max_new_tokens=40, seed=None)),
    "penalties": (
        [256, *range(40)],
        None,
        dataclasses.replace(
            DRAWN, max_new_tokens=40, presence_penalty=0.7, logit_bias={70: 3.0}
        ),
    ),
    "logprobs": ("hello", "c", dataclasses.replace(LONG, logprobs=3)),
    "prompt_logprobs": (
        [256, *range(40)],
        "a",
        dataclasses.replace(LONG, prompt_logprobs=2, logprobs=0, max_new_tokens=40),
    ),
    "several": ("hello", "a", dataclasses.replace(DRAWN, n=2, max_new_tokens=40)),
    "stop": ("hello", "a", dataclasses.replace(LONG, stop=["K\x1f", "never"])),
}


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 23])
@pytest.mark.parametrize("kind", EXPORTED)
def test_an_exported_request_goes_on_elsewhere(engine, root, kind, num_tokens):
    prompt, adapter, sampling = EXPORTED[kind]
    seen, more = [], []

    async def main():
        with Pause(engine, has_tokens(engine, num_tokens)) as pause:
            request = engine.generate(prompt, adapter, sampling, request_id="it")
            answer = asyncio.create_task(completions(request, seen))
            await pause.reached()
            asked = await export_amid(engine, pause)
            state = await asked
        for cut, sample in zip(await answer, state.samples, strict=True):
            assert cut.finish_reason == "exported"
            assert cut.token_ids == sample.token_ids
            assert len(sample.token_ids) >= num_tokens or sampling.n > 1
        again = pj.RequestState.from_json(state.to_json())
        assert again == state
        with pytest.raises(ValueError, match="no request under way has the id 'it'"):
            await engine.export("it")
        resumed = other.resume(again, request_id="it")
        return state, await completions(resumed, more, is_whole=False)

    with make_engine(root) as other:
        state, got = run(main())
        check_idle(other)
    # Whoever is not told a seed draws one, which travels.
    if sampling.seed is None and sampling.temperature:
        sampling = dataclasses.replace(sampling, seed=state.samples[0].seed)
    assert_same(got, ask(engine, prompt, adapter, sampling))
    for index, completion in enumerate(got):
        pieces = [one.text for one in seen + more if one.index == index]
        assert "".join(pieces) == completion.text


def test_what_is_held_back_travels_unseen(engine, alone):
    [whole] = alone("hello", "a", LONG)
    at = 8
    # All but the last of its characters come before the cut.
    stop = whole.text[at : at + 12] + "?"
    sampling = dataclasses.replace(LONG, stop=stop)
    seen, more = [], []

    async def main():
        with Pause(
            engine,
            lambda: any(
                len(one._transcript.text) == at and len(one.new_tokens) > at + 4
                for one in engine._loop.scheduler.running
            ),
        ) as pause:
            request = engine.generate("hello", "a", sampling, request_id="it")
            answer = asyncio.create_task(completions(request, seen))
            await pause.reached()
            asked = await export_amid(engine, pause)
            await answer
            return await asked

    state = run(main())
    [got] = run(completions(engine.resume(state), more, is_whole=False))
    assert got.text == whole.text
    assert "".join(piece.text for piece in seen + more) == whole.text


def test_what_has_ended_in_flight_is_not_exported(engine, alone):
    [whole] = alone("hello", "a", LONG)
    sampling = dataclasses.replace(LONG, stop_token_ids=[whole.token_ids[5]])
    want = alone("hello", "a", sampling)

    async def main():
        def is_over():
            return any(one.is_over for one in engine._loop.scheduler.running)

        with Pause(engine, is_over) as pause:
            request = engine.generate("hello", "a", sampling, request_id="it")
            answer = asyncio.create_task(completions(request))
            await pause.reached()
            asked = await export_amid(engine, pause)
            with pytest.raises(ValueError, match="no request under way has the id"):
                await asked
            return await answer

    assert run(main()) == want


def test_what_has_failed_in_part_is_not_exported(engine):
    sampling = dataclasses.replace(DRAWN, n=2, max_new_tokens=40)

    async def main():
        with Pause(engine, has_tokens(engine, 3)) as pause:
            request = engine.generate("hello", "a", sampling, request_id="it")
            answer = asyncio.create_task(completions(request))
            await pause.reached()
            engine._loop.scheduler.running[0].fail(pj.RequestError("it is broken"))
            asked = await export_amid(engine, pause)
            with pytest.raises(ValueError, match="no request under way has the id"):
                await asked
            with pytest.raises(pj.RequestError, match="it is broken"):
                await answer

    run(main())


def test_states_that_do_not_fit(engine):
    state = pj.RequestState(
        prompt_token_ids=(5, 6),
        adapter="a",
        sampling=GREEDY,
        terms=pj.Terms(),
        samples=(),
    )

    def resume(state):
        return run(completions(engine.resume(state), is_whole=False))

    for other in ({}, None, state.to_json()):
        with pytest.raises(ValueError, match=r"state must be a RequestState as Engine"):
            resume(other)
    with pytest.raises(
        ValueError, match=r"a sample for each of n = 1 completions, got"
    ):
        resume(state)
    with pytest.raises(ValueError, match="no adapter is named 'nope'"):
        sample = SampleState(seed=0, token_ids=())
        resume(dataclasses.replace(state, adapter="nope", samples=(sample,)))
    with pytest.raises(ValueError, match="prompt 0 has token 264"):
        resume(dataclasses.replace(state, prompt_token_ids=(264,)))
    for tokens, message in [
        ((1,) * 13, "a sample must have at most 12 tokens here, got 13"),
        ((264,), "a sample's tokens must be from 0 to 263, got 264"),
    ]:
        sample = SampleState(seed=0, token_ids=tokens)
        with pytest.raises(ValueError, match=message):
            resume(dataclasses.replace(state, samples=(sample,)))
    sample = SampleState(seed=0, token_ids=(1, 2, 3))
    sampling = dataclasses.replace(GREEDY, stop_token_ids=[2])
    with pytest.raises(ValueError, match="a sample ends with its token 2, got more"):
        resume(dataclasses.replace(state, sampling=sampling, samples=(sample,)))
    with pytest.raises(ValueError, match="adapter_digest must be text or None, got 7"):
        SampleState(seed=0, token_ids=(), adapter_digest=cast(Any, 7))
    sample = SampleState(seed=0, token_ids=(1, 2))
    sampling = dataclasses.replace(GREEDY, logprobs=1)
    with pytest.raises(ValueError, match="log-probabilities of all of its 2 tokens"):
        resume(dataclasses.replace(state, sampling=sampling, samples=(sample,)))


def test_one_of_two_samples_may_have_ended(engine):
    sampling = dataclasses.replace(DRAWN, n=2, max_new_tokens=40, seed=12)
    want = ask(engine, "hello", "a", sampling)
    early = want[0].token_ids[3]
    assert early not in want[1].token_ids[:12]
    sampling = dataclasses.replace(sampling, stop_token_ids=[early])
    want = ask(engine, "hello", "a", sampling)

    async def main():
        def holds():
            running = engine._loop.scheduler.running
            return len(running) == 1 and len(running[0].new_tokens) > 6

        with Pause(engine, holds) as pause:
            request = engine.generate("hello", "a", sampling, request_id="it")
            answer = asyncio.create_task(completions(request))
            await pause.reached()
            asked = await export_amid(engine, pause)
            ended, cut = await answer
            assert (ended.finish_reason, cut.finish_reason) == ("stop", "exported")
            resumed = engine.resume(await asked)
            return await completions(resumed, is_whole=False)

    assert run(main()) == want


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_waiting": 0}, "max_waiting must be an integer of at least 1, got 0"),
        ({"max_waiting": True}, "max_waiting must be an integer .* got True"),
        ({"max_waiting": 1.5}, "max_waiting must be an integer .* got 1.5"),
        ({"policy": "fair"}, "policy must be a function that makes a queue, such as"),
        ({"policy": None}, "policy must be a function .* got None"),
        ({"max_seats": 0}, "max_seats must be an integer of at least 1, got 0"),
        ({"max_step_rows": 0}, "max_step_rows must be an integer of at least 1, got 0"),
        ({"num_slots": 0}, "num_slots must be an integer of at least 1, got 0"),
        ({"max_rank": 513}, "max_rank must be at most 512, got 513"),
        ({"max_model_len": 129}, "max_position_embeddings 128, got 129"),
        ({"page_size": 24}, "page_size must be a power of two .* got 24"),
        ({"kv_memory": 5}, "kv_memory = 5 is 0 bytes in whole pages, and one sequence"),
        ({"kv_memory": 0}, "kv_memory must be"),
        ({"adapter_memory": 5}, "adapter_memory = 5 is 5 bytes, and one adapter of"),
        ({"host_adapter_memory": 0}, "host_adapter_memory must be"),
        ({"implementation": "cuda"}, "implementation must be one of .* got 'cuda'"),
    ],
)
def test_bad_configs(root, fields, message):
    with pytest.raises(ValueError, match=message):
        pj.Engine(root / "model", config=pj.EngineConfig(**CONFIG | fields))


def test_what_is_no_config_or_policy(root):
    with pytest.raises(ValueError, match="config must be an EngineConfig, got"):
        pj.Engine(root / "model", config={"max_seats": 2})
    config = pj.EngineConfig(**CONFIG, policy=lambda: 5)
    with pytest.raises(ValueError, match="policy must make a Policy, got 5"):
        pj.Engine(root / "model", config=config)


def test_bad_places(root):
    config = pj.EngineConfig(**CONFIG)
    with pytest.raises(ValueError, match="adapters_dir must be a directory, got"):
        pj.Engine(root / "model", adapters_dir=root / "nothing", config=config)
    with pytest.raises(ValueError, match="adapters_dir must be a path, got 5"):
        pj.Engine(root / "model", adapters_dir=cast(Any, 5), config=config)
    with pytest.raises(pj.HubError, match="no such directory"):
        pj.Engine(root / "nothing", config=config)


def test_nothing_is_known_of_it_but_what_it_says(engine):
    assert "decode[4]" in engine.programs and "write_seat" in engine.programs
    assert engine.max_model_len == 96
    assert "Engine" in repr(engine)
    assert inside(engine, lambda: engine._loop.busy) is False


def test_two_of_one_id_are_forgotten_in_any_order():
    """The first has failed, and its other sample ends after the second's last one."""

    class Named:
        name, sequences = "x", ()

    for order in ((0, 1), (1, 0)):
        table = RequestTable(cast(Any, None), cast(Any, None), max_waiting=1)
        both: list[Any] = [Named(), Named()]
        table._requests.update(dict.fromkeys(both))
        table._named["x"] = both[1]
        for place in order:
            table.forget(both[place])
        assert not list(table) and not table._named
