"""What a `config.json` says: the sizes of a model and the choices its layers make.

Knows no arrays, no checkpoints and no tokens: the ids that begin and end a text are the
tokenizer's business.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from punica_jax.models._families import (
    FAMILIES,
    REQUIRED,
    Family,
    family_of,
    read_window,
)
from punica_jax.models._hf_fields import ConfigError, check_positive, refuse_unknown
from punica_jax.models._hf_rope import length_within, read_rope
from punica_jax.models._rope import DEFAULT_ROPE_THETA, RopeScaling

# The modules that share one input, and so one fused weight and one adapter pool.
MODULE_GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "o": ("o_proj",),
        "gate_up": ("gate_proj", "up_proj"),
        "down": ("down_proj",),
    }
)
# The name of each module within its decoder layer, as Hugging Face has it.
MODULE_PATHS: Mapping[str, str] = MappingProxyType(
    {
        module: f"{'self_attn' if group in ('qkv', 'o') else 'mlp'}.{module}"
        for group, modules in MODULE_GROUPS.items()
        for module in modules
    }
)


# Field of a `config.json` -> attribute, where one is the other's value.
_ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "rms_norm_eps": "rms_norm_eps",
        "tie_word_embeddings": "tie_word_embeddings",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "max_position_embeddings": "max_position_embeddings",
    }
)
# Attributes that only some families leave open -> what they are in the others.
_CHOICES = MappingProxyType(
    {"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The sizes and choices of a Llama-shaped decoder, of any family.

    Attributes:
      model_type: the family, a key of `FAMILIES`: says what the layers have beside a
        Llama's, and what a checkpoint calls its tensors.
      num_kv_heads: key and value heads; divides `num_heads`.
      head_dim: width of a head, even; `num_heads * head_dim` need not be
        `hidden_size`.
      rope_theta: base of the rotary frequencies.
      rope_scaling: None for plain rotary embeddings.
      partial_rotary_factor: which part of a head is rotated, from its first lane on; 1
        but for "phi3".
      tie_word_embeddings: the embedding is the output projection too.
      attention_bias: q, k, v and o have a bias; `mlp_bias`: gate, up and down. For the
        families that leave it open ("qwen2" has a bias on q, k and v at all times).
      max_position_embeddings: tokens of the longest sequence, prompt and output.

    Raises:
      ConfigError: a value is out of its range, or not what the family can have.
    """

    model_type: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = DEFAULT_ROPE_THETA
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        _check_values({field.name: getattr(self, field.name) for field in fields(self)})
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_heads must be a multiple of num_kv_heads, got "
                f"{self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim must be even (rotary pairs), got {self.head_dim}"
            )
        family = family_of(self.model_type)
        for name, plain in _CHOICES.items():
            if name not in family.fields and getattr(self, name) != plain:
                raise ConfigError(
                    f"{name} must be {plain} for model_type {self.model_type!r}, got "
                    f"{getattr(self, name)}"
                )
        self._check_rope(family)

    def _check_rope(self, family: Family) -> None:
        if self.partial_rotary_factor > 1 or not self.rotary_dim or self.rotary_dim % 2:
            raise ConfigError(
                "partial_rotary_factor must be at most 1 and leave an even number of "
                f"a head's {self.head_dim} lanes, got {self.partial_rotary_factor}"
            )
        scaling = self.rope_scaling
        if scaling is None:
            return
        if family.rope_types is not None and scaling.rope_type not in family.rope_types:
            raise ConfigError(
                f"rope_type must be one of {sorted(family.rope_types)} for model_type "
                f"{self.model_type!r}, got {scaling.rope_type!r}"
            )
        if scaling.rope_type == "yarn" and self.rope_theta <= 1:
            raise ConfigError(
                "rope_theta must be greater than 1 with rope_type 'yarn', got "
                f"{self.rope_theta}"
            )
        if scaling.rope_type != "longrope":
            return
        for name in ("short_factor", "long_factor"):
            if len(getattr(scaling, name)) != self.rotary_dim // 2:
                raise ConfigError(
                    f"{name} must have {self.rotary_dim // 2} numbers, one for each "
                    f"pair of rotated lanes, got {len(getattr(scaling, name))}"
                )
        original = scaling.original_max_position_embeddings
        if self.max_position_embeddings > original:
            raise ConfigError(
                "max_position_embeddings must be at most the trained length "
                f"{original} with rope_type 'longrope', got "
                f"{self.max_position_embeddings}"
            )

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], *, max_model_len: int | None = None
    ) -> "LlamaConfig":
        """Read the fields of a Hugging Face `config.json`.

        Some models are sound only so far: within a sliding window of their layers, or
        within the trained length of `dynamic` and `longrope` rotary embeddings.
        `max_position_embeddings` is then that length.

        Args:
          hf: the fields. The rotary ones may be spelled `rope_theta` and
            `rope_scaling` or, as transformers 5 writes them, `rope_parameters`. A field
            that is null counts as absent, except `sliding_window` and
            `num_key_value_heads`, where it means none, and as many as heads.
          max_model_len: tokens of the longest sequence that will be run, if known.

        Raises:
          UnsupportedConfigError: a field is unknown, or holds what is not supported;
            or the model is not sound up to `max_model_len`.
          ConfigError: a field is missing or out of its range.
        """
        given = {name: value for name, value in hf.items() if value is not None}
        family = family_of(given.get("model_type", "missing"))
        refuse_unknown(given, family.fields)
        values: dict[str, Any] = {"model_type": given["model_type"]}
        for name, attribute in _ATTRIBUTES.items():
            if name in family.fields:
                values[attribute] = given.get(name, family.fields[name])
                if values[attribute] is REQUIRED:
                    raise ConfigError(f"config field {name!r} is required and missing")
        # Before they are reckoned with: a JSON file may hold anything.
        _check_values(values)
        heads, hidden = values["num_heads"], values["hidden_size"]
        head_dim = given.get("head_dim", family.fields["head_dim"])
        if head_dim is None and hidden % heads:
            raise ConfigError(
                "hidden_size must be a multiple of num_heads where head_dim is not "
                f"given, got {hidden} and {heads}"
            )
        kv_heads = hf.get("num_key_value_heads", family.fields["num_key_value_heads"])
        rope = read_rope(
            given, family, values["max_position_embeddings"], max_model_len
        )
        values |= {
            "num_kv_heads": heads if kv_heads is None else kv_heads,
            "head_dim": hidden // heads if head_dim is None else head_dim,
            "rope_theta": rope.theta,
            "rope_scaling": rope.scaling,
            "partial_rotary_factor": rope.partial_rotary_factor,
            "max_position_embeddings": rope.max_len,
        }
        window = read_window(hf, family, values["num_layers"])
        if window is not None and window < rope.max_len:
            values["max_position_embeddings"] = length_within(
                window,
                max_model_len,
                field="sliding_window",
                value=window,
                why="the window, within which every token sees all before it",
            )
        return cls(**values)

    @classmethod
    def from_dir(
        cls, path: str | os.PathLike[str], *, max_model_len: int | None = None
    ) -> "LlamaConfig":
        """Read `config.json` of a Hugging Face directory; see `from_hf`.

        Raises:
          ConfigError: there is no such file, or it is not a JSON object.
        """
        file = Path(path) / "config.json"
        try:
            hf = json.loads(file.read_text(encoding="utf-8"))
        except OSError as err:
            raise ConfigError(
                f"{file}: a Hugging Face model directory needs this file: "
                f"{err.strerror or err}"
            ) from err
        except ValueError as err:
            raise ConfigError(f"{file}: not valid JSON: {err}") from err
        if not isinstance(hf, dict):
            raise ConfigError(
                f"{file}: must hold a JSON object, got {type(hf).__name__}"
            )
        return cls.from_hf(hf, max_model_len=max_model_len)

    def to_hf(self) -> dict[str, Any]:
        """Return the fields of a `config.json` that `from_hf` reads back as this.

        They describe the model up to `max_position_embeddings` tokens: windows and
        `dynamic` rotary embeddings, which matter beyond, are not among them. They say
        nothing of special tokens and of the weights' type.
        """
        hf: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [self.family.architecture],
            "hidden_act": "silu",
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            # An absent one is the family's own, which the vocabulary may not have.
            "pad_token_id": None,
        }
        for name, attribute in _ATTRIBUTES.items():
            if name in self.family.fields:
                hf[name] = getattr(self, attribute)
        if "sliding_window" in self.family.fields:
            hf["sliding_window"] = None  # an absent one is not none
        if "partial_rotary_factor" in self.family.fields:
            hf["partial_rotary_factor"] = self.partial_rotary_factor
        if self.rope_scaling is not None:
            hf["rope_scaling"] = self.rope_scaling.to_hf()
            name = "original_max_position_embeddings"
            if name in self.family.fields:
                hf[name] = self.rope_scaling.original_max_position_embeddings
        return hf

    @property
    def family(self) -> Family:
        """What the model's layers have beside a Llama's."""
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.family.qkv_bias

    @property
    def rotary_dim(self) -> int:
        """Lanes of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def d_in(self, group: str) -> int:
        """Width of the input that a module group's modules share."""
        return {
            "qkv": self.hidden_size,
            "o": self.num_heads * self.head_dim,
            "gate_up": self.hidden_size,
            "down": self.intermediate_size,
        }[group]

    def d_outs(self, group: str) -> tuple[int, ...]:
        """Width of each of a module group's outputs, in `MODULE_GROUPS`' order."""
        kv = self.num_kv_heads * self.head_dim
        return {
            "qkv": (self.num_heads * self.head_dim, kv, kv),
            "o": (self.hidden_size,),
            "gate_up": (self.intermediate_size, self.intermediate_size),
            "down": (self.hidden_size,),
        }[group]


def _check_values(values: Mapping[str, Any]) -> None:
    """Check the types and signs of some of a `LlamaConfig`'s fields."""
    kinds = {field.name: field.type for field in fields(LlamaConfig)}
    for name, value in values.items():
        kind = kinds[name]
        if kind is int or kind is float:
            check_positive(name, value, kind)
        elif kind is bool and not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
