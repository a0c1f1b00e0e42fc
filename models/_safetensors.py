"""One safetensors file, read into numpy arrays.

Knows nothing of models, adapters, devices or of what the tensors mean; it does
not read an index of shards either.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

_MAX_BUFFERS = 1024  # that one call of the system fills, on Linux and macOS


class SafetensorsFileError(ValueError):
    """A safetensors file is missing, truncated or not what its header says."""


class TensorInfo(NamedTuple):
    """What the header says of one tensor, before any of its bytes is read."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "F32", "BF16", "F16", "I64", ...

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An open file: `tensors` maps each name to its `TensorInfo`.

    Use it as a context manager, or call `close`. Made by `open_safetensors`.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    _handle: Any
    _file: FileIO
    _starts: Mapping[str, int]  # where each tensor's bytes begin

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

    def read_into(self, targets: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Read tensors into arrays that are there; in any number of threads.

        One call of the system for all that lie side by side: hundreds of small ones
        would each wait for Python's lock where another thread computes.

        Args:
          targets: name -> contiguous arrays of the tensor's dtype; its elements fill
            one after the other.

        Raises:
          SafetensorsFileError: the file has become shorter than it was.
        """
        runs: list[tuple[int, list[memoryview]]] = []
        end = -1
        for name in sorted(targets, key=self._starts.__getitem__):
            start = self._starts[name]
            if start != end:
                runs.append((start, []))
            end = start
            for piece in targets[name]:
                assert piece.flags.c_contiguous, name
                if piece.size:
                    runs[-1][1].append(piece.view(np.uint8).data)
                    end += piece.nbytes
            num_elements = (end - start) // targets[name][0].itemsize
            assert num_elements == self.tensors[name].size, name
        for start, buffers in runs:
            self._fill(start, buffers)

    def _fill(self, start: int, buffers: list[memoryview]) -> None:
        """Fill buffers with the bytes from `start` on."""
        while buffers:
            try:
                # Of a closed file there is no number, which may be another's by now.
                fd = self._file.fileno()
                num_bytes = os.preadv(fd, buffers[:_MAX_BUFFERS], start)
            except (OSError, ValueError) as err:
                raise SafetensorsFileError(
                    f"{self.path}: cannot be read: {err}"
                ) from err
            if num_bytes == 0:
                num_bytes = os.fstat(fd).st_size
                raise SafetensorsFileError(
                    f"{self.path}: not a complete safetensors file ({num_bytes} "
                    "bytes): it has become shorter. Copy or download it again"
                )
            start += num_bytes
            while buffers and num_bytes >= buffers[0].nbytes:
                num_bytes -= buffers.pop(0).nbytes
            if num_bytes:
                buffers[0] = buffers[0].cast("B")[num_bytes:]

    def close(self) -> None:
        """Give the file back to the system; arrays read from it stay valid."""
        self._file.close()
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
    file = path.open("rb", buffering=0)
    try:
        handle: Any = safe_open(str(path), framework="numpy").__enter__()
        # Checked by now, to the last byte; a handle has no word for where bytes begin.
        header_len = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_len))
    except (SafetensorError, OSError, ValueError) as err:
        file.close()
        raise SafetensorsFileError(
            f"{path}: not a complete safetensors file ({path.stat().st_size} bytes): "
            f"{err}. Copy or download it again"
        ) from err
    header.pop("__metadata__", None)
    tensors, starts = {}, {}
    for name, one in header.items():
        tensors[name] = TensorInfo(tuple(one["shape"]), one["dtype"])
        starts[name] = 8 + header_len + one["data_offsets"][0]
    return SafetensorsFile(path, tensors, handle, file, starts)
