"""What an `adapter_config.json` says: the modules with a LoRA, their ranks and scales.

Matches module names by the rules of PEFT (checked against 0.21.2), so that an adapter
means here what it meant where it was trained. Knows nothing of tensors, of files, or of
how many layers a base model has.
"""

import contextlib
import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any


class AdapterError(ValueError):
    """An adapter's files are broken, or do not fit the base model."""


class UnsupportedAdapterError(AdapterError):
    """An adapter is sound, but needs a feature that is not supported."""


# Fields that change training, or nothing, but never what a trained adapter computes.
# `fan_in_fan_out` is among them: PEFT resets it for linear layers. `megatron_core` and
# `qalora_group_size` have defaults that act only together with fields refused below,
# `eva_config` and its like act through `init_lora_weights` alone: a converted adapter
# keeps them.
_INERT = frozenset(
    "auto_mapping corda_config eva_config fan_in_fan_out inference_mode loftq_config "
    "lora_dropout lora_ga_config megatron_core peft_version qalora_group_size revision "
    "runtime_config task_type".split()
)
_HANDLED = frozenset(
    "alpha_pattern base_model_name_or_path bias exclude_modules init_lora_weights "
    "layers_pattern layers_to_transform lora_alpha peft_type r rank_pattern "
    "target_modules use_rslora".split()
)
# Initialisations that leave the base's weights as they are.
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")
# Others change them: the saved tensors alone, over the plain base, are another model.
# What to do about it.
_CONVERT = (
    "PEFT's save_pretrained makes a plain LoRA of it, with "
    "path_initial_model_for_weight_conversion"
)
_ADVICE = {
    "pissa": _CONVERT,
    "corda": _CONVERT,
    "olora": _CONVERT,
    "lora_ga": _CONVERT,
    "loftq": "PEFT makes no plain LoRA of it: serve it over the base that LoftQ made, "
    "saved with unload().save_pretrained(...), and set init_lora_weights to true",
}
# What PEFT takes for a Llama when `target_modules` is null.
_DEFAULT_TARGETS = ("q_proj", "v_proj")
# Modules that PEFT can adapt and this library cannot.
UNADAPTED_MODULES = ("lm_head", "model.embed_tokens")
_DEFAULT_RANK = 8
_DEFAULT_ALPHA = 8.0
ALL_LINEAR = "all-linear"
_LAYER_INDEX = r"\.(?P<index>\d+)\."
# Far above any, and small enough for all that is computed of it.
_MAX_RANK = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftLoraConfig:
    """One adapter's configuration; the fields carry PEFT's names and meanings.

    `target_modules` and `exclude_modules` are a tuple of name endings, or one regular
    expression; `target_modules` may also be "all-linear". Module paths are those of the
    base model, such as "model.layers.3.self_attn.q_proj".

    Raises:
      AdapterError: a value is out of its range.
      UnsupportedAdapterError: `target_modules` asks for the embeddings or the head.
    """

    r: int = _DEFAULT_RANK
    lora_alpha: float = _DEFAULT_ALPHA
    use_rslora: bool = False
    target_modules: tuple[str, ...] | str = _DEFAULT_TARGETS
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base_name: str | None = None

    def __post_init__(self) -> None:
        _rank("r", self.r)
        _each("rank_pattern", self.rank_pattern, _rank)
        _finite("lora_alpha", self.lora_alpha)
        _each("alpha_pattern", self.alpha_pattern, _finite)
        self._check_patterns()
        if isinstance(self.target_modules, str) and self.layers_to_transform:
            raise AdapterError(
                "layers_to_transform needs target_modules to be a list, got "
                f"target_modules = {self.target_modules!r}"
            )
        if named := [m for m in UNADAPTED_MODULES if self.targets(m)]:
            raise UnsupportedAdapterError(
                f"target_modules = {self.shown_targets} asks for a LoRA on "
                f"{', '.join(named)}, which is not supported: only the attention and "
                "MLP projections can have one"
            )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "PeftLoraConfig":
        """Read the fields of an `adapter_config.json`.

        Args:
          fields: the parsed file. Absent fields take PEFT's defaults.

        Raises:
          UnsupportedAdapterError: a field asks for what is not supported; all such
            fields are named.
          AdapterError: a field has a value of the wrong kind.
        """
        _refuse_unsupported(fields)

        def optional(name: str, convert: Callable[[str, Any], Any]) -> dict[str, Any]:
            value = fields.get(name)
            return {} if value is None else {name: convert(name, value)}

        base_name = fields.get("base_model_name_or_path")
        return cls(
            **optional("r", _rank),
            **optional("lora_alpha", _finite),
            **optional("use_rslora", _flag),
            **optional("target_modules", _names_or_regex),
            **optional("exclude_modules", _names_or_regex),
            **optional("layers_to_transform", _layers),
            **optional("layers_pattern", _one_or_more_names),
            **optional("rank_pattern", lambda n, v: _each(n, v, _rank)),
            **optional("alpha_pattern", lambda n, v: _each(n, v, _finite)),
            base_name=base_name if isinstance(base_name, str) else None,
        )

    @property
    def shown_targets(self) -> str:
        """`target_modules` as the file writes it, for messages."""
        wanted = self.target_modules
        return repr(wanted if isinstance(wanted, str) else list(wanted))

    def targets(self, path: str) -> bool:
        """Tell whether the module at `path` has a LoRA."""
        excluded = self.exclude_modules
        if isinstance(excluded, str):
            if re.fullmatch(excluded, path):
                return False
        elif _ends_with_any(path, excluded):
            return False
        wanted = self.target_modules
        if isinstance(wanted, str):
            if wanted.lower() == ALL_LINEAR:
                return path not in UNADAPTED_MODULES
            return re.fullmatch(wanted, path) is not None
        if path in wanted:  # a full path is taken whatever layers_to_transform says
            return True
        return _ends_with_any(path, wanted) and self._layer_is_wanted(path)

    def rank(self, path: str) -> int:
        """Return the rank of the module at `path`."""
        return _first_match(self.rank_pattern, path, self.r)

    def scale(self, path: str) -> float:
        """Return what multiplies `B A` at `path`: alpha / r, or alpha / sqrt(r)."""
        alpha = _first_match(self.alpha_pattern, path, self.lora_alpha)
        rank = self.rank(path)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _layer_is_wanted(self, path: str) -> bool:
        if not self.layers_to_transform:
            return True
        forms = [_layer_form(pattern) for pattern in self.layers_pattern]
        for form in forms or [rf".*?\.[^.]*{_LAYER_INDEX}"]:
            match = re.match(form, path)
            # A branch of the pattern without an index may have matched.
            if match and match["index"] is not None:
                return int(match["index"]) in self.layers_to_transform
        return False

    def _check_patterns(self) -> None:
        forms = [
            *(("rank_pattern", one, _ending_form(one)) for one in self.rank_pattern),
            *(("alpha_pattern", one, _ending_form(one)) for one in self.alpha_pattern),
            *(("layers_pattern", one, _layer_form(one)) for one in self.layers_pattern),
        ]
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, str) and value.lower() != ALL_LINEAR:
                forms.append((name, value, value))
        for name, value, form in forms:
            for one in (value, form):  # "a)(b" is none, though its form is
                try:
                    re.compile(one)
                except re.error as err:
                    raise AdapterError(
                        f"{name}: {value!r} is not a regular expression: {err}"
                    ) from err


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise `UnsupportedAdapterError` that names every field that asks for more."""
    problems = []
    if (kind := fields.get("peft_type")) != "LORA":
        problems.append(f'peft_type = {kind!r}, only "LORA" is')
    if (bias := fields.get("bias", "none")) not in ("none", None):
        problems.append(f'bias = {bias!r}, only "none" is')
    init = fields.get("init_lora_weights")
    if init is not None and init not in _PLAIN_INITS:
        rule = "only true, false, gaussian, orthogonal, eva, mica are"
        if advice := _ADVICE.get(str(init).partition("_niter_")[0]):
            rule = f"which changes the base's weights too: {rule} ({advice})"
        problems.append(f"init_lora_weights = {init!r}, {rule}")
    for name in sorted(fields.keys() - _HANDLED - _INERT):
        # Without a table of defaults, off is what every switch of PEFT's is by default.
        if fields[name] not in (None, False, "", [], {}):
            problems.append(
                f"{name} = {fields[name]!r}, only absent, null, false or empty is"
            )
    if problems:
        raise UnsupportedAdapterError(
            "adapter_config.json asks for what is not supported: " + "; ".join(problems)
        )


def _first_match(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """Return the value of the first pattern that fits the end of a module path."""
    for pattern, value in patterns.items():
        if re.match(_ending_form(pattern), path):
            return value
    return default


def _ending_form(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _layer_form(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}{_LAYER_INDEX}"


def _ends_with_any(path: str, names: Collection[str]) -> bool:
    # One call for all names: hundreds of paths are asked for on each read.
    return path in names or path.endswith(tuple([f".{name}" for name in names]))


def _is_int(value: Any) -> bool:
    # NumPy's too: weights come with fields that are given in Python.
    return isinstance(value, Integral) and not isinstance(value, bool)


def _rank(name: str, value: Any) -> int:
    if not _is_int(value) or value < 1:
        raise AdapterError(f"{name} must be an integer from 1, got {value!r}")
    if value > _MAX_RANK:
        got = reprlib.repr(int(value))
        raise AdapterError(f"{name} must be at most {_MAX_RANK}, got {got}")
    return int(value)


def _finite(name: str, value: Any) -> float:
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of one of JSON's integers
            number = float(value)
    if not math.isfinite(number):
        raise AdapterError(f"{name} must be a finite number, got {value!r}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise AdapterError(f"{name} must be true or false, got {value!r}")
    return value


def _each(name: str, value: Any, check: Callable[[str, Any], Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise AdapterError(f"{name} must map patterns to numbers, got {value!r}")
    return {key: check(f"{name}[{key!r}]", item) for key, item in value.items()}


def _names_or_regex(name: str, value: Any) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else _one_or_more_names(name, value)


def _one_or_more_names(name: str, value: Any) -> tuple[str, ...]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(
        isinstance(item, str) for item in value
    ):
        raise AdapterError(f"{name} must be a string or strings, got {value!r}")
    return tuple(item for item in value if item)


def _layers(name: str, value: Any) -> tuple[int, ...]:
    value = [value] if _is_int(value) else value
    if not isinstance(value, list | tuple) or not all(_is_int(item) for item in value):
        raise AdapterError(f"{name} must be one layer index or several, got {value!r}")
    return tuple(map(int, value))
