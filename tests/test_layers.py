"""A lower layer never imports a higher one."""

import ast
import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

import onebit_jax

PACKAGE = pathlib.Path(onebit_jax.__file__).parent
#: From the bottom up. A module imports only what stands before it.
ORDER = ["packing", "quantize", "workers", "wrappers", "variance", "allreduce", "sync", "adam",
         "wire", "training", "__init__"]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "onebit_jax":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onebit_jax."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_down(name):
    for imported in imports(PACKAGE / f"{name}.py"):
        assert ORDER.index(imported) < ORDER.index(name)


def test_every_module_has_its_place():
    assert {p.stem for p in PACKAGE.glob("*.py")} == set(ORDER)


def test_only_allreduce_exchanges_data():
    """But for scalars: the norm of clip_by_global_norm, agreement, metrics."""
    for path in PACKAGE.glob("*.py"):
        text = path.read_text()
        if path.stem != "allreduce":
            assert "all_to_all" not in text.replace("an all_to_all", "")
            assert "lax.all_gather" not in text


def test_import_needs_only_the_declared_dependencies():
    """In a process where everything else is refused."""
    declared = importlib.metadata.requires("onebit_jax")
    assert {r.split(">")[0] for r in declared if "extra" not in r} == {"jax", "optax"}
    refused = ["flax", "rich", "matplotlib", "sklearn", "torch", "mpi4py", "cupy", "pytest"]
    code = f"import sys\nfor m in {refused}: sys.modules[m] = None\nimport onebit_jax"
    subprocess.run([sys.executable, "-c", code], check=True)
