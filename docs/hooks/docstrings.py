"""An extension of Griffe: the docstrings of elasticstate, written in reStructuredText, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")


class MarkdownDocstrings(griffe.Extension):
    """Replace roles and literal blocks, the only reStructuredText that the docstrings use."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return a docstring as Markdown: ``::`` begins a fenced block of Python."""
    lines, block = [], None  # block: the indent of the text before the fenced block
    for line in ROLE.sub(r"`\1`", text).splitlines():
        indent = len(line) - len(line.lstrip())
        if block is not None and line.strip() and indent <= block:
            lines += ["```", ""]
            block = None
        if block is None and line.rstrip().endswith("::"):
            block = indent
            begin = line.rstrip()[:-1] if line.strip() != "::" else ""
            lines += [begin, "", "```python"]
        elif not (block is not None and not line.strip() and lines[-1] == "```python"):
            lines.append(line[block + 4 :] if block is not None else line)
    if block is not None:
        lines.append("```")
    return "\n".join(lines)
