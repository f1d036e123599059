"""The actions of ``flashdreams checkpoint`` that read headers and no weights: inspect, diff, verify, suggest."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flashdreams.core.checkpoint import compare, open_checkpoint
from flashdreams.core.checkpoint.choose import choose_transform
from flashdreams.core.checkpoint.keymap import keyshape_md5
from flashdreams.core.checkpoint.mapped import DTYPE_NAMES
from flashdreams.core.checkpoint.suggest import suggest as propose
from flashdreams.infra.errors import UserError
from flashdreams.scripts.checkpoint_models import header_of, is_manifest, is_slug, model_part, read_manifest
from flashdreams.scripts.console import columns, write_file

_MOST = 20
"""Lines of one kind, beyond which the rest is counted."""


def inspect(options: Any) -> int:
    """Files, totals, and the patterns that the keys follow."""
    lines: list[str] = []
    notes: dict[str, str] = {}
    header = {}
    if not is_manifest(options.source):
        checkpoint = open_checkpoint(options.source)
        header = checkpoint.meta()
        for part in checkpoint.parts:
            lines.append(f"{part.name}: {len(part.tensors)} tensors")
            notes |= part.metadata
        lines += checkpoint.notices
    else:
        header = header_of(options.source)
    count = sum(value.numel() for value in header.values())
    size = sum(value.numel() * value.dtype.itemsize for value in header.values())
    formats = Counter(DTYPE_NAMES[value.dtype] for value in header.values())
    if options.json:
        tensors = {
            key: {"shape": list(value.shape), "dtype": DTYPE_NAMES[value.dtype]} for key, value in header.items()
        }
        content = {
            "source": options.source, "n_tensors": len(header), "n_params": count,
            "keyshape_md5": keyshape_md5(header), "tensors": tensors,
        }  # fmt: skip
        write_file(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return 0
    lines += [
        f"{len(header)} tensors, {count:,} numbers, {size / 1e9:.2f} GB",
        "formats: " + ", ".join(f"{name} x {number}" for name, number in formats.most_common()),
        f"hash of keys and shapes: {keyshape_md5(header)}",
        *(f"note {name}: {text[:100]}" for name, text in notes.items()),
        "",
        columns(_keys(header) if options.keys else _patterns(header), limit=70, wrap=False),
    ]
    print("\n".join(lines))
    return 0


def _keys(header: Mapping[str, Tensor]) -> Iterable[tuple[str, str]]:
    return ((key, _described(value)) for key, value in header.items())


def _patterns(header: Mapping[str, Tensor]) -> Iterable[tuple[str, str]]:
    """Keys with ``#`` for every number: how many there are, and of what kind."""
    groups: dict[tuple[str, str], int] = {}
    for key, value in header.items():
        group = re.sub(r"\d+", "#", key), _described(value)
        groups[group] = groups.get(group, 0) + 1
    for (pattern, what), count in groups.items():
        yield pattern, f"{count} x {what}" if count > 1 else what


def _described(value: Tensor) -> str:
    return f"{DTYPE_NAMES[value.dtype]} {list(value.shape)}"


def diff(options: Any) -> int:
    """Exit code 1 if anything differs but the order."""
    a, b = header_of(options.a), header_of(options.b)
    changed = [key for key in a if key in b and _described(a[key]) != _described(b[key])]
    groups = {
        f"only in {options.a}": [f"{key} {_described(a[key])}" for key in a if key not in b],
        f"only in {options.b}": [f"{key} {_described(b[key])}" for key in b if key not in a],
        "changed": [f"{key}: {_described(a[key])} -> {_described(b[key])}" for key in changed],
    }
    for title, lines in groups.items():
        if lines:
            print(f"{title}: {len(lines)}")
            print("\n".join(f"  {line}" for line in _cut(lines)))
    same = len(a) - len(groups[f"only in {options.a}"]) - len(changed) if options.a != options.b else len(a)
    print(f"{same} of {max(len(a), len(b))} tensors have the same key, shape and number format")
    return int(any(groups.values()))


def _cut(lines: list[str]) -> list[str]:
    return lines[:_MOST] + ([f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else [])


def verify(options: Any) -> int:
    """A model against a source or manifest, or a source against a manifest. Exit code 1 if it does not fit."""
    words = options.words
    if len(words) != (1 if options.manifest else 2):
        raise UserError("verify takes a model and a checkpoint, or one of these and --manifest FILE")
    if options.manifest is not None and not is_slug(words[0]):
        return _verify_source(words[0], options.manifest)
    source = options.manifest or words[1]
    part = model_part(words[0], options.part, options.transform)
    print_hash = 0 if options.manifest is None else _check_hash(options.manifest)
    header = header_of(source)
    allow = part.config.allow_missing
    name, _, match = choose_transform(part.wanted, header, part.candidates, allow_missing=allow)
    print(f"{source} and {part.name}: {match.summary}, with {name}")
    if match.allowed:
        print(f"absent by permission: {', '.join(match.allowed)}")
    _print_lines(match.lines(_MOST))
    return int(not match.ok) or print_hash


def _verify_source(source: str, manifest: str) -> int:
    wrong_hash = _check_hash(manifest)
    stated = read_manifest(manifest).meta()
    match = compare(stated, header_of(source), (), next(iter(stated.values())).dtype)
    print(f"{source} and {manifest}: {match.summary}")
    _print_lines(match.lines(_MOST))
    return int(not match.ok) or wrong_hash


def _check_hash(manifest: str) -> int:
    """Whether the manifest's own hash is that of its keys and shapes."""
    content = read_manifest(manifest)
    found = keyshape_md5(content.meta())
    if content.md5 in (None, found):
        return 0
    print(f"{manifest} states the hash {content.md5}, but its keys and shapes have {found}: it was changed")
    return 1


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"  {line}")


def suggest(options: Any) -> int:
    """Exit code 1 if keys remain."""
    hints = dict(hint.split("=", 1) for hint in options.hint if "=" in hint)
    if len(hints) != len(options.hint):
        raise UserError(f"--hint is {options.hint[-1]!r}; expected THEIRS=OURS, such as attn1=self_attn")
    if is_slug(options.model):
        wanted = model_part(options.model, options.part, None).wanted
    else:
        wanted = header_of(options.model)
    found = propose(wanted, header_of(options.source), hints=hints)
    print(found.report())
    if options.output is not None:
        try:
            Path(options.output).write_text(found.source(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--output {options.output} cannot be written: {error.strerror}") from None
        print(f"written to {options.output}; name it as state_dict_transform, or try it with --transform")
    elif found.is_complete:
        print("\n" + found.source().rstrip())
    return int(not found.is_complete)
