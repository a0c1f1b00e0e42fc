"""Names of models and adapters, to directories: local ones, or fetched from the hub.

Plain Python; knows which files a model and an adapter have, not what is in them.
"""

import os
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from punica_jax.model_dir import ModelDir

Kind: TypeAlias = Literal["model", "adapter"]

# org/name, optionally @revision: a branch, a tag or a commit. No character of an id
# is an "@".
_HUB_ID = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Weights under other names (pytorch_model.bin, consolidated.safetensors) are the same
# weights once more.
_WEIGHT_FILES = ["model*.safetensors", _INDEX]
_FILES: dict[Kind, list[str]] = {
    "model": [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "additional_chat_templates/*.jinja",
    ],
    "adapter": ["adapter_config.json", "adapter_model.safetensors"],
}
_NEEDED: dict[Kind, list[str]] = {
    "model": ["config.json", "tokenizer.json"],
    "adapter": _FILES["adapter"],
}
_MAX_LISTED = 4


class HubError(ValueError):
    """A name is neither a directory nor something that the hub could be asked for."""


def local_dir(
    name: str | os.PathLike[str], kind: Kind, *, progress: bool = False
) -> Path:
    """Return the directory that a model or an adapter lies in, fetched if need be.

    A model's weights are not fetched yet: `fetch_weights` does, when all else is found
    to be good.

    Args:
      name: a directory, or as text the id of a repository of the Hugging Face hub:
        `org/name`, or `org/name@revision`. A directory that exists wins.
      kind: which files to fetch.
      progress: show progress bars while fetching.

    Raises:
      HubError: there is no such directory, and it is no id or cannot be fetched; the
        text says why and what to do.
    """
    # Path("") would be the current directory.
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise HubError(
            f"{_a(kind)} must be a directory, or an id of the Hugging Face hub "
            f"(org/name or org/name@revision), got {reprlib.repr(name)}"
        )
    path = Path(name)
    # (Path's own raise where a name is too long, or without permission.)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise HubError(f"{path}: {_a(kind)} is a directory, this is a file")
    match = _HUB_ID.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise HubError(
            f"{str(name)[:200]}: no such directory, and not the id of {_a(kind)} on "
            "the Hugging Face hub either (org/name or org/name@revision)"
        )
    folder = _fetch(match["id"], match["revision"], kind, _FILES[kind], progress)
    _check_complete(str(name), folder, kind, _NEEDED[kind])
    return folder


def fetch_weights(
    name: str | os.PathLike[str], folder: Path, *, progress: bool = False
) -> None:
    """Fetch a model's weights into the directory that `local_dir` gave for its name.

    They are those of the commit that its other files are of. Does nothing where they
    are there, or the name is a directory.

    Raises:
      HubError: they cannot be fetched, or are not all there.
    """
    if folder == Path(name) or not _missing(folder, _weight_files(folder)):
        return
    repo_id, _, _ = str(name).partition("@")
    _fetch(repo_id, folder.name, "model", _WEIGHT_FILES, progress)
    _check_complete(str(name), folder, "model", _weight_files(folder))


def _weight_files(folder: Path) -> list[str]:
    """Names of the files that hold a model's weights, there or not."""
    if not (folder / _WEIGHTS).is_file():
        weight_map = ModelDir(folder).fields(_INDEX).get("weight_map")
        if isinstance(weight_map, dict):
            return sorted(set(map(str, weight_map.values())))
    return [_WEIGHTS]


def _missing(folder: Path, needed: Sequence[str]) -> list[str]:
    return [file for file in needed if not (folder / file).is_file()]


def _check_complete(name: str, folder: Path, kind: Kind, needed: Sequence[str]) -> None:
    """Raise HubError unless files are there; offline, a part of them can be cached."""
    if missing := _missing(folder, needed):
        rest = len(missing) - _MAX_LISTED
        more = f" and {rest} more" if rest > 0 else ""
        raise HubError(
            f"{name}: neither the hub nor its cache on this machine has "
            f"{', '.join(missing[:_MAX_LISTED])}{more}, which {_a(kind)} needs "
            "(weights in other formats are not read): connect, or give a local "
            "directory"
        )


def _fetch(
    repo_id: str,
    revision: str | None,
    kind: Kind,
    patterns: Sequence[str],
    progress: bool,
) -> Path:
    """Fetch a repository's files into the hub's cache, those that are not there yet."""
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
        from huggingface_hub.utils import tqdm
    except ImportError as error:
        raise HubError(
            f"{repo_id}: no such directory, and fetching it from the Hugging Face hub "
            "needs huggingface_hub: pip install 'punica-jax[hub]'"
        ) from error

    class Bars(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | ({} if progress else {"disable": True}))

    page = f"{constants.ENDPOINT}/{repo_id}"
    named = repo_id if revision is None else f"{repo_id}@{revision}"
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(patterns),
            tqdm_class=Bars,
        )
    except errors.GatedRepoError as error:
        raise HubError(
            f"{named}: the hub gives this {kind} only to people who were granted "
            f"access: ask for it at {page}, then log in: hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{named}: no such directory, and no such {kind} at {page}, or it is "
            "private: check the spelling, or log in: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{named}: {page} has no branch, tag or commit {revision!r}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise HubError(
            f"{named}: no such directory, {page} did not give the files, and not all "
            "of them are in the hub's cache: connect, or give a local directory "
            f"({_first_line(error)})"
        ) from error
    # What a broken connection or a full disk raises has no class in common.
    except Exception as error:
        raise HubError(
            f"{named}: fetching from {page} failed: {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error
    return Path(folder)


def _a(kind: Kind) -> str:
    return {"model": "a model", "adapter": "an adapter"}[kind]


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
