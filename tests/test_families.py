"""Which published models are read, and which refused and how."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from punica_jax.models import ConfigError, LlamaConfig, UnsupportedConfigError
from punica_jax.models._base_modules import base_modules
from punica_jax.models._families import FAMILIES

# As published but for the lists of longrope factors, which are made up.
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Name -> family, head_dim, kv heads, longest sequence.
READ = {
    "HuggingFaceTB/SmolLM-135M": ("llama", 64, 3, 2048),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": ("llama", 64, 32, 8192),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("llama", 64, 4, 2048),
    "codellama/CodeLlama-7b-hf": ("llama", 128, 32, 16384),
    "meta-llama/Llama-3.1-8B": ("llama", 128, 8, 131072),
    "mistralai/Mistral-7B-v0.1": ("mistral", 128, 8, 4096),  # its window
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", 128, 8, 32768),
    "mistralai/Mistral-Nemo-Instruct-2407": ("mistral", 128, 8, 131072),
    "Qwen/Qwen2-0.5B": ("qwen2", 64, 2, 131072),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", 128, 4, 32768),
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", 128, 2, 4096),
    "Qwen/Qwen3-0.6B": ("qwen3", 128, 8, 40960),
    "Qwen/Qwen3-8B": ("qwen3", 128, 8, 40960),
    "microsoft/Phi-3-mini-4k-instruct": ("phi3", 96, 32, 2047),  # its window
    "microsoft/Phi-3-mini-128k-instruct": ("phi3", 96, 32, 4096),  # as trained
    "microsoft/Phi-4-mini-instruct": ("phi3", 128, 8, 4096),  # as trained
    "microsoft/phi-4": ("phi3", 128, 10, 16384),
}
REFUSED = {
    "mistralai/Mixtral-8x7B-v0.1": (
        "model_type",
        "mixtures of experts are not supported; it must be one of ['llama', 'mistral', "
        "'phi3', 'qwen2', 'qwen3']; got 'mixtral'",
    ),
    "Qwen/Qwen3-30B-A3B": ("model_type", "mixtures of experts are not supported"),
    "google/gemma-2-2b": ("model_type", "caps its scores and logits, has four norms"),
    "google/gemma-3-1b-it": ("model_type", "two rotary bases, which this decoder does"),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": (
        "quantization_config",
        "quantised weights are not supported, a checkpoint must hold bfloat16",
    ),
    "Qwen/Qwen3-8B-FP8": ("quantization_config", "quantised weights are not supported"),
    # transformers ignores this field, others multiply by it.
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": (
        "rope_scaling.attn_factor",
        "rope_type 'yarn' does not have it; got 0.8782",
    ),
    "Qwen/Qwen2.5-7B-Instruct-1M": ("dual_chunk_attention_config", "unknown here"),
}


def read(model_type: str, max_model_len: int | None = None, **fields) -> LlamaConfig:
    hf = SMALL | {"model_type": model_type} | fields
    return LlamaConfig.from_hf(hf, max_model_len=max_model_len)


def test_every_published_config_has_a_verdict():
    assert PUBLISHED.keys() == READ.keys() | REFUSED.keys()
    assert {verdict[0] for verdict in READ.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", READ)
def test_published_configs_that_are_read(name):
    config = LlamaConfig.from_hf(PUBLISHED[name])
    got = (
        config.model_type,
        config.head_dim,
        config.num_kv_heads,
        config.max_position_embeddings,
    )
    assert got == READ[name]
    assert config.vocab_size == PUBLISHED[name]["vocab_size"]
    assert config.num_layers == PUBLISHED[name]["num_hidden_layers"]
    assert config.tie_word_embeddings == PUBLISHED[name]["tie_word_embeddings"]
    assert config.rope_theta == PUBLISHED[name]["rope_theta"]
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("name", REFUSED)
def test_published_configs_that_are_refused(name):
    with pytest.raises(UnsupportedConfigError) as caught:
        LlamaConfig.from_hf(PUBLISHED[name])
    field, text = REFUSED[name]
    assert caught.value.field == field
    assert text in str(caught.value)
    assert len(str(caught.value)) < 500


def test_phi_4_mini_rotates_three_quarters_of_a_head():
    config = LlamaConfig.from_hf(PUBLISHED["microsoft/Phi-4-mini-instruct"])
    assert (config.partial_rotary_factor, config.rotary_dim) == (0.75, 96)
    scaling = config.rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor) == ("longrope", 32.0)
    assert scaling.amplitude == pytest.approx(np.sqrt(1 + 5 / 12), rel=1e-15)


# What transformers' class says where a file is silent.
@pytest.mark.parametrize(
    ("model_type", "kv_heads", "head_dim", "eps", "max_len"),
    [
        ("llama", 64, 2, 1e-6, 2048),
        ("mistral", 8, 2, 1e-6, 4096),  # its window; else 131072
        ("phi3", 64, 2, 1e-5, 4096),
        ("qwen2", 32, 2, 1e-6, 32768),
        ("qwen3", 32, 128, 1e-6, 32768),
    ],
)
def test_absent_fields(model_type, kv_heads, head_dim, eps, max_len):
    hf = SMALL | {"model_type": model_type, "hidden_size": 128}
    hf |= {"num_attention_heads": 64}
    del hf["num_key_value_heads"]
    config = LlamaConfig.from_hf(hf)
    assert (config.num_kv_heads, config.head_dim) == (kv_heads, head_dim)
    assert (config.rms_norm_eps, config.rope_theta) == (eps, 10000.0)
    assert config.max_position_embeddings == max_len
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("model_type", FAMILIES)
def test_as_many_kv_heads_as_heads_where_the_field_is_null(model_type):
    assert read(model_type, num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("model_type", "qkv_bias", "o_bias", "qk_norm"),
    [
        ("llama", False, False, False),
        ("mistral", False, False, False),
        ("phi3", False, False, False),
        ("qwen2", True, False, False),
        ("qwen3", False, False, True),
    ],
)
def test_what_layers_have_beside_a_llama_s(model_type, qkv_bias, o_bias, qk_norm):
    config = read(model_type)
    assert config.qkv_bias is qkv_bias
    assert config.attention_bias is o_bias
    assert config.family.qk_norm is qk_norm


def test_qwen3_may_have_biases():
    config = read("qwen3", attention_bias=True)
    assert config.qkv_bias
    assert config.attention_bias


def test_fused_layers_are_one_module():
    names = [module.name for module in base_modules(read("phi3")) if not module.layer]
    assert names == [
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
    ]
    qkv = next(base_modules(read("phi3")))
    assert (qkv.d_out, qkv.num_modules) == (64, 3)


# Windows

MISTRAL = {"max_position_embeddings": 256, "sliding_window": 100}


@pytest.mark.parametrize("max_model_len", [None, 64, 100])
def test_a_window_ends_what_can_be_run(max_model_len):
    config = read("mistral", max_model_len, **MISTRAL)
    assert config.max_position_embeddings == 100


@pytest.mark.parametrize("max_model_len", [101, 256])
def test_more_than_a_window_is_refused(max_model_len):
    with pytest.raises(UnsupportedConfigError) as caught:
        read("mistral", max_model_len, **MISTRAL)
    assert (caught.value.field, caught.value.value) == ("sliding_window", 100)
    text = (
        "pass max_model_len of at most 100, the window, within which every token sees "
        f"all before it (max_model_len is {max_model_len}); got 100"
    )
    assert text in str(caught.value)


QWEN = {"max_position_embeddings": 256, "sliding_window": 100}
ON = QWEN | {"use_sliding_window": True}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mistral", MISTRAL | {"sliding_window": None}, 256),
        ("mistral", MISTRAL | {"sliding_window": 256}, 256),
        ("mistral", MISTRAL | {"sliding_window": 1000}, 256),
        ("mistral", {"max_position_embeddings": 8192}, 4096),
        ("phi3", MISTRAL, 100),
        ("phi3", {"max_position_embeddings": 8192}, 8192),
        ("qwen2", QWEN, 256),
        ("qwen3", QWEN | {"use_sliding_window": False}, 256),
        ("qwen2", ON, 256),  # the default: layers from 28 on
        ("qwen2", ON | {"max_window_layers": 4}, 256),
        ("qwen2", ON | {"max_window_layers": 3}, 100),
        ("qwen3", ON | {"max_window_layers": 0}, 100),
        ("qwen3", ON | {"max_window_layers": 0, "sliding_window": None}, 256),
        ("qwen3", ON | {"layer_types": [FULL] * 4, "max_window_layers": 0}, 256),
        ("qwen2", ON | {"layer_types": [FULL, SLIDING, FULL, FULL]}, 100),
        ("qwen2", QWEN | {"layer_types": [FULL] * 4}, 256),
    ],
)
def test_which_windows_count(model_type, fields, expected):
    assert read(model_type, **fields).max_position_embeddings == expected


def test_a_window_within_a_stretched_length():
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    fields = ON | {"max_window_layers": 0, "sliding_window": 300, "rope_scaling": rope}
    assert read("qwen2", **fields).max_position_embeddings == 300


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer"),
        ("qwen2", {"use_sliding_window": "no"}, "use_sliding_window must be true or f"),
        (
            "qwen2",
            ON | {"max_window_layers": 1.5},
            "max_window_layers must be an int",
        ),
        (
            "qwen3",
            ON | {"layer_types": ["linear_attention"]},
            "'layer_types' is not s",
        ),
        ("llama", {"sliding_window": 4096}, "'sliding_window' is not supported with"),
        ("mistral", {"layer_types": [FULL] * 4}, "'layer_types' is not supported"),
        ("qwen2", {"attention_bias": True}, "'attention_bias' is not supported with"),
        (
            "qwen2",
            {"partial_rotary_factor": 0.5},
            "'partial_rotary_factor' is not",
        ),
        ("qwen2", {"num_experts": 8}, "'num_experts' is not supported with"),
        (
            "phi3",
            {"partial_rotary_factor": 0.4},
            "leave an even number of a head's 8",
        ),
        (
            "phi3",
            {"partial_rotary_factor": 2.0},
            "partial_rotary_factor must be at",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "it must be one of ['default', 'longrope']; got 'yarn'",
        ),
    ],
)
def test_what_a_family_does_not_take(model_type, fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(model_type, **fields)


@pytest.mark.parametrize(
    ("model_type", "choice", "message"),
    [
        (
            "qwen2",
            {"attention_bias": True},
            "attention_bias must be False for",
        ),
        (
            "mistral",
            {"mlp_bias": True},
            "mlp_bias must be False for model",
        ),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor must be 1.0",
        ),
        ("llama", {"model_type": "bert"}, "'model_type' is not supported"),
    ],
)
def test_choices_that_a_family_does_not_leave(model_type, choice, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataclasses.replace(read(model_type), **choice)


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("gpt_oss", "mixtures of experts are not supported"),
        ("hunyuan_v1_moe", "mixtures of experts are not supported"),
        ("gemma", "Gemma scales its embeddings"),
    ],
)
def test_families_that_are_refused_by_name(model_type, text):
    with pytest.raises(UnsupportedConfigError, match=text) as caught:
        read(model_type)
    assert caught.value.field == "model_type"
    assert "it must be one of ['llama', " in str(caught.value)
