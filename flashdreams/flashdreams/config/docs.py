"""The documentation of config classes and of their fields. No torch here."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Documentation of the fields of ``cls``: the string under each, in it or in the class it comes from."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, TypeError, SyntaxError):  # no source at hand: the flags work, undocumented
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                doc = following.value if isinstance(following, ast.Expr) else None
                if isinstance(doc, ast.Constant) and isinstance(doc.value, str):
                    docs[statement.target.id] = " ".join(doc.value.replace("``", "").split())
    return docs


def class_doc(cls: type) -> str:
    """First sentence of the docstring of ``cls``; ``""`` if it is the one that dataclasses make."""
    doc = " ".join((cls.__doc__ or "").replace("``", "").split())
    return "" if doc.startswith(f"{cls.__name__}(") else doc.split(". ")[0]
