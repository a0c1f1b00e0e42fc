"""Small models of every family, and adapters, as their configurations say it.

Plain data for `transformers` and `peft`; knows no arrays and imports neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Module names, from the attention's input to the network's output.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED_MODULES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
# What "llama3" and "yarn" stretch: the longest prompts are beyond it.
_TRAINED_LEN = 32
# The longest sequence, to its last new token; what ends there is tested to its end.
MAX_LEN = 48
PROMPT_LENS = (7, 1, 19, 4, 40, 2, 12, 5, 26, 3)
ROPES: Mapping[str, Mapping[str, Any]] = {
    "default": {"rope_theta": 500.0},
    "linear": {"rope_theta": 10000.0, "factor": 4.0},
    # Only within its length, where it is the default form: beyond, the frequencies
    # would follow the longest sequence of a batch.
    "dynamic": {"rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _TRAINED_LEN,
    },
    "yarn": {
        "rope_theta": 500.0,
        "factor": 4.0,
        "beta_fast": 3.0,
        "original_max_position_embeddings": _TRAINED_LEN,
    },
    # Only within its length too, for four pairs of lanes.
    "longrope": {
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.25, 1.75, 2.5],
        "long_factor": [1.5, 4.0, 9.0, 20.0],
        "original_max_position_embeddings": MAX_LEN,
    },
}


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One model, the adapters beside it, and the prompts that both sides continue.

    Attributes:
      family: `model_type`.
      fields: of its `config.json`, over `SIZES`.
      adapters: name -> fields of PEFT's `LoraConfig`.
      prompt_lens: tokens of each prompt.
      seed: of the weights and the prompts.
    """

    family: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prompt_lens: tuple[int, ...] = PROMPT_LENS
    seed: int = 0


def rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    """Return the field `rope_parameters` of a rotary form."""
    return {"rope_parameters": {"rope_type": rope_type, **ROPES[rope_type], **fields}}


def parent_of(module: str) -> str:
    """Return what a module is in: the attention, or the feed-forward network."""
    names = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
    return "self_attn" if module in names else "mlp"


def adapter_of_seq(case: ModelCase) -> list[str | None]:
    """Return each prompt's adapter: none, every one, then the first ones again."""
    names = [None, *case.adapters]
    return [names[seq % len(names)] for seq in range(len(case.prompt_lens))]


def adapters_of(family: str) -> dict[str, dict[str, Any]]:
    """Return adapters that use every supported option of PEFT's, for one family.

    Their ranks are odd, one, a whole page of 16, and more than two pages.
    """
    fused = family == "phi3"
    qkv, up = ("qkv_proj", "gate_up_proj") if fused else ("q_proj", "up_proj")
    value = "qkv_proj" if fused else "v_proj"
    # PEFT has no modules of its own choice for Phi-3.
    targets = {"target_modules": ["qkv_proj"]} if fused else {}
    return {
        "few": {
            "target_modules": sorted({qkv, value}),
            "r": 4,
            "lora_alpha": 8,
            "init_lora_weights": "orthogonal",
        },
        "of_the_family": {"r": 5, "lora_alpha": 8, **targets},
        "all_linear": {
            "target_modules": "all-linear",
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "init_lora_weights": "gaussian",
        },
        "patterns": {
            "target_modules": [qkv, "o_proj", "down_proj"],
            "r": 2,
            "lora_alpha": 4,
            "rank_pattern": {f"layers.1.self_attn.{qkv}": 20, "down_proj": 17},
            "alpha_pattern": {"o_proj": 3, "layers.1.mlp.down_proj": 9},
        },
        "one_layer": {
            "target_modules": [up, "down_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
            "r": 16,
            "lora_alpha": 16,
        },
        "regex": {
            "target_modules": rf".*\.layers\.0\..*\.({value}|{up})",
            "r": 1,
            "lora_alpha": 2,
            "init_lora_weights": "mica",
        },
        "excluded": {
            "target_modules": list(FUSED_MODULES if fused else MODULES),
            "exclude_modules": ["o_proj", f"layers.0.mlp.{up}"],
            "r": 33,
            "lora_alpha": 20,
            "use_rslora": True,
            "alpha_pattern": {"down_proj": 7},
        },
        "excluded_regex": {
            "target_modules": "all-linear",
            "exclude_modules": rf".*layers\.1\.self_attn\.({qkv}|o_proj)",
            "r": 7,
            "lora_alpha": 7,
        },
    }


def _case(family: str, **fields: Any) -> ModelCase:
    return ModelCase(family=family, fields=fields, adapters=adapters_of(family))


_MHA, _MQA = {"num_key_value_heads": 4}, {"num_key_value_heads": 1}
MODELS: Mapping[str, ModelCase] = {
    "llama-mha": _case("llama", **_MHA),
    "llama-gqa": _case("llama", tie_word_embeddings=True, rms_norm_eps=1e-2),
    "llama-mqa": _case("llama", head_dim=16, **_MQA),
    "llama-biased": _case("llama", attention_bias=True, mlp_bias=True),
    "llama-linear": _case("llama", **rope("linear")),
    "llama-dynamic": _case("llama", max_position_embeddings=MAX_LEN, **rope("dynamic")),
    "llama-llama3": _case("llama", **rope("llama3")),
    "llama-yarn": _case("llama", **rope("yarn")),
    "llama-longrope": _case("llama", **rope("longrope")),
    "mistral-mqa": _case("mistral", sliding_window=None, **_MQA),
    "mistral-window": _case("mistral", sliding_window=MAX_LEN, head_dim=16),
    "qwen2-mha": _case("qwen2", **_MHA),
    "qwen2-yarn": _case("qwen2", tie_word_embeddings=True, **rope("yarn")),
    "qwen3-gqa": _case("qwen3", head_dim=16),
    "qwen3-biased": _case("qwen3", head_dim=8, attention_bias=True, **_MQA),
    "phi3-mha": _case("phi3", sliding_window=MAX_LEN, **_MHA),
    # As Phi-4-mini is: half of each head is rotated.
    "phi3-longrope": _case(
        "phi3",
        hidden_size=64,
        original_max_position_embeddings=MAX_LEN,
        **rope("longrope", partial_rotary_factor=0.5),
    ),
}
# One of each family, for what all of them share: the entry points around the model.
FAMILIES = ("llama-mqa", "mistral-window", "qwen2-yarn", "qwen3-gqa", "phi3-longrope")
