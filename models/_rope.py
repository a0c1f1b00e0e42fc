"""Rotary frequencies: the forms in which they are stretched, and what they come to.

Knows no positions, no arrays of a model and no spelling of a file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from punica_jax.models._hf_fields import ConfigError, check_positive

DEFAULT_ROPE_THETA = 10000.0
# Form -> the fields of `RopeScaling` that it must have, and those that it may have.
SCALING_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (
        (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "truncate"),
    ),
    "longrope": (
        (
            "factor",
            "short_factor",
            "long_factor",
            "original_max_position_embeddings",
        ),
        ("attention_factor",),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained length.

    Attributes:
      rope_type: "linear" (every frequency over `factor`), "llama3" (only the low ones,
        with a smooth passage), "yarn" (the same by another passage, with larger
        embeddings) or "longrope" (each over a number of its own).
      factor: at least 1; of "longrope" it only enlarges the embeddings.
      original_max_position_embeddings: the trained length; not for "linear".
      low_freq_factor, high_freq_factor: "llama3" only. Wavelengths above
        `original / low` are divided, those below `original / high` kept.
      beta_slow, beta_fast: "yarn" only. Frequencies that turn less than `beta_slow`
        times in the trained length are divided, those that turn more than `beta_fast`
        times kept.
      truncate: "yarn" only; the passage begins and ends at whole pairs of lanes.
      short_factor, long_factor: "longrope" only, a number for each pair of lanes. The
        short ones hold up to the trained length, and only they are used here; the long
        ones are kept for `LlamaConfig.to_hf`.
      attention_factor: what multiplies the rotary embeddings of "yarn" and "longrope";
        None for what their papers say.

    Raises:
      ConfigError: a value is out of its range.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in SCALING_FIELDS:
            raise ConfigError(
                f"rope_type must be one of {sorted(SCALING_FIELDS)}, "
                f"got {self.rope_type!r}"
            )
        numbers = "factor low_freq_factor high_freq_factor beta_slow beta_fast"
        for name in numbers.split():
            check_positive(name, getattr(self, name), float)
        name = "original_max_position_embeddings"
        check_positive(name, getattr(self, name), int)
        if self.original_max_position_embeddings < 2:
            raise ConfigError(f"rope {name} must be at least 2, got 1")
        if self.attention_factor is not None:
            check_positive("attention_factor", self.attention_factor, float)
        for name in ("short_factor", "long_factor"):
            for index, value in enumerate(getattr(self, name)):
                check_positive(f"{name}[{index}]", value, float)
        if not isinstance(self.truncate, bool):
            raise ConfigError(f"truncate must be true or false, got {self.truncate!r}")
        if self.factor < 1:
            raise ConfigError(f"rope factor must be at least 1, got {self.factor}")
        for low, high in (
            ("low_freq_factor", "high_freq_factor"),
            ("beta_slow", "beta_fast"),
        ):
            if getattr(self, high) <= getattr(self, low):
                raise ConfigError(
                    f"rope {high} must be greater than {low}, got "
                    f"{getattr(self, high)} and {getattr(self, low)}"
                )

    @property
    def amplitude(self) -> float:
        """What multiplies the cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "yarn":
            return yarn_mscale(self.factor, 1.0)
        if self.rope_type == "longrope":
            original = self.original_max_position_embeddings
            return math.sqrt(1 + math.log(self.factor) / math.log(original))
        return 1.0

    def to_hf(self) -> dict[str, Any]:
        """Return the object that stands under `rope_scaling` in a `config.json`."""
        required, optional = SCALING_FIELDS[self.rope_type]
        hf: dict[str, Any] = {"rope_type": self.rope_type}
        for name in required + optional:
            value = getattr(self, name)
            if value is not None:
                hf[name] = list(value) if isinstance(value, tuple) else value
        return hf


def yarn_mscale(factor: float, weight: float) -> float:
    """Return by how much a stretch enlarges the embeddings (YaRN, arXiv 2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None
) -> np.ndarray:
    """Return the angle per position of each pair of lanes, `f32[rotary_dim // 2]`.

    Rounds where transformers rounds: an error in the last bit here is 1e-2 radians
    at position 100,000.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    # The power alone in float64: numpy's own float32 power is not correctly rounded.
    power = np.power(float(np.float32(theta)), exponent.astype(np.float64))
    power = power.astype(np.float32)
    one = np.float32(1)
    if scaling is None:
        return one / power
    if scaling.rope_type == "linear":
        return one / power / np.float32(scaling.factor)
    if scaling.rope_type == "longrope":
        return one / (np.array(scaling.short_factor, np.float32) * power)
    if scaling.rope_type == "yarn":
        return _yarn(power, theta, scaling)
    return _llama3(one / power, scaling)


def _llama3(inv_freq: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Source: Llama 3.1's reference code."""
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


def _yarn(power: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Source: YaRN, arXiv 2309.00071, section 3.2. The plain ones are 1 / `power`."""
    pairs = len(power)
    original = scaling.original_max_position_embeddings

    def lane_that_turns(times: float) -> float:
        """Which lane makes that many whole turns in the trained length."""
        turns = math.log(original / (times * 2 * math.pi))
        return 2 * pairs * turns / (2 * math.log(theta))

    first = lane_that_turns(scaling.beta_fast)
    last = lane_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001  # else a division by zero; transformers' number
    one = np.float32(1)
    lane = np.arange(pairs, dtype=np.float32)
    ramp = (lane - np.float32(first)) / np.float32(last - first)
    kept = one - np.clip(ramp, np.float32(0), one)
    divided = one / (np.float32(scaling.factor) * power)
    return divided * (one - kept) + one / power * kept
