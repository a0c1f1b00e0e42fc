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

from punica_jax.models._hf_fields import (
    FAMILIES,
    REQUIRED,
    ConfigError,
    check_positive,
    family_of,
    refuse_unknown,
)
from punica_jax.models._rope import DEFAULT_ROPE_THETA, RopeScaling, read_rope

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The sizes and choices of one Llama.

    Attributes:
      num_kv_heads: key and value heads; divides `num_heads`.
      head_dim: width of a head, even; `num_heads * head_dim` need not be
        `hidden_size`.
      rope_theta: base of the rotary frequencies.
      rope_scaling: None for plain rotary embeddings.
      tie_word_embeddings: the embedding is the output projection too.
      attention_bias: q, k, v and o have a bias; `mlp_bias`: gate, up and down.
      max_position_embeddings: tokens of the longest sequence, prompt and output.

    Raises:
      ConfigError: a value is out of its range.
    """

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

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], *, max_model_len: int | None = None
    ) -> "LlamaConfig":
        """Read the fields of a Hugging Face `config.json`.

        Args:
          hf: the fields. The rotary ones may be spelled `rope_theta` and
            `rope_scaling` or, as transformers 5 writes them, `rope_parameters`. A field
            that is null counts as absent.
          max_model_len: tokens of the longest sequence that will be run. `dynamic`
            rope scaling is accepted only when this stays within the original length,
            where it changes nothing.

        Raises:
          UnsupportedConfigError: a field is unknown, or holds what is not supported.
          ConfigError: a field is missing or out of its range.
        """
        hf = {name: value for name, value in hf.items() if value is not None}
        family = family_of(hf)
        refuse_unknown(hf, family)
        values = {}
        for name, (attribute, default) in family.items():
            values[attribute] = hf.get(name, default)
            if values[attribute] is REQUIRED:
                raise ConfigError(f"config field {name!r} is required and missing")
        # Before they are reckoned with: a JSON file may hold anything.
        _check_values(values)
        heads, hidden = values["num_heads"], values["hidden_size"]
        if "head_dim" not in hf and hidden % heads:
            raise ConfigError(
                "hidden_size must be a multiple of num_heads where head_dim is not "
                f"given, got {hidden} and {heads}"
            )
        theta, scaling, max_len = read_rope(
            hf, values["max_position_embeddings"], max_model_len
        )
        values |= {
            "num_kv_heads": hf.get("num_key_value_heads", heads),
            "head_dim": hf.get("head_dim", hidden // heads),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_position_embeddings": max_len,
        }
        _check_values(values)
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

        They say nothing of token ids and of the weights' type.
        """
        names = {attribute: name for name, (attribute, _) in FAMILIES["llama"].items()}
        names |= {"num_kv_heads": "num_key_value_heads"}
        hf = {
            names.get(field.name, field.name): getattr(self, field.name)
            for field in fields(self)
        }
        if self.rope_scaling is not None:
            hf["rope_scaling"] = self.rope_scaling.to_hf()
        hf |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        return hf | {"hidden_act": "silu"}

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
