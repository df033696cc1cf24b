"""Tries the wheel and the sdist where nothing else is installed.

    python -m build && python tests/installed.py dist

Looks at what is in the wheel, installs each into a new environment and trains there, and
collects the tests of the unpacked sdist, running those of the files around the package.
Ends with an error at the first fault.
"""

import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

from packaging.metadata import Metadata

PACKAGE = pathlib.Path(__file__).parent.parent / "onebit_jax"
#: Runs with jax and optax alone.
TRAINING = """
import importlib.util, pathlib, jax, jax.numpy as jnp, onebit_jax

package = pathlib.Path(onebit_jax.__file__).parent
assert "site-packages" in package.parts, f"{package} is not what was installed"
assert (package / "py.typed").exists(), "py.typed is missing"
for other in ("flax", "orbax", "rich", "matplotlib"):
    assert importlib.util.find_spec(other) is None, f"{other} is installed"

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("data",))
x = jax.random.normal(jax.random.key(0), (64, 8))
batch = (x, x @ jnp.arange(8.0))
tx = onebit_jax.onebit_adam(0.3, "data", variance=5)
with jax.set_mesh(mesh):
    state = (jnp.zeros(8), tx.init(jnp.zeros(8)))
step = onebit_jax.make_train_step(
    lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2), tx, mesh
)
losses = []
for _ in range(20):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
assert losses[-1] < losses[0] / 4, losses
assert onebit_jax.metrics(state)["onebit_rounds"] > 0
print(f"loss {losses[0]:.2f}, after {len(losses)} steps on 2 devices {losses[-1]:.2f}")
"""


def main(folder):
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_contents(wheel)
    for archive in (wheel, sdist):
        print(f"{archive.name}, in an environment of its own:", flush=True)
        with tempfile.TemporaryDirectory() as place:
            check_installed(archive, pathlib.Path(place))
    with tempfile.TemporaryDirectory() as place:
        check_tests(sdist, pathlib.Path(place))


def check_contents(wheel):
    """The package, its licence and its metadata, nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = Metadata.from_email(archive.read(metadata))  # refuses what an index would
    assert str(about.version) in wheel.name
    info = metadata.removesuffix("METADATA")
    assert f"{info}licenses/LICENSE" in names, "the licence is missing"
    found = {name for name in names if not name.startswith(info)}
    sources = {p for p in PACKAGE.rglob("*") if p.suffix == ".py" or p.name == "py.typed"}
    wanted = {str(p.relative_to(PACKAGE.parent)) for p in sources}
    assert found == wanted, f"in the wheel or in the tree alone: {sorted(found ^ wanted)}"


def check_installed(archive, place):
    """Without the extras it imports, trains, and says what the tables need."""
    venv.create(place / "venv", with_pip=True)
    # Isolated, so that neither this folder nor PYTHONPATH lends anything.
    python = [place / "venv/bin/python", "-I"]
    subprocess.run([*python, "-m", "pip", "install", "--quiet", archive.resolve()], check=True)
    subprocess.run([*python, "-m", "onebit_jax", "--version"], check=True, cwd=place)
    (place / "training.py").write_text(TRAINING)
    subprocess.run([*python, "training.py"], check=True, cwd=place)
    plan = ["plan", "--params", "1e6", "--workers", "2", "--bandwidth", "1gbit",
            "--compute-ms", "1"]
    ended = subprocess.run(
        [*python, "-m", "onebit_jax", *plan], cwd=place, capture_output=True, text=True
    )
    assert ended.returncode == 2, ended
    assert ended.stderr.endswith("pip install 'onebit_jax[cli]'\n"), ended


def check_tests(sdist, place):
    """In the environment of this program, which has what the tests need."""
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (unpacked,) = place.iterdir()
    pytest = [sys.executable, "-m", "pytest", "-q"]
    env = dict(os.environ, PYTHONPATH=str(unpacked))
    subprocess.run([*pytest, "--collect-only", "-q"], check=True, cwd=unpacked, env=env)
    around = ["tests/test_release.py", "tests/test_layers.py", "tests/test_docs.py"]
    subprocess.run([*pytest, *around, "-k", "not blocks"], check=True, cwd=unpacked, env=env)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
