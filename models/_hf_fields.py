"""Which fields of a Hugging Face `config.json` are understood, and which refused.

A table, for every family of models: a field that is neither handled, nor inert, nor at
a value under which it does nothing would silently make another model. Knows nothing of
what the handled fields mean.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

REQUIRED = object()
# model_type -> Hugging Face's field -> (field of LlamaConfig, default when absent).
FAMILIES: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "llama": {
        "vocab_size": ("vocab_size", REQUIRED),
        "hidden_size": ("hidden_size", REQUIRED),
        "intermediate_size": ("intermediate_size", REQUIRED),
        "num_hidden_layers": ("num_layers", REQUIRED),
        "num_attention_heads": ("num_heads", REQUIRED),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
        "tie_word_embeddings": ("tie_word_embeddings", False),
        "attention_bias": ("attention_bias", False),
        "mlp_bias": ("mlp_bias", False),
        "max_position_embeddings": ("max_position_embeddings", 2048),
    },
}
# Handled too, but not field by field.
_DERIVED = frozenset(
    "head_dim model_type num_key_value_heads rope_parameters rope_scaling "
    "rope_theta".split()
)
# Fields that never change what a Llama computes from tokens, whatever they hold.
_INERT = frozenset(
    "_attn_implementation _attn_implementation_autoset _commit_hash "
    "_flash_attn_2_enabled _name_or_path architectures attention_dropout auto_map "
    "bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id "
    "diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size "
    "eos_token_id exponential_decay_length_penalty finetuning_task "
    "forced_bos_token_id forced_eos_token_id id2label initializer_range "
    "is_llama_config label2id length_penalty max_length max_sequence_length "
    "min_length name_or_path no_repeat_ngram_size num_beam_groups num_beams "
    "num_labels num_return_sequences output_attentions output_hidden_states "
    "output_scores pad_token_id prefix problem_type remove_invalid_values "
    "repetition_penalty return_dict return_dict_in_generate sep_token_id "
    "suppress_tokens task_specific_params temperature tf_legacy_loss "
    "tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript "
    "transformers.js_config transformers_version typical_p unsloth_fixed "
    "unsloth_version use_bfloat16 use_cache".split()
)
# Fields that change what is computed, and the values under which they do not.
_SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (),
    "hidden_act": ("silu",),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1.0,),
    "per_layer_config": ({},),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "quantization_config": (),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
}


class ConfigError(ValueError):
    """A model's configuration is missing, broken or contradicts itself."""


class UnsupportedConfigError(ConfigError):
    """A configuration is sound, but asks for what is not supported.

    Attributes:
      field: name of the field in `config.json`.
      value: what it holds.
      rule: what is supported.
    """

    def __init__(self, field: str, value: Any, rule: str):
        super().__init__(
            f"config field {field!r} is not supported with this value: {rule}; "
            f"got {value!r}"
        )
        self.field = field
        self.value = value
        self.rule = rule


def family_of(hf: Mapping[str, Any]) -> Mapping[str, tuple[str, Any]]:
    """Return the entry of `FAMILIES` that a `config.json`'s `model_type` names.

    Raises:
      UnsupportedConfigError: there is no such family.
    """
    model_type = hf.get("model_type", "missing")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedConfigError(
            "model_type", model_type, f"it must be one of {sorted(FAMILIES)}"
        )
    return FAMILIES[model_type]


def refuse_unknown(hf: Mapping[str, Any], family: Mapping[str, Any]) -> None:
    """Check every field that is not null against the tables of this file.

    Raises:
      UnsupportedConfigError: a field is unknown, or not at a supported value.
    """
    for name, value in hf.items():
        if name in family or name in _DERIVED or name in _INERT:
            continue
        if name not in _SUPPORTED_VALUES:
            raise UnsupportedConfigError(
                name, value, "the field is unknown here and may change the model"
            )
        supported = _SUPPORTED_VALUES[name]
        # By type too: False == 0 and True == 1.
        if not any(
            value == known and isinstance(value, bool) == isinstance(known, bool)
            for known in supported
        ):
            listed = [json.dumps(known) for known in supported] + ["null"]
            raise UnsupportedConfigError(
                name, value, f"it must be {' or '.join(listed)}"
            )


def check_positive(name: str, value: Any, kind: type) -> None:
    """Refuse what is not a positive, finite number of that kind (`int` or `float`).

    Raises:
      ConfigError: with the name and the value.
    """
    kinds = int if kind is int else (int, float)
    right = isinstance(value, kinds) and not isinstance(value, bool)
    if not right or not 0 < value < math.inf:
        noun = "integer" if kind is int else "number"
        raise ConfigError(f"{name} must be a positive {noun}, got {value!r}")
