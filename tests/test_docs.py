"""Every Python block of the README and the docs runs."""

import pathlib
import re
import shlex
import types

import jax
import pytest

import onebit_jax
from onebit_jax import cli

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if page.name == "README.md":
        assert blocks
    assert len(page.read_text()) > 500
    assert "_TABLE" not in page.read_text(), "a table is still to be measured"
    namespace = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_everything_public_is_on_the_page_of_the_api():
    public = {
        name for name, value in vars(onebit_jax).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    page = (ROOT / "docs" / "api.md").read_text()
    assert public == set(re.findall(r"^::: onebit_jax\.(\w+)$", page, re.MULTILINE))


def test_every_page_is_in_the_navigation():
    settings = (ROOT / "mkdocs.yml").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert pages == set(re.findall(r"\w+\.md", settings))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_predictions_are_what_the_command_prints(page, capsys):
    shown = re.findall(r"```\n\$ python -m onebit_jax (plan .*)\n([^`]*)```", page.read_text())
    assert shown or page.name != "choosing.md"
    for command, wanted in shown:
        assert cli.main(shlex.split(command)) == 0
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert [line for line in lines if line] == wanted.splitlines()
