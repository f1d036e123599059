"""Imports point downwards only; the torch-free modules stay torch-free; core and infra name no model."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci_cpu

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "flashdreams/flashdreams"
INTEGRATIONS = sorted(
    path.parent.name for path in ROOT.glob("integrations/*/*/__init__.py") if path.parent.name != "tests"
)
FAMILIES = sorted(path.name for path in (RUNTIME / "recipes").iterdir() if path.is_dir() and path.name[0] not in "_.")

TORCH_FREE = [
    "flashdreams",
    "flashdreams.config",
    "flashdreams.plugins",
    "flashdreams.infra.config",
    "flashdreams.infra.postprocess",
    *(f"flashdreams.recipes.{name}.config" for name in FAMILIES if (RUNTIME / "recipes" / name / "config.py").exists()),
    *(f"{name}.config" for name in INTEGRATIONS),
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_import_contracts_hold() -> None:
    outcome = lint(ROOT)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_contracts_name_every_integration() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert sorted(table["root_packages"]) == sorted(["flashdreams", *INTEGRATIONS])
    independent = next(contract for contract in table["contracts"] if contract["type"] == "independence")
    assert sorted(independent["modules"]) == INTEGRATIONS
    layers = next(contract for contract in table["contracts"] if contract["type"] == "layers")["layers"]
    assert set(INTEGRATIONS) <= {name for layer in layers for name in re.split(r"[|:\s]+", layer)}


def test_contracts_place_every_package_of_the_runtime() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(contract for contract in table["contracts"] if contract["type"] == "layers")["layers"]
    placed = {name for layer in layers for name in re.split(r"[|:\s]+", layer)}
    packages = {f"flashdreams.{path.parent.name}" for path in RUNTIME.glob("*/__init__.py")}
    assert packages <= placed


def test_an_upward_import_breaks_a_contract(tmp_path: Path) -> None:
    package = tmp_path / "flashdreams"
    for name in ("config", "plugins", "core", "infra", "recipes", "scripts"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "core/__init__.py").write_text("def later():\n    import flashdreams.recipes\n")
    layers = "flashdreams.scripts flashdreams.recipes flashdreams.infra flashdreams.core flashdreams.config".split()
    contract = f'[[tool.importlinter.contracts]]\nname = "layers"\ntype = "layers"\nlayers = {layers}\n'
    (tmp_path / "pyproject.toml").write_text(f'[tool.importlinter]\nroot_packages = ["flashdreams"]\n{contract}')
    assert "flashdreams.core is not allowed to import flashdreams.recipes" in lint(tmp_path).stdout


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_no_torch(module: str) -> None:
    program = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'av', 'imageio') if m in sys.modules])"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert outcome.stdout.strip() == "[]", outcome.stderr


def words_of(text: str) -> str:
    """``"WanNetwork_v2"`` as ``"wan network v"``."""
    return " ".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)).lower()


@pytest.mark.parametrize("package", ["core", "infra"])
def test_names_no_model(package: str) -> None:
    """No identifier or string in core and infra is a family or a model (docstrings and comments may cite one)."""
    models = [words_of(name) for name in (*FAMILIES, *INTEGRATIONS) if name != "template"]
    named = re.compile(rf"\b({'|'.join(models)})\b")
    found = []
    for path in sorted((RUNTIME / package).rglob("*.py")):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            prose = token.type == tokenize.STRING and token.string.lstrip("rbfu").startswith('"""')
            if token.type in (tokenize.NAME, tokenize.STRING) and not prose and named.search(words_of(token.string)):
                found.append(f"{path.name}:{token.start[0]}: {token.string}")
    assert found == []


def test_a_model_that_is_not_compiled_runs_without_the_compiler() -> None:
    """Its imports take longer than to read a small model's weights."""
    program = (
        "import sys; from flashdreams import load_pipeline; "
        "pipeline = load_pipeline('tiny-world', device='cpu'); "
        "next(pipeline.rollout('a red ball moves left', seed=0)); "
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert outcome.stdout.strip() == "[]", outcome.stdout + outcome.stderr
