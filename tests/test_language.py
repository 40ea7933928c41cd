"""Docstrings, comments, messages and help are plain English: no idioms of other languages, and no headless nouns."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import fairseq_plugins

PACKAGE = Path(fairseq_plugins.__file__).parent
FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted((PACKAGE.parent / "examples").rglob("*.py"))]

# Each pattern of a forbidden idiom, with the advice that replaces the idiom.
FORBIDDEN = {
    r"^(Of|With what|Where|Which|Whose|What|Who|Those|So)\b(?!.*\?$)": "begin with the subject or a verb",
    r"\b(of whom|those (that|which)|what (is|are|has|have|stands|comes))\b": "name the thing",
    r"(?<![Tt]here )\b(is|are|was|be) no\b(?! longer|-)": "is not",
    r"\banew\b": "again",
    r"\bin the place of\b": "instead of",
    r"\bgoes? with\b": "belongs to",
    r"\bwants? (a|an|the|to|no)\b": "needs",
    r"\b(is|are|was) told\b": "name the thing that tells",
    r"^(?!.*\bone \w+ at a time\b).*\bat a time\b": "once, or in turns",
    r"\b(nobody|somebody)\b": "name the person or process",
    r"\b(to be had|as of (a|the)|none of (its|their))\b": "say it directly",
}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of all docstrings, comments and messages."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def faults(source: str) -> Iterator[str]:
    """Yield the sentences with a forbidden idiom."""
    for line, text in texts(source):
        for sentence in re.split(r"(?<=[.:;])\s+", re.sub(r"`[^`]*`", "X", text)):
            for pattern, instead in FORBIDDEN.items():
                if found := re.search(pattern, sentence.strip()):
                    yield f"line {line}: {found[0]!r} in {' '.join(sentence.split())!r}; write {instead!r}"


def test_texts_are_plain_english() -> None:
    assert [f"{path}, {fault}" for path in FILES for fault in faults(path.read_text(encoding="utf-8"))] == []
