"""The rules of the layout, read from the source: arrows point down only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "punica_jax": ROOT / "punica_jax",
    "punica_jax.models": ROOT / "models",
    "punica_jax.pallas_kernels": ROOT / "pallas_kernels",
}
WITHOUT_JAX = [
    "_text_stages",
    "adapters",
    "chat",
    "chunk",
    "claims",
    "consolidation",
    "engine_config",
    "exclusive",
    "generation_config",
    "hub",
    "journey",
    "members",
    "messages",
    "model_dir",
    "mover",
    "pages",
    "placements",
    "policies",
    "progress",
    "prompts",
    "random_bits",
    "request",
    "request_state",
    "registry",
    "residence",
    "scheduler",
    "sequence",
    "stats",
    "stops",
    "stream",
    "tasks",
    "tickets",
    "tiny",
    "tokenizer",
    "transcript",
    "versions",
]


def modules():
    return {
        f"{package}.{file.stem}".removesuffix(".__init__"): file
        for package, folder in FOLDERS.items()
        for file in folder.glob("*.py")
    }


def imports(file):
    """Return the names that a file imports when it runs (type checking aside)."""
    found = set()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def layer_of(name):
    packages = sorted(FOLDERS, key=len, reverse=True)
    return next((p for p in packages if (name + ".").startswith(p + ".")), None)


def test_arrows_point_down():
    allowed = {
        "punica_jax": set(FOLDERS),
        "punica_jax.models": {"punica_jax.models", "punica_jax.pallas_kernels"},
        "punica_jax.pallas_kernels": {"punica_jax.pallas_kernels"},
    }
    for module, file in modules().items():
        # `import punica_jax.models` alone names the package above; only files count.
        for name in imports(file) - {"punica_jax"}:
            layer = layer_of(name)
            if layer == "punica_jax" and name.count(".") == 1 and name in FOLDERS:
                continue
            if layer is not None:
                assert layer in allowed[layer_of(module)], f"{module} imports {name}"


def test_no_cycles():
    known = modules()
    graph = {name: imports(file) & known.keys() for name, file in known.items()}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path, name])
        if name in done:
            return
        path.append(name)
        for other in sorted(graph[name] - {name}):
            # A package's __init__ re-exports its own files; importing a sibling file
            # by its full name does not need it.
            if not (known[other].stem == "__init__" and name.startswith(other + ".")):
                visit(other)
        path.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_policy_is_plain_python(name):
    found = imports(ROOT / "punica_jax" / f"{name}.py")
    heavy = {"jax", "jaxlib", "flax", "jaxtyping"}
    assert not {top for top in (n.split(".")[0] for n in found) if top in heavy}
    assert not {n for n in found if layer_of(n) not in (None, "punica_jax")}


def test_gpu_lowerings_stay_inside_the_kernels():
    names = "pallas.triton", "pallas.mosaic_gpu"
    for module, file in modules().items():
        if layer_of(module) != "punica_jax.pallas_kernels":
            found = imports(file)
            assert "triton" not in found
            assert not any(name in n for n in found for name in names)


def test_files_are_small():
    for folder in [*FOLDERS.values(), ROOT / "demos", ROOT / "benchmarks"]:
        for file in folder.glob("*.py"):
            lines = len(file.read_text().splitlines())
            assert lines <= 360, f"{file}: {lines} lines"
