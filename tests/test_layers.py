"""The house: folders and what is in them import downwards only, and nothing grows too long."""

import ast
import importlib.metadata
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import onebit_jax

PACKAGE = pathlib.Path(onebit_jax.__file__).parent
#: From the ground up. A module imports only what stands before it.
ORDER = (
    "workers",
    "compression.marks", "compression.packing", "compression.quantize", "compression.tiles",
    "compression.chunks",
    "compression.feedback", "compression.leaves", "compression.allreduce",
    "optimizers.rounds", "optimizers.wrappers", "optimizers.variance", "optimizers.moments",
    "optimizers.means", "optimizers.scaling", "optimizers.adam",
    "training.replicas", "training.watch", "training.progress", "training.train_step",
    "training.checkpoints",
    "audit.hlo", "audit.wire",
    "deepspeed.options", "deepspeed.conversion",
    "onebit_jax", "cli", "__main__",
)
FOLDERS = ("compression", "optimizers", "training", "audit", "deepspeed")
PUBLIC = {
    "Collective", "Decision", "EarlyFreezeWarning", "ErrorFeedback", "Rounds",
    "ScaleByOnebitAdamState", "Signals", "SignQuantizer", "VariancePolicy", "WireReport",
    "accumulate", "assert_replicas_equal", "bytes_sent", "checkpoints", "clip_by_global_norm",
    "compressed_mean", "exact_mean", "freeze_after", "freeze_when_stable",
    "from_deepspeed_config", "make_train_step", "metrics", "onebit_adam", "onebit_adamw",
    "pack_signs", "paper_1bit_adam", "per_worker", "refresh", "replica_fingerprint",
    "resize_workers", "scale_by_onebit_adam", "state_specs", "unpack_signs", "wire_report",
}


def place(path):
    """A file's name in ORDER; the modules of the command line may import one another."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        return "onebit_jax"
    return "cli" if parts[0] == "cli" else ".".join(parts)


def imports(path):
    """Names in ORDER of what a file imports of the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            base, *inside = module.split(".")
            if base != "onebit_jax":
                continue
            full = ".".join([*inside, name] if name else inside)
            if full.startswith("cli"):
                yield "cli"
            else:
                known = [p for p in ORDER if f"{full}.".startswith(f"{p}.")]
                yield max(known, key=len, default="onebit_jax")


FILES = {
    path: place(path) for path in sorted(PACKAGE.rglob("*.py"))
    if place(path).removesuffix(".__init__") not in FOLDERS
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    mine = FILES[path]
    for imported in set(imports(path)) - ({"cli"} if mine == "cli" else set()):
        assert ORDER.index(imported) < ORDER.index(mine), imported


def test_every_module_has_its_place():
    assert set(FILES.values()) == set(ORDER)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_lives_there_and_holds_nothing_else(folder):
    tree = ast.parse((PACKAGE / folder / "__init__.py").read_text())
    assert len(tree.body) == 1
    assert len(ast.get_docstring(tree).splitlines()) >= 3


def test_public_names():
    found = {name for name, value in vars(onebit_jax).items()
             if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))}
    assert found | {"checkpoints"} == PUBLIC
    assert all(hasattr(onebit_jax, name) for name in PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = onebit_jax.nonsense


def test_only_allreduce_exchanges_gradients():
    """Elsewhere: scalars of agreement and norm, metrics and batch statistics."""
    allowed = {
        "compression.allreduce": {"all_to_all", "all_gather", "psum", "pmax"},
        "workers": {"pmin", "psum"},
        "optimizers.means": {"pmean"},
        "training.train_step": {"pmean", "pmax"},
    }
    pattern = r"lax\.(all_to_all|all_gather|psum\w*|pmean|pmax|pmin|ppermute)\("
    for path, name in FILES.items():
        if name != "cli":
            found = set(re.findall(pattern, path.read_text()))
            assert found == allowed.get(name, set()), name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_is_too_long_to_live_in(path):
    """Lines of a function without its docstring, of a class, of a file."""
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines = node.end_lineno - node.lineno + 1
            if isinstance(node, ast.FunctionDef):
                documented = ast.get_docstring(node) is not None
                first = node.body[0]
                lines -= first.end_lineno - first.lineno + 1 if documented else 0
                assert lines <= 80, node.name
            else:
                assert lines <= 150, node.name


def test_import_needs_only_the_declared_dependencies():
    """In a process where everything else is refused."""
    declared = importlib.metadata.requires("onebit_jax")
    assert {r.split(">")[0] for r in declared if "extra" not in r} == {"jax", "optax"}
    refused = ["flax", "rich", "matplotlib", "sklearn", "torch", "mpi4py", "cupy", "pytest",
               "orbax", "orbax.checkpoint"]
    code = f"import sys\nfor m in {refused}: sys.modules[m] = None\nimport onebit_jax"
    subprocess.run([sys.executable, "-c", code], check=True)
