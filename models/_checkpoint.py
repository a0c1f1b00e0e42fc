"""Hugging Face model directories: `config.json` and safetensors, to a `Llama` and back.

Knows which tensor of a file is which rows of which weight. Knows nothing of adapters,
tokenizers or downloads.
"""

import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from safetensors.numpy import save_file

from punica_jax.models._base_modules import base_modules
from punica_jax.models._config import LlamaConfig
from punica_jax.models._llama import Llama
from punica_jax.models._safetensors import (
    SafetensorsFile,
    SafetensorsFileError,
    open_safetensors,
)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("float32", "bfloat16", "float16")
# safetensors' name of a type -> bytes of an element.
_STORED_DTYPES = {"F32": 4, "BF16": 2, "F16": 2}
# Buffers that old versions of transformers wrote; they follow from the configuration.
_DERIVED_TENSOR = re.compile(r"rotary_emb\.inv_freq$")
_HEAD = "lm_head.weight"
# What GPTQ, AWQ, bitsandbytes, fp8 and compressed-tensors add to a linear layer.
_QUANTISED_TENSOR = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|weight_(scale|scale_inv|packed|zero_point)|"
    r"(input|k|v)_scale|weight\.(absmax|quant_map|nested_absmax|quant_state\..*))$"
)


class CheckpointError(ValueError):
    """A model's files are missing, broken, or do not fit its `config.json`."""


class _Part(NamedTuple):
    """Where one tensor of a checkpoint lies: some rows of one parameter."""

    param: nnx.Param
    first: int
    shape: tuple[int, ...]


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: Any = jnp.float32,
    max_model_len: int | None = None,
    config: LlamaConfig | None = None,
    progress: bool = True,
) -> Llama:
    """Read a Hugging Face model directory onto the default device.

    The tensors are read one at a time, and each is on the device before the next is
    read: beyond the model itself, the host holds one of them.

    Args:
      path: a directory with `config.json` and either `model.safetensors` or
        `model.safetensors.index.json` and the files that it names; tensors in float32,
        bfloat16 or float16.
      dtype: what the weights are cast to: one of those three.
      max_model_len: see `LlamaConfig.from_hf`.
      config: what `config.json` says, where the caller has read it; None reads it.
      progress: show a progress bar on standard error.

    Returns:
      The model, its configuration in `model.config`.

    Raises:
      CheckpointError: a file is missing or broken, or the tensors do not fit the
        configuration. Nothing has been put on the device then, unless reading itself
        failed.
      ConfigError: `config.json` is missing, broken or not supported.
      ValueError: `dtype` is none of the three, or `path` is not a path.
    """
    check_dtype(dtype)
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"path must be a directory that holds a Hugging Face model, got {path!r}"
        )
    path = Path(path)
    if config is None:
        config = LlamaConfig.from_dir(path, max_model_len=max_model_len)
    model = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    parts = _parts(model)
    with _open_files(path) as sources:
        _check_tensors(path, parts, sources)
        names = [name for name in sources if name in parts]
        for name in _with_progress(names, sources, progress):
            _load_part(parts[name], name, sources[name], jnp.dtype(dtype))
    return model


def check_dtype(dtype: Any) -> None:
    """Raise ValueError unless weights can have a type: float32, bfloat16, float16."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = dtype
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {_DTYPES}, got {name!r}")


def save_model(
    model: Llama,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a model as a Hugging Face directory, in the dtype of its weights.

    Args:
      model: the model.
      path: the directory, made where it is missing. `config.json` and the weights in it
        are replaced.
      max_shard_bytes: begin another file, and write an index, where one would grow
        beyond this (a single larger tensor excepted); None for one file.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    hf = model.config.to_hf() | {"torch_dtype": jnp.dtype(model.dtype).name}
    (path / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    parts = _parts(model)
    itemsize = jnp.dtype(model.dtype).itemsize
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, part in parts.items():
        num_bytes = math.prod(part.shape) * itemsize
        if shards[-1] and max_shard_bytes and shard_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += num_bytes
    for old in (path / _SINGLE, path / _INDEX):
        old.unlink(missing_ok=True)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if max_shard_bytes is None:
            file = _SINGLE
        tensors = {name: _host_array(parts[name]) for name in names}
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if max_shard_bytes is not None:
        total = sum(math.prod(part.shape) for part in parts.values()) * itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _parts(model: Llama) -> dict[str, _Part]:
    """Name every tensor of a checkpoint, in the order of the model."""

    def whole(param: nnx.Param) -> _Part:
        return _Part(param, 0, tuple(param.shape))

    parts = {"model.embed_tokens.weight": whole(model.embed)}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        norm, mlp_norm = layer.input_norm.weight, layer.mlp_norm.weight
        parts[f"{prefix}.input_layernorm.weight"] = whole(norm)
        parts[f"{prefix}.post_attention_layernorm.weight"] = whole(mlp_norm)
        for name, head_norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
            if head_norm is not None:
                parts[f"{prefix}.self_attn.{name}.weight"] = whole(head_norm.weight)
    for module in base_modules(model.config):
        linear = getattr(model.layers[module.layer], module.group)
        first = sum(linear.d_outs[: module.index])
        shape = (module.d_out, module.d_in)
        parts[f"{module.path}.weight"] = _Part(linear.weight, first, shape)
        if linear.bias is not None:
            parts[f"{module.path}.bias"] = _Part(linear.bias, first, shape[:1])
    parts["model.norm.weight"] = whole(model.norm.weight)
    if model.lm_head is not None:
        parts[_HEAD] = whole(model.lm_head)
    return parts


def _host_array(part: _Part) -> np.ndarray:
    rows = part.param[...][part.first : part.first + part.shape[0]]
    return np.ascontiguousarray(rows)


@contextlib.contextmanager
def _open_files(path: Path) -> Iterator[dict[str, SafetensorsFile]]:
    """Open all files of a checkpoint; yield each tensor's file, in reading order."""
    with contextlib.ExitStack() as stack:
        sources: dict[str, SafetensorsFile] = {}
        for file_path in _file_paths(path):
            try:
                file = stack.enter_context(open_safetensors(file_path))
            except SafetensorsFileError as err:
                raise CheckpointError(str(err)) from err
            for name in file.names:
                if name in sources:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} must be in one file, found in "
                        f"{sources[name].path.name} and {file_path.name}"
                    )
                sources[name] = file
        yield sources


def _file_paths(path: Path) -> list[Path]:
    if (path / _SINGLE).exists():
        return [path / _SINGLE]
    index = path / _INDEX
    if not index.exists():
        raise CheckpointError(
            f"{path}: the weights must be in {_SINGLE}, or in files named by {_INDEX}; "
            f"neither exists. Other formats are not read: convert them to safetensors"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
        pure_paths = [PurePath(file) for file in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(
            f"{index}: must be a JSON object whose weight_map gives each tensor's "
            f"file name; reading it gave {type(err).__name__}: {err}"
        ) from err
    # By its spelling: a file may be a link into a download cache, as huggingface_hub
    # makes them.
    for file, pure in zip(files, pure_paths, strict=True):
        if pure.is_absolute() or ".." in pure.parts or "\\" in file:
            raise CheckpointError(
                f"{index}: every file must lie in the directory, got {file!r}"
            )
    missing = [file for file in files if not (path / file).exists()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of the {len(files)} files that {_INDEX} names do "
            f"not exist: {', '.join(missing)}"
        )
    return [path / file for file in files]


def _check_tensors(
    path: Path, parts: Mapping[str, _Part], sources: Mapping[str, SafetensorsFile]
) -> None:
    """Compare all names, shapes and types before any tensor is read."""

    def harmless(name: str) -> bool:
        # A head that is no part of the model is a copy of the embedding it is tied to.
        return bool(_DERIVED_TENSOR.search(name)) or name == _HEAD

    quantised = [n for n in sources if n not in parts and _QUANTISED_TENSOR.search(n)]
    if quantised:
        raise CheckpointError(
            f"{path}: the weights are quantised (there is a tensor {quantised[0]}), "
            "which is not supported: take the checkpoint that these were made from, "
            "in bfloat16, float16 or float32"
        )
    problems = []
    missing = [name for name in parts if name not in sources]
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {', '.join(missing)}")
    unexpected = [n for n in sources if n not in parts and not harmless(n)]
    if unexpected:
        listed = ", ".join(unexpected)
        problems.append(f"{len(unexpected)} tensors are unexpected: {listed}")
    for name, part in parts.items():
        if name not in sources:
            continue
        info = sources[name].tensors[name]
        if info.shape != part.shape:
            problems.append(
                f"{name} must have shape {list(part.shape)}, got {list(info.shape)}"
            )
        if info.dtype not in _STORED_DTYPES:
            problems.append(
                f"{name} must be one of {', '.join(_STORED_DTYPES)}, got {info.dtype}"
            )
    if problems:
        raise CheckpointError(
            f"{path}: the tensors do not fit config.json: {'; '.join(problems)}"
        )


def _with_progress(
    names: list[str], sources: Mapping[str, SafetensorsFile], progress: bool
) -> Iterator[str]:
    """Yield the names; the bar moves when the work on one is done."""
    num_bytes = {}
    for name in names:
        info = sources[name].tensors[name]
        num_bytes[name] = info.size * _STORED_DTYPES[info.dtype]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not progress,
    )
    with bar:
        task = bar.add_task("loading model", total=sum(num_bytes.values()))
        for name in names:
            yield name
            bar.advance(task, num_bytes[name])


def _load_part(part: _Part, name: str, file: SafetensorsFile, dtype: Any) -> None:
    try:
        array = file.read(name)
    except SafetensorsFileError as err:
        raise CheckpointError(str(err)) from err
    target = part.param.get_value()
    if isinstance(target, jax.ShapeDtypeStruct):
        target = jnp.zeros(target.shape, dtype)
    # Also where the tensor is the whole parameter: on a CPU a parameter might else be
    # the host's array itself, which cannot be donated.
    filled = _write_rows(target, jax.device_put(array), np.int32(part.first))
    part.param.set_value(filled)
    # Else the host would read ahead of the transfers.
    filled.block_until_ready()


@functools.partial(jax.jit, donate_argnums=0)
def _write_rows(target: Array, rows: Array, first: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(target, rows.astype(target.dtype), first, 0)
