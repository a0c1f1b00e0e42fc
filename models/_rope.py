"""Rotary frequencies: how a `config.json` spells them and what they come to.

Knows no positions and no arrays of a model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from punica_jax.models._hf_fields import (
    ConfigError,
    UnsupportedConfigError,
    check_positive,
)

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_COMMON_FIELDS = frozenset(
    "rope_type type rope_theta partial_rotary_factor "
    "original_max_position_embeddings".split()
)
DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained length.

    Attributes:
      rope_type: "linear" (every frequency over `factor`) or "llama3" (only the low
        ones, with a smooth passage).
      factor: at least 1.
      low_freq_factor, high_freq_factor, original_max_position_embeddings: "llama3"
        only. Wavelengths above `original / low` are divided, those below
        `original / high` kept.

    Raises:
      ConfigError: a value is out of its range.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ("linear", "llama3"):
            raise ConfigError(
                f"rope_type must be 'linear' or 'llama3', got {self.rope_type!r}"
            )
        for name in _FIELDS["llama3"]:
            check_positive(name, getattr(self, name), float)
        name = "original_max_position_embeddings"
        check_positive(name, getattr(self, name), int)
        if self.factor < 1:
            raise ConfigError(f"rope factor must be at least 1, got {self.factor}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                "rope high_freq_factor must be greater than low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )

    def to_hf(self) -> dict[str, Any]:
        """Return the object that stands under `rope_scaling` in a `config.json`."""
        hf = {"rope_type": self.rope_type}
        hf |= {name: getattr(self, name) for name in _FIELDS[self.rope_type]}
        if self.rope_type == "llama3":
            name = "original_max_position_embeddings"
            hf[name] = getattr(self, name)
        return hf


def read_rope(
    hf: Mapping[str, Any], max_len: int, max_model_len: int | None
) -> tuple[float, RopeScaling | None, int]:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters`, which holds both.

    Args:
      hf: fields of a `config.json`, none of them null.
      max_len: what `max_position_embeddings` says.
      max_model_len: tokens of the longest sequence that will be run, if known.

    Returns:
      theta, the scaling, and the length up to which they hold.

    Raises:
      UnsupportedConfigError: a field is unknown, or asks for what is not supported.
      ConfigError: a field is missing or out of its range.
    """
    tables = {}
    for name in ("rope_parameters", "rope_scaling"):
        if hf.get(name):
            if not isinstance(hf[name], Mapping):
                raise UnsupportedConfigError(name, hf[name], "it must be an object")
            tables[name] = {k: v for k, v in hf[name].items() if v is not None}
    scalings = [
        _read_scaling(name, table, max_len, max_model_len)
        for name, table in tables.items()
    ]
    thetas = [t["rope_theta"] for t in (*tables.values(), hf) if "rope_theta" in t]
    if len(set(scalings)) > 1 or any(theta != thetas[0] for theta in thetas):
        raise UnsupportedConfigError(
            "rope_parameters",
            hf.get("rope_parameters"),
            f"it must agree with rope_scaling {hf.get('rope_scaling')!r} and "
            f"rope_theta {hf.get('rope_theta')!r}",
        )
    scaling, max_len = scalings[0] if scalings else (None, max_len)
    return thetas[0] if thetas else DEFAULT_ROPE_THETA, scaling, max_len


def _read_scaling(
    name: str, table: Mapping[str, Any], max_len: int, max_model_len: int | None
) -> tuple[RopeScaling | None, int]:
    rope_type = table.get("rope_type", table.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _FIELDS:
        raise UnsupportedConfigError(
            f"{name}.rope_type", rope_type, f"it must be one of {sorted(_FIELDS)}"
        )
    for field, value in table.items():
        if field not in _FIELDS[rope_type] and field not in _COMMON_FIELDS:
            raise UnsupportedConfigError(
                f"{name}.{field}", value, f"rope_type {rope_type!r} does not have it"
            )
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedConfigError(
            f"{name}.partial_rotary_factor",
            table["partial_rotary_factor"],
            "it must be 1.0 or null",
        )
    for field in _FIELDS[rope_type]:
        if field not in table:
            raise ConfigError(
                f"config field '{name}.{field}' is required by rope_type "
                f"{rope_type!r} and missing"
            )
        check_positive(f"{name}.{field}", table[field], float)
    original = table.get("original_max_position_embeddings", max_len)
    check_positive(f"{name}.original_max_position_embeddings", original, int)
    if rope_type == "default":
        return None, max_len
    if rope_type == "dynamic":
        within = min(original, max_len)
        if max_model_len is None or max_model_len > within:
            raise UnsupportedConfigError(
                f"{name}.rope_type",
                rope_type,
                f"pass max_model_len of at most the original length {within}, where "
                f"dynamic scaling changes nothing (max_model_len is {max_model_len})",
            )
        return None, within
    values = {field: table[field] for field in _FIELDS[rope_type]}
    if rope_type == "llama3":
        values["original_max_position_embeddings"] = original
    return RopeScaling(rope_type=rope_type, **values), max_len


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> np.ndarray:
    """Return the angle per position of each pair of lanes, `f32[head_dim // 2]`.

    Rounds where transformers rounds: an error in the last bit here is 1e-2 radians
    at position 100,000. Source of "llama3": Llama 3.1's reference code.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power alone in float64: numpy's own float32 power is not correctly rounded.
    power = np.power(float(np.float32(theta)), exponent.astype(np.float64))
    inv_freq = np.float32(1) / power.astype(np.float32)
    if scaling is None:
        return inv_freq
    if scaling.rope_type == "linear":
        return inv_freq / np.float32(scaling.factor)
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    factor = np.float32(scaling.factor)
    one = np.float32(1)
    # torch divides a number by a tensor as the tensor's reciprocal times the number.
    wavelen = one / inv_freq * np.float32(2 * math.pi)
    is_low = wavelen > np.float32(original / low)
    is_high = wavelen < np.float32(original / high)
    smooth = one / wavelen * np.float32(original) - np.float32(low)
    smooth = smooth / np.float32(high - low)
    between = (one - smooth) * inv_freq / factor + smooth * inv_freq
    return np.where(is_low, inv_freq / factor, np.where(is_high, inv_freq, between))
