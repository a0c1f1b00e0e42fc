"""The README says what is true."""

import re
import tomllib
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

import punica_jax as pj
from benchmarks import readme

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_tables_are_generated():
    assert readme.filled(TEXT) == TEXT, "run: python -m benchmarks.readme"


def test_a_section_that_is_missing_is_an_error():
    with pytest.raises(AssertionError, match="one section 'tiny', has 0"):
        readme.filled("no sections")


EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_there_are_three_examples():
    assert len(EXAMPLES) == 3  # each has a test of its own


def test_first_example_runs(checkpoint, capsys):
    example = EXAMPLES[0]
    for path, real in (
        ("path/to/hf_model_dir", checkpoint / "model"),
        ("path/to/peft_dir", checkpoint / "a"),
        ("path/to/another_peft_dir", checkpoint / "b"),
    ):
        assert path in example
        example = example.replace(f'"{path}"', f'"{real}"')
    exec(example, {})
    out = capsys.readouterr().out
    assert "4 modules in 2 layers" in out  # the report
    assert "KV cache" in out and "legal: slot 1" in out  # what is resident


@pytest.mark.slow
def test_second_example_runs(checkpoint, capsys):
    example = EXAMPLES[1]
    for text, real in (
        ("path/to/hf_model_dir", checkpoint / "model"),
        ("path/to/peft_dirs", checkpoint),
        ("path/to/another_peft_dir", checkpoint / "b"),
        ("upper", "a"),
    ):
        assert text in example
        example = example.replace(f'"{text}"', f'"{real}"')
    exec(example, {"pj": pj})
    assert "{'a': 'device', 'legal': 'device'}" in capsys.readouterr().out


@pytest.mark.slow
def test_third_example_runs(checkpoint):
    example = EXAMPLES[2]
    example = example.replace("path/to/hf_model_dir", str(checkpoint / "model"))
    example = example.replace("path/to/peft_dir", str(checkpoint / "a"))
    call = "prompt_lens, slots, max_new_tokens=64"
    assert call in example
    # The pools of the example have one slot only.
    example = example.replace(call, "prompt_lens, slots - 1, max_new_tokens=3")
    names = {
        "jnp": jnp,
        "pj": pj,
        "rngs": nnx.Rngs(0),
        "d_in": 16,
        "d_out": 24,
        "a": jnp.ones((2, 4, 16)),
        "b": jnp.ones((2, 24, 4)),
        "x": jnp.ones((3, 16)),
        "y": jnp.zeros((3, 24)),
        "slots": jnp.asarray([1, -1, 0], jnp.int32),
        "prompt_tokens": jnp.ones((3, 5), jnp.int32),
        "prompt_lens": jnp.asarray([5, 1, 3], jnp.int32),
    }
    exec(example, names)
    assert names["tokens"].shape == (3, 3) and list(names["counts"]) == [3, 3, 3]
    added = names["y"] - names["layer"](names["x"])
    assert jnp.allclose(added, jnp.asarray([[64.0], [0.0], [64.0]]), rtol=1e-5)


def test_names_in_examples_exist():
    names = set(re.findall(r"\bpj\.(\w+)", TEXT))
    assert names and names <= set(pj.__all__)


def test_dependencies_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.split(r"[\[<>=]", text)[0] for text in requirements}

    always, extras = (
        [line.strip("| ").split(" | ") for line in part.splitlines() if "|" in line][2:]
        for part in TEXT.split("## Dependencies")[1].split("\n\n")[1:3]
    )
    listed = {name for row in always for name in row[0].split(", ")}
    assert listed == names(project["dependencies"])
    found, extra = {}, ()
    for row in extras:
        if len(row) == 3:
            extra = re.findall(r"`(\w+)`", row[0])
        for name in extra:
            found.setdefault(name, set()).update(row[-2].split(", "))
    assert found == {
        name: names(requirements)
        for name, requirements in project["optional-dependencies"].items()
    }


def test_links_and_files_exist():
    for page in (ROOT / "README.md", ROOT / "docs" / "design.md"):
        for target in re.findall(r"\]\(((?!https?:)[^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    design = (ROOT / "docs" / "design.md").read_text()
    for file in re.findall(
        r"`((?:pallas_kernels|models|punica_jax|tests)/[\w./]+)`", design
    ):
        assert (ROOT / file).exists(), file
