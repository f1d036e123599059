"""``flashdreams plan``: counted work and memory against real runs and against arithmetic by hand."""

from __future__ import annotations

import json

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from flashdreams.acceleration.counting import counting
from flashdreams.acceleration.devices import DEVICES, this_cpu
from flashdreams.acceleration.meta_memo import MetaMemo
from flashdreams.acceleration.plan import plan_model
from flashdreams.config import derive_config
from flashdreams.core.attention import attention
from flashdreams.infra.errors import UserError
from flashdreams.plugins.registry import get_runner
from flashdreams.recipes.wan.vae_config import WanVAEConfig
from flashdreams.scripts import plan as plan_command
from flashdreams.scripts.main import dispatch
from mini_wan import RUNNER as MINI
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


def test_work_of_a_chunk_is_what_the_arithmetic_says():
    """Self-Forcing 1.3B at 480x832, a window of 21 full: five passes of 40.4 TFLOP, and 40.65 of the decoder."""
    plan = plan_model(get_runner("self-forcing-t2v-1.3b").pipeline)
    dim, layers, queries, keys = 1536, 30, 4680, 32760
    linears = layers * queries * 2 * (6 * dim**2 + 2 * dim * 8960)
    attended = layers * 4 * dim * queries * (keys + 512)
    one_pass = (linears + attended) / 1e12
    skipped = one_pass / layers - 2 * queries * 2 * dim**2 / 1e12
    assert plan.flops["denoise"] / 1e12 == pytest.approx(4 * one_pass, rel=0.001)
    assert plan.flops["commit"] / 1e12 == pytest.approx(one_pass - skipped, rel=0.001), "all but keys of the last block"
    assert plan.flops["decode"] / 1e12 == pytest.approx(40.65, rel=0.001)
    (transformer, *_) = plan.parts
    assert transformer.parameters == 1_418_996_800
    assert plan.state > 2 * layers * keys * dim * 2, "keys and values in bfloat16, and what the decoder keeps"
    assert plan.frames == 12 and plan.steps == 4
    assert not [part for part in plan.parts if part.name == "text encoder" and part.resident]


def test_work_is_that_of_a_counter_on_a_real_run():
    pipeline = template_pipeline(window_size_t=4, guidance_scale=2.0)
    for expert in pipeline.diffusion_model.experts:
        expert.config = derive_config(expert.config, network={"attention": "reference"})
        for block in expert.network.blocks:
            block.self_attn.backend = block.cross_attn.backend = "reference"  # products that the counter knows
    rollout = pipeline.rollout("a", num_chunk=None)
    chunks = 0
    while rollout.cache.experts[0].start < 4:
        next(rollout)
        rollout.flush()
        chunks += 1
    with FlopCounterMode(display=False) as counted:
        next(rollout)
        rollout.flush()
    plan = plan_model(pipeline.config)
    assert plan.total_flops == pytest.approx(counted.get_total_flops(), rel=0.01)


def test_live_and_peak_bytes_are_those_of_the_tensors():
    weight = torch.nn.Linear(8, 8).to("meta")
    with torch.no_grad(), counting(weight) as counter:
        x = torch.zeros(4, 8, device="meta")
        assert counter.live == 128
        y = weight(x).view(8, 4)
        assert counter.live == 256, "a view is no new memory, nor is a weight"
        del x
        assert counter.live == 128
        counter.reset()
        weight(y.view(4, 8)).relu()
        assert (counter.live, counter.peak) == (128, 384)
        q = torch.zeros(1, 6, 2, 16, device="meta")
        assert attention(q, q, q).shape == q.shape
        assert counter.flops["attention"] == 4 * 6 * 6 * 2 * 16
    real = torch.randn(1, 6, 2, 16)
    assert attention(real, real, real).is_cpu, "the backends are back in their places"


class RealPeak(TorchDispatchMode):
    """The most bytes that tensors made while it is active take at once, on the CPU: the slow obvious way."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.peak, self._made = 0, {}
        weights = (*model.parameters(), *model.buffers())
        self._weights = {StorageWeakRef(tensor.untyped_storage()) for tensor in weights}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (ref := StorageWeakRef(storage)) not in self._weights:
                    self._made[ref] = storage.nbytes()
        self._made = {ref: size for ref, size in self._made.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._made.values()))
        return made


def test_the_memory_of_a_rollout_is_what_was_planned():
    """What a rollout holds longer than it must, such as states that its decoder has replaced, would show here."""
    transformer = {"window_size_t": 4, "len_t": 2}
    config = derive_config(
        MINI.pipeline, decoder=WanVAEConfig(dim=16), encoder=None, diffusion_model={"transformer": transformer},
        height=64, width=96,
    )  # fmt: skip
    pipeline = config.setup()
    plan = plan_model(pipeline.config)
    with RealPeak(pipeline) as real:
        rollout = pipeline.rollout("a", num_chunk=None)
        for _ in range(2):
            next(rollout)
        real.peak = 0
        while rollout.cache.experts[0].start < 4:
            next(rollout)
    assert real.peak == pytest.approx(plan.peak - plan.weights, rel=0.05)


def test_a_two_expert_model_on_one_device_holds_one_expert():
    plan = plan_model(get_runner("wan22-t2v-a14b").pipeline, num_frames=5)
    high, low, *_ = plan.parts
    assert high.resident and not low.resident and high.parameters == low.parameters == 14_288_491_584
    assert plan.latent_frames == 2
    assert plan.peak_offloaded < plan.peak - 0.9 * high.weights


def test_the_command_says_it_in_numbers(capsys):
    assert dispatch(["plan", "tiny-world", "--device", "4090"]) == 0
    page = capsys.readouterr().out
    assert "tiny-world: 128x128, 1 latent = 4 frames a chunk, window 6, 4 steps" in page
    assert "4,087,344 parameters in float32" in page and "GeForce RTX 4090" in page
    assert dispatch(["plan", "tiny-world", "--json", "--height", "256"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["height"] == 256 and facts["fits"] and facts["total_flops"] > 0


def test_of_all_models_one_that_cannot_be_planned_is_named_and_the_others_are(monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "discover_runners", lambda: ["wan21-t2v-1.3b", "tiny-world"])
    assert dispatch(["plan", "--all", "--height", "128", "--width", "128", "--num-frames", "5"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("wan21-t2v-1.3b") and len(told.out.splitlines()) == 1
    assert told.err.startswith("tiny-world") and "goes on without end" in told.err


def test_mistakes_are_said(capsys):
    for words, message in (
        (["tiny-world", "--device", "h900"], "expected one of a100"),
        (["tiny-world", "--height", "100"], "not a multiple of 32"),
        (["tiny-world", "--num-frames", "9"], "goes on without end"),
        ([], "name one model or give --all"),
        (["tiny-world", "--all"], "name one model or give --all"),
    ):
        with pytest.raises(UserError, match=message):
            dispatch(["plan", *words])


def test_devices_fall_back_to_a_wider_format():
    assert DEVICES["h100"].rate("bfloat16") == 989e12
    assert DEVICES["h100"].rate("float64") == DEVICES["h100"].rate("float32")
    cpu = this_cpu()
    assert cpu.rate("float32") > 1e9 and cpu.memory > 0.1


def test_a_model_whose_work_depends_on_what_it_sees_says_so(monkeypatch):
    pipeline = template_pipeline()
    monkeypatch.setattr(type(pipeline.decoder), "decode", lambda self, latent, cache, input: latent[latent > 0])
    with pytest.raises(ValueError, match="cannot be planned: the work depends on what the model sees"):
        plan_model(pipeline.config)


@pytest.mark.parametrize("slug", ["tiny-world", "self-forcing-t2v-1.3b-taehv"])
def test_what_is_remembered_of_operations_changes_no_figure(monkeypatch, slug):
    two = {"transformer": {"network": {"num_layers": 2}}}
    config = derive_config(get_runner(slug).pipeline, diffusion_model=two, decoder={"checkpoint_path": "random:0"})
    remembered = plan_model(config, height=128, width=128)
    monkeypatch.setattr(MetaMemo, "__call__", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert plan_model(config, height=128, width=128) == remembered


def test_what_is_remembered_of_an_operation_is_what_it_gives():
    """Twice each: the second time it is not called."""
    x, y = torch.zeros(2, 3, 4, device="meta"), torch.zeros(4, dtype=torch.bfloat16, device="meta")
    calls = [
        lambda: x + y, lambda: x * 2, lambda: x * 2.5, lambda: x.int() * 2, lambda: x.int() * 2.5, lambda: x > 1,
        lambda: x.transpose(0, 2), lambda: x.transpose(0, 2) + 1, lambda: x[:, 1:], lambda: x[:, 1:][:, :, 2:],
        lambda: x.expand(5, 2, 3, 4), lambda: x.sum(1, keepdim=True), lambda: x.max(1), lambda: x.to(torch.float64),
        lambda: x.split(2, 2), lambda: torch.cat([x, x], 1), lambda: x.clone().add_(1), lambda: x.new_zeros(3),
        lambda: x.permute(2, 0, 1).contiguous(), lambda: x.view(torch.int32), lambda: x.half().float(),
        lambda: torch.nn.functional.layer_norm(x, (4,)), lambda: x.unbind(1), lambda: torch.complex(x, x),
        lambda: torch.view_as_real(torch.complex(x, x)), lambda: torch.complex(x, x).conj() * 2,
        lambda: torch.einsum("abc,dbc->ad", x, x), lambda: x @ x.new_zeros(4, 5),
        lambda: x.clone().unsqueeze_(0), lambda: x.clone().transpose_(0, 1), lambda: x.clone().resize_(2, 2),
    ]  # fmt: skip
    facts = [
        [(part.shape, part.stride(), part.storage_offset(), part.dtype, part.is_conj()) for part in _parts(call())]
        for call in calls
    ]
    with counting():
        for call, known in zip(calls * 2, facts * 2, strict=True):
            got = call()
            assert [(p.shape, p.stride(), p.storage_offset(), p.dtype, p.is_conj()) for p in _parts(got)] == known
        base = x.clone()
        for _ in range(2):
            assert base[:, 1:].untyped_storage()._cdata == base.untyped_storage()._cdata, "a view is of what it views"
            assert base.add_(1) is base


def _parts(made):
    return [made] if isinstance(made, torch.Tensor) else list(made)
