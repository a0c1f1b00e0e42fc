"""The pages of docs/ are whole, true, and can be built."""

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import punica_jax as pj
from punica_jax.models._families import FAMILIES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text() for path in DOCS.glob("*.md")}
# Python, and the text below it, if any, which is what it prints.
EXAMPLE = re.compile(r"```python\n(.*?)```\n*(?:```text\n(.*?)```)?", re.DOTALL)
TEXTS = {"README": (ROOT / "README.md").read_text(), **PAGES}
COMMAND = re.compile(r"python -m ((?:benchmarks|demos)\.\w+)([^`\n]*)")
COMMANDS = [
    # It imports torch, transformers and PEFT.
    pytest.param(*found, marks=pytest.mark.slow) if "parity" in found[0] else found
    for found in sorted(
        {pair for text in TEXTS.values() for pair in COMMAND.findall(text)}
    )
]
FOLDERS = ("punica_jax", "models", "pallas_kernels", "benchmarks", "demos", "tests")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
# Pages with examples, in reading order: names of one are known to the next.
WITH_EXAMPLES = ["quickstart", "adapters", "sampling", "engine", "cluster", "your_code"]


def documented(public):
    """Yield each public function, class and method by its dotted name."""
    for name in public:
        value = getattr(pj, name)
        yield name, value
        if not inspect.isclass(value):
            continue
        for method, member in vars(value).items():
            if isinstance(member, classmethod | staticmethod):
                member = member.__func__
            own = method == "__call__" or not method.startswith("_")
            if inspect.isfunction(member) and own:
                yield f"{name}.{method}", member


def test_reference_has_every_public_name():
    found = re.findall(r"^::: punica_jax\.(\w+)$", PAGES["api"], re.M)
    assert sorted(found) == sorted(pj.__all__)


@pytest.mark.parametrize("name, value", list(documented(pj.__all__)))
def test_docstring_says_what_applies(name, value):
    text = inspect.getdoc(value)
    assert text and re.match(r"[A-Z`].*[.:]$", text.splitlines()[0]), name
    if inspect.isclass(value):
        if issubclass(value, Exception) or hasattr(value, "__dataclass_fields__"):
            return
        value = vars(value)["__init__"]
        text = f"{text}\n{inspect.getdoc(value)}"
    signature = inspect.signature(value)
    parameters = signature.parameters.keys() - {"self", "cls"}
    # What a method does with its one argument its summary says, or whose they are.
    elsewhere = re.search(r"\bsee `\w+`\.|arguments see", text.splitlines()[0])
    if len(parameters) > 1 and not elsewhere:
        for parameter in parameters:
            described = rf"^ +\**{parameter}: |^Args:\n.*: see .*`{parameter}`"
            assert re.search(described, text, re.M | re.S), f"{name}: {parameter}"
        if "." not in name and not inspect.isclass(getattr(pj, name)):
            assert re.search(r"^Returns:", text, re.M), f"{name}: what it returns"
    if re.search(r"^\s+raise ", inspect.getsource(value), re.M):
        assert re.search(r"^Raises:", text, re.M), f"{name}: what it raises"


def test_every_extra_is_on_its_page():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = PAGES["install"].split("## Extras")[1]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == project["optional-dependencies"].keys()


def test_every_family_is_on_its_page():
    table = PAGES["models"].split("## Models")[1].split("| part |")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert named[0] == "model_type" and sorted(named[1:]) == sorted(FAMILIES)
    limits = (ROOT / "README.md").read_text().split("## Limits")[1]
    assert set(FAMILIES) <= set(re.findall(r"`(\w+)`", limits))


def test_examples_are_python_and_name_what_exists():
    assert {page for page, text in PAGES.items() if "```python" in text} == set(
        WITH_EXAMPLES
    )
    for page, text in PAGES.items():
        for code, _ in EXAMPLE.findall(text):
            ast.parse(code)
        names = set(re.findall(r"\bpj\.(\w+)", text))
        assert names <= set(pj.__all__), (page, names - set(pj.__all__))


@pytest.mark.parametrize("page", TEXTS)
def test_names_are_those_of_the_code(page):
    sources = [path.read_text() for path in (*SOURCES, ROOT / "pyproject.toml")]
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    files = [f"/{path.relative_to(ROOT)}" for path in SOURCES]
    text = re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)
    for span in re.findall(r"`([\w./]+)`", text):
        if span.endswith(".py"):
            assert any(file.endswith(f"/{span}") for file in files), span
        elif "/" not in span and not (ROOT / span).exists():
            assert set(span.split(".")) <= words, span


class _Parsed(Exception):
    """A command's words were understood; nothing else is to happen."""


@pytest.mark.parametrize("module, words", COMMANDS)
def test_commands_are_understood(module, words, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(parser, words=None):
        parse(parser, words)
        raise _Parsed

    if module == "benchmarks.parity":
        pytest.importorskip("peft")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    monkeypatch.setattr(sys, "argv", [module, *shlex.split(words, comments=True)])
    with pytest.raises(_Parsed):
        importlib.import_module(module).main()


def test_every_record_can_be_made_again():
    session = PAGES["benchmarks"].split("## To remake every record")[1]
    found = {module for module, _ in COMMAND.findall(session)}
    records = {
        f"benchmarks.{path.stem}"
        for path in (ROOT / "benchmarks").glob("*.py")
        if "Log.add_options" in path.read_text()
    }
    assert found == {*records, "benchmarks.plots", "benchmarks.readme"}
    for module, words in COMMAND.findall(session):
        if module in records:
            name = module.removeprefix("benchmarks.")
            device = "cpu" if name == "scheduling" else "h200"
            assert f" --out $out/{name}_{device}.jsonl  # " in words


@pytest.mark.slow
def test_examples_print_what_the_pages_say():
    names = {}
    for page in WITH_EXAMPLES:
        for code, expected in EXAMPLE.findall(PAGES[page]):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(code, names)
            if expected:
                assert out.getvalue() == expected, code


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages; every warning is an error (mkdocs.yml is strict)."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.parent.name: path.read_text() for path in folder.glob("*/index.html")}


@pytest.mark.slow
def test_site_builds(site):
    assert site.keys() == PAGES.keys() - {"index"}
    for name in pj.__all__:
        assert re.search(rf'id="punica_jax\.{name}"', site["api"]), name


@pytest.mark.slow
def test_shapes_are_as_written(site):
    text = re.sub(r"<[^>]+>", "", site["api"]).replace("&#34;", '"')
    for shape in ('Float[Array, "rows d_in"]', 'Int[Array, "rows"]'):
        assert shape in text
    assert not re.findall(r"\[Array, (?!\")[^\]]*\]", text)


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site):
    loads = r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>"
    for page, text in site.items():
        assert not re.findall(loads, text), page
