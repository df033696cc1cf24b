"""What is published says the same version everywhere."""

import pathlib
import re

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


def test_the_package_is_typed():
    assert (pathlib.Path(onebit_jax.__file__).parent / "py.typed").exists()
