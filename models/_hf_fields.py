"""Which fields of a Hugging Face `config.json` are understood, and which refused.

Tables: a field that is neither handled, nor inert, nor at a value under which it does
nothing would silently make another model. Knows nothing of what the handled fields
mean, nor of the families that have them.
"""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

# Handled, whatever the family.
_HANDLED = frozenset(
    "model_type original_max_position_embeddings rope_parameters rope_scaling "
    "rope_theta".split()
)
# Fields that never change what a model computes from tokens, whatever they hold.
_INERT = frozenset(
    "_attn_implementation _attn_implementation_autoset _commit_hash "
    "_flash_attn_2_enabled _name_or_path architectures attention_dropout auto_map "
    "bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id "
    "diversity_penalty do_sample dtype early_stopping embd_pdrop "
    "encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty "
    "finetuning_task forced_bos_token_id forced_eos_token_id id2label "
    "initializer_range is_llama_config label2id length_penalty max_length "
    "max_sequence_length min_length name_or_path no_repeat_ngram_size "
    "num_beam_groups num_beams "
    "num_labels num_return_sequences output_attentions output_hidden_states "
    "output_scores pad_token_id prefix problem_type remove_invalid_values "
    "repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id "
    "suppress_tokens task_specific_params temperature tf_legacy_loss "
    "tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript "
    "transformers.js_config transformers_version typical_p unsloth_fixed "
    "unsloth_version use_bfloat16 use_cache".split()
)
# Fields that change what is computed, and the values under which they do not. A family
# that has such a field takes other values too.
_SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (),
    "full_attn_mod": (1,),
    "hidden_act": ("silu",),
    "interpolate_factor": (1,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "per_layer_config": ({},),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}
# Fields that are refused whatever they hold, and why.
_REFUSED: Mapping[str, str] = dict.fromkeys(
    ("compression_config", "quantization", "quantization_config"),
    "quantised weights are not supported, a checkpoint must hold bfloat16, float16 or "
    "float32: take the one that this was made from, or dequantise it",
)
_MAX_SHOWN = 200


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
        shown = repr(value)
        if len(shown) > _MAX_SHOWN:
            shown = f"{shown[:_MAX_SHOWN]}..."
        super().__init__(
            f"config field {field!r} is not supported with this value: {rule}; "
            f"got {shown}"
        )
        self.field = field
        self.value = value
        self.rule = rule

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies are made of what `__init__` takes, which is not the text.
        return type(self), (self.field, self.value, self.rule), vars(self)


def refuse_unknown(hf: Mapping[str, Any], family_fields: Collection[str]) -> None:
    """Check every field that is not null against the tables of this file.

    Args:
      hf: the fields, none of them null.
      family_fields: those that the model's family has.

    Raises:
      UnsupportedConfigError: a field is unknown, or not at a supported value.
    """
    for name, value in hf.items():
        if name in family_fields or name in _HANDLED or name in _INERT:
            continue
        if name not in _SUPPORTED_VALUES:
            unknown = "the field is unknown here and may change the model"
            raise UnsupportedConfigError(name, value, _REFUSED.get(name, unknown))
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
