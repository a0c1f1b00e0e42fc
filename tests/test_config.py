import dataclasses
import json
import math
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
from punica_jax.models._families import FAMILIES
from punica_jax.models._rope import SCALING_FIELDS, inverse_frequencies

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


@pytest.mark.parametrize("max_model_len", [None, 512])
def test_dynamic_scaling_within_the_trained_length_is_none(max_model_len):
    plain = LlamaConfig.from_hf(SMALL | {"max_position_embeddings": 512})
    assert LlamaConfig.from_hf(DYNAMIC, max_model_len=max_model_len) == plain


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "dynamic", "factor": 2.0},
        {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    ],
)
def test_what_depends_on_the_length_is_refused_beyond_the_trained_one(rope):
    with pytest.raises(UnsupportedConfigError) as caught:
        LlamaConfig.from_hf(DYNAMIC | {"rope_scaling": rope}, max_model_len=513)
    assert caught.value.field == "rope_scaling.rope_type"
    assert caught.value.value in ("dynamic", "longrope")
    assert "pass max_model_len of at most 512, the trained length" in str(caught.value)
    assert "(max_model_len is 513)" in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.7, "mscale": 2.0, "mscale_all_dim": 1.0}, 0.7),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, 1.2772588722 / 1.0693147181),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"factor": None}, 0.1 * math.log(8) + 1),  # 1024 over 128
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_enlarges_the_embeddings(more, expected):
    fields = SMALL | {"max_position_embeddings": 1024, "rope_scaling": YARN | more}
    config = LlamaConfig.from_hf(fields)
    assert config.rope_scaling is not None
    assert config.rope_scaling.amplitude == pytest.approx(expected, rel=1e-9)
    assert config.max_position_embeddings == 1024


def test_yarn_lengthens_a_model_whose_length_was_not_written_anew():
    """As the model cards of Qwen say to: `rope_scaling` is added, nothing else."""
    fields = SMALL | {"max_position_embeddings": 128, "rope_scaling": YARN}
    assert LlamaConfig.from_hf(fields).max_position_embeddings == 512


def test_all_of_yarn_is_read():
    more = {"beta_fast": 16.0, "beta_slow": 2, "truncate": False, "finetuned": True}
    config = LlamaConfig.from_hf(SMALL | {"rope_scaling": YARN | more})
    assert config.rope_scaling == RopeScaling(
        **YARN, beta_fast=16.0, beta_slow=2, truncate=False
    )


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 4.0, 9.0, 16.0],
}


def test_longrope_holds_up_to_the_trained_length():
    lengths = {
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": 256,
    }
    config = LlamaConfig.from_hf(SMALL | lengths | {"rope_scaling": LONGROPE})
    assert config.max_position_embeddings == 256
    assert config.rope_scaling == RopeScaling(
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=256,
        short_factor=(1.0, 1.5, 2.0, 3.0),
        long_factor=(1.0, 4.0, 9.0, 16.0),
    )
    assert config.rope_scaling is not None
    assert config.rope_scaling.amplitude == math.sqrt(1 + math.log(4) / math.log(256))
    inside = {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 256}}
    inside |= {"max_position_embeddings": 1024}
    assert LlamaConfig.from_hf(SMALL | inside) == config
    with pytest.raises(ConfigError, match="at most the trained length 256 with rope_"):
        dataclasses.replace(config, max_position_embeddings=257)


@pytest.mark.parametrize(
    ("fields", "name", "rule"),
    [
        ({"model_type": "gpt2"}, "model_type", "it must be one of ['llama', 'mistral'"),
        ({"model_type": None}, "model_type", "it must be one of ['llama', 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act", 'must be "silu" or null'),
        ({"pretraining_tp": 2}, "pretraining_tp", "must be 1 or null"),
        ({"pretraining_tp": True}, "pretraining_tp", "must be 1 or null"),
        ({"quantization": {"bits": 4}}, "quantization", "quantised weights are not"),
        ({"sliding_window": 4096}, "sliding_window", "must be null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "must be 1.0"),
        ({"logit_scale": 0.1}, "logit_scale", "unknown here and may change the model"),
        ({"use_qk_norm": False}, "use_qk_norm", "unknown here"),
        ({"rope_scaling": 2.0}, "rope_scaling", "must be an object"),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
            "rope_scaling.rope_type",
            "one of ['default', 'dynamic', 'linear', 'llama3', 'longrope', 'yarn']",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            "rope_scaling.original_max_position_embeddings",
            "must agree with original_max_position_embeddings, which is 64",
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
        (
            {"rope_scaling": YARN | {"beta_fast": 1}},
            "rope beta_fast must be greater than beta_slow, got 1 and 1.0",
        ),
        (
            {"rope_scaling": YARN | {"truncate": 1}},
            "truncate must be true or false, got 1",
        ),
        (
            {"rope_scaling": YARN | {"attention_factor": "1"}},
            "rope_scaling.attention_factor must be a positive number, got '1'",
        ),
        (
            {"rope_scaling": LONGROPE | {"long_factor": None}},
            "'rope_scaling.long_factor' is required by rope_type 'longrope' and miss",
        ),
        (
            {"rope_scaling": LONGROPE | {"short_factor": 2.0}},
            "rope_scaling.short_factor must be a list, got 2.0",
        ),
        (
            {"rope_scaling": LONGROPE | {"short_factor": [1.0, -1.0, 1.0, 1.0]}},
            "rope_scaling.short_factor[1] must be a positive number, got -1.0",
        ),
        (
            {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
            "long_factor must have 4 numbers, one for each pair of rotated lanes",
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
    rope_type=st.sampled_from([None, "linear", "llama3", "yarn", "longrope"]),
    model_type=st.sampled_from(sorted(FAMILIES)),
    attention_factor=st.sampled_from([None, 0.75]),
)
def test_to_hf_and_back(
    heads, groups, half, flags, rope_type, model_type, attention_factor
):
    family = FAMILIES[model_type]
    scaling = None
    if rope_type in (family.rope_types or SCALING_FIELDS):
        lists = tuple(1.0 + 0.5 * i for i in range(half))
        values = {
            "factor": 2.5,
            "low_freq_factor": 1.5,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 2048,
            "beta_slow": 2.0,
            "attention_factor": attention_factor,
            "truncate": flags[0],
            "short_factor": lists,
            "long_factor": lists,
        }
        of_type = [name for part in SCALING_FIELDS[rope_type] for name in part]
        values = {name: value for name, value in values.items() if name in of_type}
        scaling = RopeScaling(rope_type=rope_type, **values)
    config = LlamaConfig(
        model_type=model_type,
        vocab_size=10,
        hidden_size=17,
        intermediate_size=30,
        num_layers=2,
        num_heads=heads * groups,
        num_kv_heads=heads,
        head_dim=2 * half,
        rope_scaling=scaling,
        tie_word_embeddings=flags[0],
        attention_bias=flags[1] and "attention_bias" in family.fields,
        mlp_bias=flags[2] and "mlp_bias" in family.fields,
        max_position_embeddings=5120 if rope_type == "yarn" else 2048,
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
YARN_4 = [
    1.0,
    0.19392276,
    0.03760603,
    0.005469498,
    0.0007071067,
    6.856205e-05,
    1.3295739e-05,
    2.5783463e-06,
]
YARN_4_BETWEEN_LANES = [
    1.0,
    0.19392276,
    0.03760603,
    0.007292665,
    0.00035355336,
    6.856205e-05,
    1.3295739e-05,
    2.5783463e-06,
]
SHORT_FACTORS = (1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8)
LONGROPE_SHORT = [
    1.0,
    0.1762934,
    0.028927715,
    0.0045579155,
    0.0007071067,
    0.00010969927,
    1.7155793e-05,
    2.7140488e-06,
]


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, PLAIN),
        (RopeScaling(rope_type="yarn", factor=4.0), YARN_4),
        (
            RopeScaling(
                rope_type="yarn",
                factor=4.0,
                beta_fast=8.0,
                beta_slow=2.0,
                truncate=False,
            ),
            YARN_4_BETWEEN_LANES,
        ),
        (
            RopeScaling(
                rope_type="longrope",
                factor=4.0,
                short_factor=SHORT_FACTORS,
                long_factor=(9.0,) * 8,
            ),
            LONGROPE_SHORT,
        ),
        (RopeScaling(rope_type="linear", factor=3.0), LINEAR_3),
        (RopeScaling(**LLAMA3), LLAMA3_8),
    ],
)
def test_inverse_frequencies_equal_transformers(scaling, expected):
    inv_freq = inverse_frequencies(16, 500000.0, scaling)
    assert inv_freq.dtype == np.float32
    np.testing.assert_array_equal(inv_freq, np.array(expected, np.float32))


def test_yarn_needs_a_base_above_one():
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}
    with pytest.raises(ConfigError, match="rope_theta must be greater than 1 with"):
        LlamaConfig.from_hf(SMALL | {"rope_parameters": rope})
