"""A lower layer never imports a higher one."""

import ast
import importlib.metadata
import pathlib
import re
import subprocess
import sys

import pytest

import onebit_jax

PACKAGE = pathlib.Path(onebit_jax.__file__).parent
#: From the bottom up. A module imports only what stands before it; the command
#: line, a package of its own, is on top, and its modules may import one another.
ORDER = ["packing", "quantize", "workers", "feedback", "tiles", "wrappers", "variance", "leaves",
         "allreduce", "sync", "replicas", "watch", "scaling", "adam", "progress",
         "deepspeed_options", "deepspeed", "hlo", "wire", "training", "checkpoints", "__init__",
         "cli", "__main__"]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "onebit_jax":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onebit_jax."):
            yield node.module.split(".")[1]


def files(name):
    path = PACKAGE / name
    return sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_down(name):
    for imported in {i for path in files(name) for i in imports(path)} - {"cli"}:
        assert ORDER.index(imported) < ORDER.index(name)


def test_only_the_command_line_imports_itself():
    users = {name for name in ORDER for path in files(name) if "cli" in imports(path)}
    assert users <= {"cli", "__main__"}


def test_every_module_has_its_place():
    packages = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert {p.stem for p in PACKAGE.glob("*.py")} | packages == set(ORDER)


def test_only_allreduce_exchanges_gradients():
    """Elsewhere: scalars of agreement and norm, metrics and batch statistics."""
    allowed = {
        "allreduce": {"all_to_all", "all_gather", "psum", "pmax"},
        "workers": {"pmin", "psum"},
        "sync": {"pmean"},
        "training": {"pmean", "pmax"},
    }
    pattern = r"lax\.(all_to_all|all_gather|psum\w*|pmean|pmax|pmin|ppermute)\("
    for path in PACKAGE.glob("*.py"):
        found = set(re.findall(pattern, path.read_text()))
        assert found == allowed.get(path.stem, set()), path.stem


def test_import_needs_only_the_declared_dependencies():
    """In a process where everything else is refused."""
    declared = importlib.metadata.requires("onebit_jax")
    assert {r.split(">")[0] for r in declared if "extra" not in r} == {"jax", "optax"}
    refused = ["flax", "rich", "matplotlib", "sklearn", "torch", "mpi4py", "cupy", "pytest"]
    code = f"import sys\nfor m in {refused}: sys.modules[m] = None\nimport onebit_jax"
    subprocess.run([sys.executable, "-c", code], check=True)
