import dataclasses
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import punica_jax as pj
from punica_jax.batch import Batch, Bucket, Buckets
from tests import tiny_checkpoint as tiny

PROMPTS = ["hello", "hello", "hello", "a prompt that is longer", "x", "hello"]
ADAPTERS = ["a", None, "b", "c", "a", "c"]
GREEDY = pj.SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def together(llm):
    return llm.generate(PROMPTS, ADAPTERS, GREEDY)


def test_rows_equal_the_same_requests_alone(llm, together):
    # Six prompts on four seats: the batch's rows come and go.
    for prompt, adapter, row in zip(PROMPTS, ADAPTERS, together, strict=True):
        assert llm.generate(prompt, adapter, GREEDY) == [row]
        assert row.adapter == adapter
        assert len(row.token_ids) == 12 and row.finish_reason == "length"
        assert row.text == llm.tokenizer.decode(row.token_ids)
    hello = [row.token_ids for row in together[:3]]
    assert len(set(hello)) == 3, "adapters must matter"


@pytest.mark.parametrize("draws", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_generate_inside_jit_equals_llm(llm, checkpoint, draws):
    model = pj.load_model(checkpoint / "model", progress=False)
    # Slots of another order than the LLM's.
    order = ["c", "a", "b"]
    pools = pj.load_adapters(model, [checkpoint / name for name in order])
    fields = {
        "temperature": ([1.0, 0.0, 2.0, 0.5, 1.0, 1.5], np.float32),
        "top_k": ([0, 3, 0, 50, 20, 4], np.int32),
        "top_p": ([1.0, 0.5, 0.5, 1.0, 0.9, 1.0], np.float32),
        "min_p": ([0.0, 0.5, 0.0, 0.01, 0.0, 0.1], np.float32),
    }
    params = [
        pj.SamplingParams(
            max_new_tokens=12,
            seed=seed,
            **{name: values[seed] for name, (values, _) in fields.items() if draws},
        )
        for seed in range(len(PROMPTS))
    ]
    filters = {
        name: jnp.asarray(values, dtype)
        for name, (values, dtype) in fields.items()
        if draws
    }
    expected = llm.generate(PROMPTS, ADAPTERS, params)
    # A stop token that some rows meet early.
    eos = expected[0].token_ids[4]
    lens = [len(row.prompt_token_ids) for row in expected]
    prompts = np.full((len(lens), max(lens) + 3), 5, np.int32)
    for row, completion in zip(prompts, expected, strict=True):
        row[: len(completion.prompt_token_ids)] = completion.prompt_token_ids
    slots = [order.index(a) if a else -1 for a in ADAPTERS]

    @jax.jit
    def outer(model, pools, prompts, lens, slots, seeds, filters):
        return pj.generate(
            model,
            pools,
            prompts,
            lens,
            slots,
            max_new_tokens=12,
            eos_token_ids=(eos,),
            seeds=seeds,
            page_size=16,
            **filters,
        )

    tokens, counts = outer(
        model,
        pools,
        jnp.asarray(prompts),
        jnp.asarray(lens, jnp.int32),
        jnp.asarray(slots, jnp.int32),
        jnp.arange(len(lens), dtype=jnp.uint32),
        filters,
    )
    for row, count, completion in zip(tokens, counts, expected, strict=True):
        want = list(completion.token_ids)
        if eos in want:
            want = want[: want.index(eos) + 1]
        assert list(map(int, row[: int(count)])) == want
        assert not row[int(count) :].any()


def test_generate_checks_its_arguments(checkpoint):
    model = pj.load_model(checkpoint / "model", progress=False)
    one = jnp.ones((1,), jnp.int32)
    with pytest.raises(ValueError, match=r"prompt_tokens must be i32\[seqs >= 1"):
        pj.generate(model, None, one, one, one, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"slots must be \[1\], got \(2,\)"):
        pj.generate(model, None, one[None], one, jnp.ones((2,)), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"max_new_tokens must be an integer .* 0"):
        pj.generate(model, None, one[None], one, one, max_new_tokens=0)
    with pytest.raises(ValueError, match="exceed the model's max_position_embeddin"):
        pj.generate(model, None, one[None], one, one, max_new_tokens=128)
    with pytest.raises(
        ValueError, match="model must be what load_model returns, got s"
    ):
        pj.generate(cast(Any, "model"), None, one[None], one, one, max_new_tokens=2)
    with pytest.raises(
        ValueError, match=r"pools must be what load_adapters .* got list"
    ):
        pj.generate(model, cast(Any, []), one[None], one, one, max_new_tokens=2)
    for prompts in (["hello"], [[1, 2], [3]]):
        with pytest.raises(
            ValueError, match="prompt_tokens must be an array, got list"
        ):
            pj.generate(model, None, cast(Any, prompts), one, one, max_new_tokens=2)
    with pytest.raises(
        ValueError, match="model must be what load_model returns, got s"
    ):
        pj.load_adapters(cast(Any, "model"), [checkpoint / "a"])
    # A prompt's length and an int8 make no int8.
    long = jnp.ones((1, 20), jnp.int32)
    with pytest.raises(ValueError, match="max_prompt 20 and max_new_tokens 120 exceed"):
        pj.generate(model, None, long, one, one, max_new_tokens=np.int8(120))
    with pytest.raises(ValueError, match=r"page_size must be a power of two .* got 0"):
        pj.generate(model, None, one[None], one, one, max_new_tokens=1, page_size=0)
    arrays = {"prompt_tokens": one[None], "prompt_lens": one, "slots": one}
    for name in (*arrays, "top_k", "seeds"):
        for dtype in ("float32", "bool"):
            wrong = arrays | {name: jnp.ones_like(arrays.get(name, one), dtype)}
            message = f"{name} must be integers, got {dtype}"
            with pytest.raises(ValueError, match=message):
                pj.generate(model, None, **wrong, max_new_tokens=2)
    for stop in (1.0, [1.0], "12", ["a"], None):
        message = r"eos_token_ids must be an integer or a list of integers, got "
        with pytest.raises(ValueError, match=message + re.escape(repr(stop))):
            pj.generate(
                model, None, **arrays, max_new_tokens=2, eos_token_ids=cast(Any, stop)
            )


def test_generate_takes_stop_tokens_of_any_kind(checkpoint):
    model = pj.load_model(checkpoint / "model", progress=False)
    one = jnp.ones((1,), jnp.int32)

    def count(stop):
        arrays = (one[None], one, -one)
        options = {"max_new_tokens": 2, "eos_token_ids": stop}
        tokens, counts = pj.generate(model, None, *arrays, **options)
        return int(tokens[0, 0]), int(counts[0])

    first, without = count(())
    assert without == 2
    for kind in (int, np.int64, np.array, jnp.array, lambda n: [n], lambda n: {n}):
        assert count(kind(first)) == (first, 1)

    @jax.jit
    def count_traced(stop):
        arrays = (one[None], one, -one)
        options = {"max_new_tokens": 2, "eos_token_ids": [stop, stop + 1]}
        return pj.generate(model, None, *arrays, **options)[1][0]

    assert count_traced(first) == 1


def test_a_single_path_is_a_list_of_one(checkpoint):
    model = pj.load_model(checkpoint / "model", progress=False)
    expected = pj.load_adapters(model, [checkpoint / "a"])
    for path in (checkpoint / "a", str(checkpoint / "a")):
        pools = pj.load_adapters(model, path)
        jax.tree.map(np.testing.assert_array_equal, pools, expected)


@pytest.mark.parametrize("paths", [{"x": "a"}, None, [None], ["a", 3], b"a", iter("a")])
def test_paths_of_adapters_that_are_none(checkpoint, paths):
    model = pj.load_model(checkpoint / "model", progress=False)
    message = r"paths must be a PEFT directory or a list .* \(of a mapping, pass list\("
    with pytest.raises(ValueError, match=message):
        pj.load_adapters(model, paths)
    with pytest.raises(ValueError, match="at least one adapter, got none"):
        pj.load_adapters(model, [])


def test_stop_token_ends_a_row(llm, together, monkeypatch):
    stop = together[0].token_ids[3]
    cut = together[0].token_ids.index(stop) + 1
    monkeypatch.setattr(llm.tokenizer, "eos_token_ids", frozenset([stop]))
    row = llm.generate(PROMPTS[0], ADAPTERS[0], GREEDY)[0]
    assert row.finish_reason == "stop"
    assert row.token_ids == together[0].token_ids[:cut]
    ignoring = dataclasses.replace(GREEDY, ignore_eos=True)
    assert llm.generate(PROMPTS[0], ADAPTERS[0], ignoring) == [together[0]]


def test_streamed_pieces_join_to_the_text(llm, together):
    pieces = [""] * len(PROMPTS)

    def collect(index, piece):
        assert piece
        pieces[index] += piece

    llm.generate(PROMPTS, ADAPTERS, GREEDY, on_token=collect)
    assert pieces == [row.text for row in together]


def raising(index, number, error):
    """Make a callback that raises at some completion's piece of that number."""
    pieces = []

    def on_token(at, piece):
        pieces.extend([piece] * (at == index))
        if at == index and len(pieces) == number:
            raise error

    on_token.pieces = pieces
    return on_token


def test_a_callback_that_raises_is_one_completions_error(llm, together, caplog):
    callback = raising(3, 2, KeyError("mine"))
    rows = llm.generate(PROMPTS, ADAPTERS, GREEDY, on_token=callback)
    failed = rows.pop(3)
    assert rows == [*together[:3], *together[4:]]
    assert failed.finish_reason == "error"
    assert failed.error == "on_token raised KeyError('mine')"
    assert failed.text == "".join(callback.pieces) and len(callback.pieces) == 2
    count = len(failed.token_ids)
    assert count < 12 and failed.token_ids == together[3].token_ids[:count]
    [record] = caplog.records  # where it was raised
    assert record.message == "a request has failed" and "on_token" in caplog.text
    assert not llm._loop.busy
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together


@pytest.mark.parametrize("stop", [(), ("STOP",)])
def test_a_callback_that_raises_at_the_last_piece(llm, together, stop):
    # The last character is held back until the end: it may begin a stop string.
    stop = [together[0].text[-1] + end for end in stop]
    params = dataclasses.replace(GREEDY, stop=stop)
    callback = raising(0, 99, ValueError())
    [whole] = llm.generate("hello", "a", params, on_token=callback)
    last = len(callback.pieces)
    callback = raising(0, last, ValueError())
    [row] = llm.generate("hello", "a", params, on_token=callback)
    assert row == dataclasses.replace(
        whole, finish_reason="error", error="on_token raised ValueError()"
    )


def test_a_callback_that_raises_at_one_of_several_samples(llm):
    params = pj.SamplingParams(max_new_tokens=9, temperature=1.0, seed=4, n=3)
    want = llm.generate("hello", "a", params)
    callback = raising(1, 2, ZeroDivisionError())
    rows = llm.generate("hello", "a", params, on_token=callback)
    assert [row.error for row in rows] == [
        None,
        "on_token raised ZeroDivisionError()",
        None,
    ]
    assert rows[::2] == want[::2]


def test_a_callback_that_raises_in_a_chat(llm, together):
    [row] = llm.chat(
        [{"role": "user", "content": "hello"}],
        "a",
        GREEDY,
        template="<s>{{ messages[0].content }}",
        on_token=raising(0, 1, RuntimeError("stop it")),
    )
    assert row.error == "on_token raised RuntimeError('stop it')"
    assert row.prompt_token_ids == together[0].prompt_token_ids


def test_an_interrupt_in_a_callback_ends_the_call(llm, together):
    with pytest.raises(KeyboardInterrupt):
        llm.generate(
            PROMPTS, ADAPTERS, GREEDY, on_token=raising(3, 2, KeyboardInterrupt())
        )
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together


def test_one_call_at_a_time(llm, checkpoint, together):
    # Seats and slots are shared: a call inside another would spoil its rows.
    calls = {
        "generate": lambda: llm.generate("x", None, GREEDY),
        "load_adapter": lambda: llm.load_adapter("late", checkpoint / "d"),
        "unload_adapter": lambda: llm.unload_adapter("a"),
        "warm_up": llm.warm_up,
    }
    refused = set()

    def meddle(index, piece):
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=f"{name} was called while another"):
                call()
            refused.add(name)

    assert llm.generate(PROMPTS, ADAPTERS, GREEDY, on_token=meddle) == together
    assert refused == calls.keys() and sorted(llm.adapters) == ["a", "b", "c"]


@pytest.mark.slow
def test_warm_up_compiles_everything(llm, together, monkeypatch, compiles):
    monkeypatch.setattr(llm._loop, "_buckets", Buckets(max_seqs=4, max_rows=8))
    monkeypatch.setattr(llm._loop.scheduler, "max_rows", 8)
    llm.warm_up()
    with compiles:
        for count in (1, 2, 6):
            rows = llm.generate(PROMPTS[:count], ADAPTERS[:count], GREEDY)
            assert rows == together[:count]
    assert compiles.count == 0


def test_warm_up_shows_every_program(llm, monkeypatch, capsys):
    monkeypatch.setattr(llm._loop, "_buckets", Buckets(max_seqs=1, max_rows=8))
    monkeypatch.setenv("COLUMNS", "500")
    llm._loop.warm_up(progress=True)
    shown = capsys.readouterr().err
    table = [line.split("│")[1:3] for line in shown.splitlines() if "│" in line]
    names = [name.strip() for name, _ in table]
    assert {"decode[1]", "prefill[8 rows, 1 seqs]", "draw[1]", "set_slot"} <= {*names}
    assert {*llm.programs} == {*names}
    # The two steps, and the rest together.
    assert len([float(seconds) for _, seconds in table if seconds.strip()]) == 3


def test_what_is_compiled_ahead_is_what_runs(checkpoint, compiles):
    llm = pj.LLM(checkpoint / "model", max_seats=2, page_size=16, progress=False)
    runner, pages_per_seq = llm._loop._runner, 2
    [bucket, *_] = Buckets(max_seqs=2, max_rows=8)
    # Under the caller's configuration, which other threads do not see.
    with jax.default_matmul_precision("highest"):
        with compiles:
            [(compiled, _)] = runner.compile([bucket], pages_per_seq)
        assert (compiled, compiles.count) == (bucket, 1)
        with compiles:
            runner.forward(Batch.of([], bucket, pages_per_seq))
        assert compiles.count == 0


def test_a_decode_step_writes_where_the_last_one_did(checkpoint):
    llm = pj.LLM(checkpoint / "model", max_seats=4, page_size=16, progress=False)
    runner, pages_per_seq = llm._loop._runner, 2
    decode, prefill = Bucket(4, 4, 1), Bucket(64, 4, 64)
    other = Bucket(1, 1, 1)
    forwards = [
        runner.forward(Batch.of([], bucket, pages_per_seq))
        for bucket in (decode, prefill, other)
    ]
    first, *others = forwards
    likely = np.asarray(first.likely)

    def places_of(forward):  # as many seats as sequences: `newest` is as `likely`
        arrays = forward.logits, *forward.blocks, runner._newest
        return [one.unsafe_buffer_pointer() for one in arrays]

    places = places_of(first)
    second = runner.forward(Batch.of([], decode, pages_per_seq))
    assert places == places_of(second)
    assert first.logits.is_deleted()
    assert all(block.is_deleted() for block in first.blocks)
    np.testing.assert_array_equal(first.likely, likely)
    # What another size's step gave is its own, and prompts' steps keep nothing.
    assert not any(array.is_deleted() for array in jax.tree.leaves(others))
    assert runner._spent.of(prefill) is None
    # Looking at a program gives nothing away, as `compile` does for each.
    runner.lower(Batch.of([], decode, pages_per_seq))
    assert runner._spent.of(decode) == (second.logits, second.blocks)
    # Given away and not kept, as where a step is interrupted.
    logits = np.array(second.logits)
    for array in jax.tree.leaves(runner._spent.of(decode)):
        array.delete()
    third = runner.forward(Batch.of([], decode, pages_per_seq))
    np.testing.assert_array_equal(third.logits, logits)


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("pallas_triton", marks=pytest.mark.gpu)]
)
def test_nothing_else_is_where_the_host_reads_tokens(checkpoint, implementation):
    # They are in other memory each time: a CUDA graph is updated for what is there.
    llm = pj.LLM(
        checkpoint / "model",
        max_seats=4,
        page_size=16,
        implementation=implementation,
        progress=False,
    )
    batch = Batch.of([], Bucket(4, 4, 1), 2)
    program = llm._loop._runner.lower(batch).compile().as_text()
    head, _, body = program.partition("\nENTRY ")
    [results] = re.findall(r" -> \((.*)\) {", body)
    places = dict(re.findall(r"{(\d+)}: \((\d+), ", head))
    assert len(places) == len(re.findall(r"\w+\[", results))  # each of what is donated
    [name] = re.findall(rf"%(\S+) = s32\[4\]\S* parameter\({places['1']}\)", body)
    # It is read once, when the second result is: until then it holds its place.
    [reader] = re.findall(rf"%(\S+) = .*[(, ]%{re.escape(name)}[,)]", body)
    assert not reader.startswith("copy")
    assert re.search(rf"ROOT .* tuple\(%[^,]+, %{re.escape(reader)},", body)


def test_a_full_pool_can_replace(checkpoint):
    llm = pj.LLM(
        checkpoint / "model",
        {"only": checkpoint / "b"},
        max_seats=1,
        num_slots=1,
        max_rank=20,
        page_size=16,
        progress=False,
    )
    llm.load_adapter("only", checkpoint / "b")
    llm.load_adapter("only", checkpoint / "a")
    assert llm.adapters["only"].report.rank == 4


def test_prompts_are_prefilled_in_chunks(llm, together, monkeypatch):
    # 8 rows a step: the prompts take several steps, and share some.
    monkeypatch.setattr(llm._loop, "_buckets", Buckets(max_seqs=4, max_rows=8))
    monkeypatch.setattr(llm._loop.scheduler, "max_rows", 8)
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together


def test_token_prompts_and_seeds(llm, together):
    tokens = [list(row.prompt_token_ids) for row in together]
    assert llm.generate(tokens, ADAPTERS, GREEDY) == together
    warm = [
        pj.SamplingParams(max_new_tokens=12, temperature=2.0, seed=s) for s in (1, 1, 2)
    ]
    first, same, other = llm.generate(["hello"] * 3, "a", warm)
    assert first == same and first != other
    assert llm.generate("hello", "a", warm[0]) == [first]


def test_a_prompts_logprobs_are_its_adapters(llm):
    """Those of generated tokens are the same when these are a prompt.

    Such long prompts take several blocks of rows, whose edges are amid sequences; the
    short one's block goes beyond the rows of its bucket.
    """
    adapters = ["a", "c", None, "b"]
    length = llm.max_model_len - 12
    prompts = [[1 + i, *range(length - 1)] for i in range(3)] + [[3, 4, 5]]
    new = pj.SamplingParams(max_new_tokens=10, logprobs=1, ignore_eos=True)
    rows = llm.generate(prompts, adapters, new)
    whole = [row.prompt_token_ids + row.token_ids for row in rows]
    scored = pj.SamplingParams(max_new_tokens=1, prompt_logprobs=1)
    together = llm.generate(whole, adapters, scored)
    alone = [
        llm.generate([tokens], adapter, scored)[0]
        for tokens, adapter in zip(whole, adapters, strict=True)
    ]
    for row, *others in zip(rows, together, alone, strict=True):
        wanted = [entry.logprob for entry in row.logprobs]
        for other in others:
            got = [entry.logprob for entry in other.prompt_logprobs[-10:]]
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_context_ends_a_row(llm):
    prompt = [7] * (llm.max_model_len - 2)
    row = llm.generate([prompt], sampling=pj.SamplingParams(max_new_tokens=9))[0]
    assert len(row.token_ids) == 2 and row.finish_reason == "length"


def test_load_replace_unload(llm, checkpoint, together):
    loaded = llm.load_adapter("legal", checkpoint / "d")
    assert llm.adapters["legal"] is loaded
    assert {row.module for row in loaded.report.rows} == {"mlp.down_proj"}
    as_d = llm.generate("hello", "legal", GREEDY)[0].token_ids
    slot = loaded.slot
    llm.load_adapter("legal", checkpoint / "a")
    assert llm.adapters["legal"].slot == slot
    as_a = llm.generate("hello", "legal", GREEDY)[0].token_ids
    assert as_a == together[0].token_ids != as_d
    llm.unload_adapter("legal")
    assert "legal" not in llm.adapters
    with pytest.raises(pj.UnknownAdapterError, match=r"'legal'.*loaded are 'a', 'b'"):
        llm.generate("hello", "legal", GREEDY)
    with pytest.raises(pj.UnknownAdapterError, match="'legal'"):
        llm.unload_adapter("legal")
    # The emptied slot gives the base's own tokens.
    llm._table.check_integrity()
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together


def test_nothing_is_compiled_twice(checkpoint, compiles):
    # One of its own: of others' programs some may have been let go of.
    adapters = {name: checkpoint / name for name in "abc"}
    sizes = {"max_seats": 4, "num_slots": 5, "page_size": 16}
    llm = pj.LLM(checkpoint / "model", adapters, **sizes, progress=False)
    warm = pj.SamplingParams(max_new_tokens=5, temperature=0.7, seed=3)
    scored = pj.SamplingParams(max_new_tokens=1, prompt_logprobs=1)

    def use(first, second):
        llm.load_adapter("new", checkpoint / first)
        llm.generate(["hi", "there"], ["new", "c"], GREEDY)
        llm.load_adapter("new", checkpoint / second)
        llm.generate(["x", "hello, hello"], ["b", "new"], GREEDY)
        llm.unload_adapter("new")
        llm.generate(["hi", "you"], [None, None], warm)
        for prompts in (["hi"], ["hi", "a prompt that is longer"]):
            llm.generate(prompts, None, scored)
        llm.generate(PROMPTS[::-1], ADAPTERS, GREEDY)

    use("a", "b")
    with compiles:
        use("d", "c")
    assert compiles.count == 0
    steps = [name for name in llm.programs if name.startswith(("decode", "prefill"))]
    assert llm._runner._steps_by[False, False]._cache_size() == len(steps)
    # Of whatever step the rows are.
    assert llm._runner._prompt_logprobs._cache_size() == 1


@pytest.mark.slow  # an `Engine` made so is tested by default
def test_it_stays_on_the_device_it_was_made_on(checkpoint):
    first, *_, last = jax.devices()
    assert first != last
    with jax.default_device(last):
        llm = pj.LLM(checkpoint / "model", max_seats=1)
    draw = pj.SamplingParams(max_new_tokens=3, temperature=0.7, seed=3, logprobs=1)
    runner = llm._runner
    before = {leaf.unsafe_buffer_pointer() for leaf in runner._weights}
    with jax.transfer_guard_device_to_device("disallow"):
        llm.load_adapter("a", checkpoint / "a")
        llm.generate("hello", "a", draw)
    assert {leaf.unsafe_buffer_pointer() for leaf in runner._weights} == before
    state = runner._weights, runner._cache, runner.adapters.pools, runner._seats
    state = *state, runner._counts, runner._newest
    for leaf in jax.tree.leaves(state):
        assert leaf.devices() == {last}


def spoil(source, target, value):
    """Copy an adapter with one bad value."""
    target.mkdir()
    for name in ("adapter_config.json",):
        (target / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name].copy()
    tensors[name].flat[-1] = value
    save_file(tensors, target / "adapter_model.safetensors")
    return target


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(llm, checkpoint, together, tmp_path, value):
    path = spoil(checkpoint / "a", tmp_path / "bad", value)
    with pytest.raises(pj.AdapterError, match=r"'bad'.*NaN or infinite.*allow_nan"):
        llm.load_adapter("bad", path)
    assert "bad" not in llm.adapters
    with pytest.raises(pj.AdapterError, match=r"'a' at .*NaN or infinite"):
        llm.load_adapter("a", path)  # the one that it would replace stays
    llm._table.check_integrity()
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together
    llm.load_adapter("bad", path, allow_nan=True)
    # One adapter's NaN is its own rows' business.
    mixed = llm.generate(["hello", "hello"], ["bad", "a"], GREEDY)
    assert mixed[1] == together[0]
    assert mixed[0].finish_reason == "error" and mixed[0].token_ids == ()
    assert mixed[0].error is not None
    assert re.search(r"logits are not finite after token 6 .*'bad'", mixed[0].error)
    llm.unload_adapter("bad")
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == together


def test_capacity(llm, checkpoint, tmp_path):
    llm.load_adapter("d1", checkpoint / "d")
    llm.load_adapter("d2", checkpoint / "d")
    with pytest.raises(pj.AdapterCapacityError, match="all 5 slots are taken"):
        llm.load_adapter("d3", checkpoint / "d")
    llm.unload_adapter("d1")
    big = tiny.write_adapter(tmp_path / "big", 65)
    with pytest.raises(pj.AdapterCapacityError, match="rank is 65, above max_rank"):
        llm.load_adapter("big", big)
    llm.unload_adapter("d2")
    assert sorted(llm.adapters) == ["a", "b", "c"]


def test_token_ids_may_be_numpys(llm):
    ids = [5, 263, 0]
    mixed = [np.int64(5), 263, np.uint8(0)]
    got = llm.generate([ids, np.asarray(ids, np.int32), mixed], None, GREEDY)
    assert len({one.token_ids for one in got}) == 1
    for one in got:
        assert one.prompt_token_ids == tuple(ids)
        assert {type(token) for token in one.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("prompts", "adapters", "sampling", "message"),
    [
        (["a", ""], None, None, "prompt 1 is empty"),
        ([[]], None, None, "prompt 0 is empty"),
        (
            [[5, 264]],
            None,
            None,
            "prompt 0 has token 264; tokens must be integers from 0 to 263",
        ),
        ([[-1]], None, None, "prompt 0 has token -1"),
        ([[1.5]], None, None, r"prompt 0 has token 1.5; tokens must be integers"),
        ([["1"]], None, None, "prompt 0 has token '1'"),
        ([[True]], None, None, "prompt 0 has token True"),
        ([[5, False]], None, None, "prompt 0 has token False"),
        ([[5], np.asarray([5, 264])], None, None, "prompt 1 has token .*264"),
        ([b"hi"], None, None, "prompt 0 must be a text or a list of token ids"),
        (["a", None], None, None, "prompt 1 must be a text .* got None"),
        (
            [1, 2],
            None,
            None,
            r"prompt 0 must be a text .* got 1; one prompt of token ids is passed as "
            r"\[\[1, 2, 3\]\]$",
        ),
        (None, None, None, "prompts must be a text, or a list .* got None"),
        (["a"], None, [3], "sampling 0 must be a SamplingParams, got 3"),
        (
            [{"prompt_token_ids": [5, 6]}],
            None,
            None,
            "prompt 0 must be a text or a list of token ids, got {'prompt_token_ids'",
        ),
        ([{5, 6}], None, None, "prompt 0 must be a text or a list .* got {5, 6}$"),
        (
            ["a"],
            GREEDY,
            None,
            r"adapters must be one .* got SamplingParams\(.*; sampling "
            "comes third, or as sampling=$",
        ),
        (["a"], [["a"]], None, r"no adapter named \['a'\] is loaded"),
        (["x" * 127], None, None, "128 tokens, which leaves no room.*is 128"),
        (["a"], ["a", "b"], None, "adapters must be one .* got 2 for 1 prompts"),
        (["a"], None, [GREEDY] * 3, "sampling must be one .* got 3 for 1 prompts"),
        (["a"], "nope", None, "no adapter named 'nope' is loaded"),
    ],
)
def test_bad_requests(llm, prompts, adapters, sampling, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, adapters, sampling)


def test_a_callback_must_be_callable(llm):
    with pytest.raises(ValueError, match=r"on_token must be a function of .* got 3"):
        llm.generate(["a"], on_token=3)


def test_default_sampling_of_some(llm, together, monkeypatch):
    monkeypatch.setattr(llm, "default_sampling", GREEDY)
    mixed = [GREEDY, None] * (len(PROMPTS) // 2)
    assert llm.generate(PROMPTS, ADAPTERS, mixed) == together


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seats": 0}, "max_seats must be an integer of at least 1, got 0"),
        ({"max_model_len": 0}, "max_model_len must be .* got 0"),
        ({"max_model_len": 129}, "max_position_embeddings 128, got 129"),
        ({"num_slots": 0}, "num_slots must be an integer of at least 1, got 0"),
        ({"max_rank": 513}, "max_rank must be at most 512, got 513"),
        ({"max_rank": "x"}, "max_rank must be an integer of at least 1, got 'x'"),
        ({"max_seats": 1.5}, "max_seats must be an integer of at least 1, got 1.5"),
        ({"implementation": "cuda"}, "implementation must be one of .* got 'cuda'"),
        ({"implementation": "pallas_triton"}, "needs a GPU, the default device is a c"),
        ({"page_size": 24}, "page_size must be a power of two .* got 24"),
    ],
)
def test_bad_sizes(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        pj.LLM(checkpoint / "model", progress=False, **options)


@pytest.mark.slow
def test_half_precision_and_no_prompts(checkpoint):
    llm = pj.LLM(
        checkpoint / "model",
        {"a": checkpoint / "a"},
        dtype=jnp.bfloat16,
        max_seats=2,
        num_slots=1,
        page_size=16,
        progress=False,
    )
    assert llm.generate([]) == []
    rows = llm.generate(["hello", "hello"], ["a", None], GREEDY)
    assert rows[0].token_ids != rows[1].token_ids
    assert rows[1] == llm.generate("hello", None, GREEDY)[0]
