"""The demos' example scripts and notebooks do what they say, run as users run them."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

DEMOS = Path(__file__).parents[1] / "demos"


def run_example(name, *options):
    """Run a script as its docstring says; return what it prints."""
    command = f"python -m demos.{name}"
    assert f"    {command}\n" in (DEMOS / f"{name}.py").read_text()
    done = subprocess.run(
        [sys.executable, *options, "-m", f"demos.{name}"],
        cwd=DEMOS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_flax_model():
    out = run_example("example_flax_model", "-W", "error")
    lines = re.findall(r"(.+?) +error before (\S+)  after (\S+)", out)
    errors = {name: (float(before), float(after)) for name, before, after in lines}
    assert errors.pop("no adapter") == (0.0, 0.0)
    assert list(errors) == ["negate", "double", "reverse", "shift"]
    for name, (before, after) in errors.items():
        assert after < 0.05 * before, (name, before, after)


@pytest.mark.slow
def test_generate():
    out = run_example("example_generate", "-W", "error")
    rows = [line.split() for line in out.splitlines()]
    assert rows.pop() == ["times", "traced:", "1"]
    expected = """
        upper harbor HARBOR, sort planet aelnpt, twice copper ccooppppeerr,
        reverse sun nus, reverse winter retniw, upper tin TIN,
        twice zebra zzeebbrraa, upper violet VIOLET, sort banana aaabnn
    """
    assert rows == [[*row.split(), "right"] for row in expected.split(",")]


@pytest.mark.parity
def test_peft():
    out = run_example("example_peft")
    assert "28 modules in 4 layers, greatest rank 8" in out
    rows = [line.split() for line in out.splitlines()[-12:]]
    expected = """
        spell flask f-l-a-s-k, upper flask FLASK, sort flask afkls, - flask flask,
        spell garden g-a-r-d-e-n, upper garden GARDEN, sort garden adegnr,
        - garden garden, spell python p-y-t-h-o-n, upper python PYTHON,
        sort python hnopty, - python python
    """
    assert rows == [row.split() for row in expected.split(",")]


def notebooks():
    return sorted(DEMOS.glob("*.ipynb"))


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_notebooks_hold_no_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, prints",
    [
        ("colab_kernels", ["cpu runs xla", "slots [ 0  1  2  2 -1]", "distinct"]),
        ("colab_serving", ["morse      -. --- -", "a2e1l3p1r1", "NOTEBOOK"]),
    ],
)
def test_notebook_runs(name, prints):
    out = io.StringIO()
    names = {}
    # As in a notebook, not as in these tests.
    with (
        contextlib.redirect_stdout(out),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        for cell in json.loads((DEMOS / f"{name}.ipynb").read_text())["cells"]:
            if cell["cell_type"] == "code":
                lines = [line for line in cell["source"] if line[0] not in "!%"]
                exec("".join(lines), names)
    for text in prints:
        assert text in out.getvalue()


def test_all_notebooks_run():
    marks = test_notebook_runs.pytestmark
    (cases,) = (mark.args[1] for mark in marks if mark.name == "parametrize")
    assert [name for name, _ in cases] == [path.stem for path in notebooks()]
