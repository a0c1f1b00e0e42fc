"""Adapters of an engine: found, loaded, replaced, refused and let go."""

import asyncio
import dataclasses
import itertools
import shutil
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

import punica_jax as pj
from punica_jax import residence
from punica_jax.models import Adapter
from tests import tiny_checkpoint as tiny
from tests.engine_cases import (
    GREEDY,
    NUM_SLOTS,
    Alone,
    Pause,
    check_idle,
    completions,
    export_amid,
    files,
    has_tokens,
    held,
    inside,
    make_engine,
    run,
    until,
)
from tests.test_llm import spoil

LONG = pj.SamplingParams(max_new_tokens=60, ignore_eos=True)
PROMPT = [256, *range(40)]  # two full pages of 16 tokens and some more


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return files(tmp_path_factory)


@pytest.fixture(scope="module")
def shared(root):
    with make_engine(root) as engine:
        yield engine


@pytest.fixture
def engine(shared, root):
    """An engine with `a` to `g` on disk, as tests found it."""
    for name in [name for name in shared.adapters if len(name) > 1]:
        run(shared.unload_adapter(name))
    for name in "abcdefg":
        if name not in shared.adapters:
            shared.register_adapter(name, root / "adapters" / name)
    yield shared
    check_idle(shared)


@pytest.fixture(scope="module")
def alone(root):
    return Alone(root)


def ask(engine, *request, **options):
    return run(completions(engine.generate(*request, **options)))


def tokens(engine, *request):
    return [one.token_ids for one in ask(engine, *request)]


def load(engine, *arguments, **options):
    run(engine.load_adapter(*arguments, **options))


def arrays_of(folder):
    """Read an adapter's file as the arrays that were saved there."""
    tensors = load_file(folder / "adapter_model.safetensors")
    pairs = {}
    for name, array in tensors.items():
        module, _, factor = name.removesuffix(".weight").rpartition(".lora_")
        parts = module.split(".")
        at = int(parts[parts.index("layers") + 1]), parts[-1]
        pairs.setdefault(at, {})[factor] = array
    return {at: (pair["A"], pair["B"]) for at, pair in pairs.items()}


def test_more_adapters_than_slots(engine, alone):
    async def main():
        return await asyncio.gather(
            *(completions(engine.generate("hello", name, GREEDY)) for name in "abcdefg")
        )

    assert run(main()) == [alone("hello", name) for name in "abcdefg"]
    stats = engine.stats()
    assert stats.num_on_device == NUM_SLOTS
    assert sum(one.num_evictions for one in stats.adapters.values()) >= 7 - NUM_SLOTS


def test_registered_ones_can_be_named_at_once(engine, root, alone):
    # Though the engine's thread comes to know of them later.
    async def main():
        with held(engine):
            engine.register_adapter("new", root / "adapters" / "a")
            answer = asyncio.create_task(
                completions(engine.generate("hello", "new", GREEDY))
            )
            pinned = asyncio.create_task(engine.pin_adapter("new"))
            await until(lambda: len(engine._thread._commands) == 3)
        await pinned
        return await answer

    assert run(main())[0].token_ids == alone("hello", "a")[0].token_ids
    assert engine.stats().tiers["new"] == "device"


def test_a_folders_adapters_are_found(root, alone, tmp_path):
    folder = tmp_path / "outer" / "adapters"
    shutil.copytree(root / "adapters" / "a", folder / "x")
    shutil.copytree(root / "adapters" / "b", folder / "pinned")
    shutil.copytree(root / "adapters" / "b", folder.parent, dirs_exist_ok=True)
    shutil.copytree(root / "adapters" / "b", tmp_path / "beside")
    with make_engine(root, adapters_dir=folder) as engine:
        assert len(engine.adapters) == 0
        assert tokens(engine, "hello", "x", GREEDY) == alone.tokens("hello", "a")
        run(engine.pin_adapter("pinned"))
        run(until(lambda: engine.stats().tiers["pinned"] == "device"))
        for name in ("later", "..", "../../beside", str(folder / "x"), "x/", "./x", ""):
            with pytest.raises(pj.UnknownAdapterError, match="no adapter is named"):
                ask(engine, "hello", name)
        shutil.copytree(root / "adapters" / "b", folder / "later")
        want = alone.tokens("hello", "b")
        assert tokens(engine, "hello", "later", GREEDY) == want
        assert list(engine.adapters) == ["x", "pinned", "later"]
        run(engine.unload_adapter("x"))
        for _ in range(2):
            with pytest.raises(pj.UnknownAdapterError, match="named 'x'; known are"):
                ask(engine, "hello", "x")
        with pytest.raises(pj.UnknownAdapterError, match="no adapter is named 'x'"):
            run(engine.unload_adapter("x"))
        engine.register_adapter("x", folder / "later")
        assert tokens(engine, "hello", "x", GREEDY) == want
        check_idle(engine)


def test_a_folders_adapters_can_be_unloaded_before_they_are_known(root, tmp_path):
    for name in "xyz":
        shutil.copytree(root / "adapters" / "a", tmp_path / name)
    with make_engine(root, adapters_dir=tmp_path) as engine:
        run(engine.unload_adapter("x"))
        with pytest.raises(pj.UnknownAdapterError, match="no adapter is named 'x'"):
            ask(engine, "hello", "x")
        with pytest.raises(pj.UnknownAdapterError, match="no adapter is named 'nope'"):
            run(engine.unload_adapter("nope"))
        # Remembered is what would be found again, and nothing else.
        engine.register_adapter("elsewhere", root / "adapters" / "a")
        run(engine.unload_adapter("elsewhere"))
        run(engine.unload_adapter("y"))
        assert engine._finder._unloaded == {"x", "y"}
        # Also where it went, and came again, while others were unloaded.
        shutil.rmtree(tmp_path / "x")
        run(engine.unload_adapter("z"))
        shutil.copytree(root / "adapters" / "a", tmp_path / "x")
        with pytest.raises(pj.UnknownAdapterError, match="no adapter is named 'x'"):
            ask(engine, "hello", "x")
        check_idle(engine)


def test_a_folder_that_is_still_being_written(root, alone, tmp_path, monkeypatch):
    whole, path = root / "adapters" / "a", tmp_path / "x"
    path.mkdir()
    shutil.copy(whole / "adapter_config.json", path)
    with make_engine(root, adapters_dir=tmp_path) as engine:
        with pytest.raises(pj.AdapterError, match=r"no adapter_model\.safetensors"):
            ask(engine, "hello", "x", GREEDY)
        shutil.copy(whole / "adapter_model.safetensors", path)
        monkeypatch.setattr(residence, "RETRY_S", 0.0)
        assert tokens(engine, "hello", "x", GREEDY) == alone.tokens("hello", "a")
        assert engine.stats().adapters["x"].num_load_failures == 1


def test_nobody_finds_again_what_is_being_forgotten(root, tmp_path):
    shutil.copytree(root / "adapters" / "a", tmp_path / "x")
    with make_engine(root, adapters_dir=tmp_path) as engine:
        ask(engine, "hello", "x", GREEDY)

        async def main():
            with held(engine):
                unloaded = asyncio.create_task(engine.unload_adapter("x"))
                await until(lambda: len(engine._thread._commands) == 1)
                answer = asyncio.create_task(
                    completions(engine.generate("hello", "x", GREEDY))
                )
                await until(lambda: len(engine._thread._commands) == 2)
            await unloaded
            with pytest.raises(pj.UnknownAdapterError):
                await answer

        run(main())
        assert len(engine.adapters) == 0
        check_idle(engine)


@pytest.mark.parametrize("how", ["register", "load"])
def test_arrays_are_what_they_are_as_files(engine, root, alone, how):
    arrays = arrays_of(root / "adapters" / "b")
    if how == "load":
        load(engine, "arrays", arrays)
    else:
        engine.register_adapter("arrays", arrays)
    got = tokens(engine, "hello", "arrays", GREEDY)
    assert got == alone.tokens("hello", "b") == tokens(engine, "hello", "b", GREEDY)
    # A field scales them.
    load(engine, "arrays", arrays, lora_alpha=1)
    assert tokens(engine, "hello", "arrays", GREEDY) != got
    with pytest.raises(ValueError, match=r"only weights take fields of .*lora_alpha"):
        engine.register_adapter("x", root / "adapters" / "a", lora_alpha=1)
    with pytest.raises(ValueError, match="an adapter's name must be a text, not empty"):
        engine.register_adapter("", arrays)
    with pytest.raises(ValueError, match=r"an adapter's name must be a text, .* got 3"):
        load(engine, 3, arrays)


def test_a_broken_file_fails_its_requests_alone(engine, root, alone, tmp_path):
    path = tmp_path / "broken"
    shutil.copytree(root / "adapters" / "a", path)
    weights = path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    engine.register_adapter("broken", path)

    async def main():
        requests = ["broken", "a", "broken", None, "b"]
        return await asyncio.gather(
            *(completions(engine.generate("hello", name, GREEDY)) for name in requests),
            return_exceptions=True,
        )

    one, a, two, base, b = run(main())
    for error in (one, two):
        assert isinstance(error, ValueError) and "broken" in str(error)
    assert [a, base, b] == [alone("hello", name) for name in ("a", None, "b")]
    stats = engine.stats().adapters["broken"]
    assert stats.num_failed == 2 and stats.num_load_failures == 1
    weights.write_bytes(whole)
    engine.register_adapter("broken", path)
    assert tokens(engine, "hello", "broken", GREEDY) == alone.tokens("hello", "a")


def test_files_that_are_missing(engine, root):
    engine.register_adapter("missing", root / "nothing")
    with pytest.raises(pj.HubError, match="nothing: no such directory"):
        ask(engine, "hello", "missing")
    with pytest.raises(pj.HubError, match="nothing: no such directory"):
        load(engine, "missing", root / "nothing")


def test_weights_that_are_not_finite_fail_their_requests_alone(
    engine, root, alone, tmp_path
):
    path = spoil(root / "adapters" / "a", tmp_path / "nan", np.nan)
    engine.register_adapter("nan", path)

    async def main():
        return await asyncio.gather(
            *(completions(engine.generate("hello", name, GREEDY)) for name in names),
            return_exceptions=True,
        )

    names = ["nan", "a", None, "nan", "b"]
    one, a, base, two, b = run(main())
    for error in (one, two):
        assert isinstance(error, ValueError)
        assert "adapter 'nan' has weights that are NaN or infinite" in str(error)
    assert [a, base, b] == [alone("hello", name) for name in ("a", None, "b")]
    assert engine.stats().tiers["nan"] == "disk"
    with pytest.raises(ValueError, match="adapter 'a' has weights that are NaN"):
        load(engine, "a", path)
    assert ask(engine, "hello", "a", GREEDY) == a


def test_logits_that_are_not_finite_fail_their_requests_alone(
    engine, root, alone, tmp_path
):
    path = spoil(root / "adapters" / "a", tmp_path / "nan", np.nan)
    engine.register_adapter("nan", path, allow_nan=True)

    async def main():
        return await asyncio.gather(
            *(completions(engine.generate(PROMPT, name, GREEDY)) for name in names),
            return_exceptions=True,
        )

    names = ["nan", "a", None, "nan", "b"]
    for _ in range(2):
        one, a, base, two, b = run(main())
        for error in (one, two):
            assert isinstance(error, pj.RequestError)
            assert str(error) == (
                "the model's logits are not finite after token 41 of a sequence with "
                "adapter 'nan'"
            )
        assert [a, base, b] == [alone(PROMPT, name) for name in ("a", None, "b")]
    assert engine.stats().tiers["nan"] == "device"
    # What it wrote to its pages is nobody's.
    for name in "cdef":
        assert ask(engine, PROMPT, name, GREEDY) == alone(PROMPT, name)


def test_what_is_too_large(engine, tmp_path):
    big = tiny.write_adapter(tmp_path / "big", 65, ("down_proj",))
    engine.register_adapter("big", big)
    text = (
        "adapter 'big' does not fit: its rank is 65, above max_rank = 64; raise max_r"
    )
    for _ in range(2):
        with pytest.raises(pj.AdapterCapacityError, match=text):
            ask(engine, "hello", "big")
    with pytest.raises(pj.AdapterCapacityError, match=text):
        load(engine, "big", big)
    assert engine.stats().tiers["big"] == "disk"


def test_a_bad_replacement_leaves_the_old(engine, root, alone, tmp_path):
    want = alone.tokens("hello", "b")
    load(engine, "name", root / "adapters" / "b")
    wrong = np.ones((2, 31), np.float32), np.ones((32, 2), np.float32)
    bad = [
        ("nothing: no such directory", root / "nothing"),
        (
            "adapter 'name' does not fit: its rank is 65",
            tiny.write_adapter(tmp_path / "big", 65, ("down_proj",)),
        ),
        (
            "adapter 'name' has weights that are NaN or infinite",
            spoil(root / "adapters" / "a", tmp_path / "nan", np.inf),
        ),
        ("q_proj", {(0, "q_proj"): wrong}),
    ]
    for text, source in bad:
        with pytest.raises(ValueError, match=text):
            load(engine, "name", source)
        assert tokens(engine, "hello", "name", GREEDY) == want
        check_idle(engine)
    with pytest.raises(pj.HubError, match="nothing: no such directory"):
        load(engine, "never", root / "nothing")
    assert "never" not in engine.adapters
    load(engine, "name", root / "adapters" / "a")
    assert tokens(engine, "hello", "name", GREEDY) == alone.tokens("hello", "a")


@pytest.mark.parametrize("how", ["register", "load"])
def test_who_runs_keeps_the_old_weights(engine, root, alone, how):
    load(engine, "name", root / "adapters" / "a")

    async def main():
        with Pause(engine, has_tokens(engine, 5)) as pause:
            request = engine.generate("hello", "name", LONG)
            old = asyncio.create_task(completions(request))
            await pause.reached()
            source = root / "adapters" / "b"
            if how == "register":
                engine.register_adapter("name", source)
                new = asyncio.create_task(
                    completions(engine.generate("hello", "name", LONG))
                )
                await until(lambda: len(engine._thread._commands) == 2)
                pause.go()
            else:
                loaded = asyncio.create_task(engine.load_adapter("name", source))
                await until(lambda: bool(engine._thread._commands))
                pause.go()
                await loaded
                new = asyncio.create_task(
                    completions(engine.generate("hello", "name", LONG))
                )
            return [*await old, *await new]

    got = [one.token_ids for one in run(main())]
    assert got == alone.tokens("hello", "a", LONG) + alone.tokens("hello", "b", LONG)
    check_idle(engine)


def test_samples_that_sit_later_have_the_weights_of_the_first(engine, root, alone):
    load(engine, "name", root / "adapters" / "a")
    sampling = dataclasses.replace(LONG, n=7, temperature=1.0, seed=5)

    async def main():
        with Pause(engine, has_tokens(engine, 2)) as pause:
            request = engine.generate("hello", "name", sampling)
            answers = asyncio.create_task(completions(request))
            await pause.reached()
            engine.register_adapter("name", root / "adapters" / "b")
            pause.go()
            return await answers

    got = [one.token_ids for one in run(main())]
    assert got == alone.tokens("hello", "a", sampling)
    check_idle(engine)


@pytest.fixture
def computed(engine, monkeypatch):
    """The number of rows of every step."""
    rows = []
    launch = engine._runner.launch

    def count(batch, wanted=None, feed=None):
        rows.append(int(batch.seqs.bounds[-1]))
        return launch(batch, wanted, feed)

    monkeypatch.setattr(engine._runner, "launch", count)
    inside(engine, engine._loop.reset)  # no prefix is known
    return rows


def know_digests(engine):
    run(until(lambda: not engine._residence._tasks))
    inside(engine, lambda: None)  # a turn has taken them


def test_the_same_weights_share_their_pages(engine, root, computed):
    answers = []
    for name in ("one", "two"):
        load(engine, name, root / "adapters" / "a")
        know_digests(engine)
        computed.clear()
        answers += tokens(engine, PROMPT, name, GREEDY)
        prompt_rows = sum(computed) - 11
        assert prompt_rows == len(PROMPT) - (32 if name == "two" else 0)
    assert answers[0] == answers[1]


def hold_digests(monkeypatch):
    """Let digests wait for the event that is returned."""
    go, digest = threading.Event(), Adapter.digest

    def slow(adapter):
        assert go.wait(20)
        return digest(adapter)

    monkeypatch.setattr(Adapter, "digest", slow)
    return go


def test_pages_that_came_before_their_digest_are_shared_after_it(
    engine, root, computed, monkeypatch
):
    go = hold_digests(monkeypatch)
    load(engine, "one", root / "adapters" / "a")
    load(engine, "two", arrays_of(root / "adapters" / "a"))
    want = tokens(engine, PROMPT, "one", GREEDY)
    assert sum(computed) - 11 == len(PROMPT)
    go.set()
    know_digests(engine)
    computed.clear()
    assert tokens(engine, PROMPT, "two", GREEDY) == want
    assert sum(computed) - 11 == len(PROMPT) - 32


def spoil_step(engine, monkeypatch, number):
    """Have the first sequence of a step to come get logits that are not finite."""
    collect, steps = engine._runner.collect, itertools.count(1)

    def spoiling(launched):
        output = collect(launched)
        if next(steps) != number:
            return output
        tokens = output.tokens.copy()
        tokens[0] = -1
        return output._replace(tokens=tokens)

    monkeypatch.setattr(engine._runner, "collect", spoiling)


def test_what_failed_is_computed_again(engine, alone, computed, monkeypatch):
    ask(engine, "hello", "a", GREEDY)
    spoil_step(engine, monkeypatch, 2)  # the first one has 32 rows of the prompt's 41
    with pytest.raises(pj.RequestError, match="logits are not finite after token 41"):
        ask(engine, PROMPT, "a", GREEDY)
    computed.clear()
    assert ask(engine, PROMPT, "a", GREEDY) == alone(PROMPT, "a")
    assert sum(computed) - 11 == len(PROMPT)


def test_one_sample_that_fails_ends_the_others(engine, monkeypatch):
    ask(engine, "hello", "a", GREEDY)
    before = engine.stats().adapters["a"]
    spoil_step(engine, monkeypatch, 5)
    sampling = dataclasses.replace(LONG, n=3, temperature=1.0)

    async def main():
        with pytest.raises(pj.RequestError, match="logits are not finite after token"):
            await completions(engine.generate("hello", "a", sampling))
        # Whoever asked is still there: it is not for its sake that they end.
        await until(lambda: not engine._thread.requests._owners)

    run(main())
    after = engine.stats().adapters["a"]
    assert after.num_failed == before.num_failed + 1
    assert after.num_cancelled == before.num_cancelled + 2


async def exported(engine, sampling):
    """Take out a request under the adapter `name` that has a few tokens."""
    with Pause(engine, has_tokens(engine, 5)) as pause:
        request = engine.generate("hello", "name", sampling, request_id="it")
        answer = asyncio.create_task(completions(request))
        await pause.reached()
        asked = await export_amid(engine, pause)
        await answer
        return pj.RequestState.from_json((await asked).to_json())


def resume(engine, state):
    return run(completions(engine.resume(state), is_whole=False))


def test_samples_that_never_sat_go_on_under_the_weights_of_the_others(engine, root):
    load(engine, "name", root / "adapters" / "a")
    know_digests(engine)
    sampling = dataclasses.replace(LONG, n=7, temperature=1.0, seed=5)
    state = run(exported(engine, sampling))
    assert {len(sample.token_ids) > 0 for sample in state.samples} == {True, False}
    [digest] = {sample.adapter_digest for sample in state.samples}
    assert digest is not None


def test_a_request_goes_on_under_its_own_weights_alone(engine, root, alone):
    load(engine, "name", root / "adapters" / "a")
    know_digests(engine)
    state = run(exported(engine, LONG))
    [sample] = state.samples
    assert sample.adapter_digest is not None
    load(engine, "name", root / "adapters" / "b")
    know_digests(engine)
    with pytest.raises(
        ValueError,
        match=r"adapter 'name' must have the weights that the request began with, of "
        rf"digest {sample.adapter_digest}; here they are [0-9a-f]+; register those",
    ):
        resume(engine, state)
    load(engine, "name", arrays_of(root / "adapters" / "a"))
    [got] = resume(engine, state)
    assert got.token_ids == alone("hello", "a", LONG)[0].token_ids
    # Where the digest is not known, the name is all there is.
    load(engine, "name", root / "adapters" / "b")
    unknown = dataclasses.replace(sample, adapter_digest=None)
    [got] = resume(engine, dataclasses.replace(state, samples=(unknown,)))
    count = len(sample.token_ids)
    assert got.token_ids[:count] == sample.token_ids
    assert got.token_ids != alone("hello", "a", LONG)[0].token_ids


def test_a_request_goes_on_until_other_weights_are_known(engine, root, monkeypatch):
    load(engine, "name", root / "adapters" / "a")
    know_digests(engine)
    state = run(exported(engine, LONG))
    go = hold_digests(monkeypatch)
    load(engine, "name", root / "adapters" / "b")

    async def main():
        count = len(state.samples[0].token_ids) + 5
        with Pause(engine, has_tokens(engine, count)) as pause:
            answer = asyncio.create_task(
                completions(engine.resume(state), is_whole=False)
            )
            await pause.reached()
            [sequence] = engine._loop.scheduler.running
            # Whoever takes it from here is to look out for the same weights.
            assert sequence.state.adapter_digest == state.samples[0].adapter_digest
            go.set()
            await until(lambda: bool(engine._residence._tasks._done))
            pause.go()
            with pytest.raises(ValueError, match="'name' must have the weights that"):
                await answer

    run(main())


def test_who_stood_up_before_a_digest_was_known_travels_with_it(
    engine, root, monkeypatch
):
    go = hold_digests(monkeypatch)
    load(engine, "name", root / "adapters" / "a")
    before = engine.stats().num_preempted

    async def main():
        requests = [engine.generate([number] * 16, "name", LONG) for number in range(4)]
        with Pause(engine, lambda: engine.stats().num_preempted > before) as pause:
            answers = asyncio.gather(*map(completions, requests))
            await pause.reached()
            go.set()
            residence = engine._residence
            await until(lambda: not residence.poll() and not residence._tasks)
            for names in residence.take_renames():  # as in the next turn
                engine._thread.requests.rename(*names)
            states = [request.state for request in engine._thread.requests]
            running = engine._loop.scheduler.running
            pause.go()
            return await answers, states, len(running)

    _, states, num_running = run(main())
    assert len(states) == 4 > num_running
    digests = {state.samples[0].adapter_digest for state in states}
    assert len(digests) == 1 and None not in digests


def test_flags_are_refused_in_their_callers_frame(engine, root, alone):
    path, both = root / "adapters" / "a", np.array([True, False])
    for name in ("pin", "allow_nan"):
        message = f"{name} must be True or False, got array"
        with pytest.raises(ValueError, match=message):
            engine.register_adapter("name", path, **{name: both})
        with pytest.raises(ValueError, match=message):
            run(engine.load_adapter("name", path, **{name: both}))
    with pytest.raises(ValueError, match="cancel must be True or False, got 1"):
        run(engine.unload_adapter("a", cancel=1))
    for flag in (both, "no"):
        with pytest.raises(ValueError, match="is_pinned must be True or False, got"):
            run(engine.pin_adapter("a", flag))
    assert "name" not in engine.adapters
    assert tokens(engine, PROMPT, "a", GREEDY) == alone.tokens(PROMPT, "a")


def test_the_adapters_are_those_of_when_they_were_asked_for(engine, root):
    for name in ("x", "y"):
        engine.register_adapter(name, root / "adapters" / "a")
    inside(engine, lambda: None)
    items, values = iter(engine.adapters.items()), iter(engine.adapters.values())
    first, _ = next(items)
    next(values)
    for name in ("x", "y"):
        run(engine.unload_adapter(name))
    names = [first, *(name for name, _ in items)]
    assert names[-2:] == ["x", "y"] and len(list(values)) == len(names) - 1


def test_other_weights_never_share(engine, root, alone, computed):
    names = [None, "a", "b"]
    for name in names:
        computed.clear()
        assert tokens(engine, PROMPT, name, GREEDY) == alone.tokens(PROMPT, name)
        assert sum(computed) - 11 == len(PROMPT)
    for source in "aba":
        load(engine, "name", root / "adapters" / source)
        got = tokens(engine, PROMPT, "name", GREEDY)
        assert got == alone.tokens(PROMPT, source)


def test_files_that_change_on_disk_share_nothing(root, alone, tmp_path):
    path = tmp_path / "adapters" / "x"
    shutil.copytree(root / "adapters" / "a", path)
    with make_engine(
        root, adapters_dir=path.parent, host_adapter_memory=1, num_slots=NUM_SLOTS
    ) as engine:
        for name in "bcd":
            engine.register_adapter(name, root / "adapters" / name)
        assert tokens(engine, PROMPT, "x", GREEDY) == alone.tokens(PROMPT, "a")
        know_digests(engine)
        for name in "bcd":  # its slot and its host memory are needed
            ask(engine, "hello", name, GREEDY)
        assert engine.stats().tiers["x"] == "disk"
        shutil.copytree(root / "adapters" / "b", path, dirs_exist_ok=True)
        assert tokens(engine, PROMPT, "x", GREEDY) == alone.tokens(PROMPT, "b")
        check_idle(engine)


@pytest.mark.parametrize("cancel", [False, True])
def test_unloading_waits_for_users_or_cancels_them(engine, root, alone, cancel):
    load(engine, "name", root / "adapters" / "a")

    async def main():
        with Pause(engine, has_tokens(engine, 5)) as pause:
            answers = [
                asyncio.create_task(completions(engine.generate("hello", name, LONG)))
                for name in (*["name"] * 6, "b")  # some of them wait for a seat
            ]
            await pause.reached()
            commands = engine._thread._commands
            num_before = len(commands)  # of the last requests, if steps were quicker
            unloaded = asyncio.create_task(engine.unload_adapter("name", cancel=cancel))
            await until(lambda: len(commands) > num_before)
            late = asyncio.create_task(completions(engine.generate("hello", "name")))
            await until(lambda: len(commands) == num_before + 2)
            assert not unloaded.done()
            pause.go()
            with pytest.raises(
                pj.UnknownAdapterError, match="'name' is being unloaded"
            ):
                await late
            await unloaded
            stats = engine.stats()
            assert "name" not in stats.tiers and "name" not in stats.adapters
            return [(await answer)[0] for answer in answers]

    *got, beside = run(main())
    [want] = alone.tokens("hello", "a", LONG)
    for completion in got:
        assert completion.finish_reason == ("cancelled" if cancel else "length")
        assert completion.token_ids == want[: len(completion.token_ids)]
    assert beside == alone("hello", "b", LONG)[0]
    with pytest.raises(pj.UnknownAdapterError, match="no adapter is named 'name'"):
        ask(engine, "hello", "name")


def test_unloading_frees_host_and_device(engine, root):
    know_digests(engine)
    before = engine.stats().host_adapter_bytes
    load(engine, "name", root / "adapters" / "c")
    know_digests(engine)
    now = engine.stats()
    assert now.tiers["name"] == "device" and now.host_adapter_bytes > before
    run(engine.unload_adapter("name"))
    after = engine.stats()
    assert after.host_adapter_bytes == before
    assert after.num_on_device == now.num_on_device - 1
    for group, count in now.num_free_rank_pages.items():  # rank 64 is four pages
        assert after.num_free_rank_pages[group] == count + 4
        assert after.num_free_rank_pages[group] <= after.num_rank_pages[group]


def test_who_waits_for_an_unloading_may_leave(engine, root, alone):
    load(engine, "name", root / "adapters" / "a")

    async def main():
        with Pause(engine, has_tokens(engine, 2)) as pause:
            answer = asyncio.create_task(
                completions(engine.generate("hello", "name", GREEDY))
            )
            await pause.reached()
            for call in (
                engine.unload_adapter("name"),
                engine.load_adapter("other", root / "adapters" / "b"),
                engine.pin_adapter("b"),
            ):
                task = asyncio.create_task(call)
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            pause.go()
            return await answer

    assert run(main())[0].token_ids == alone("hello", "a")[0].token_ids
    run(engine.pin_adapter("b", False))
    check_idle(engine)
    assert "name" not in engine.adapters and "other" not in engine.adapters


def test_who_waits_for_users_may_leave(engine, root, alone):
    load(engine, "name", root / "adapters" / "a")

    async def main():
        with Pause(engine, has_tokens(engine, 2)) as first:
            answer = asyncio.create_task(
                completions(engine.generate("hello", "name", LONG))
            )
            await first.reached()
            with Pause(engine, has_tokens(engine, 9)) as second:
                unloaded = asyncio.create_task(engine.unload_adapter("name"))
                await until(lambda: bool(engine._thread._commands))
                first.go()
                await second.reached()
                await asyncio.sleep(0)
                assert engine._thread.requests._leaving and not unloaded.done()
                unloaded.cancel()
                await asyncio.gather(unloaded, return_exceptions=True)
                second.go()
                return await answer

    assert run(main())[0].token_ids == alone("hello", "a", LONG)[0].token_ids
    check_idle(engine)
    assert "name" not in engine.adapters


def test_what_was_replaced_while_it_left_is_forgotten(engine, root, monkeypatch):
    """Also while requests for those that came in its place never cease."""
    load(engine, "name", root / "adapters" / "a")
    requests, seen = engine._thread.requests, []
    note_end = requests.note_end

    def noting(sequence):
        note_end(sequence)
        seen.append(dict(requests._leaving))

    monkeypatch.setattr(requests, "note_end", noting)

    async def main():
        with Pause(engine, has_tokens(engine, 2)) as pause:
            old = asyncio.create_task(
                completions(engine.generate("hello", "name", GREEDY))
            )
            await pause.reached()
            unloaded = asyncio.create_task(engine.unload_adapter("name"))
            await until(lambda: bool(engine._thread._commands))
            engine.register_adapter("name", root / "adapters" / "b")
            new = asyncio.create_task(
                completions(engine.generate("hello", "name", LONG))
            )
            await until(lambda: len(engine._thread._commands) == 3)
            pause.go()
            return await old, await new, await unloaded

    run(main())
    assert seen == [{}, {}]
    run(engine.unload_adapter("name"))
    check_idle(engine)


def hold_copies(engine, monkeypatch):
    """Let copies to the device wait; returns what tells of one, and lets them go."""
    begun, go = threading.Event(), threading.Event()
    wait = engine._residence._device.wait

    def wait_long(staged):
        begun.set()
        assert go.wait(20)
        return wait(staged)

    monkeypatch.setattr(engine._residence._device, "wait", wait_long)
    return begun, go


@pytest.fixture
def unhastened(engine, monkeypatch):
    """Copies are waited for as they are beside a step."""
    monkeypatch.setattr(engine._residence, "hasten", lambda: False)


def test_copies_begin_between_steps(engine, root, monkeypatch):
    """A copy waits for the steps launched before it: another thread is later."""
    threads, stage = [], engine._residence._device.stage

    def noted(*args):
        threads.append(threading.current_thread().name)
        return stage(*args)

    monkeypatch.setattr(engine._residence._device, "stage", noted)
    load(engine, "other", root / "adapters" / "b")
    assert threads == ["punica-jax-engine"]


def test_an_idle_engine_does_not_wait_for_a_copy(engine, root, alone, monkeypatch):
    begun, go = hold_copies(engine, monkeypatch)
    engine.register_adapter("slow", root / "adapters" / "b")
    hasten, flights = engine._residence.hasten, []

    def noted():
        flights.append(engine._thread.loop.has_flight)
        return hasten()

    monkeypatch.setattr(engine._residence, "hasten", noted)

    async def main():
        running = engine.generate("hello", "a", LONG)
        await anext(running)
        late = asyncio.create_task(
            completions(engine.generate("hello", "slow", GREEDY))
        )
        assert await asyncio.to_thread(begun.wait, 20)
        assert len(await completions(running, is_whole=False)) == 1
        # Now there is no step that its copy would hold up.
        assert (await late)[0].token_ids == alone("hello", "b")[0].token_ids

    try:
        run(main())
    finally:
        go.set()
    assert flights and not any(flights)


def test_no_step_waits_for_a_copy_that_some_rows_could_do_without(
    engine, root, monkeypatch
):
    begun, go = hold_copies(engine, monkeypatch)
    engine.register_adapter("slow", root / "adapters" / "b")
    residence, loop = engine._residence, engine._thread.loop
    hasten, left = residence.hasten, []

    def noted():
        is_hastened = hasten()
        if is_hastened:
            left.append(sum(one.adapter == "a" for one in loop.scheduler._policy))
        return is_hastened

    async def main():
        # Those that sit end together, and four others could sit down then.
        names = ["a"] * 4 + ["slow"] + ["a"] * 12
        asked = [engine.generate("hello", name, GREEDY) for name in names]
        await asyncio.gather(*map(completions, asked))

    run(completions(engine.generate("hello", "a", GREEDY)))
    monkeypatch.setattr(residence, "hasten", noted)
    try:
        run(main())
    finally:
        go.set()
    assert begun.is_set() and left == [0]


def test_loading_may_be_left_while_it_is_copied(engine, root, unhastened, monkeypatch):
    begun, go = hold_copies(engine, monkeypatch)

    async def main():
        path = root / "adapters" / "b"
        task = asyncio.create_task(engine.load_adapter("other", path))
        assert await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go.set()

    run(main())
    check_idle(engine)
    assert "other" not in engine.adapters


def test_loading_may_be_left_at_any_moment(engine, root):
    async def main():
        for turns in range(0, 40, 3):
            task = asyncio.create_task(
                engine.load_adapter("other", root / "adapters" / "b")
            )
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(main())
    check_idle(engine)
    load(engine, "other", root / "adapters" / "b")


def test_pinned_ones_stay_on_the_device(engine, root):
    run(engine.pin_adapter("a"))
    run(until(lambda: engine.stats().tiers["a"] == "device"))
    engine.register_adapter("pinned", root / "adapters" / "b", pin=True)
    run(until(lambda: engine.stats().tiers.get("pinned") == "device"))
    load(engine, "pinned", root / "adapters" / "c")  # in place: it stays pinned
    for name in "cdef":
        ask(engine, "hello", name, GREEDY)
    tiers = engine.stats().tiers
    assert tiers["a"] == tiers["pinned"] == "device"
    assert engine.stats().num_on_device == NUM_SLOTS
    for name in ("a", "pinned"):
        run(engine.pin_adapter(name, False))
    for name in "cde":
        ask(engine, "hello", name, GREEDY)
    tiers = engine.stats().tiers
    assert tiers["a"] == tiers["pinned"] == "host"
    with pytest.raises(pj.UnknownAdapterError, match="no adapter is named 'nope'"):
        run(engine.pin_adapter("nope"))


def test_pinning_what_is_being_forgotten(engine, root, alone):
    load(engine, "name", root / "adapters" / "a")

    async def main():
        with held(engine):
            unloaded = asyncio.create_task(engine.unload_adapter("name"))
            await until(lambda: len(engine._thread._commands) == 1)
            pinned = asyncio.create_task(engine.pin_adapter("name"))
            await until(lambda: len(engine._thread._commands) == 2)
        await unloaded
        with pytest.raises(pj.UnknownAdapterError, match="no adapter is named 'name'"):
            await pinned

    run(main())
    assert ask(engine, "hello", "a", GREEDY) == alone("hello", "a")


def test_others_go_on_while_an_adapter_is_copied(
    engine, root, alone, unhastened, monkeypatch
):
    ask(engine, "hello", "a", GREEDY)
    begun, go = hold_copies(engine, monkeypatch)
    engine.register_adapter("slow", root / "adapters" / "b")

    async def main():
        late = asyncio.create_task(
            completions(engine.generate("hello", "slow", GREEDY))
        )
        assert await asyncio.to_thread(begun.wait, 20)
        for name in ("a", None, "a"):
            got = await completions(engine.generate("hello", name, GREEDY))
            assert got == alone("hello", name)
        assert engine.stats().tiers["slow"] == "host" and not late.done()
        go.set()
        return await late

    assert run(main())[0].token_ids == alone("hello", "b")[0].token_ids


def test_a_deadline_passes_while_an_adapter_is_copied(
    engine, root, unhastened, monkeypatch
):
    _, go = hold_copies(engine, monkeypatch)
    engine.register_adapter("slow", root / "adapters" / "b")
    try:
        with pytest.raises(pj.DeadlineError, match=r"of 0.05 s; 0 tokens had come"):
            ask(engine, "hello", "slow", GREEDY, terms=pj.Terms(deadline_s=0.05))
    finally:
        go.set()
    know_digests(engine)
