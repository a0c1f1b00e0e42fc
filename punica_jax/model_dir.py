"""A Hugging Face model directory: its small JSON files, each read once.

Plain Python; knows names of files, not what their fields mean.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ModelFileError(ValueError):
    """A small file of a model directory is missing or malformed."""


class ModelDir:
    """Where a model's files lie.

    Attributes:
      path: the directory.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._fields: dict[str, Mapping[str, Any]] = {}

    @property
    def config(self) -> Mapping[str, Any]:
        """The fields of `config.json`.

        Raises:
          ModelFileError: there is no such file, or it holds no JSON object.
        """
        file = self.path / "config.json"
        if not file.is_file():
            hint = ""
            if (self.path / "adapter_config.json").is_file():
                hint = "; this is an adapter's directory, to be loaded beside its base"
            raise ModelFileError(
                f"{file}: a Hugging Face model directory needs this file{hint}"
            )
        return self.fields("config.json")

    def fields(self, name: str) -> Mapping[str, Any]:
        """Return the fields of a JSON file; an absent file has none.

        Raises:
          ModelFileError: it holds no JSON object.
        """
        if name not in self._fields:
            self._fields[name] = _read_object(self.path / name)
        return self._fields[name]

    def text(self, name: str) -> str | None:
        """Return the text of a file, None for an absent one.

        Raises:
          ModelFileError: it is not UTF-8.
        """
        file = self.path / name
        if not file.is_file():
            return None
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise ModelFileError(f"{file}: not valid UTF-8: {error}") from error

    @property
    def model_names(self) -> tuple[str, ...]:
        """What the model may be called, at least one name, and the best one first.

        Its id on the hub, if it lies in the hub's cache; what its config says, which
        may be the model that it was made from; its folder's name.
        """
        path = self.path.resolve()
        ids = [
            folder.name.removeprefix("models--").replace("--", "/")
            for folder in (self.path, *path.parents)
            if folder.name.startswith("models--")
        ]
        field = self.fields("config.json").get("_name_or_path")
        fields = [field] if isinstance(field, str) and field else []
        names = [*ids[:1], *fields, path.name]
        # A path tells where the model once lay: the last thing to call it.
        return tuple(sorted(names, key=lambda name: name.startswith(("/", "."))))


def _read_object(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelFileError(
            f"{file}: must hold a JSON object, got {type(fields).__name__}"
        )
    return fields
