"""The wheel holds what the tree holds, under the one import name."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_links_point_at_the_folders():
    for name in ("models", "pallas_kernels"):
        link = ROOT / "punica_jax" / name
        assert link.is_symlink() and str(link.readlink()) == f"../{name}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # A copy: setuptools leaves build/ and an egg-info beside what it builds.
    tree = tmp_path_factory.mktemp("tree") / "punica-jax"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*cache"
    )
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next((tree / "dist").glob("*.whl"))


def test_wheel_has_exactly_the_files_of_the_tree(wheel):
    expected = set()
    for folder, name in (
        ("punica_jax", "punica_jax"),
        ("models", "punica_jax/models"),
        ("pallas_kernels", "punica_jax/pallas_kernels"),
    ):
        expected |= {f"{name}/{file.name}" for file in (ROOT / folder).glob("*.py")}
    data = ROOT / "punica_jax" / "tiny_llama"
    expected |= {
        f"punica_jax/tiny_llama/{file.relative_to(data)}"
        for file in data.rglob("*")
        if file.is_file()
    }
    expected.add("punica_jax/py.typed")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {n for n in names if ".dist-info/" not in n} == expected


@pytest.mark.slow
def test_wheel_imports_from_elsewhere(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import punica_jax as pj;"
        "import punica_jax.models, punica_jax.pallas_kernels;"
        "assert pj.__file__.startswith(sys.argv[1]), pj.__file__;"
        "assert 'models' not in sys.modules and 'pallas_kernels' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(site)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
