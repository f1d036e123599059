"""``flashdreams serve``: what it refuses before anything is loaded."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flashdreams.infra.errors import UserError
from flashdreams.scripts.serve import main

pytestmark = pytest.mark.ci_cpu


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tiny-world", "--host", "0.0.0.0"], "needs a token: set FLASHDREAMS_TOKEN"),
        (["tiny-world", "--token", "abc"], "the token has 3 characters"),
        (["tiny-world", "--port", "70000"], "--port is 70000"),
        (["tiny-world", "--max-sessions", "0"], "--max-sessions is 0"),
        (["tiny-world", "--threads", "0"], "--threads is 0"),
        (["tiny-world", "--idle-timeout", "0"], "--idle-timeout is 0"),
        (["tiny-world", "--wat"], "--wat"),
        ([], "SLUG"),
    ],
)
def test_a_mistake_is_said_before_anything_starts(words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHDREAMS_TOKEN", raising=False)
    with pytest.raises(UserError) as error:
        main(words, "flashdreams serve")
    assert says in str(error.value)


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1 port {port}"):
            main(["tiny-world", "--port", str(port)], "flashdreams serve")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used"):
        main(["tiny-world", "--port", "0", "--folder", str(tmp_path / "file")], "flashdreams serve")


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"], "flashdreams serve") == 0
    assert len(capsys.readouterr().out.splitlines()) <= 50


def test_without_the_extra_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from flashdreams.scripts.serve import main\n"
        "from flashdreams.infra.errors import UserError\n"
        "try:\n    main(['tiny-world'], 'flashdreams serve')\n"
        "except UserError as error:\n    print(error)"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'flashdreams[serve]'" in outcome.stdout, outcome.stderr
