"""What a checkpoint's makers would have: read, or refused by file and field."""

import json

import pytest

from punica_jax import GenerationConfigError, ModelFileError, SamplingParams
from punica_jax.generation_config import GenerationConfig
from punica_jax.model_dir import ModelDir


def read(path, fields):
    (path / "generation_config.json").write_text(json.dumps(fields))
    return GenerationConfig.from_dir(ModelDir(path))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}, {}),
        (  # Llama-3.1-8B-Instruct's
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            {"temperature": 0.6, "top_p": 0.9},
        ),
        (  # Qwen2.5-7B-Instruct's
            {
                "do_sample": True,
                "repetition_penalty": 1.05,
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 20,
            },
            {
                "repetition_penalty": 1.05,
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 20,
            },
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None}, {"temperature": 1.0}),
        # Greedy, as in transformers.
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 9, "min_p": 0.1}, {}),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
            {"repetition_penalty": 1.1},
        ),
        ({"do_sample": True, "top_k": 0}, {"temperature": 1.0, "top_k": 0}),
        ({"max_new_tokens": 300, "max_length": 20}, {"max_new_tokens": 300}),
        ({"max_length": 4096}, {"max_new_tokens": 4096}),
        (
            {"min_new_tokens": 200, "max_new_tokens": 300},
            {"min_new_tokens": 200, "max_new_tokens": 300},
        ),
        ({"stop_strings": ["END"]}, {"stop": ["END"]}),
        ({"transformers_version": "5.0", "cache_implementation": "static"}, {}),
        # Switched off, each in its own way.
        ({"suppress_tokens": [], "bad_words_ids": [], "sequence_bias": {}}, {}),
        ({"renormalize_logits": False, "token_healing": False, "num_beams": 1}, {}),
        ({"typical_p": 0.9, "top_h": 0.5, "eta_cutoff": 1e-3, "do_sample": False}, {}),
        # Without effect, so not looked at.
        ({"temperature": 200, "top_k": 1.5}, {}),
        ({"top_p": 0, "min_p": "x", "do_sample": False}, {}),
    ],
)
def test_defaults(tmp_path, fields, expected):
    config = read(tmp_path, fields)
    assert config == GenerationConfig(sampling=SamplingParams(**expected))


def test_no_file(tmp_path):
    config = GenerationConfig.from_dir(ModelDir(tmp_path))
    assert config == GenerationConfig(sampling=SamplingParams())


def test_what_is_not_supported_when_sampling_is_named(tmp_path):
    fields = {"typical_p": 0.9, "top_h": 0.5, "eta_cutoff": 0.0, "max_time": 1.5}
    assert read(tmp_path, fields).unused == ("max_time",)
    fields["do_sample"] = True
    assert read(tmp_path, fields).unused == ("max_time", "top_h", "typical_p")


def test_what_is_not_supported_is_named(tmp_path):
    fields = {"num_beams": 4, "no_repeat_ngram_size": 0, "typical_p": 1.0}
    fields |= {"suppress_tokens": [1], "penalty_alpha": None, "guidance_scale": 2}
    fields |= {"dola_layers": "high", "renormalize_logits": True}
    fields |= {"remove_invalid_values": True, "token_healing": True}
    config = read(tmp_path, fields)
    assert config.unused == (
        "dola_layers",
        "guidance_scale",
        "num_beams",
        "remove_invalid_values",
        "renormalize_logits",
        "suppress_tokens",
        "token_healing",
    )
    assert config.sampling == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
        (
            {"do_sample": True, "temperature": -1},
            "temperature: temperature must be a number .* got -1",
        ),
        ({"do_sample": True, "top_p": 2}, "top_p: top_p must be a number .* got 2"),
        ({"do_sample": True, "top_k": 1.5}, "top_k: top_k must be .* got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty: repetition_penalty must be"),
        ({"max_length": "x"}, "max_length: max_new_tokens must be .* got 'x'"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens must be .* got 5"),
        ({"stop_strings": [""]}, "stop_strings: stop must"),
    ],
)
def test_bad_values(tmp_path, fields, message):
    with pytest.raises(GenerationConfigError, match=message) as caught:
        read(tmp_path, fields)
    assert str(caught.value).startswith(f"{tmp_path / 'generation_config.json'}: ")


def test_no_object(tmp_path):
    with pytest.raises(ModelFileError, match=r"must hold a JSON object, got list"):
        read(tmp_path, [])
