"""What the pages and docstrings need on top of Markdown: mathematics and roles.

Formulas become MathML, which browsers show without a script. Docstrings refer to one
another in reStructuredText, which here becomes Markdown.
"""

import pathlib
import re
from typing import Any

import griffe
from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

API = pathlib.Path(__file__).parent / "api.md"


class Docstrings(griffe.Extension):
    """Rewrites docstrings before their sections are parsed."""

    def __init__(self) -> None:
        paths = re.findall(r"^::: (\S+)", API.read_text(), re.MULTILINE)
        self._paths = {path.rpartition(".")[2]: path for path in paths}

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = self._markdown(obj.docstring.value)

    def _markdown(self, text: str) -> str:
        text = re.sub(r"^\.\. math::\n((?:[ \t]+.*\n|\n)+)", self._display, text, flags=re.M)
        text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
        text = re.sub(r":\w+:`([^`]+)`", self._role, text)
        text = re.sub(r"(?<!`)`([^`<]+?)\s+<(http[^>]+)>`__?", r"[\1](\2)", text)
        text = re.sub(r"^Example:\n", "Examples:\n", text, flags=re.MULTILINE)
        # What stands before a colon would be taken for a type.
        return re.sub(r"^(Returns:\n\s+)", r"\1: ", text, flags=re.MULTILINE)

    def _display(self, match: re.Match) -> str:
        formula = match[1].strip()
        if r"\\" in formula:
            formula = rf"\begin{{align*}}{formula}\end{{align*}}"
        return f"$$\n{formula}\n$$\n\n"

    def _role(self, match: re.Match) -> str:
        name = match[1].removeprefix("onebit_jax.")
        path = self._paths.get(name)
        return f"[`{name}`][{path}]" if path else f"`{name}`"


class _Formulas(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = "\n".join(lines)
        text = re.sub(r"^\$\$\n(.*?)^\$\$$", self._display, text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"(?<![\w$`])\$([^$\n`]+)\$(?![\w$`])", self._inline, text)
        return text.split("\n")

    def _display(self, match: re.Match) -> str:
        html = f'<div class="math">{convert(match[1].strip(), display="block")}</div>'
        return f"\n{self.md.htmlStash.store(html)}\n"

    def _inline(self, match: re.Match) -> str:
        return self.md.htmlStash.store(convert(match[1]))


class _Mathematics(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # After 25, which puts code blocks aside, and before 20, which takes HTML out.
        md.preprocessors.register(_Formulas(md), "formulas", 24)


@event_priority(100)  # before mkdocstrings takes the list for docstrings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(_Mathematics())  # type: ignore[arg-type]
    return config
