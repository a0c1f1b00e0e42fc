"""Which tensor of a PEFT file belongs to which module of the base model.

Works on names and shapes: holds the file's contents against `adapter_config.json` on
one side and the base model on the other. Reads no tensor and opens no file.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from punica_jax.models._base_modules import BaseModule, modules_by_path
from punica_jax.models._config import LlamaConfig
from punica_jax.models._peft_config import (
    UNADAPTED_MODULES,
    AdapterError,
    PeftLoraConfig,
    UnsupportedAdapterError,
)

# "base_model.model." + module path + ".lora_A" + (an adapter's name, in files that were
# saved by hand from a state dict) + ".weight"
_KEY = re.compile(
    r"base_model\.model\.(?P<path>.+)\.lora_(?P<half>[AB])(\.(?P<name>[^.]+))?\.weight"
)
# PEFT saves these whole where the vocabulary was resized, or where it is told to.
_TABLES = tuple(f"base_model.model.{module}." for module in UNADAPTED_MODULES)
_MAX_LISTED = 8


class Binding(NamedTuple):
    """One module's two tensors, by name, and what the configuration says of them."""

    a_name: str
    b_name: str
    rank: int
    scale: float


@dataclass(slots=True)
class _Halves:
    """The names found so far of a module's A and B."""

    a: str | None = None
    b: str | None = None


def tensor_name(path: str, half: str) -> str:
    """Return PEFT's name for half "A" or "B" of the module at `path`."""
    return f"base_model.model.{path}.lora_{half}.weight"


def bind_tensors(
    lora: PeftLoraConfig,
    config: LlamaConfig,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[BaseModule, Binding]:
    """Find every module's tensors, and hold them against configuration and base.

    Args:
      lora: the adapter's configuration.
      config: the base model's.
      shapes: tensor name -> shape, of the whole file.

    Returns:
      A binding for each module that has a LoRA, at least one, in the base's order.

    Raises:
      UnsupportedAdapterError: the file holds an embedding or an output table.
      AdapterError: the adapter binds nothing; a tensor fits no module of the base, or
        none that the configuration names; a module lacks a tensor; a shape is not what
        rank and widths say. All tensors of the kind are named (the first few of many).
    """
    modules = modules_by_path(config)
    promised = {path for path in modules if lora.targets(path)}
    found = _sort_names(shapes, modules, config)
    if not promised or not found:
        raise AdapterError(
            f"the adapter binds nothing: target_modules = {lora.shown_targets} "
            f"names {len(promised)} of the base's {len(modules)} modules, and the file "
            f"holds LoRA tensors for {len(found)}"
        )
    _check_complete(found, promised)
    bindings = {}
    for path, module in modules.items():
        if path in found:
            a_name, b_name = found[path].a, found[path].b
            assert a_name is not None and b_name is not None
            bindings[module] = Binding(
                a_name, b_name, lora.rank(path), lora.scale(path)
            )
    _check_shapes(bindings, shapes)
    return bindings


def _sort_names(
    names: Iterable[str], modules: Mapping[str, BaseModule], config: LlamaConfig
) -> dict[str, _Halves]:
    """Sort the tensors' names by module path; refuse those that fit no module."""
    found: dict[str, _Halves] = {}
    tables, foreign, doubled = [], [], []
    for name in sorted(names):
        match = _KEY.fullmatch(name)
        if match is None and name.startswith(_TABLES):
            tables.append(name)
            continue
        if match is None or match["path"] not in modules:
            foreign.append(name)
            continue
        halves = found.setdefault(match["path"], _Halves())
        half = match["half"].lower()
        if getattr(halves, half) is not None:
            doubled.append(name)
        setattr(halves, half, name)
    if tables:
        raise UnsupportedAdapterError(
            "the file holds an embedding or an output table of its own, which is not "
            f"supported: {listed(tables)}. If they are the base's, unchanged, save the "
            "adapter again with save_pretrained(..., save_embedding_layers=False); if "
            "not, merge_and_unload() makes a base model of both"
        )
    if foreign:
        raise AdapterError(
            "these tensors fit no module of the base model, which has layers 0 to "
            f"{config.num_layers - 1} with LoRA on "
            f"{', '.join(dict.fromkeys(m.name for m in modules.values()))}: "
            f"{listed(foreign)}. Was the adapter made for another base?"
        )
    if doubled:
        raise AdapterError(
            "the file must hold one adapter, but has several tensors for the same "
            f"module: {listed(doubled)}"
        )
    return found


def _check_complete(found: Mapping[str, _Halves], promised: set[str]) -> None:
    """Refuse modules with half a LoRA, with none, or that nobody asked for."""
    missing = [
        tensor_name(path, half)
        for path, halves in found.items()
        for half, name in (("A", halves.a), ("B", halves.b))
        if name is None
    ]
    if missing:
        raise AdapterError(
            f"a LoRA needs both lora_A and lora_B, the file lacks: {listed(missing)}"
        )
    if lacking := sorted(promised - found.keys(), key=_natural):
        raise AdapterError(
            "adapter_config.json names modules whose tensors the file lacks: "
            f"{listed(lacking)}"
        )
    if extra := sorted(found.keys() - promised, key=_natural):
        raise AdapterError(
            "the file holds tensors for modules that adapter_config.json does not name "
            f"in target_modules: {listed(extra)}"
        )


def _check_shapes(
    bindings: Mapping[BaseModule, Binding], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse tensors whose shape is not what rank and widths say."""
    wrong = []
    for module, (a_name, b_name, rank, _) in bindings.items():
        expected = {a_name: (rank, module.d_in), b_name: (module.d_out, rank)}
        wrong += [
            f"{name}: expected {list(shape)} (rank {rank}), got {list(shapes[name])}"
            for name, shape in expected.items()
            if tuple(shapes[name]) != shape
        ]
    if wrong:
        raise AdapterError(
            "these tensors have the wrong shape; the rank is what r and "
            "rank_pattern of adapter_config.json say, the other side is the base's: "
            f"{listed(wrong, separator='; ')}"
        )


def listed(names: list[str], separator: str = ", ") -> str:
    """Join names for an error message, the first few of many."""
    shown = separator.join(names[:_MAX_LISTED])
    rest = len(names) - _MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    parts = path.split(".")
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]
