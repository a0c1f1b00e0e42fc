"""Where adapters come from: directories, ids of the hub, arrays.

Knows names, files and the base model they must fit; reads nothing before it is asked.
"""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from punica_jax.base_model import BaseModel
from punica_jax.hub import local_dir
from punica_jax.models import (
    Adapter,
    EmptyBuffer,
    HostBuffer,
    make_adapter,
    read_adapter,
)
from punica_jax.placements import check_name, check_sources
from punica_jax.request import check_flag

# A PEFT directory or an id of the hub, or weights: see `save_adapter`.
AdapterSource: TypeAlias = (
    str
    | os.PathLike[str]
    | Mapping[str, tuple[Any, Any]]
    | Mapping[tuple[int, str], tuple[Any, Any]]
    | Mapping[str | tuple[int, str], tuple[Any, Any]]
)
_CONFIG_FILE = "adapter_config.json"
# What `make_adapter` takes besides fields.
_OWN_ARGUMENTS = frozenset(("config", "tensors", "dtype", "empty"))


class Reader(NamedTuple):
    """What reads an adapter.

    Attributes:
      read: reads it, in any thread.
      is_remote: whether it may have to wait for a network: what was named is no
        directory, but may be an id of the hub.
    """

    read: Callable[[], Adapter]
    is_remote: bool


class AdapterSources:
    """Ways to read adapters of one base model into host memory.

    Attributes:
      empty: makes that memory, one rank page after the other.
    """

    def __init__(self, base: BaseModel, folder: str | os.PathLike[str] | None):
        """Take the base, and a directory of PEFT directories, if there is one.

        Raises:
          ValueError: it is no path, or there is no such directory.
        """
        self._config, self._dtype = base.config, np.dtype(base.dtype)
        self._base_names = base.names
        self.empty: EmptyBuffer = HostBuffer.empty
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise ValueError(f"adapters_dir must be a path, got {folder!r}")
        # What the current directory is may change before they are read.
        self._folder = None if folder is None else Path(folder).absolute()
        if self._folder is not None and not self._folder.is_dir():
            raise ValueError(f"adapters_dir must be a directory, got {folder!r}")

    def readers(
        self, adapters: Mapping[str, AdapterSource] | None
    ) -> dict[str, Reader]:
        """Return what reads each of a first set of adapters.

        Raises:
          ValueError: it is no mapping, or has a bad name.
        """
        if adapters is None:
            return {}
        check_sources(adapters)
        return {name: self.reader(name, adapters[name], {}) for name in adapters}

    def reader(
        self, name: str, source: AdapterSource, fields: Mapping[str, Any]
    ) -> Reader:
        """Return what reads an adapter.

        Args:
          name: what it is to be called.
          source: where it is.
          fields: of `adapter_config.json`, for weights that have no file.

        Raises:
          ValueError: the name is empty or no text, or fields are given for files, or
            are none.
        """
        check_name(name)
        if isinstance(source, Mapping):
            if odd := fields.keys() & _OWN_ARGUMENTS:
                raise ValueError(
                    f"fields must be those of {_CONFIG_FILE}, got {sorted(odd)}"
                )
            return Reader(functools.partial(self._make, source, fields), False)
        if fields:
            raise ValueError(
                f"only weights take fields of {_CONFIG_FILE}, got {sorted(fields)}"
            )
        is_remote = isinstance(source, str) and not os.path.isdir(source)
        if isinstance(source, str | os.PathLike) and not is_remote:
            source = Path(source).absolute()
        return Reader(functools.partial(self._read, source), is_remote)

    def find(self, name: str) -> Reader | None:
        """Return what reads the directory's adapter of that name, if there is one."""
        if self._folder is None or not isinstance(name, str):
            return None
        path = self._folder / name
        # A name that is a path must not lead out of the directory, nor be another
        # name of what is in it ("a/", "./a").
        if path.parent != self._folder or path.name != name or name == "..":
            return None
        if not os.path.isfile(path / _CONFIG_FILE):  # False for a name too long
            return None
        return self.reader(name, path, {})

    def _read(self, source: str | os.PathLike[str]) -> Adapter:
        return read_adapter(
            local_dir(source, "adapter"),
            self._config,
            dtype=self._dtype,
            base_names=self._base_names,
            empty=self.empty,
        )

    def _make(self, tensors: Any, fields: Mapping[str, Any]) -> Adapter:
        return make_adapter(
            self._config, tensors, dtype=self._dtype, empty=self.empty, **fields
        )


def checked_flags(allow_nan: Any, pin: Any) -> dict[str, Any]:
    """Return how an engine's thread is to take an adapter.

    Checked before it has it: an error there would be everybody's.
    """
    check_flag("allow_nan", allow_nan)
    if pin is not None:
        check_flag("pin", pin)
    return {"allow_nan": allow_nan, "is_pinned": pin}
