"""The families of models that the one decoder serves, as data.

A family is what a `model_type` of a `config.json` stands for: which fields it has, what
they are where they are absent, and what its layers have beside a Llama's. Knows nothing
of what the fields' values come to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from punica_jax.models._hf_fields import (
    ConfigError,
    UnsupportedConfigError,
    check_positive,
)

REQUIRED = object()
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one `model_type` means, as its classes in transformers have it.

    Attributes:
      architecture: the class that reads its checkpoints.
      fields: the fields of `config.json` that only some families have or that differ
        among them, and those that all have -> what an absent one is; None where that
        follows from other fields.
      qkv_bias: q, k and v have a bias, whatever the fields say.
      qk_norm: every head of q and k is normalised before it is rotated.
      fused: module group -> the one linear layer that is all its modules.
      rope_types: the rotary forms, None for all.
    """

    architecture: str
    fields: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    fused: Mapping[str, str] = field(default_factory=dict)
    rope_types: tuple[str, ...] | None = None


_COMMON = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_QWEN = _COMMON | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        fields=_COMMON
        | {
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        fields=_COMMON
        | {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        fields=_COMMON
        | {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
        fused={"qkv": "qkv_proj", "gate_up": "gate_up_proj"},
        rope_types=("default", "longrope"),
    ),
    "qwen2": Family(architecture="Qwen2ForCausalLM", fields=_QWEN, qkv_bias=True),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        fields=_QWEN | {"head_dim": 128, "attention_bias": False},
        qk_norm=True,
    ),
}

# Families that are asked for and not there -> why.
_EXPERTS = "mixtures of experts are not supported"
_GEMMA = "scales its embeddings, adds 1 to the weights of its norms and uses GELU"
_NOT_THERE = {
    **dict.fromkeys(
        "dbrx deepseek_v2 deepseek_v3 deepseek_v32 gpt_oss grok-1 jamba llama4 "
        "llama4_text minimax mixtral qwen3_next".split(),
        _EXPERTS,
    ),
    "gemma": f"Gemma {_GEMMA}, which this decoder does not",
    "gemma2": f"Gemma 2 {_GEMMA}, caps its scores and logits, has four norms a layer "
    "and windows in every other one, which this decoder does not",
    **dict.fromkeys(
        ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text"),
        f"Gemma 3 {_GEMMA}, has four norms a layer, windows in most of them and two "
        "rotary bases, which this decoder does not",
    ),
}


def family_of(model_type: Any) -> Family:
    """Return the family that a `config.json`'s `model_type` names.

    Raises:
      UnsupportedConfigError: there is no such family.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    rule = f"it must be one of {sorted(FAMILIES)}"
    if isinstance(model_type, str):
        reason = _NOT_THERE.get(model_type, _EXPERTS if "moe" in model_type else None)
        rule = f"{reason}; {rule}" if reason else rule
    raise UnsupportedConfigError("model_type", model_type, rule)


def read_window(hf: Mapping[str, Any], family: Family, num_layers: int) -> int | None:
    """Return how many tokens a row of a sliding layer sees, itself included.

    Args:
      hf: the fields of a `config.json`. Unlike other fields, a `sliding_window` of null
        is not an absent one: it means that there is none.
      family: the model's.
      num_layers: its decoder layers.

    Returns:
      The window, or None where every layer sees all.

    Raises:
      UnsupportedConfigError: a layer is neither full nor sliding attention.
      ConfigError: a field is out of its range.
    """
    window = hf.get("sliding_window", family.fields.get("sliding_window"))
    if "use_sliding_window" in family.fields:
        switch = hf.get("use_sliding_window")
        if switch not in (None, False, True):
            raise ConfigError(f"use_sliding_window must be true or false, got {switch}")
        if not switch:
            return None
    if window is None or not _any_slides(hf, family, num_layers):
        return None
    check_positive("sliding_window", window, int)
    return window


def _any_slides(hf: Mapping[str, Any], family: Family, num_layers: int) -> bool:
    if "layer_types" not in family.fields:
        return True
    layer_types = hf.get("layer_types")
    if layer_types is None:
        first = hf.get("max_window_layers")
        first = family.fields["max_window_layers"] if first is None else first
        if not isinstance(first, int) or isinstance(first, bool):
            raise ConfigError(f"max_window_layers must be an integer, got {first!r}")
        return first < num_layers
    if not isinstance(layer_types, list) or set(layer_types) - {_FULL, _SLIDING}:
        raise UnsupportedConfigError(
            "layer_types", layer_types, f"each must be {_FULL!r} or {_SLIDING!r}"
        )
    return _SLIDING in layer_types
