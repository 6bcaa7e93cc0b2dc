"""Finds the `#include "..."` lines that a backend's preprocessor would reach."""

from __future__ import annotations

import re
from collections.abc import Iterator

BACKEND_MACROS = {
    "cpu": {"CPU_KERNEL"},
    "cuda": {"CUDA_KERNEL", "USE_CUDA"},
    "rocm": {"ROCM_KERNEL", "USE_ROCM"},
}
_KNOWN = set().union(*BACKEND_MACROS.values())
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DIRECTIVE = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|else|endif|include)\b\s*(.*)$")
_QUOTED = re.compile(r'"([^"]+)"')
_TOKEN = re.compile(r"\w+|&&|\|\||!=|==|[!()]|\S")
_OPERATORS = {"&&": "and", "||": "or", "!": "not", "(": "(", ")": ")"}


def included_headers(text: str, backend: str) -> Iterator[str]:
    """Yields the quoted headers of `text`, without branches that another backend's macro guards.

    A condition on anything but the backend macros counts as true on both of its sides.
    """
    macros = BACKEND_MACROS[backend]
    branches: list[list[bool | None]] = []  # per nesting level: [is this branch on, was one before]
    for line in _COMMENT.sub(_keep_newlines, text).splitlines():
        match = _DIRECTIVE.match(line)
        if match is None:
            continue
        directive, rest = match.groups()
        if directive == "include":
            quoted = _QUOTED.match(rest)
            if quoted and all(branch[0] is not False for branch in branches):
                yield quoted.group(1)
        elif directive == "endif":
            if branches:
                branches.pop()
        elif directive in ("else", "elif"):
            if branches:
                before = branches[-1][1]
                value = _evaluate(rest, macros) if directive == "elif" else True
                branches[-1] = [_and_not(value, before), _or(value, before)]
        else:
            value = _condition(directive, rest, macros)
            branches.append([value, value])


def _keep_newlines(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n") or " "


def _condition(directive: str, rest: str, macros: set[str]) -> bool | None:
    if directive == "ifdef":
        return _evaluate(f"defined({rest})", macros)
    if directive == "ifndef":
        return _evaluate(f"!defined({rest})", macros)
    return _evaluate(rest, macros)


def _evaluate(condition: str, macros: set[str]) -> bool | None:
    """The value of a condition made of backend macros only; None for any other."""
    words = []
    for token in _TOKEN.findall(condition):
        if token == "defined":
            continue
        if token in _KNOWN:
            words.append(str(token in macros))
        elif token in _OPERATORS:
            words.append(_OPERATORS[token])
        elif token in ("0", "1"):
            words.append(str(token == "1"))
        else:
            return None
    try:
        return bool(eval(" ".join(words), {"__builtins__": {}}))
    except SyntaxError:
        return None


def _and_not(value: bool | None, before: bool | None) -> bool | None:
    if value is False or before is True:
        return False
    return True if value is True and before is False else None


def _or(value: bool | None, before: bool | None) -> bool | None:
    if value is True or before is True:
        return True
    return False if value is False and before is False else None
