"""Names, folders, files and arrays: what is read, and what is refused."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import punica_jax as pj
from punica_jax.adapter_sources import AdapterSources
from punica_jax.models import save_adapter
from tests import tiny_checkpoint as tiny

BASE: Any = SimpleNamespace(config=tiny.CONFIG, dtype="float32", names=("tiny",))
ARRAYS: dict[str | tuple[int, str], Any] = {
    (layer, "down_proj"): (
        np.full((2, 48), 0.5, np.float32),
        np.full((32, 2), layer + 1.0, np.float32),
    )
    for layer in range(2)
}


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """Adapters `x` and `y`, one more around them, and one beside their folder."""
    path = tmp_path / "outer" / "adapters"
    path.mkdir(parents=True)
    for place in (path / "x", path / "y", tmp_path / "beside"):
        shutil.copytree(checkpoint / "a", place)
    shutil.copytree(checkpoint / "a", path.parent, dirs_exist_ok=True)
    return path


def test_adapters_of_a_folder_are_found_by_their_names(folder: Path):
    sources = AdapterSources(BASE, folder)
    found = sources.find("x")
    assert found is not None and found.read().rank == 4 and not found.is_remote
    assert sources.find("later") is None
    shutil.copytree(folder / "y", folder / "later")
    assert sources.find("later") is not None
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    assert sources.find("empty") is None and sources.find("file") is None


@pytest.mark.parametrize(
    "name",
    [
        *(
            "..",
            ".",
            "",
            "../beside",
            "../../beside",
            "x/../y",
            "x/..",
            "../adapters/x",
        ),
        *(
            "x/",
            "x//",
            "./x",
            "x/.",
            "/",
            "\0",
            "x\0",
            "\ud800",
            "x" * 5000,
            3,
            None,
            b"x",
            ["x"],
        ),
    ],
)
def test_names_that_are_paths_are_not_found(folder: Path, name: Any):
    assert AdapterSources(BASE, folder).find(name) is None


def test_absolute_names_are_not_found(folder: Path):
    sources = AdapterSources(BASE, folder)
    assert sources.find(str(folder / "x")) is None
    assert sources.find(str(folder.parent)) is None
    assert AdapterSources(BASE, None).find("x") is None


def test_a_folder_must_be_one(folder: Path):
    for path in (folder / "nothing", folder / "x" / "adapter_config.json"):
        with pytest.raises(ValueError, match="adapters_dir must be a directory, got"):
            AdapterSources(BASE, path)
    AdapterSources(BASE, str(folder))


def test_arrays_are_what_they_are_as_files(folder: Path):
    sources = AdapterSources(BASE, None)
    save_adapter(folder / "saved", tiny.CONFIG, ARRAYS, lora_alpha=6)
    saved = sources.reader("s", folder / "saved", {}).read()
    arrays = sources.reader("s", ARRAYS, {"lora_alpha": 6}).read()
    assert arrays.digest() == saved.digest() and arrays.nbytes == saved.nbytes
    assert arrays.digest() != sources.reader("s", ARRAYS, {}).read().digest()


def test_nothing_is_read_before_it_is_asked(folder: Path):
    read, _ = AdapterSources(BASE, None).reader("z", folder / "nothing", {})
    with pytest.raises(ValueError, match="nothing"):
        read()
    wrong = {(0, "down_proj"): (np.ones((2, 47)), np.ones((32, 2)))}
    read, _ = AdapterSources(BASE, None).reader("z", wrong, {})
    with pytest.raises(pj.AdapterError, match="down_proj"):
        read()


def test_what_is_no_source_is_told_in_few_words():
    source: Any = [np.ones((30, 40))] * 9
    read, _ = AdapterSources(BASE, None).reader("z", source, {})
    with pytest.raises(
        pj.HubError, match=r"must be a directory, or .* got \[array\("
    ) as caught:
        read()
    assert len(str(caught.value)) < 400


def test_only_a_network_is_waited_for_apart(folder: Path):
    sources = AdapterSources(BASE, None)
    for source in (folder / "x", str(folder / "x"), ARRAYS, folder / "nothing"):
        assert not sources.reader("x", source, {}).is_remote
    for source in ("org/name", "org/name@main", str(folder / "nothing")):
        assert sources.reader("x", source, {}).is_remote


def test_paths_are_those_of_when_they_were_given(folder: Path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    sources = AdapterSources(BASE, folder.name)
    readers = [sources.find("x"), sources.reader("y", f"{folder.name}/y", {})]
    monkeypatch.chdir("/")
    assert sources.find("y") is not None
    for reader in readers:
        assert reader is not None and reader.read().rank > 0


def test_a_path_goes_through_links(folder: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(folder / "x")
    path = f"{tmp_path}/link/../y"  # beside what the link names
    assert AdapterSources(BASE, None).reader("y", path, {}).read().rank > 0


def test_what_a_reader_refuses(folder: Path):
    sources = AdapterSources(BASE, folder)
    for name in ("", None, 3, ["x"]):
        with pytest.raises(ValueError, match="an adapter's name must be a text, not"):
            sources.reader(name, folder / "x", {})  # pyright: ignore[reportArgumentType]
    for own in ("config", "tensors", "dtype", "empty"):
        with pytest.raises(
            ValueError,
            match=rf"fields must be those of adapter_config.json, got \['{own}'\]",
        ):
            sources.reader("x", {}, {own: None})
    with pytest.raises(
        ValueError,
        match=r"only weights take fields of adapter_config.json, got \['lora_alpha'\]",
    ):
        sources.reader("x", folder / "x", {"lora_alpha": 1})
