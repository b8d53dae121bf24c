"""Prints 150 texts of the project at random: ``sample_words.py [SEED]``; the same for one seed and one tree.

A reader who did not write them reads each once, and counts the texts that need a second reading: at most 18 may. There
are 60 docstrings, 42 comments, 28 messages and hints, and 20 help texts and descriptions of options and columns.
"""

from __future__ import annotations

import ast
import io
import random
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("api", "client", "daemon", "diagnosis", "federation", "groups", "launcher")
PARTS = {"docstring": 60, "comment": 42, "message": 28, "help": 20}
_LEAST_WORDS = 4
_ERRORS = ("Error", "Rejected", "Timeout", "Gone", "Refused", "Found", "Target", "warning", "info")
_TEXTS = ("help", "hint", "doc")
_HELPS = ("Option", "Argument", "Column", "Table")


def texts_of(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yields (kind, line, text) of each text in a module."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                yield "docstring", getattr(node, "lineno", 1), text
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            kind = "help" if name in _HELPS else "message" if name.endswith(_ERRORS) else ""
            values = [
                *node.args,
                *(keyword.value for keyword in node.keywords if keyword.arg in ("help", "hint", "doc")),
            ]
            for value in values if kind else ():
                if isinstance(value, (ast.Constant, ast.JoinedStr)) and (text := _literal(value)):
                    yield kind, node.lineno, text
    yield from (("comment", line, text) for line, text in _comments(source))


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each comment; comments on lines that follow each other are one text."""
    lines = source.splitlines()
    first, last, texts = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# type:", "# noqa", "# fmt:")):
            continue
        line = token.start[0]
        alone = lines[line - 1].lstrip().startswith("#")
        if texts and not (alone and line == last + 1):
            yield first, " ".join(texts)
            texts = []
        first, last = (first if texts else line), (line if alone else 0)
        texts.append(token.string.removeprefix("#").strip())
    if texts:
        yield first, " ".join(texts)


def _literal(node: ast.Constant | ast.JoinedStr) -> str:
    """Returns the text of a literal, with an ellipsis for each value in it; empty where it is no text."""
    if not isinstance(node, ast.JoinedStr):
        return node.value if isinstance(node.value, str) else ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def main() -> None:
    chosen = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 400)  # noqa: S311
    texts: dict[str, list[tuple[str, str]]] = {kind: [] for kind in PARTS}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" not in path.name:
                for kind, line, text in texts_of(path):
                    if len(text.split()) >= _LEAST_WORDS:
                        texts[kind].append((f"{path.relative_to(ROOT)}:{line}", text))
    for kind, count in PARTS.items():
        for number, (where, text) in enumerate(chosen.sample(sorted(texts[kind]), count), 1):
            print(f"{kind} {number}  {where}\n    " + text.replace("\n", "\n    "))


if __name__ == "__main__":
    main()
