"""Requests' parameters: what is accepted, and what each refusal says."""

import ast
import dataclasses
from fractions import Fraction
from numbers import Number
from pathlib import Path

import numpy as np
import pytest

from punica_jax import request
from punica_jax.request import Completion, SamplingParams, Terms


def test_defaults_are_greedy():
    params = SamplingParams()
    assert params.max_new_tokens == 128
    assert params.temperature == 0.0
    assert params.seed is None
    assert params.ignore_eos is False
    assert params.n == 1 and params.stop == params.stop_token_ids == ()
    assert not params.changes_logits
    assert params == SamplingParams(stop=None, stop_token_ids=None)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": np.int32(7)},
        {"temperature": 1},
        {"temperature": 1e-30},
        {"temperature": 100.0},
        {"temperature": np.float32(0.5)},
        {"seed": 0},
        {"seed": 2**32 - 1},
        {"ignore_eos": True},
        {"n": 3, "temperature": 0.1},
        {"max_new_tokens": 4, "min_new_tokens": 4},
        {"top_k": None},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**6},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"logit_bias": {}},
        {"logit_bias": {0: -100, 5: 100}},
        {"logit_bias": dict.fromkeys(range(300), 1.0)},
        {"stop": ("a", "bc")},
        {"stop_token_ids": (3, 0)},
        {"include_stop_str_in_output": True},
        {"logprobs": 0},
        {"prompt_logprobs": 20},
    ],
)
def test_accepts_the_ends_of_every_range(fields):
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize("value", [0, -1, 1.0, "8", None, True])
def test_max_new_tokens_is_a_positive_integer(value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(max_new_tokens=value)
    assert str(caught.value) == (
        f"max_new_tokens must be an integer of at least 1, got {value!r}"
    )


@pytest.mark.parametrize(
    "value", [-0.1, 100.5, float("nan"), float("inf"), "1", None, True]
)
def test_temperature_is_a_number_in_range(value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(temperature=value)
    assert str(caught.value) == (
        f"temperature must be a number from 0 to 100, got {value!r}"
    )


@pytest.mark.parametrize("value", [-1, 2**32, 0.5, "1", True])
def test_seed_fits_32_bits(value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(seed=value)
    assert str(caught.value) == (
        f"seed must be None or an integer from 0 to 4294967295, got {value!r}"
    )


def test_numbers_of_others_become_pythons():
    """NumPy's narrow ones would overflow in sums of lengths, and among times."""
    sampling = SamplingParams(
        **dict.fromkeys(("n", "logprobs", "prompt_logprobs", "top_k"), np.int8(3)),
        max_new_tokens=np.int8(100),
        min_new_tokens=np.int8(98),
        seed=np.uint32(7),
        temperature=np.float16(0.5),
        **dict.fromkeys(("top_p", "min_p", "repetition_penalty"), Fraction(1, 2)),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), np.float32(1)),
        logit_bias={np.int16(5): np.float32(1.5)},
        stop_token_ids=[np.int8(4)],
    )
    values = dataclasses.asdict(sampling)
    [(token, bias)] = values.pop("logit_bias").items()
    [stop] = values.pop("stop_token_ids")
    numbers = [value for value in values.values() if isinstance(value, Number)]
    assert len(numbers) == len(values) - 1  # the texts that stop
    assert {type(one) for one in (token, bias, stop, *numbers)} == {int, float, bool}
    assert sampling.max_new_tokens + 28 == 128 and sampling.temperature == 0.5
    for seconds in (Fraction(1, 4), np.float16(0.25)):
        terms = Terms(deadline_s=seconds, first_token_s=seconds)
        assert type(terms.deadline_s) is type(terms.first_token_s) is float
        assert terms.deadline_s == terms.first_token_s == 0.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SamplingParams(temperature=10**400),
            "temperature must be a number from 0 to 100, got 1000",
        ),
        (
            lambda: SamplingParams(logit_bias={1: 10**400}),
            "logit_bias of token 1 must be a number from -100 to 100, got 1000",
        ),
        (
            lambda: Terms(deadline_s=10**400),
            "deadline_s must be a number above 0, got 1000",
        ),
        (
            lambda: SamplingParams(stop=["x"] * 65),
            "stop must have at most 64 texts, got 65",
        ),
    ],
)
def test_what_is_too_large(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_ignore_eos_is_a_bool(value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(ignore_eos=value)
    assert str(caught.value) == f"ignore_eos must be True or False, got {value!r}"


NOT_STOP = (
    "stop must be a text or a sequence of texts, none of them empty, got {value!r}"
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        (
            {"n": 2},
            "n must be 1 at temperature 0, where all completions would be the same, "
            "got 2",
        ),
        (
            {"max_new_tokens": 3, "min_new_tokens": 4},
            "min_new_tokens must be an integer from 0 to max_new_tokens 3, got 4",
        ),
        (
            {"top_k": -2},
            "top_k must be an integer of at least 1, or None, 0 or -1 for off, got -2",
        ),
        (
            {"top_k": 1.0},
            "top_k must be an integer of at least 1, or None, 0 or -1 for off, got 1.0",
        ),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, "top_p must be a number above 0 and at most 1, got 1.1"),
        ({"min_p": -0.1}, "min_p must be a number from 0 to 1, got -0.1"),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty must be a number above 0 and at most 100, got 0.0",
        ),
        (
            {"presence_penalty": 2.5},
            "presence_penalty must be a number from -2 to 2, got 2.5",
        ),
        (
            {"frequency_penalty": float("nan")},
            "frequency_penalty must be a number from -2 to 2, got nan",
        ),
        (
            {"logit_bias": [3]},
            "logit_bias must be a mapping of token ids to numbers, got [3]",
        ),
        (
            {"logit_bias": dict.fromkeys(range(301), 1)},
            "logit_bias must have at most 300 tokens, got 301",
        ),
        (
            {"logit_bias": {-1: 1}},
            "logit_bias must hold token ids, 0 or more, got -1",
        ),
        (
            {"logit_bias": {"5": 1}},
            "logit_bias must hold token ids, 0 or more, got '5'",
        ),
        (
            {"logit_bias": {5: float("-inf")}},
            "logit_bias of token 5 must be a number from -100 to 100, got -inf",
        ),
        ({"stop": ""}, NOT_STOP.format(value="")),
        ({"stop": ["a", ""]}, NOT_STOP.format(value=["a", ""])),
        ({"stop": b"a"}, NOT_STOP.format(value=b"a")),
        ({"stop": [1]}, NOT_STOP.format(value=[1])),
        ({"stop": 1}, NOT_STOP.format(value=1)),
        (
            {"stop_token_ids": 5},
            "stop_token_ids must be a sequence of token ids, got 5",
        ),
        (
            {"stop_token_ids": [5, True]},
            "stop_token_ids must hold token ids, 0 or more, got True",
        ),
        (
            {"include_stop_str_in_output": 1},
            "include_stop_str_in_output must be True or False, got 1",
        ),
        ({"logprobs": 21}, "logprobs must be None or an integer from 0 to 20, got 21"),
        (
            {"prompt_logprobs": True},
            "prompt_logprobs must be None or an integer from 0 to 20, got True",
        ),
    ],
)
def test_refusals_name_field_rule_and_value(fields, message):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == message


def test_containers_are_copies():
    stop, tokens, bias = ["a"], [1], {2: 3.0}
    params = SamplingParams(stop=stop, stop_token_ids=tokens, logit_bias=bias)
    stop.append("b")
    tokens.append(2)
    bias[5] = 1.0
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    assert params.logit_bias == {2: 3.0}
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert dataclasses.replace(params, seed=1).stop == ("a",)


def test_an_answer_in_another_place_is_equal():
    fields = {"token_ids": (1,), "finish_reason": "stop", "adapter": None}
    first = Completion(text="a", prompt_token_ids=(2,), **fields)
    second = dataclasses.replace(first, prompt_index=3, sample_index=1)
    assert first == second != dataclasses.replace(first, stop_reason=1)


def test_values_are_frozen():
    completion = Completion(
        text="hi",
        token_ids=(5, 2),
        finish_reason="stop",
        adapter=None,
        prompt_token_ids=(1,),
    )
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        completion.text = "other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        SamplingParams().seed = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "name", ["request.py", "stops.py", "tokenizer.py", "_text_stages.py"]
)
def test_host_files_import_no_jax(name):
    tree = ast.parse((Path(request.__file__).parent / name).read_text())
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported
    roots = {module.split(".")[0] for module in imported}
    assert not roots & {"jax", "jaxlib", "flax", "jaxtyping"}
    assert not {module for module in imported if module.startswith("punica_jax.models")}


def test_arrays_of_numpy_are_no_stops():
    with pytest.raises(ValueError, match="stop must be a text or a sequence of texts"):
        SamplingParams(stop=np.array(["a", "b"]))
    with pytest.raises(ValueError, match="stop_token_ids must be a sequence"):
        SamplingParams(stop_token_ids=np.array([1, 2]))
