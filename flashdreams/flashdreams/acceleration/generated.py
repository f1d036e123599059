"""What PyTorch's compiler generates for a CPU, run without the compiler.

That is a Python function which calls kernels (libraries of their own), matrix products and operators of PyTorch. The
function is taken out of the generated file only if every name in it is known here; importing the file itself would
import the compiler, which takes longer than loading a small model.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
"""Where a kernel looks for the function that tells where a tensor's memory is."""

_OPERATORS = ("aten", "mkldnn")
"""Those that are defined in C++, and so are there without the compiler."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


@dataclass(frozen=True)
class Generated:
    """A function ``call(tensors) -> tensors``, and the libraries of the kernels that it calls by name."""

    source: str
    kernels: dict[str, str]
    inputs: int
    outputs: int

    def load(self, libraries: Mapping[str, bytes], folder: Path) -> Callable[[list[Any]], Any]:
        """The function; ``folder`` is one that can be written.

        Raises:
            OSError, ImportError, KeyError, SyntaxError: a library is missing or is none.
        """
        names = _known()
        with tempfile.TemporaryDirectory(dir=folder) as place:
            for name, library in self.kernels.items():
                names[name] = _kernel(library, libraries[library], Path(place))
        exec(compile(self.source, "<kept code>", "exec"), names)
        return names["call"]


def generated(module: ModuleType, folder: Path) -> Generated | None:
    """The function in a generated ``module`` whose libraries lie in ``folder``; ``None`` where it needs more than is
    known here."""
    try:
        tree = ast.parse(Path(module.__file__ or "").read_text())
    except (OSError, SyntaxError):
        return None
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if len(functions) != 1:
        return None
    function = functions[0]
    function.args.args = function.args.args[-1:]
    taken, given, known = _arguments(function), _returned(function), _known()
    kernels = {}
    for name in _free_names(function) - set(known):
        file = getattr(getattr(getattr(module, name, None), "__self__", None), "__file__", None)
        if file is None or not Path(file).is_relative_to(folder):
            return None
        kernels[name] = Path(file).relative_to(folder).as_posix()
    if taken is None or given is None or not all(map(_is_known, _chains(function))):
        return None
    return Generated(ast.unparse(function), kernels, taken, given)


def _known() -> dict[str, Any]:
    guards = _guards()
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "extern_kernels": SimpleNamespace(**{name: getattr(torch, name) for name in _PRODUCTS}),
        "assert_size_stride": guards.assert_size_stride,
        "empty_strided_cpu": guards._empty_strided_cpu,
        "reinterpret_tensor": guards._reinterpret_tensor,
        "inf": float("inf"),
        "nan": float("nan"),
    }


def _guards() -> Any:
    """PyTorch's own part of it in C++, which is there without the compiler."""
    return torch._C._dynamo.guards


def _is_known(chain: list[str]) -> bool:
    """Whether dotted names begin with something that is there without the compiler."""
    match chain:
        case ["extern_kernels", name, *_]:
            return name in _PRODUCTS
        case ["torch", "ops", name, *_]:
            return name in _OPERATORS
        case ["torch", name]:
            return isinstance(getattr(torch, name, None), torch.dtype)
        case ["torch", *_]:
            return False
    return True


def _chains(function: ast.FunctionDef) -> Iterator[list[str]]:
    """Every dotted name, in full."""
    inner = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    for node in ast.walk(function):
        if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner:
            chain, part = [], node
            while isinstance(part, ast.Attribute):
                chain.append(part.attr)
                part = part.value
            if isinstance(part, ast.Name):
                yield [part.id, *reversed(chain)]


def _free_names(function: ast.FunctionDef) -> set[str]:
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {arg.arg for arg in function.args.args}
    return {node.id for node in names} - bound


def _arguments(function: ast.FunctionDef) -> int | None:
    """How many tensors it takes: its first line names them."""
    match function.body[0]:
        case ast.Assign(targets=[ast.Tuple(elts=names)]):
            return len(names)
    return None


def _returned(function: ast.FunctionDef) -> int | None:
    """How many tensors it returns, if these are ones that it made."""
    match [node for node in ast.walk(function) if isinstance(node, ast.Return)]:
        case [ast.Return(value=ast.Tuple(elts=values))]:
            names = [node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)]
            return None if any(name.startswith("arg") for name in names) else len(values)
    return None


def _kernel(name: str, content: bytes, folder: Path) -> Any:
    """The function of a library, under the name by which the compiler finds it too. The file is not needed once it is
    loaded."""
    full = f"{Path(name).name.partition('.')[0]}.kernel"
    if full not in sys.modules:
        os.environ[_POINTER] = str(_guards()._torchinductor_pyobject_tensor_data_ptr)
        path = folder / Path(name).name
        path.write_bytes(content)
        spec = importlib.util.spec_from_file_location(full, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is no library")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[full] = module
    return sys.modules[full].kernel
