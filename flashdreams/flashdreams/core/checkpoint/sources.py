"""What a person may write for a checkpoint, taken apart."""

from __future__ import annotations

import importlib.resources
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.layout import WEIGHTS

FORMS = "a file or folder, org/repo, hf://org/repo[/path][@revision], a link to a file on the hub, or random:SEED"

_PACKAGE = "package://"
_HUB = "hf://"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PINNED = re.compile(r"(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?")


@dataclass(frozen=True)
class LocalSource:
    """A file or folder; ``entry`` names a state dict inside a file of ``torch.save``."""

    path: Path
    entry: str | None = None


@dataclass(frozen=True)
class HubSource:
    """A repository of the hub, or the file or folder ``path`` in it."""

    repo: str
    path: str = ""
    revision: str = "main"
    entry: str | None = None

    def __str__(self) -> str:
        return _HUB + self.repo + (f"/{self.path}" if self.path else "") + f"@{self.revision}"


@dataclass(frozen=True)
class RandomSource:
    """Weights drawn from a seed, of whatever size the model has."""

    seed: int


@dataclass(frozen=True)
class ZeroSource:
    """Zeros, those of one shape in the same memory: for a model that stands in for another while it is compiled."""


Source = LocalSource | HubSource | RandomSource | ZeroSource

ZEROS = "zeros:"
"""How a :class:`ZeroSource` is written. It makes no video, so that it is none of :data:`FORMS`."""


def parse_source(text: str | Path) -> Source:
    """What ``text`` names. ``#entry`` at its end picks a state dict inside a training dump.

    Raises:
        CheckpointError: it is none of the forms.
    """
    text = os.fspath(text)
    if not text.strip() or "\0" in text:
        raise CheckpointError(f"checkpoint is {text!r}; expected {FORMS}")
    scheme, colon, rest = text.partition(":")
    if colon and scheme == "random":
        if not re.fullmatch(r"\d{1,20}", rest) or int(rest) >= 2**64:
            raise CheckpointError(f"checkpoint is {text!r}; expected random:SEED with a seed of 0 to 2**64 - 1")
        return RandomSource(int(rest))
    if text == ZEROS:
        return ZeroSource()
    if text.startswith(_PACKAGE) or os.path.lexists(os.path.expanduser(text)):
        return LocalSource(resolve_path(text))
    text, _, entry = text.partition("#")
    if text.startswith(_HUB):
        return _parse_uri(text.removeprefix(_HUB), entry or None)
    if scheme in ("http", "https"):
        return _parse_link(text, entry or None)
    if re.match(r"[a-z][a-z0-9+.-]+://", text):
        raise CheckpointError(f"checkpoint is {text!r}; that kind of address is not read: expected {FORMS}")
    path = resolve_path(text)
    bare = _REPO.fullmatch(text.partition("@")[0]) and not path.name.lower().endswith((*WEIGHTS, ".json", ".gguf"))
    if bare and not os.path.lexists(path):
        return _parse_uri(text, entry or None)
    return LocalSource(path, entry or None)


def resolve_path(source: str) -> Path:
    """The local path that ``source`` names, ``package://<package>/<file>`` for a file of an installed package."""
    if not source.startswith(_PACKAGE):
        return Path(os.path.expanduser(source))  # Path.expanduser raises where the user has no home
    package, _, name = source.removeprefix(_PACKAGE).partition("/")
    try:
        return Path(str(importlib.resources.files(package).joinpath(name)))
    except (ImportError, ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint is {source!r}, but there is no package {package!r} here: {error}") from None


def _parse_uri(rest: str, entry: str | None) -> HubSource:
    """``org/repo[@revision][/path]`` or ``org/repo[/path][@revision]``."""
    rest = rest.removeprefix("models/") if rest.count("/") > 1 else rest
    if rest.startswith(("datasets/", "spaces/", "buckets/", "kernels/")):
        raise CheckpointError(f"{_HUB}{rest} is no model repository; weights are read from those only")
    body, at, revision = rest.partition("@")
    if at and body.count("/") == 1 and (pinned := _PINNED.fullmatch(rest)):
        body, revision = pinned["repo"] + ("/" + pinned["path"] if pinned["path"] else ""), pinned["revision"] or ""
    return _hub(body, unquote(revision) if at else "main", entry, _HUB + rest)


def _parse_link(text: str, entry: str | None) -> HubSource:
    """A link to a repository, folder or file as the hub's web pages show it."""
    from huggingface_hub import constants

    address = urlsplit(text)
    known = {urlsplit(page).netloc for page in (constants.ENDPOINT, constants.HUGGINGFACE_CO_URL_HOME)} | {"hf.co"}
    if address.netloc not in known:
        raise CheckpointError(
            f"checkpoint is {text!r}; only links to {', '.join(sorted(known))} are read: download the file and give "
            "its path"
        )
    parts = [unquote(part) for part in address.path.strip("/").split("/")]
    if len(parts) > 2 and parts[2] in ("blob", "resolve", "raw", "tree"):
        special = 3 if parts[3:4] == ["refs"] else 1
        revision, path = "/".join(parts[3 : 3 + special]), "/".join(parts[3 + special :])
        return _hub("/".join([*parts[:2], *([path] if path else [])]), revision or "main", entry, text)
    if len(parts) != 2:
        raise CheckpointError(f"checkpoint is {text!r}; expected a link to a model repository or a file in one")
    return _hub("/".join(parts), "main", entry, text)


def _hub(body: str, revision: str, entry: str | None, text: str) -> HubSource:
    parts = body.strip("/").split("/")
    repo, path = "/".join(parts[:2]), "/".join(parts[2:])
    escaping = any(part in ("", ".", "..") for part in parts) or "\\" in body or ".." in revision.split("/")
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo or not revision or escaping:
        raise CheckpointError(f"checkpoint is {text!r}; expected {FORMS}")
    return HubSource(repo, path, revision, entry)
