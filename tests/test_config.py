import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from punica_jax.models import (
    MODULE_GROUPS,
    MODULE_PATHS,
    ConfigError,
    LlamaConfig,
    RopeScaling,
    UnsupportedConfigError,
)
from punica_jax.models._rope import inverse_frequencies

# As published, token ids and bookkeeping fields included.
LLAMA_2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMALL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_2_7b():
    assert LlamaConfig.from_hf(LLAMA_2_7B) == LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=4096,
    )


def test_llama_3_2_1b():
    config = LlamaConfig.from_hf(LLAMA_3_2_1B)
    assert config.rope_scaling == RopeScaling(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert (config.rope_theta, config.tie_word_embeddings) == (500000.0, True)
    assert config.d_in("qkv") == 2048
    assert config.d_outs("qkv") == (2048, 512, 512)
    assert config.d_outs("gate_up") == (8192, 8192)
    assert (config.d_in("down"), config.d_outs("down")) == (8192, (2048,))


def test_absent_fields_have_transformers_defaults():
    assert LlamaConfig.from_hf(SMALL) == LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=2048,
    )


def test_widths_where_heads_and_hidden_size_differ():
    config = LlamaConfig.from_hf(SMALL | {"head_dim": 24, "num_key_value_heads": 2})
    assert (config.d_in("qkv"), config.d_outs("qkv")) == (32, (96, 48, 48))
    assert (config.d_in("o"), config.d_outs("o")) == (96, (32,))


def test_module_groups_name_every_projection_once():
    modules = [module for group in MODULE_GROUPS.values() for module in group]
    assert sorted(modules) == sorted(MODULE_PATHS)
    assert MODULE_PATHS["o_proj"] == "self_attn.o_proj"
    assert MODULE_PATHS["down_proj"] == "mlp.down_proj"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
        {"rope_parameters": LLAMA3, "rope_theta": 500.0},
        {"rope_parameters": LLAMA3, "rope_theta": 500.0, "rope_scaling": LLAMA3},
    ],
)
def test_both_spellings_of_the_rotary_fields(rope):
    config = LlamaConfig.from_hf(SMALL | rope)
    assert config.rope_theta == 500.0
    assert config.rope_scaling == RopeScaling(**LLAMA3)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_scaling(key):
    fields = SMALL | {"rope_scaling": {key: "linear", "factor": 4.0}}
    scaling = LlamaConfig.from_hf(fields).rope_scaling
    assert scaling == RopeScaling(rope_type="linear", factor=4.0)


def test_default_rope_type_is_no_scaling():
    rope = {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 1.0}
    config = LlamaConfig.from_hf(SMALL | {"rope_parameters": rope})
    assert (config.rope_theta, config.rope_scaling) == (7.0, None)


DYNAMIC = SMALL | {
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "max_position_embeddings": 512,
}


def test_dynamic_scaling_within_the_original_length_is_none():
    plain = LlamaConfig.from_hf(SMALL | {"max_position_embeddings": 512})
    assert LlamaConfig.from_hf(DYNAMIC, max_model_len=512) == plain


@pytest.mark.parametrize("max_model_len", [None, 513])
def test_dynamic_scaling_beyond_the_original_length(max_model_len):
    with pytest.raises(UnsupportedConfigError) as caught:
        LlamaConfig.from_hf(DYNAMIC, max_model_len=max_model_len)
    assert caught.value.field == "rope_scaling.rope_type"
    assert caught.value.value == "dynamic"
    assert "max_model_len of at most the original length 512" in str(caught.value)
    assert f"(max_model_len is {max_model_len})" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "name", "rule"),
    [
        ({"model_type": "mixtral"}, "model_type", "must be one of ['llama']"),
        ({"model_type": None}, "model_type", "must be one of ['llama']"),
        ({"hidden_act": "gelu"}, "hidden_act", 'must be "silu" or null'),
        ({"pretraining_tp": 2}, "pretraining_tp", "must be 1 or null"),
        ({"pretraining_tp": True}, "pretraining_tp", "must be 1 or null"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "must be null"),
        ({"sliding_window": 4096}, "sliding_window", "must be null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "must be 1.0"),
        ({"logit_scale": 0.1}, "logit_scale", "unknown here and may change the model"),
        ({"use_qk_norm": False}, "use_qk_norm", "unknown here"),
        ({"rope_scaling": 2.0}, "rope_scaling", "must be an object"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling.rope_type",
            "must be one of ['default', 'dynamic', 'linear', 'llama3']",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1}},
            "rope_parameters.mscale",
            "rope_type 'linear' does not have it",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
            "must be 1.0",
        ),
        (
            {"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 6.0},
            "rope_parameters",
            "must agree with rope_scaling None and rope_theta 6.0",
        ),
        (
            {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 2.0}},
            "rope_parameters",
            "must agree with rope_scaling",
        ),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields, name, rule):
    with pytest.raises(UnsupportedConfigError) as caught:
        LlamaConfig.from_hf(SMALL | fields)
    assert caught.value.field == name
    assert rule in caught.value.rule
    assert repr(name) in str(caught.value)
    assert f"got {caught.value.value!r}" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization_config": None, "sliding_window": None, "new_field": None},
        {"use_sliding_window": False, "rope_interleaved": False, "pruned_heads": {}},
        {"attention_dropout": 0.1, "dtype": "float16", "eos_token_id": [3, 4]},
    ],
)
def test_harmless_fields_are_accepted(fields):
    assert LlamaConfig.from_hf(SMALL | fields) == LlamaConfig.from_hf(SMALL)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": None}, "config field 'vocab_size' is required and missing"),
        ({"vocab_size": 64.0}, "vocab_size must be a positive integer, got 64.0"),
        ({"num_attention_heads": 0}, "num_heads must be a positive integer, got 0"),
        (
            {"num_hidden_layers": True},
            "num_layers must be a positive integer, got True",
        ),
        ({"num_key_value_heads": 3}, "a multiple of num_kv_heads, got 4 and 3"),
        ({"hidden_size": 33}, "a multiple of num_heads where head_dim is not given"),
        ({"head_dim": 7}, "head_dim must be even (rotary pairs), got 7"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number, got -1.0"),
        ({"rope_theta": "10000"}, "rope_theta must be a positive number, got '10000'"),
        ({"mlp_bias": 1}, "mlp_bias must be true or false, got 1"),
        (
            {"max_position_embeddings": "2k"},
            "max_position_embeddings must be a positive integer, got '2k'",
        ),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "'rope_scaling.factor' is required by rope_type 'linear' and missing",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            "rope factor must be at least 1, got 0.5",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            "rope_scaling.factor must be a positive number, got '2'",
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "high_freq_factor must be greater than low_freq_factor, got 1.0 and 1.0",
        ),
    ],
)
def test_broken_values(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LlamaConfig.from_hf(SMALL | fields)


@given(
    heads=st.integers(1, 4),
    groups=st.integers(1, 3),
    half=st.integers(1, 64),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    scaling=st.sampled_from(
        [None, RopeScaling(**LLAMA3), RopeScaling(rope_type="linear", factor=2.5)]
    ),
)
def test_to_hf_and_back(heads, groups, half, flags, scaling):
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=17,
        intermediate_size=30,
        num_layers=2,
        num_heads=heads * groups,
        num_kv_heads=heads,
        head_dim=2 * half,
        rope_scaling=scaling,
        tie_word_embeddings=flags[0],
        attention_bias=flags[1],
        mlp_bias=flags[2],
    )
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_from_dir(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: a Hugging Face model direc"):
        LlamaConfig.from_dir(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        LlamaConfig.from_dir(tmp_path)
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object, got list"):
        LlamaConfig.from_dir(tmp_path)
    file.write_text(json.dumps(SMALL))
    assert LlamaConfig.from_dir(tmp_path) == LlamaConfig.from_hf(SMALL)


# From transformers 5.23 (`LlamaRotaryEmbedding.inv_freq`), theta 500000, head_dim 16.
PLAIN = [
    1.0,
    0.19392276,
    0.03760603,
    0.007292665,
    0.0014142134,
    0.0002742482,
    5.3182957e-05,
    1.0313385e-05,
]
LINEAR_3 = [
    0.33333334,
    0.06464092,
    0.012535344,
    0.0024308884,
    0.0004714045,
    9.141606e-05,
    1.7727652e-05,
    3.4377952e-06,
]
LLAMA3_8 = [
    1.0,
    0.19392276,
    0.03760603,
    0.007292665,
    0.000524846,
    3.4281024e-05,
    6.6478697e-06,
    1.2891732e-06,
]


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, PLAIN),
        (RopeScaling(rope_type="linear", factor=3.0), LINEAR_3),
        (RopeScaling(**LLAMA3), LLAMA3_8),
    ],
)
def test_inverse_frequencies_equal_transformers(scaling, expected):
    inv_freq = inverse_frequencies(16, 500000.0, scaling)
    assert inv_freq.dtype == np.float32
    np.testing.assert_array_equal(inv_freq, np.array(expected, np.float32))
