"""Requests' parameters: what is accepted, and what each refusal says."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from punica_jax import request
from punica_jax.request import Completion, SamplingParams


def test_defaults_are_greedy():
    params = SamplingParams()
    assert params.max_new_tokens == 128
    assert params.temperature == 0.0
    assert params.seed is None
    assert params.ignore_eos is False


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


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_ignore_eos_is_a_bool(value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(ignore_eos=value)
    assert str(caught.value) == f"ignore_eos must be True or False, got {value!r}"


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


@pytest.mark.parametrize("name", ["request.py", "tokenizer.py", "_text_stages.py"])
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
    assert not {module for module in imported if module.startswith("punica_jax.mo")}
