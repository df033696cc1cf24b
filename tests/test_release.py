"""What is published says the same version everywhere."""

import pathlib
import re
import tomllib

import pytest

import onebit_jax
from onebit_jax import cli

ROOT = pathlib.Path(__file__).parent.parent


def test_the_command_line_tells_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"onebit_jax {onebit_jax.__version__} (jax ")


def test_changelog_and_citation_are_of_this_version():
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest[1] == onebit_jax.__version__
    assert f"\nversion: {onebit_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_readme_and_changelog_know_the_lowest_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = [f"Python {project['requires-python'].removeprefix('>=')}"]
    lowest += [requirement.replace(">=", " ") for requirement in project["dependencies"]]
    for page in ("README.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text()
        for version in lowest:
            assert re.search(rf"{re.escape(version)}\b(?!\.\d)", text), (page, version)


def test_the_package_is_typed():
    assert (pathlib.Path(onebit_jax.__file__).parent / "py.typed").exists()
