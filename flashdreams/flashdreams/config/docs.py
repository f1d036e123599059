"""The documentation of config classes and of their fields. No torch here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from itertools import pairwise


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Documentation of the fields of ``cls``: the string under each, in it or in the class it comes from."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if dataclasses.is_dataclass(owner):
            docs |= _docs_in(owner.__module__).get(owner.__qualname__, {})
    return docs


def class_doc(cls: type) -> str:
    """First sentence of the docstring of ``cls``; ``""`` if it is the one that dataclasses make."""
    doc = _tidy(cls.__doc__ or "")
    return "" if doc.startswith(f"{cls.__name__}(") else doc.split(". ")[0]


@functools.cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    """The field documentation of every class in a module, by qualified name; parsing it once serves them all."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError, KeyError):  # no source at hand: the flags work, undocumented
        return {}
    docs: dict[str, dict[str, str]] = {}

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                docs[prefix + statement.name] = _docs_of(statement)
                collect(statement.body, f"{prefix}{statement.name}.")

    collect(tree.body, "")
    return docs


def _docs_of(definition: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for statement, following in pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            doc = following.value if isinstance(following, ast.Expr) else None
            if isinstance(doc, ast.Constant) and isinstance(doc.value, str):
                docs[statement.target.id] = _tidy(doc.value)
    return docs


def _tidy(text: str) -> str:
    return " ".join(text.replace("``", "").split())
