"""Compiled code that is kept: taken up by a fresh process, and left alone where it is damaged, foreign or too large."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from flashdreams.acceleration import artifacts, native
from flashdreams.acceleration.artifacts import SUFFIX, Artifacts, identity, prune, writable_compiler_folder
from flashdreams.acceleration.conditions import digest
from flashdreams.acceleration.startup import measure
from flashdreams.config import derive_config
from flashdreams.core import notices
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE, RUNNER_TEMPLATE

pytestmark = pytest.mark.ci_cpu

NO_PASSWD = Path(__file__).parents[1] / "cases" / "B14" / "nopasswd"
CPU = torch.device("cpu")
WHO = {"torch": "2", "device": "cpu"}
RESTORE = native.restore


@dataclass
class FakeCompiler:
    """PyTorch's store of artifacts: what was compiled in this process, and what was handed to it."""

    compiled: dict[str, list[str]] = field(default_factory=dict)
    loaded: list[bytes] = field(default_factory=list)
    libraries: dict[str, bytes] = field(default_factory=dict)
    restored: dict[str, bytes] = field(default_factory=dict)

    def save(self):
        return (json.dumps(self.compiled).encode(), Info(self.compiled)) if self.compiled else None

    def load(self, content: bytes):
        self.loaded.append(content)
        return Info(json.loads(content)) if content.startswith(b"{") else None


@dataclass
class Info:
    artifacts: dict[str, list[str]]


@pytest.fixture
def compiler(monkeypatch):
    notices.reset()
    fake = FakeCompiler()
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", fake.save)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", fake.load)
    monkeypatch.setattr(native, "collect", lambda: fake.libraries)
    monkeypatch.setattr(native, "restore", fake.restored.update)
    return fake


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def test_what_was_compiled_comes_back_whole_with_its_libraries(tmp_path, compiler):
    compiler.compiled, compiler.libraries = {"inductor": ["a", "b"]}, {"ab/x.main.so": b"\n1\n", "cd/y.so": b""}
    kept = Artifacts(WHO, tmp_path).save()
    assert files(tmp_path) == [kept]
    fresh = Artifacts(WHO, tmp_path)
    assert fresh.load() == 2
    assert not compiler.loaded and not compiler.restored, "the compiler was not needed yet"
    fresh.hand_over()
    fresh.hand_over()
    assert [json.loads(content) for content in compiler.loaded] == [compiler.compiled]
    assert compiler.restored == compiler.libraries
    assert fresh.save() is None, "nothing new was compiled"


def test_what_the_compiler_cannot_read_is_left_out_with_one_line(tmp_path, compiler, capsys, monkeypatch):
    compiler.compiled = {"inductor": ["a"]}
    path = Artifacts(WHO, tmp_path).save()
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: None)
    fresh = Artifacts(WHO, tmp_path)
    assert fresh.load() == 1
    fresh.hand_over()
    assert capsys.readouterr().err.splitlines() == [
        f"compiled code in {path} is not used: PyTorch cannot read it; it can be deleted"
    ]


def test_shapes_of_a_later_run_are_kept_beside_the_earlier_ones_and_what_is_covered_goes(tmp_path, compiler):
    compiler.compiled = {"inductor": ["a"]}
    first = Artifacts(WHO, tmp_path).save()
    compiler.compiled = {"inductor": ["b"]}  # another size, in a process that did not need the first
    second = Artifacts(WHO, tmp_path).save()
    assert files(tmp_path) == sorted([first, second])
    assert Artifacts(WHO, tmp_path).load() == 2
    compiler.compiled = {"inductor": ["a", "b", "c"]}
    third = Artifacts(WHO, tmp_path).save()
    assert files(tmp_path) == [third]


def test_kept_calls_stay_as_long_as_what_they_were_traced_from_does(tmp_path, compiler):
    current, outdated = (
        {"kind": "a:b", "files": {"json": was}, "generated": {"kernels": {"cpp": f"ab/{name}.main.so"}}}
        for name, was in (("new", digest("json")), ("old", "of another version"))
    )
    compiler.compiled, compiler.libraries = {"inductor": ["a"]}, {f"ab/{name}.main.so": b"1" for name in ("old", "new")}
    first = Artifacts(WHO, tmp_path)
    first.save([current, outdated])
    assert first.save([outdated]) is None
    compiler.libraries, compiler.compiled = {}, {"inductor": ["a", "b"]}
    second = Artifacts(WHO, tmp_path)
    assert second.load() == 3 and second.has_calls
    path = second.save()
    assert files(tmp_path) == [path], "what is out of date keeps its file alive"
    third = Artifacts(WHO, tmp_path)
    assert third.load() == 3
    assert third._calls == [current] and list(third._libraries) == ["ab/new.main.so"]


def test_files_of_another_model_are_not_looked_at(tmp_path, compiler):
    compiler.compiled = {"inductor": ["a"]}
    Artifacts(WHO, tmp_path).save()
    assert Artifacts({**WHO, "torch": "3"}, tmp_path).load() == 0 and compiler.loaded == []


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda content: content[:-1], "it is damaged"),
        (lambda content: content[:5], "it is damaged"),
        (lambda content: b"", "it is damaged"),
        (lambda content: b"\xff\x00" + content, "it is damaged"),
        (lambda content: content.replace(b'"torch": "2"', b'"torch": "1"'), "other versions"),
        (lambda content: content.replace(b"ab/x.main.so", b"../../x.so  "), "it is damaged|holds a file"),
    ],
)
def test_a_damaged_or_foreign_file_is_left_out_with_one_line(tmp_path, compiler, capsys, monkeypatch, spoil, why):
    monkeypatch.setattr(native, "restore", RESTORE)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    compiler.compiled, compiler.libraries = {"inductor": ["a"]}, {"ab/x.main.so": b"machine code"}
    path = Artifacts(WHO, tmp_path).save()
    path.write_bytes(spoil(path.read_bytes()))
    assert Artifacts(WHO, tmp_path).load() == 0 and compiler.loaded == []
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and str(path) in said[0] and "is not used" in said[0]
    assert any(part in said[0] for part in why.split("|"))
    assert not list(tmp_path.parent.glob("x.so*"))


def test_a_library_outside_the_compiler_s_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    for name in ("../x.so", "/tmp/x.so", "ab/../../x.so", "ab/x.sh", "abc/x.so"):
        with pytest.raises(ValueError, match="it holds a file"):
            native.restore({name: b""})
    native.restore({"ab/x.main.so": b"new"})
    native.restore({"ab/x.main.so": b"newer"})  # loaded by another process, perhaps: it stays
    assert (tmp_path / "compiler/ab/x.main.so").read_bytes() == b"new"


def test_what_is_too_large_is_not_kept_and_that_is_said(tmp_path, compiler, capsys, monkeypatch):
    monkeypatch.setattr(artifacts, "MAX_FILE", 1000)
    compiler.compiled, compiler.libraries = {"inductor": ["a"]}, {"ab/x.so": bytes(1001)}
    assert Artifacts(WHO, tmp_path).save() is None and not files(tmp_path)
    assert "is not kept; at most" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_and_hurts_nobody(tmp_path, compiler, capsys):
    compiler.compiled = {"inductor": ["a"]}
    (tmp_path / "file").write_text("")
    assert Artifacts(WHO, tmp_path / "file").save() is None
    assert "compiled code cannot be kept in" in capsys.readouterr().err


def test_the_files_not_used_for_the_longest_time_make_room(tmp_path):
    for age, name in enumerate("abcd"):
        path = tmp_path / f"{name}{SUFFIX}"
        path.write_bytes(bytes(100))
        os.utime(path, (1000 - age, 1000 - age))
    prune(tmp_path, 250)
    assert [path.name[0] for path in files(tmp_path)] == ["a", "b"]


def test_the_identity_changes_with_all_that_compiled_code_depends_on_and_with_nothing_else(monkeypatch):
    base = identity(PIPELINE_TEMPLATE, CPU)
    same = derive_config(
        PIPELINE_TEMPLATE, name="other", fps=8.0, diffusion_model={"transformer": {"checkpoint_path": "random:3"}}
    )
    assert identity(same, CPU) == base
    for change in ({"dtype": "bfloat16"}, {"window_size_t": 9}, {"network": {"dim": 96}}, {"len_t": 3}):
        assert identity(derive_config(PIPELINE_TEMPLATE, diffusion_model={"transformer": change}), CPU) != base
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
        assert identity(same, CPU) == base
        patch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
        assert identity(same, CPU) != base
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert identity(PIPELINE_TEMPLATE, CPU) != base


def test_b14_the_compiler_is_given_a_folder_where_its_own_cannot_be_written(tmp_path, monkeypatch, capsys):
    """Case B14: a user id without a name in versions of PyTorch that need one, and a folder that is read-only."""
    importlib.import_module("torch._inductor.codecache")  # which sets the variable when it is imported
    notices.reset()
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.default_cache_dir", nameless)
    writable_compiler_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert "set TORCHINDUCTOR_CACHE_DIR" in capsys.readouterr().err
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/none")
    writable_compiler_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert "/proc/none cannot be written" in capsys.readouterr().err
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    writable_compiler_folder()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine") and not capsys.readouterr().err


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_second_start_in_a_fresh_process_with_an_empty_compiler_folder_compiles_nothing(tmp_path, monkeypatch):
    """By a user id without a name or a home (case B14); every call of the C++ compiler that makes a file is noted."""
    log, wrapper = tmp_path / "log", tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *.cpp*) echo "$TORCHINDUCTOR_CACHE_DIR" >> {log};; esac\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    for name in ("USER", "LOGNAME", "USERNAME", "LNAME", "XDG_CACHE_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(NO_PASSWD), os.environ.get("PYTHONPATH")))))
    startup = measure(RUNNER_TEMPLATE, repeats=1)
    assert (startup.without[0].kept, startup.kept[0].kept) == (False, True)
    assert (startup.without[0].compiler, startup.kept[0].compiler) == (True, False), "the compiler was imported"
    made_by = {Path(line).name for line in log.read_text().splitlines()}
    assert made_by == {"first"}, "the second start called the C++ compiler"
    assert startup.ratio > 0 and "x" in startup.describe()
