import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from punica_jax.request import SamplingParams, Terms, TokenLogprobs
from punica_jax.request_state import RequestState, SampleState

BAD_LOGPROBS = [
    None,
    -0.5,
    TokenLogprobs(logprob=None, rank=1, top={}),  # pyright: ignore[reportArgumentType]
    TokenLogprobs(logprob=-1.0, rank=0, top={}),
    TokenLogprobs(logprob=-1.0, rank=1.5, top={}),  # pyright: ignore[reportArgumentType]
    TokenLogprobs(logprob=-1.0, rank=1, top={2: "x"}),  # pyright: ignore[reportArgumentType]
    TokenLogprobs(logprob=-1.0, rank=1, top=None),  # pyright: ignore[reportArgumentType]
    TokenLogprobs(logprob=-1.0, rank=1, top=[1]),  # pyright: ignore[reportArgumentType]
    TokenLogprobs(logprob=-(10**400), rank=1, top={}),
    TokenLogprobs(logprob=float("nan"), rank=1, top={}),
]


TOKENS = st.lists(st.integers(0, 1 << 20), max_size=5).map(tuple)
NUMBERS = st.floats(allow_nan=False, width=32)
LOGPROBS = st.builds(
    TokenLogprobs,
    logprob=NUMBERS,
    rank=st.integers(1, 1 << 20),
    top=st.dictionaries(st.integers(0, 1 << 20), NUMBERS, max_size=3),
)
SAMPLES = st.builds(
    SampleState,
    seed=st.integers(0, 2**32 - 1),
    token_ids=TOKENS,
    logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
    prompt_logprobs=st.one_of(
        st.just(()), st.lists(LOGPROBS, max_size=2).map(lambda rest: (None, *rest))
    ),
)
SAMPLING = st.builds(
    SamplingParams,
    n=st.just(1),
    max_new_tokens=st.integers(1, 99),
    temperature=st.floats(0, 100),
    top_k=st.none() | st.integers(1, 50),
    top_p=st.floats(0.1, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-100, 100)),
    stop=st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=TOKENS,
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    seed=st.none() | st.integers(0, 2**32 - 1),
)
TERMS = st.builds(
    Terms,
    priority=st.integers(-9, 9),
    tenant=st.text(),
    first_token_s=st.none() | st.floats(0.001, 9),
    deadline_s=st.none() | st.floats(0.001, 9),
)
STATES = st.builds(
    RequestState,
    prompt_token_ids=TOKENS,
    adapter=st.none() | st.text(min_size=1),
    sampling=SAMPLING,
    terms=TERMS,
    samples=st.lists(SAMPLES, max_size=2).map(tuple),
)
STATE = RequestState(
    prompt_token_ids=(5, 6),
    adapter="a",
    sampling=SamplingParams(logit_bias={3: 1.5}),
    terms=Terms(),
    samples=(
        SampleState(
            seed=1,
            token_ids=(7,),
            logprobs=(TokenLogprobs(logprob=-0.5, rank=1, top={7: -0.5}),),
            prompt_logprobs=(None,),
        ),
    ),
)


@given(STATES)
def test_text_and_back(state):
    assert RequestState.from_json(state.to_json()) == state


def test_the_text_is_json():
    fields = json.loads(STATE.to_json())
    assert fields["prompt_token_ids"] == [5, 6] and fields["adapter"] == "a"
    assert fields["samples"][0]["logprobs"][0]["top"] == {"7": -0.5}


def test_numbers_of_numpy():
    sampling = SamplingParams(
        seed=np.int64(3),  # pyright: ignore[reportArgumentType]
        temperature=np.float32(0.5),  # pyright: ignore[reportArgumentType]
        logit_bias={np.int32(4): np.float32(2)},  # pyright: ignore[reportArgumentType]
        stop_token_ids=np.arange(3).tolist(),
        top_k=np.int32(9),  # pyright: ignore[reportArgumentType]
    )
    state = dataclasses.replace(STATE, sampling=sampling)
    again = RequestState.from_json(state.to_json())
    assert again == state and type(again.sampling.seed) is int


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": 2**32}, "seed must be an integer from 0 to 4294967295, got 4294967"),
        ({"seed": "x"}, "seed must be an integer from 0 to 4294967295, got 'x'"),
        ({"seed": 1, "token_ids": (3, -1)}, "token_ids must be 0 or more, got -1"),
        ({"seed": 1, "token_ids": ("3",)}, "token_ids must be 0 or more, got '3'"),
    ],
)
def test_samples_that_are_none(fields, message):
    with pytest.raises(ValueError, match=message):
        SampleState(**({"token_ids": ()} | fields))


@pytest.mark.parametrize("samples", [None, 3, ({},), [None]])
def test_a_state_of_what_are_no_samples(samples):
    with pytest.raises(ValueError, match="samples must be SampleStates, got "):
        dataclasses.replace(STATE, samples=samples)


def without(name, **deeper):
    fields = json.loads(STATE.to_json())
    at = fields[deeper["inside"]] if deeper else fields
    del (at[0] if isinstance(at, list) else at)[name]
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("null", "this is no RequestState"),
        ("hello", "this is no RequestState: JSONDecodeError"),
        ("[]", "this is no RequestState"),
        ("3", "this is no RequestState"),
        ("{}", "this is no RequestState: KeyError"),
        (without("samples"), "this is no RequestState: KeyError.'samples'"),
        (without("adapter"), "this is no RequestState: KeyError.'adapter'"),
        (without("seed", inside="samples"), "this is no RequestState: KeyError.'seed'"),
        (
            STATE.to_json().replace('"n": 1', '"m": 1'),
            "this is no RequestState: TypeError.*unexpected keyword argument 'm'",
        ),
        (
            STATE.to_json().replace('{"3": 1.5}', "[3]"),
            "this is no RequestState: AttributeError",
        ),
        (STATE.to_json().replace('"n": 1', '"n": 0'), "n must be an integer of at"),
        (STATE.to_json().replace('{"3":', '{"x":'), "invalid literal for int"),
        (STATE.to_json().replace('"tenant": ""', '"tenant": 3'), "tenant must be"),
        (
            STATE.to_json().replace('{"3": 1.5}', f'{{"3": 1{"0" * 400}}}'),
            "logit_bias of token 3 must be a number",
        ),
        ("[" * 100_000, "this is no RequestState: RecursionError"),
    ],
)
def test_other_texts(text, message):
    with pytest.raises(ValueError, match=message):
        RequestState.from_json(text)


@pytest.mark.parametrize("entry", BAD_LOGPROBS, ids=lambda entry: repr(entry)[:60])
def test_logprobs_that_are_none_are_refused(entry):
    """They would fail where its completion is made: in the thread of all requests."""
    output = SampleState(seed=1, token_ids=(65,), logprobs=(entry,))
    prompt = SampleState(seed=1, token_ids=(), prompt_logprobs=(None, entry))
    for state in (output, prompt) if entry is not None else (output,):
        with pytest.raises(ValueError, match="logprobs must be TokenLogprobs of a num"):
            state.check(9, has_logprobs=state is output)
