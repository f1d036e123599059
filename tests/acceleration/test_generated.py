"""What is taken out of a generated file, and what is left to the compiler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashdreams.acceleration.generated import generated

pytestmark = pytest.mark.ci_cpu

FILE = """
import there_is_no_such_compiler

class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        assert_size_stride(arg0_1, (2, 2), (2, 1), 'input')
        buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        {line}
        return ({returned},)
"""


def found(folder, line: str = "", returned: str = "buf0", **names):
    path = folder / "generated.py"
    path.write_text(FILE.format(line=line or "pass", returned=returned))
    return generated(SimpleNamespace(__file__=str(path), **names), folder)


@pytest.mark.parametrize("line", ["", "buf0 = torch.ops.aten.relu.default(buf0)", "buf0 = aten.relu(buf0)"])
def test_a_function_of_known_names_runs_alone(tmp_path, line):
    made = found(tmp_path, line)
    assert made is not None and (made.inputs, made.outputs, made.kernels) == (2, 1, {})
    one, two = torch.randn(2, 2), torch.randn(2, 2)
    (got,) = made.load({}, tmp_path)([one, two])
    assert torch.equal(got, (one @ two).relu() if line else one @ two)


@pytest.mark.parametrize(
    "line",
    [
        "buf0 = torch.ops.inductor.there_is_none(buf0)",
        "buf0 = torch.sin(buf0)",
        "torch.cuda.synchronize()",
        "extern_kernels.bias_addmm(buf0, arg0_1, arg1_1, out=buf0)",
        "cpp_fused_0(buf0)",
        "triton_0.run(buf0)",
        "return (arg0_1,)",
    ],
)
def test_what_needs_more_is_left_to_the_compiler(tmp_path, line):
    outside = SimpleNamespace(__self__=SimpleNamespace(__file__="/elsewhere/kernel.so"))
    assert found(tmp_path, line, triton_0=object(), cpp_fused_0=outside) is None


def test_what_returns_an_input_is_left_to_the_compiler(tmp_path):
    assert found(tmp_path, returned="reinterpret_tensor(arg0_1, (4,), (1,), 0)") is None


def test_kernels_are_named_by_their_place_in_the_compiler_s_folder(tmp_path):
    kernel = SimpleNamespace(__self__=SimpleNamespace(__file__=str(tmp_path / "ab" / "c.main.so")))
    made = found(tmp_path, "cpp_fused_0(buf0)", cpp_fused_0=kernel)
    assert made is not None and made.kernels == {"cpp_fused_0": "ab/c.main.so"}
    with pytest.raises(KeyError):
        made.load({}, tmp_path)
    with pytest.raises(ImportError):
        made.load({"ab/c.main.so": b"no library"}, tmp_path)
    assert not list(tmp_path.glob("tmp*"))
