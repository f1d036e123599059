"""The digest of a file is its sha256, looked up while the file stays the same."""

from __future__ import annotations

import hashlib
import os

import pytest

from flashdreams.core.caches import cache_folder
from flashdreams.core.checkpoint import digest

pytestmark = pytest.mark.ci_cpu


def truth(path):
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def file(tmp_path):
    (tmp_path / "w").write_bytes(b"weights")
    return tmp_path / "w"


def test_a_file_is_read_once_until_it_changes(file, monkeypatch):
    assert digest.file_digest(file) == truth(file)
    with monkeypatch.context() as patch:
        patch.setattr(digest, "hash_file", lambda path: pytest.fail("read again"))
        assert digest.file_digest(file) == truth(file)
        (file.parent / "link").symlink_to(file)
        assert digest.file_digest(file.parent / "link") == truth(file)
    before = file.stat()
    file.write_bytes(b"weighty")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert digest.file_digest(file) == truth(file)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"state": 1}'])
def test_a_damaged_note_is_written_anew(file, text):
    digest.file_digest(file)
    (note,) = cache_folder("digests").iterdir()
    note.write_text(text)
    assert digest.file_digest(file) == truth(file)
    assert note.read_text() != text
