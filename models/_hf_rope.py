"""How a `config.json` spells its rotary embeddings.

Old files have `rope_theta` and `rope_scaling`, new ones `rope_parameters`, which holds
both. Knows nothing of what the frequencies come to.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from punica_jax.models._families import Family
from punica_jax.models._hf_fields import (
    ConfigError,
    UnsupportedConfigError,
    check_positive,
)
from punica_jax.models._rope import DEFAULT_ROPE_THETA, RopeScaling, yarn_mscale

_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_COMMON_FIELDS = frozenset(("rope_type", "type", "rope_theta", _ORIGINAL, _PARTIAL))
# Form -> the fields that it must have beside those.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "yarn": (),
}
# Form -> the fields that it may have. `finetuned` is read by YaRN's own code, where it
# matters to another form.
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "longrope": ("factor", "attention_factor"),
    "yarn": tuple(
        "factor attention_factor beta_fast beta_slow finetuned mscale mscale_all_dim "
        "truncate".split()
    ),
}
_SWITCHES = ("finetuned", "truncate")
_LISTS = ("short_factor", "long_factor")
_NOT_KEPT = ("finetuned", "mscale", "mscale_all_dim")


class Rope(NamedTuple):
    """What the rotary fields of a `config.json` say.

    Attributes:
      theta: base of the frequencies.
      scaling: how they are stretched, if they are.
      partial_rotary_factor: which part of a head is rotated.
      max_len: tokens up to which all this holds.
    """

    theta: float
    scaling: RopeScaling | None
    partial_rotary_factor: float
    max_len: int


def read_rope(
    hf: Mapping[str, Any], family: Family, max_len: int, max_model_len: int | None
) -> Rope:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters`, which holds both.

    Args:
      hf: fields of a `config.json`, none of them null.
      family: the model's.
      max_len: what `max_position_embeddings` says.
      max_model_len: tokens of the longest sequence that will be run, if known.

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
    scalings = []
    for name, table in tables.items():
        rope_type = _check_table(name, table, family)
        original = _original(name, table, hf, family, max_len)
        scalings.append(
            _read_scaling(name, table, rope_type, original, max_len, max_model_len)
        )
    thetas = [t["rope_theta"] for t in (*tables.values(), hf) if "rope_theta" in t]
    parts = [t[_PARTIAL] for t in (*tables.values(), hf) if _PARTIAL in t]
    for found in (scalings, thetas, parts):
        if any(value != found[0] for value in found):
            raise UnsupportedConfigError(
                "rope_parameters",
                hf.get("rope_parameters"),
                f"it must agree with rope_scaling {hf.get('rope_scaling')!r} and "
                f"rope_theta {hf.get('rope_theta')!r}",
            )
    scaling, max_len = scalings[0] if scalings else (None, max_len)
    return Rope(
        theta=thetas[0] if thetas else DEFAULT_ROPE_THETA,
        scaling=scaling,
        partial_rotary_factor=parts[0] if parts else 1.0,
        max_len=max_len,
    )


def length_within(
    limit: int, max_model_len: int | None, *, field: str, value: Any, why: str
) -> int:
    """Return `limit`, to which a model's `field` confines its sequences.

    Raises:
      UnsupportedConfigError: longer ones are to be run.
    """
    if max_model_len is not None and max_model_len > limit:
        raise UnsupportedConfigError(
            field,
            value,
            f"pass max_model_len of at most {limit}, {why} "
            f"(max_model_len is {max_model_len})",
        )
    return limit


def _check_table(name: str, table: Mapping[str, Any], family: Family) -> str:
    """Check a table's fields, each for itself; return which form it is of."""
    rope_type = table.get("rope_type", table.get("type", "default"))
    if rope_type == "su":  # what Phi-3's first files call it
        rope_type = "longrope"
    known = _REQUIRED if family.rope_types is None else family.rope_types
    if not isinstance(rope_type, str) or rope_type not in known:
        raise UnsupportedConfigError(
            f"{name}.rope_type", rope_type, f"it must be one of {sorted(known)}"
        )
    fields = (*_REQUIRED[rope_type], *_OPTIONAL.get(rope_type, ()))
    for field, value in table.items():
        if field not in fields and field not in _COMMON_FIELDS:
            raise UnsupportedConfigError(
                f"{name}.{field}", value, f"rope_type {rope_type!r} does not have it"
            )
    if _PARTIAL not in family.fields and table.get(_PARTIAL, 1.0) != 1.0:
        raise UnsupportedConfigError(
            f"{name}.{_PARTIAL}", table[_PARTIAL], "it must be 1.0 or null"
        )
    for field in fields:
        if field not in table:
            if field in _REQUIRED[rope_type]:
                raise ConfigError(
                    f"config field '{name}.{field}' is required by rope_type "
                    f"{rope_type!r} and missing"
                )
        elif field in _LISTS:
            if not isinstance(table[field], list):
                raise ConfigError(
                    f"{name}.{field} must be a list, got {table[field]!r}"
                )
            for index, value in enumerate(table[field]):
                check_positive(f"{name}.{field}[{index}]", value, float)
        elif field not in _SWITCHES:
            check_positive(f"{name}.{field}", table[field], float)
    return rope_type


def _original(
    name: str,
    table: Mapping[str, Any],
    hf: Mapping[str, Any],
    family: Family,
    max_len: int,
) -> int:
    """Return the trained length, which may stand in the table or beside it."""
    outer = hf.get(_ORIGINAL, family.fields.get(_ORIGINAL))
    original = table.get(_ORIGINAL, max_len if outer is None else outer)
    check_positive(f"{name}.{_ORIGINAL}", original, int)
    # transformers takes the outer one, readers of the table the inner one.
    if outer not in (None, original):
        raise UnsupportedConfigError(
            f"{name}.{_ORIGINAL}",
            original,
            f"it must agree with {_ORIGINAL}, which is {outer!r}",
        )
    return original


def _read_scaling(
    name: str,
    table: Mapping[str, Any],
    rope_type: str,
    original: int,
    max_len: int,
    max_model_len: int | None,
) -> tuple[RopeScaling | None, int]:
    """Return what a checked table says, and the length up to which it holds."""
    if rope_type == "default":
        return None, max_len
    fields = (*_REQUIRED[rope_type], *_OPTIONAL.get(rope_type, ()))
    values = {f: table[f] for f in fields if f in table and f not in _NOT_KEPT}
    values |= {f: tuple(values[f]) for f in _LISTS if f in values}
    values.setdefault("factor", max(max_len / original, 1.0))
    if rope_type in ("dynamic", "longrope"):
        max_len = length_within(
            min(original, max_len),
            max_model_len,
            field=f"{name}.rope_type",
            value=rope_type,
            why="the trained length: beyond it the frequencies would depend on how "
            "long each sequence is",
        )
    if rope_type == "dynamic":
        return None, max_len
    if rope_type == "linear":
        return RopeScaling(rope_type=rope_type, **values), max_len
    if rope_type == "yarn":
        if "attention_factor" not in values and {"mscale", "mscale_all_dim"} <= {
            *table
        }:
            own, all_dim = (
                yarn_mscale(values["factor"], table[weight])
                for weight in ("mscale", "mscale_all_dim")
            )
            values["attention_factor"] = own / all_dim
        # Files that switch YaRN on often leave max_position_embeddings as it was.
        max_len = max(max_len, int(values["factor"] * original))
    values["original_max_position_embeddings"] = original
    return RopeScaling(rope_type=rope_type, **values), max_len
