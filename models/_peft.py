"""PEFT adapter directories: read one into host memory, write one.

A directory holds `adapter_config.json` and `adapter_model.safetensors`, as `peft` saves
them. Knows nothing of the device, of slots, or of which adapters are loaded.
"""

import contextlib
import json
import os
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from punica_jax.models._adapter import Adapter
from punica_jax.models._adapter_report import AdapterReport, ReportRow
from punica_jax.models._base_modules import BaseModule, modules_by_path
from punica_jax.models._config import LlamaConfig
from punica_jax.models._peft_binding import (
    Binding,
    bind_tensors,
    listed,
    tensor_name,
)
from punica_jax.models._peft_config import (
    AdapterError,
    PeftLoraConfig,
    UnsupportedAdapterError,
)
from punica_jax.models._rank_page import EmptyBuffer, HostBuffer
from punica_jax.models._safetensors import (
    SafetensorsFile,
    SafetensorsFileError,
    open_safetensors,
)
from punica_jax.models._user_warning import warn_user

__all__ = [
    "Adapter",
    "AdapterError",
    "AdapterReport",
    "ReportRow",
    "UnsupportedAdapterError",
    "make_adapter",
    "read_adapter",
    "read_rank",
    "save_adapter",
]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_DTYPE_RULE = f"weights must be of dtype {', '.join(_DTYPES)}"


def read_adapter(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    *,
    dtype: Any,
    base_names: Sequence[str] = (),
    empty: EmptyBuffer = HostBuffer.empty,
) -> Adapter:
    """Read a PEFT directory, and check all of it against the base model.

    Takes host memory for its rank pages in `dtype`, and for some tensors while it
    reads.

    Args:
      path: the directory.
      config: the base model's.
      dtype: of the weights on the device. B is multiplied by the adapter's scale in
        float32, and rounded once: here, or on the device if the file's dtype is no
        wider.
      base_names: what the base model may be called, for a warning (a `UserWarning`)
        if the adapter names another one. Only the part after the last "/" counts, in
        upper or lower case.

    Returns:
      The adapter; its weights may still hold values that are not finite, which are
      found on the device.

    Raises:
      UnsupportedAdapterError: it needs a feature that is not supported.
      AdapterError: a file is missing or broken, or the adapter does not fit the base.
    """
    path = Path(path)
    with _naming(path):
        lora = PeftLoraConfig.from_fields(_read_fields(path))
        _compare_base_names(path, lora.base_name, base_names)
        with _bound_file(path, lora, config) as (file, bindings):
            dtypes = {name: _DTYPES[info.dtype] for name, info in file.tensors.items()}
            return Adapter(
                config, bindings, dtypes, file.read_into, np.dtype(dtype), empty
            )


def read_rank(path: str | os.PathLike[str], config: LlamaConfig) -> int:
    """Read an adapter's greatest rank, and check all of it but its weights' values.

    Args:
      path: the PEFT directory.
      config: the base model's.

    Raises:
      UnsupportedAdapterError, AdapterError: see `read_adapter`.
    """
    path = Path(path)
    with _naming(path):
        lora = PeftLoraConfig.from_fields(_read_fields(path))
        with _bound_file(path, lora, config) as (_, bindings):
            return max(binding.rank for binding in bindings.values())


def save_adapter(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    tensors: Mapping[str | tuple[int, str], tuple[Any, Any]],
    **fields: Any,
) -> None:
    """Write a PEFT directory, which `peft` and `read_adapter` can load.

    Args:
      path: the directory; made if it is not there, its files are overwritten.
      config: the base model's.
      tensors: module -> (`A [rank, d_in]`, `B [d_out, rank]`), as PEFT keeps them: B
        is not multiplied by the scale. A module is named by its path in the model
        ("model.layers.3.self_attn.q_proj"), or by its layer and its name in the layer,
        parent or not: `(3, "self_attn.q_proj")`, `(3, "q_proj")`.
      **fields: of `adapter_config.json`; those that say which module has which rank
        (`r`, `rank_pattern`, `target_modules`, `layers_to_transform`) are found from
        the tensors where they are not given, `lora_alpha` is then `r`.

    Raises:
      AdapterError: the tensors do not fit the base model or the fields.
    """
    fields, arrays = _as_files(config, tensors, fields)
    shapes = {name: array.shape for name, array in arrays.items()}
    bind_tensors(PeftLoraConfig.from_fields(fields), config, shapes)
    text = json.dumps(fields, indent=2, sort_keys=True, default=_number)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    save_file(arrays, path / WEIGHTS_FILE, metadata={"format": "pt"})


def make_adapter(
    config: LlamaConfig,
    tensors: Mapping[str | tuple[int, str], tuple[Any, Any]],
    *,
    dtype: Any,
    empty: EmptyBuffer = HostBuffer.empty,
    **fields: Any,
) -> Adapter:
    """Make an adapter of arrays, without files: as if they were saved and read.

    Args:
      config: the base model's.
      tensors: see `save_adapter`.
      dtype: see `read_adapter`; and so `empty`.
      **fields: see `save_adapter`.

    Raises:
      AdapterError: the tensors do not fit the base model or the fields.
    """
    fields, arrays = _as_files(config, tensors, fields)
    shapes = {name: array.shape for name, array in arrays.items()}
    bindings = bind_tensors(PeftLoraConfig.from_fields(fields), config, shapes)
    dtypes = {name: array.dtype for name, array in arrays.items()}

    def read_into(targets: Mapping[str, Sequence[np.ndarray]]) -> None:
        for name, pieces in targets.items():
            bounds = np.cumsum([len(piece) for piece in pieces])
            rows = np.split(arrays[name], bounds[:-1])
            for piece, part in zip(pieces, rows, strict=True):
                piece[...] = part

    return Adapter(config, bindings, dtypes, read_into, np.dtype(dtype), empty)


def _as_files(
    config: LlamaConfig,
    tensors: Mapping[str | tuple[int, str], tuple[Any, Any]],
    fields: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the fields and the named tensors that PEFT would have in its files."""
    known = modules_by_path(config)
    factors = {
        known[module_path]: _factors(known[module_path], pair)
        for module_path, pair in _by_path(tensors, known).items()
    }
    ranks = {module: a.shape[0] for module, (a, _) in factors.items()}
    all_fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        **_describe(ranks, config.num_layers, fields.get("r")),
        **fields,
    }
    all_fields.setdefault("lora_alpha", all_fields["r"])
    arrays = {}
    for module, (a, b) in factors.items():
        # safetensors writes the buffer as it lies, whatever the strides are
        arrays[tensor_name(module.path, "A")] = np.ascontiguousarray(a)
        arrays[tensor_name(module.path, "B")] = np.ascontiguousarray(b)
    return all_fields, arrays


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else float(value)


def _factors(module: BaseModule, pair: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a module's A and B as arrays; their sizes are checked with all others."""
    got = reprlib.repr(pair)
    if isinstance(pair, tuple | list) and len(pair) == 2:
        a, b = map(np.asarray, pair)
        if a.ndim == b.ndim == 2:
            if {a.dtype, b.dtype} <= {*_DTYPES.values()}:
                return a, b
            got = f"{a.dtype} and {b.dtype}"
            raise AdapterError(f"{module.path}: {_DTYPE_RULE}, got {got}")
        got = f"A of shape {list(a.shape)} and B of {list(b.shape)}"
    raise AdapterError(
        f"{module.path} must have a pair of arrays, A [rank, {module.d_in}] and B "
        f"[{module.d_out}, rank], got {got}"
    )


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let errors begin with the adapter's directory."""
    try:
        yield
    except (AdapterError, SafetensorsFileError) as err:
        kind = type(err) if isinstance(err, AdapterError) else AdapterError
        raise kind(f"adapter {path}: {err}") from err


def _read_fields(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise AdapterError(f"a PEFT directory is needed, the path {what}")
    config_path = path / CONFIG_FILE
    if not config_path.is_file():
        raise AdapterError(f"the directory holds no {CONFIG_FILE}")
    try:
        fields = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise AdapterError(f"{CONFIG_FILE} is not readable JSON: {err}") from err
    if not isinstance(fields, dict):
        raise AdapterError(
            f"{CONFIG_FILE} must be a JSON object, got {type(fields).__name__}"
        )
    return fields


def _weights_path(path: Path) -> Path:
    if not (path / WEIGHTS_FILE).is_file():
        if (path / _PICKLE_FILE).is_file():
            raise UnsupportedAdapterError(
                f"{_PICKLE_FILE} is a pickle, which can run any code when it is read. "
                f"Convert it to {WEIGHTS_FILE}: load it with peft where you trust it, "
                "then save_pretrained(..., safe_serialization=True)"
            )
        raise AdapterError(f"the directory holds no {WEIGHTS_FILE}")
    return path / WEIGHTS_FILE


def _compare_base_names(
    path: Path, trained_on: str | None, names: Sequence[str]
) -> None:
    if not trained_on or not names:
        return
    if Path(trained_on).name.lower() not in {Path(n).name.lower() for n in names}:
        warn_user(
            f"adapter {path} was trained on {trained_on!r}, the base model is "
            f"{names[0]!r}"
        )


@contextlib.contextmanager
def _bound_file(
    path: Path, lora: PeftLoraConfig, config: LlamaConfig
) -> Iterator[tuple[SafetensorsFile, dict[BaseModule, Binding]]]:
    """Open the weights; hold their names, shapes and dtypes against all there is."""
    with open_safetensors(_weights_path(path)) as file:
        infos = file.tensors.items()
        odd = [f"{name} ({i.dtype})" for name, i in infos if i.dtype not in _DTYPES]
        if odd:
            raise AdapterError(f"{_DTYPE_RULE}, got {listed(sorted(odd))}")
        shapes = {name: info.shape for name, info in infos}
        yield file, bind_tensors(lora, config, shapes)


def _by_path(
    tensors: Mapping[str | tuple[int, str], tuple[Any, Any]],
    known: Mapping[str, BaseModule],
) -> dict[str, tuple[Any, Any]]:
    """Turn every way to name a module into its path."""
    names = {
        (module.layer, name): path
        for path, module in known.items()
        for name in (module.name, module.short_name)
    }
    by_path: dict[str, tuple[Any, Any]] = {}
    for key, pair in tensors.items():
        path = key if isinstance(key, str) else names.get(key)
        if path is None or path not in known:
            named = ", ".join(dict.fromkeys(m.short_name for m in known.values()))
            raise AdapterError(
                f"the base model has no module {key!r}; a module is (layer, name) or a "
                f"path such as {next(iter(known))!r}, with layers 0 to "
                f"{max(layer for layer, _ in names)} and {named}"
            )
        if path in by_path:
            raise AdapterError(f"module {path} is given twice")
        by_path[path] = pair
    return by_path


def _describe(
    ranks: Mapping[BaseModule, int], num_layers: int, r: int | None
) -> dict[str, Any]:
    """Find the fields of `adapter_config.json` that these ranks come from."""
    if not ranks:
        raise AdapterError("the adapter binds nothing: no tensors were given")
    r = Counter(ranks.values()).most_common(1)[0][0] if r is None else r
    ranks_of: dict[str, dict[int, int]] = {}
    for module, rank in ranks.items():
        ranks_of.setdefault(module.short_name, {})[module.layer] = rank
    rank_pattern = {}
    for module, rank in ranks.items():
        uniform = len(set(ranks_of[module.short_name].values())) == 1
        if rank != r:
            rank_pattern[module.short_name if uniform else module.path] = rank
    layer_sets = {frozenset(by_layer) for by_layer in ranks_of.values()}
    fields: dict[str, Any] = {"r": r, "rank_pattern": rank_pattern}
    if len(layer_sets) > 1:
        return {**fields, "target_modules": [module.path for module in ranks]}
    layers = sorted(layer_sets.pop())
    whole = len(layers) == num_layers
    return {
        **fields,
        "target_modules": list(ranks_of),
        "layers_to_transform": None if whole else layers,
    }
