"""Which block-sparse backend is taken, what is said about it, and how the optional package is called."""

from __future__ import annotations

import math
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from flashdreams.core import notices
from flashdreams.core.attention import BLOCK_SPARSE_BACKENDS, block_sparse_attention
from flashdreams.core.attention.block_sparse_choice import INSTALLED, Use, choose, lacks
from flashdreams.scripts import doctor_machine

pytestmark = pytest.mark.ci_cpu

CUDA_HALF = Use("cuda", torch.bfloat16)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """The optional packages that this machine has, as far as the choice can tell: both."""
    for package in INSTALLED:
        monkeypatch.setitem(INSTALLED, package, True)
    return INSTALLED


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, tokens, 3, 32, generator=generator) for tokens in (300, 450, 450))
    return q, k, v


@pytest.fixture
def mask() -> Tensor:
    mask = torch.rand(2, 3, 3, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[1, 2, 2] = False
    return mask


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (CUDA_HALF, "block_sparse_attn"),
        (Use("cuda", torch.float16, grad=True), "block_sparse_attn"),
        (Use("cuda", torch.float32), "flex"),
        (Use("cuda", torch.bfloat16, block_k=256), "flex"),
        (Use("cuda", torch.bfloat16, head_dim=80), "flex"),
        (Use("cuda", torch.bfloat16, block_q=64), "gather"),
        (Use("cuda", torch.float64), "gather"),
        (Use("cpu", torch.float32), "gather"),
        (Use("cpu", torch.bfloat16, grad=True), "gather"),
        (Use("mps", torch.float16), "gather"),
    ],
)
def test_the_best_that_works_is_chosen(installed: dict[str, bool], use: Use, name: str):
    assert choose(use)[0] == name and not lacks(name, use)


def test_without_packages_the_next_best_is_chosen_and_the_missing_one_named(installed: dict[str, bool]):
    assert choose(CUDA_HALF) == ("block_sparse_attn", "block-sparse attention: block_sparse_attn, the fastest here")
    installed["block_sparse_attn"] = False
    name, notice = choose(CUDA_HALF)
    assert name == "flex" and notice.startswith(
        "block-sparse attention: flex, the fastest here; block_sparse_attn would"
    )
    assert "needs the package block-sparse-attn (build it from the sources" in notice
    installed["triton"] = False
    name, notice = choose(CUDA_HALF)
    assert name == "gather" and "package block-sparse-attn" in notice and "flex would be faster but needs" in notice


def test_what_was_chosen_is_said_once(qkv: tuple[Tensor, ...], mask: Tensor, capfd: pytest.CaptureFixture[str]):
    notices.reset()
    for _ in range(2):
        block_sparse_attention(*qkv, mask)
    said = "block-sparse attention: gather, the fastest here on cpu; faster ones need a CUDA device\n"
    assert capfd.readouterr().err == said
    block_sparse_attention(*qkv, mask, backend="dense")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("backend", ["auto", "dense", "flex"])
def test_a_model_is_compiled_whole_around_it(qkv: tuple[Tensor, ...], mask: Tensor, backend: str):
    """The graph is traced without a break, for one mask as for the next; a kernel is not made here."""
    torch.compiler.reset()

    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, backend: str = backend) -> Tensor:
        return 2 * block_sparse_attention(q + 1, k, v, mask, backend=backend)

    traced = CompileCounter()
    compiled = torch.compile(model, backend=traced, fullgraph=True)
    for each in (mask, ~mask):
        torch.testing.assert_close(compiled(*qkv, each), model(*qkv, each, "dense"), rtol=1e-5, atol=1e-5)
    assert traced.frame_count == 1


def test_importing_it_does_not_import_the_compiler():
    """That takes two seconds."""
    program = "import sys, flashdreams.core.attention; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("backend", "use", "message"),
    [
        ("block_sparse_attn", Use("cpu"), "a CUDA device (got cpu)"),
        ("block_sparse_attn", Use("cuda", torch.float32), "float16 or bfloat16 (got float32)"),
        ("block_sparse_attn", Use("cuda", torch.float16, block_k=64), "blocks of 128 tokens (got 128 and 64)"),
        ("block_sparse_attn", Use("cuda", torch.float16, head_dim=40), "heads of 32, 64 or 128 features (got 40)"),
        ("flex", Use("cpu", torch.float64), "float32, float16 or bfloat16 (got float64)"),
        ("flex", Use("cuda", block_q=64), "blocks of a multiple of 128 tokens on CUDA (got 64 and 128)"),
        ("flex", Use("cuda", head_dim=8), "heads of at least 16 features on CUDA (got 8)"),
        ("flex", Use("mps"), "a CUDA device or a CPU (got mps)"),
        ("flex", Use("cpu", grad=True), "a CUDA device to train through (got cpu)"),
        ("flex_eager", Use("cpu", grad=True), "a CUDA device to train through (got cpu)"),
    ],
)
def test_each_thing_a_backend_can_lack_is_named(installed: dict[str, bool], backend: str, use: Use, message: str):
    assert lacks(backend, use) == message


def test_compiled_flex_attention_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("CXX", sys.executable)
    assert lacks("flex", Use()) == ""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert lacks("flex", Use()) == "a C++ compiler (no-such-compiler is not on PATH; CXX may name another)"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert lacks("flex", Use()) == "a CPU with AVX2, and not macOS"


def test_a_named_backend_that_cannot_work_here_is_an_error(qkv: tuple[Tensor, ...], mask: Tensor):
    with pytest.raises(ValueError, match="'block_sparse_attn' needs a CUDA device .got cpu.; use 'auto' to get one"):
        block_sparse_attention(*qkv, mask, backend="block_sparse_attn")
    q, k, v = qkv
    with pytest.raises(ValueError, match="'flex' needs a CUDA device to train through"):
        block_sparse_attention(q, k, v.requires_grad_(), mask, backend="flex")
    with pytest.raises(ValueError, match="no block-sparse backend 'sparge'; there are auto, block_sparse_attn, flex,"):
        block_sparse_attention(*qkv, mask, backend="sparge")


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((2, 3, 3, 3), 128), ((2, 3, 4, 3), 128), ((2, 2, 3, 4), 128), ((2, 3, 3, 4), 64), ((3, 4), 128)],
)
def test_a_mask_of_another_shape_is_refused(qkv: tuple[Tensor, ...], shape: tuple[int, ...], blocks: int):
    message = r"the block mask is \[.*\]; expected \[2 or 1, 3 or 1, (3, 4|5, 8)\] for 300 queries in blocks of "
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(*qkv, torch.ones(shape, dtype=torch.bool), block_q=blocks, block_k=blocks)


def test_a_mask_that_is_not_boolean_is_refused(qkv: tuple[Tensor, ...]):
    with pytest.raises(ValueError, match="the block mask is torch.int64; expected torch.bool"):
        block_sparse_attention(*qkv, torch.ones(1, 1, 3, 4, dtype=torch.int64))


def test_queries_and_keys_that_do_not_fit_are_refused(qkv: tuple[Tensor, ...], mask: Tensor):
    q, k, v = qkv
    for wrong in ((q, k, v[:, :-1]), (q, k[:, :, :2], v[:, :, :2]), (q[:1], k, v), (q[..., :16], k, v)):
        with pytest.raises(ValueError, match=r"do not fit: expected q \[B, L, H, D\] and k, v \[B, S, H, D\]"):
            block_sparse_attention(*wrong, mask)


def package(calls: list[dict[str, Any]]) -> ModuleType:
    """A stand-in for ``block_sparse_attn``, with its published signature; leaves rows without a block undefined."""

    def block_sparse_attn_func(
        q_unpad, k_unpad, v_unpad, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, base_blockmask,
        max_seqlen_q_, max_seqlen_k_, p_dropout, deterministic=False, softmax_scale=None, is_causal=False,
        exact_streaming=False, return_attn_probs=False,
    ):  # fmt: skip
        calls.append(dict(locals()))
        out = torch.full_like(q_unpad, math.nan)
        for sample, (start, stop) in enumerate(zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], strict=True)):
            begin, end = cu_seqlens_k[sample : sample + 2]
            for head in range(q_unpad.shape[1]):
                allowed = base_blockmask[sample, head].repeat_interleave(128, 0).repeat_interleave(128, 1)
                scores = q_unpad[start:stop, head] @ k_unpad[begin:end, head].T * softmax_scale
                scores.masked_fill_(~allowed[: stop - start, : end - begin], -math.inf)
                out[start:stop, head] = scores.softmax(-1) @ v_unpad[begin:end, head]
        return out

    module = ModuleType("block_sparse_attn")
    module.block_sparse_attn_func = block_sparse_attn_func  # ty: ignore[unresolved-attribute]
    return module


def test_the_package_is_called_as_published(qkv: tuple[Tensor, ...], mask: Tensor, monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "block_sparse_attn", package(calls))
    got = BLOCK_SPARSE_BACKENDS["block_sparse_attn"](*qkv, mask, (128, 128), 0.2)
    torch.testing.assert_close(got, block_sparse_attention(*qkv, mask, scale=0.2, backend="dense"))
    (call,) = calls
    assert call["q_unpad"].shape == (600, 3, 32) and call["k_unpad"].shape == call["v_unpad"].shape == (900, 3, 32)
    for name, value in (
        ("cu_seqlens_q", [0, 300, 600]),
        ("cu_seqlens_k", [0, 450, 900]),
        ("head_mask_type", [1, 1, 1]),
    ):
        assert call[name].tolist() == value and call[name].dtype == torch.int32
    assert (call["max_seqlen_q_"], call["max_seqlen_k_"], call["p_dropout"], call["softmax_scale"]) == (
        300,
        450,
        0,
        0.2,
    )
    assert call["base_blockmask"].is_contiguous() and (call["base_blockmask"] == mask).all()
    assert call["streaming_info"] is None
    assert not any(call[name] for name in ("is_causal", "exact_streaming", "return_attn_probs"))


def test_the_package_is_given_one_mask_per_head_and_sample(
    qkv: tuple[Tensor, ...], mask: Tensor, monkeypatch: pytest.MonkeyPatch
):
    calls: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "block_sparse_attn", package(calls))
    got = BLOCK_SPARSE_BACKENDS["block_sparse_attn"](*qkv, mask[1:, 2:], (128, 128), 0.2)
    torch.testing.assert_close(got, block_sparse_attention(*qkv, mask[1:, 2:], scale=0.2, backend="dense"))
    assert calls[0]["base_blockmask"].shape == (2, 3, 3, 4)


def test_the_doctor_tries_them_and_says_what_is_lacking(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(BLOCK_SPARSE_BACKENDS, "fancy", lambda q, k, v, mask, blocks, scale: q * 0)
    found = {name: rest for name, *rest in doctor_machine.block_sparse()}
    assert found["block_sparse_attn"][0].startswith("needs a CUDA device") and len(found["block_sparse_attn"]) == 1
    assert found["gather, cpu, float32"][0].startswith("right, error ") and len(found["gather, cpu, float32"]) == 1
    assert found["chosen, cpu, bfloat16"] == ["gather"]
    text, advice = found["fancy, cpu, float32"]
    assert "block-sparse backend 'fancy' is wrong on cpu" in text and "update PyTorch or the package" in advice
