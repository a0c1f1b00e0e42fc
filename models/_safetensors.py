"""One safetensors file, read tensor by tensor into numpy arrays.

Knows nothing of models, adapters, devices or of what the tensors mean; it does
not read an index of shards either.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open


class SafetensorsFileError(ValueError):
    """A safetensors file is missing, truncated or not what its header says."""


class TensorInfo(NamedTuple):
    """What the header says of one tensor, before any of its bytes is read."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "F32", "BF16", "F16", "I64", ...

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An open file: `tensors` maps each name to its `TensorInfo`.

    Use it as a context manager, or call `close`. Made by `open_safetensors`.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    _handle: Any

    @property
    def names(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self.tensors)

    def read(self, name: str) -> np.ndarray:
        """Read one tensor into a fresh host array.

        Args:
          name: one of `names`.

        Returns:
          An array of the stored shape and dtype; bfloat16 is `ml_dtypes.bfloat16`.

        Raises:
          SafetensorsFileError: there is no such tensor, or it cannot be read.
        """
        if name not in self.tensors:
            raise SafetensorsFileError(f"{self.path}: holds no tensor named {name!r}")
        try:
            return self._handle.get_tensor(name)
        except (SafetensorError, OSError, TypeError, ValueError, AttributeError) as err:
            raise SafetensorsFileError(
                f"{self.path}: tensor {name!r} of dtype {self.tensors[name].dtype} "
                f"cannot be read: {err}"
            ) from err

    def close(self) -> None:
        """Give the file back to the system; arrays read from it stay valid."""
        self._handle.__exit__(None, None, None)

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Open a safetensors file and read its header.

    Args:
      path: the file.

    Returns:
      The open file. No tensor's bytes have been read yet.

    Raises:
      SafetensorsFileError: the file is missing, is a directory, is truncated, or
        its header is not safetensors'.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise SafetensorsFileError(f"{path}: a safetensors file is needed, it {what}")
    try:
        handle: Any = safe_open(str(path), framework="numpy").__enter__()
        tensors = {name: _info(handle, name) for name in handle.keys()}
    except (SafetensorError, OSError) as err:
        raise SafetensorsFileError(
            f"{path}: not a complete safetensors file ({path.stat().st_size} bytes): "
            f"{err}. Copy or download it again"
        ) from err
    return SafetensorsFile(path=path, tensors=tensors, _handle=handle)


def _info(handle: Any, name: str) -> TensorInfo:
    view = handle.get_slice(name)
    return TensorInfo(tuple(view.get_shape()), str(view.get_dtype()))
