"""Sampling through `LLM`: what a request asks for is what its completion shows."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import punica_jax as pj
from punica_jax.batch import Buckets
from punica_jax.models import dense_causal_attention
from tests.test_seats import penalised

PROMPTS = ["hello", "hello", "a prompt that is longer", "x", "hello"]
ADAPTERS = ["a", None, "b", "c", "a"]
LENGTH = 12
GREEDY = pj.SamplingParams(max_new_tokens=LENGTH)
MIXED = [
    GREEDY,
    pj.SamplingParams(max_new_tokens=LENGTH, temperature=1.5, top_k=20, seed=1),
    pj.SamplingParams(max_new_tokens=LENGTH, repetition_penalty=1.7, logprobs=2),
    pj.SamplingParams(
        max_new_tokens=LENGTH, temperature=1.0, top_p=0.8, min_p=0.01, seed=2
    ),
    pj.SamplingParams(
        max_new_tokens=LENGTH,
        temperature=0.7,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={40: 2.0},
        min_new_tokens=3,
        seed=3,
        prompt_logprobs=1,
    ),
]


@pytest.fixture(scope="module")
def llm(llm):
    """The shared LLM with small steps: one size of prompts' programs."""
    whole = llm._loop._buckets
    llm._loop._buckets = Buckets(max_seqs=4, max_rows=8)
    llm._loop.scheduler.max_rows = 8
    llm.warm_up()
    yield llm
    llm._loop._buckets = whole
    llm._loop.scheduler.max_rows = whole.max_rows


@pytest.fixture(scope="module")
def plain(llm):
    return llm.generate(PROMPTS, ADAPTERS, GREEDY)


@pytest.fixture(scope="module")
def mixed(llm):
    return llm.generate(PROMPTS, ADAPTERS, MIXED)


def close(left, right):
    """Compare completions; their logarithms to within rounding."""

    def values(entries):
        return [
            value
            for entry in entries or ()
            if entry is not None
            for value in (entry.logprob, *entry.top.values())
        ]

    for name in ("logprobs", "prompt_logprobs"):
        pair = values(getattr(left, name)), values(getattr(right, name))
        np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4)
    bare = {"logprobs": None, "prompt_logprobs": None, "cumulative_logprob": None}
    return dataclasses.replace(left, **bare) == dataclasses.replace(right, **bare)


def test_a_mixed_batch_equals_each_request_alone(llm, mixed, plain, compiles):
    with compiles:
        for i, row in enumerate(mixed):
            assert row.prompt_index == i and row.sample_index == 0
            alone = llm.generate(PROMPTS[i], ADAPTERS[i], MIXED[i])[0]
            assert close(alone, row)
        assert close(mixed[0], plain[0])
        assert mixed[2].token_ids != plain[2].token_ids
        again = llm.generate(PROMPTS[::-1], ADAPTERS[::-1], MIXED[::-1])
        assert all(map(close, again[::-1], mixed))
        # The seats that drew, penalised and biased leave nothing to who sits next.
        assert all(map(close, llm.generate(PROMPTS, ADAPTERS, GREEDY), plain))
    assert compiles.count == 0


def test_all_programs_are_listed(llm, mixed):
    assert {"draw[1]", "draw[4]", "logprobs[1]", "logprobs[4]"} < set(llm.programs)
    assert llm.programs.count("write_seat") == 1
    assert llm.programs.count("prompt_logprobs") == 1


def test_greedy_batches_run_the_step_alone(llm, plain, monkeypatch):
    for name in ("_draw", "_logprobs", "_prompt_logprobs", "_write_seat"):
        monkeypatch.setattr(llm._runner, name, None)
    assert llm.generate(PROMPTS, ADAPTERS, GREEDY) == plain


def model_logits(checkpoint, tokens):
    """The base model's logits after each token, all at once."""
    model = pj.load_model(checkpoint / "model", progress=False)
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    attend = dense_causal_attention(len(tokens))
    return np.asarray(model.logits(model(tokens, positions, attend)), np.float64)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.6, "frequency_penalty": 0.7},
        {"presence_penalty": 2.0, "logit_bias": {9: 4.0, 200: -5.0}},
    ],
)
def test_penalties_are_those_of_the_definition(llm, checkpoint, fields):
    # 25 tokens of prompt, in chunks of 8.
    params = dataclasses.replace(GREEDY, **fields)
    row = llm.generate("a prompt that is longer.", None, params)[0]
    prompt, output = row.prompt_token_ids, row.token_ids
    logits = model_logits(checkpoint, prompt + output)
    for k, token in enumerate(output):
        x = penalised(logits[len(prompt) - 1 + k], params, prompt, output[:k])
        assert token == x.argmax()
    assert output != llm.generate("a prompt that is longer.", None, GREEDY)[0].token_ids


def test_bias_forces_and_bans(llm, plain):
    forced = dataclasses.replace(GREEDY, logit_bias={77: 100.0})
    assert set(llm.generate("hello", "a", forced)[0].token_ids) == {77}
    first = plain[0].token_ids[0]
    banned = dataclasses.replace(GREEDY, logit_bias={first: -100.0})
    assert first not in llm.generate("hello", "a", banned)[0].token_ids


def test_top_k_of_one_is_greedy(llm, plain):
    one = dataclasses.replace(GREEDY, temperature=5.0, top_k=1)
    assert llm.generate(PROMPTS, ADAPTERS, one) == plain


def test_stop_tokens(llm, plain, monkeypatch):
    tokens = plain[0].token_ids
    stop = tokens[3]
    cut = tokens.index(stop) + 1
    params = dataclasses.replace(GREEDY, stop_token_ids=[stop])
    row = llm.generate("hello", "a", params)[0]
    assert (row.finish_reason, row.stop_reason) == ("stop", stop)
    assert row.token_ids == tokens[:cut]
    # The text leaves out what ended it, unless it is asked for.
    assert row.text == llm.tokenizer.decode(tokens[: cut - 1])
    shown = dataclasses.replace(params, include_stop_str_in_output=True)
    text = llm.generate("hello", "a", shown)[0].text
    assert text == llm.tokenizer.decode(tokens[:cut])
    # The model's own stop token has no reason of the request's.
    monkeypatch.setattr(llm.tokenizer, "eos_token_ids", frozenset([stop]))
    row = llm.generate("hello", "a", params)[0]
    assert (row.finish_reason, row.stop_reason) == ("stop", None)
    ignoring = dataclasses.replace(params, ignore_eos=True)
    row = llm.generate("hello", "a", ignoring)[0]
    assert (row.finish_reason, row.stop_reason) == ("stop", stop)


def test_no_stop_before_min_new_tokens(llm, plain):
    stop = plain[0].token_ids[0]
    for least in (1, 4):
        params = dataclasses.replace(
            GREEDY, stop_token_ids=[stop], min_new_tokens=least
        )
        row = llm.generate("hello", "a", params)[0]
        assert stop not in row.token_ids[:least]
        if row.finish_reason == "stop":
            assert len(row.token_ids) > least and row.token_ids[-1] == stop
    # Held back is only what stops.
    free = dataclasses.replace(GREEDY, min_new_tokens=LENGTH)
    assert llm.generate(PROMPTS, ADAPTERS, free) == plain


# ASCII letters that a forced sequence is made of; one byte a token.
SAY = "one two STOP three"


def force(llm, monkeypatch, ids):
    """Let a prompt of two tokens be answered with some ids, over and over."""
    launch = llm._runner.launch

    def forced(batch, wanted=None, feed=None):
        lens = np.asarray(batch.seqs.kv_lens) - 2
        tokens = np.array([ids[i % len(ids)] for i in lens], np.int32)
        return launch(batch, wanted, feed)._replace(tokens=tokens)

    monkeypatch.setattr(llm._runner, "launch", forced)


@pytest.fixture
def says(llm, monkeypatch):
    """Make the LLM say `SAY` whatever is asked, token by token."""
    ids = llm.tokenizer.encode(SAY)[1:]
    force(llm, monkeypatch, ids)

    def say(**fields):
        pieces = []
        params = pj.SamplingParams(**({"max_new_tokens": len(ids)} | fields))
        row = llm.generate("x", None, params, on_token=lambda i, p: pieces.append(p))
        assert "".join(pieces) == row[0].text
        return row[0], pieces

    return say


def test_stop_strings_cut_the_text(says):
    row, pieces = says(stop=["STOP", "three"])
    assert row.text == "one two " and row.stop_reason == "STOP"
    assert row.finish_reason == "stop"
    assert len(row.token_ids) == len("one two STOP")
    assert not any("S" in piece for piece in pieces)
    row, _ = says(stop="STOP", include_stop_str_in_output=True)
    assert row.text == "one two STOP"


def test_what_is_held_back_comes_at_the_end(says):
    row, pieces = says(stop="threes")
    assert row.text == SAY and row.finish_reason == "length"
    assert row.stop_reason is None and pieces[-1] == "three"


def test_stop_strings_wait_for_min_new_tokens(says):
    row, _ = says(stop=["two", "STOP"], min_new_tokens=7)
    assert row.stop_reason == "STOP"  # "two" was complete with the 7th token
    row, _ = says(stop=["two", "STOP"], min_new_tokens=6)
    assert row.stop_reason == "two" and row.text == "one "


def test_a_stop_string_at_the_last_token_stops(says):
    row, _ = says(stop="three")
    assert row.finish_reason == "stop" and row.text == "one two STOP "


def test_several_completions_of_a_prompt(llm):
    params = pj.SamplingParams(max_new_tokens=6, temperature=8.0, seed=2**32 - 2, n=3)
    heard = {}

    def listen(index, piece):
        heard[index] = heard.get(index, "") + piece

    rows = llm.generate(["hello", "x"], ["a", None], [params, GREEDY], on_token=listen)
    assert [(r.prompt_index, r.sample_index) for r in rows] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]
    assert heard == {i: row.text for i, row in enumerate(rows) if row.text}
    assert len({row.token_ids for row in rows[:3]}) == 3
    # Sample j draws from seed + j, around the end of the range.
    for row, seed in zip(rows, (2**32 - 2, 2**32 - 1, 0), strict=False):
        alone = dataclasses.replace(params, n=1, seed=seed)
        assert llm.generate("hello", "a", alone) == [row]
    assert llm.generate("x", None, GREEDY) == [rows[3]]


@pytest.mark.parametrize("seed", [np.int32(5), np.uint32(2**32 - 1)])
def test_seeds_of_numpy(llm, seed):
    params = pj.SamplingParams(max_new_tokens=3, temperature=2.0, seed=seed, n=2)
    same = dataclasses.replace(params, seed=int(seed))
    assert llm.generate("x", None, params) == llm.generate("x", None, same)


def test_a_seed_of_none_is_a_fresh_one_each_time(llm):
    params = pj.SamplingParams(max_new_tokens=8, temperature=100.0, n=3)
    rows = [*llm.generate("x", None, params), *llm.generate("x", None, params)]
    assert len({row.token_ids for row in rows}) == len(rows)


def test_a_stop_string_in_what_was_held_back_to_the_end(llm):
    half = llm.tokenizer._tokenizer.token_to_id(
        "\u00c3"
    )  # the byte C3, half of "\u00e9"
    params = pj.SamplingParams(max_new_tokens=1, logit_bias={half: 100.0})
    [row] = llm.generate("x", None, params)
    assert (row.text, row.finish_reason) == ("\ufffd", "length")
    [row] = llm.generate("x", None, dataclasses.replace(params, stop="\ufffd"))
    assert (row.text, row.finish_reason, row.stop_reason) == ("", "stop", "\ufffd")


def test_logprobs_are_the_models_own(llm, checkpoint):
    params = pj.SamplingParams(
        max_new_tokens=5,
        temperature=3.0,
        top_k=50,
        presence_penalty=1.0,
        seed=5,
        logprobs=3,
        prompt_logprobs=2,
    )
    # 25 tokens: four chunks of 8 rows, the third of which ends mid-prompt.
    row = llm.generate("a prompt that is longer.", None, params)[0]
    tokens = row.prompt_token_ids + row.token_ids
    logits = model_logits(checkpoint, tokens)
    exact = logits - logits.max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    entries = row.prompt_logprobs + row.logprobs
    assert entries[0] is None and len(entries) == len(tokens)
    for i, entry in enumerate(entries[1:]):
        token, values = tokens[i + 1], exact[i]
        assert entry.logprob == pytest.approx(values[token], abs=2e-3)
        assert entry.rank == 1 + (values > values[token]).sum()
        order = np.argsort(-values, kind="stable")
        top = order[: 3 if i + 1 >= len(row.prompt_token_ids) else 2]
        assert list(entry.top) == top.tolist()
        assert list(entry.top.values()) == pytest.approx(values[top], abs=2e-3)
    total = sum(entry.logprob for entry in row.logprobs)
    assert row.cumulative_logprob == pytest.approx(total)


def test_logprobs_of_none_and_of_no_others(llm, plain):
    assert plain[0].logprobs is plain[0].prompt_logprobs is None
    assert plain[0].cumulative_logprob is None
    params = dataclasses.replace(GREEDY, logprobs=0, max_new_tokens=2)
    row = llm.generate("hello", "a", params)[0]
    assert row.token_ids == plain[0].token_ids[:2]
    assert [(entry.rank, entry.top) for entry in row.logprobs] == [(1, {})] * 2
    one = llm.generate([[65]], None, pj.SamplingParams(prompt_logprobs=1))[0]
    assert one.prompt_logprobs == (None,)


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_tokens_outside_the_vocabulary(llm, name):
    bad = {"logit_bias": {264: 1.0}, "stop_token_ids": [3, 264]}[name]
    params = [GREEDY, pj.SamplingParams(**{name: bad})]
    with pytest.raises(ValueError) as caught:
        llm.generate(["x", "y"], None, params)
    assert str(caught.value) == (
        f"sampling 1 has token 264 in {name}; tokens must be from 0 to 263"
    )


def test_byte_fallback_text_is_searched_too(llm, monkeypatch):
    # Bytes of one character, each a token: the string is complete with the last.
    ids = [llm.tokenizer.encode("a👍b")[1:][i] for i in range(6)]
    force(llm, monkeypatch, ids)
    row = llm.generate("x", None, pj.SamplingParams(max_new_tokens=6, stop="👍"))[0]
    assert (row.text, row.stop_reason) == ("a", "👍")
    assert row.token_ids == tuple(ids[:5])


def test_parameters_can_be_written_down():
    # As servers log requests.
    fields = dataclasses.asdict(MIXED[-1])
    fields["logit_bias"] = {str(k): v for k, v in fields["logit_bias"].items()}
    assert json.loads(json.dumps(fields))["logit_bias"] == {"40": 2.0}
