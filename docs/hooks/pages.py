"""MkDocs hooks: pages made from files of the repository, links between both, the reference of options and events."""

from __future__ import annotations

import ast
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from elasticstate.core import event_file
from elasticstate.options import Declaration, declarations

ROOT = Path(__file__).parents[2]
COPIES = {  # file of the repository -> page of the site with its text
    "README.md": "index.md",
    "DESIGN.md": "project/design.md",
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
PAGES = {**COPIES, "MIGRATION.md": "guides/horovod.md"}  # file of the repository -> page that a link to it opens
NOTES = ROOT / "docs" / "reference" / "option-notes.md"
OPTIONS_MARK = "<!-- the options: docs/hooks/pages.py -->"
EVENTS_MARK = "<!-- the events: docs/hooks/pages.py -->"
LINK = re.compile(r"(?<!!)\[(?P<text>[^][]*(?:\[[^][]*\][^][]*)*)\]\((?P<target>[^()\s]+)\)")

log = logging.getLogger("mkdocs.hooks.pages")


def on_files(files: Files, config: Any) -> Files:
    for source, page in COPIES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    path = page.file.src_uri
    source = next((name for name, other in COPIES.items() if other == path), None)
    folder = posixpath.dirname(source if source is not None else f"docs/{path}")
    markdown = markdown.replace(OPTIONS_MARK, option_reference()) if OPTIONS_MARK in markdown else markdown
    markdown = markdown.replace(EVENTS_MARK, event_reference()) if EVENTS_MARK in markdown else markdown
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):  # the parts between code blocks
        parts[index] = LINK.sub(lambda match: _link(match, folder, path, files), parts[index])
    return "".join(parts)


def _link(match: re.Match[str], folder: str, page: str, files: Files) -> str:
    """Return the link as it works in the site. A file that is no page of the site keeps its text alone."""
    target, _, anchor = match["target"].partition("#")
    if not target or ":" in target:
        return match[0]
    name = posixpath.normpath(posixpath.join(folder, target))
    found = PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
    if found is not None and files.get_file_from_path(found) is not None:
        link = posixpath.relpath(found, posixpath.dirname(page) or ".")
        return f"[{match['text']}]({link}{'#' + anchor if anchor else ''})"
    if not (ROOT / name).exists():
        log.warning("%s: no file %s in the repository", page, name)
    return match["text"]


# --------------------------------------------------------------------------------------------- the command line


def option_notes() -> dict[str, str]:
    """Return the hand-written notes: first name of the option -> Markdown."""
    text = NOTES.read_text(encoding="utf-8")
    parts = re.split(r"^## `(.+)`$", text, flags=re.MULTILINE)[1:]
    for line in re.findall(r"^## (?!`[^`]+`$).*", text, flags=re.MULTILINE):
        log.warning("%s: the heading is not the name of an option alone: %s", NOTES.name, line)
    return {name: note.strip() for name, note in zip(parts[::2], parts[1::2], strict=True)}


def option_reference() -> str:
    """Return one section for each option, made from the declarations in elasticstate/options and from the notes."""
    options = declarations()
    notes, lines, group = option_notes(), [], ""
    names = {option.names[0] for option in options.values()}
    for name in sorted(set(notes) - names):
        log.warning("%s: %s is no option", NOTES.name, name)
    for option in options.values():
        if option.group != group:
            group = option.group
            lines += [f"## {group[:1].upper()}{group[1:]}", ""]
        lines += _section(option, notes.get(option.names[0], ""))
    return "\n".join(lines)


def _section(option: Declaration, note: str) -> list[str]:
    long_name = next(name for name in option.names if name.startswith("--"))
    metavar = f" {option.kind.metavar}" if option.kind.metavar else ""
    given = re.search(r" \(default: ([^()]*)\)", option.help)  # the list below the text has it
    text = option.help.replace(given[0], "") if given is not None else option.help
    return [
        f"### `{option.names[0]}{metavar}` {{ #{long_name[2:]} }}",
        "",
        f"{text} {note.strip()}".strip(),
        "",
        f"- Value: {_value(option.kind)}",
        f"- Default: {given[1] if given is not None else option.shown_default or 'none'}",
        *([f"- Other names: {', '.join(f'`{name}`' for name in option.names[1:])}"] if option.names[1:] else []),
        f"- In the environment: {', '.join(f'`{twin}`' for twin in option.twins)}",
        "",
    ]


def _value(kind: Any) -> str:
    return str(kind.valid).replace("|", "\\|").replace("*", "\\*") if kind.metavar else "none; it is a switch"


# ---------------------------------------------------------------------------------------------------- the event file


def event_reference() -> str:
    """Return the table of all events with their fields, made from the classes in elasticstate/core/event_file.py."""
    source = Path(event_file.__file__).read_text(encoding="utf-8")
    comments = [line.partition("  # ")[2] for line in source.splitlines()]
    fields = {"CommonFields": ""}  # by class
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name not in fields:
            bases = [fields.get(base.id, "") for base in node.bases if isinstance(base, ast.Name)]
            own = [_field(line, comments[line.lineno - 1]) for line in node.body if isinstance(line, ast.AnnAssign)]
            fields[node.name] = ", ".join(filter(None, [*bases, *own]))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):  # a name that is a keyword
            fields[node.targets[0].id] = f"`for` ({comments[node.lineno - 1]})"
    events = event_file.by_name()
    rows = [f"| `{name}` | {fields[event.__name__] or '-'} |" for name, event in events.items()]
    return "\n".join(["| event | fields besides the common ones |", "|---|---|", *rows])


def _field(line: ast.AnnAssign, comment: str) -> str:
    or_null = " or null" if ast.unparse(line.annotation).rstrip("]").endswith("| None") else ""
    return f"`{ast.unparse(line.target)}`{or_null}{f' ({comment})' if comment else ''}"
