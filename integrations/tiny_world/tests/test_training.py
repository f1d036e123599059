"""What training relies on: the packed pass is the streamed model, and its parts do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny_world
from flashdreams.config import derive_config
from flashdreams.infra.layout import ChunkPlan, Layout
from tiny_world._words import TEXT_LEN, UNK, VOCABULARY
from tiny_world.config import PIPELINE_TINY_WORLD
from tiny_world.train._loop import Average, Clock, rate
from tiny_world.train.distill import DistillPlan, distill_loss
from tiny_world.train.dit import FlowPlan, group_loss
from tiny_world.train.export import export, unpack
from tiny_world.train.latents import thin
from tiny_world.train.muon import Muon, orthogonalised
from tiny_world.train.packing import Batch, Packing, TrainingModel, flow

WEIGHTS = Path(tiny_world.__file__).parent / "weights"


@pytest.mark.ci_cpu
def test_packed_training_pass_equals_the_streamed_model() -> None:
    torch.manual_seed(0)
    model = TrainingModel().requires_grad_(False)
    torch.nn.init.normal_(model.network.head.head.weight, std=0.05)
    config = derive_config(PIPELINE_TINY_WORLD.diffusion_model.transformer, checkpoint_path=None, guidance_scale=1.0)
    streamed = config.setup()
    streamed.network.load_state_dict(model.network.state_dict())
    latents, noisy, sigma = torch.randn(2, 8, 12, 8, 8), torch.randn(2, 8, 12, 8, 8), torch.rand(2, 8)
    batch = Batch(latents, torch.randint(0, 5, (2, 8, 4)), torch.randint(0, 37, (2, TEXT_LEN)))
    conditions = streamed.conditions_type(text=model.text(batch.tokens))
    cache = streamed.initialize_cache(Layout(2, 12, 8, 8, ChunkPlan.of(1)), conditions)
    for i in range(8):
        first = max(0, i - 5)
        window = Batch(latents[:, first:], batch.actions[:, first:], batch.tokens)
        packing = Packing(i - first, (i - first,))
        want = flow(
            model, packing, packing.context(), window, latents[:, first:i], noisy[:, i : i + 1], sigma[:, i : i + 1]
        )
        got = streamed.predict_flow(noisy[:, i, :, None], 1000 * sigma[:, i], cache, batch.actions[:, i : i + 1])
        if i < 6:
            torch.testing.assert_close(got[:, :, 0], want[:, 0], rtol=1e-4, atol=1e-5)
        else:  # older keys were made with a longer past than a window holds
            assert torch.corrcoef(torch.stack([got.flatten(), want.flatten()]))[0, 1] > 0.9
        streamed.commit(latents[:, i, :, None], torch.zeros(2), cache, batch.actions[:, i : i + 1])


@pytest.mark.ci_cpu
def test_targets_of_one_packing_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = TrainingModel().requires_grad_(False)
    torch.nn.init.normal_(model.network.head.head.weight, std=0.05)
    packing = Packing(1, (0, 1, 1))
    batch = Batch(
        torch.randn(1, 2, 12, 8, 8), torch.zeros(1, 2, 4, dtype=torch.long), torch.zeros(1, 12, dtype=torch.long)
    )
    noisy, sigma = torch.randn(1, 3, 12, 8, 8), torch.full((1, 3), 0.5)
    one = flow(model, packing, packing.context(), batch, batch.latents[:, :1], noisy, sigma)
    noisy[:, 2] = 0
    two = flow(model, packing, packing.context(), batch, batch.latents[:, :1], noisy, sigma)
    torch.testing.assert_close(one[:, :2], two[:, :2])
    assert not torch.allclose(one[:, 2], two[:, 2])


@pytest.mark.ci_cpu
def test_orthogonalised_keeps_singular_vectors() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(1, 24, 60)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    got = orthogonalised(matrix, steps=6)
    values = torch.linalg.svdvals(got)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    aligned = (u.mT @ got @ vt.mT)[0]
    assert float((aligned - torch.diag(aligned.diag())).abs().max()) < 1e-3
    torch.testing.assert_close(orthogonalised(matrix.mT), orthogonalised(matrix).mT)


@pytest.mark.ci_cpu
def test_muon_descends_on_matrices_and_convolutions() -> None:
    torch.manual_seed(0)
    targets = [torch.randn(8, 12), torch.randn(4, 3, 3, 3)]
    params = [torch.zeros_like(t, requires_grad=True) for t in targets]
    muon = Muon(params, lr=0.1)
    losses = []
    for _ in range(60):
        loss = sum((p - t).square().mean() for p, t in zip(params, targets, strict=True))
        loss.backward()
        muon.step()
        muon.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.ci_cpu
def test_rate_warms_up_stays_and_falls() -> None:
    assert rate(0.0, 0, flat=0.5, warmup=10) == pytest.approx(0.1)
    assert rate(0.4, 100, flat=0.5) == 1.0
    assert rate(0.75, 100, flat=0.5) == pytest.approx(0.51)
    assert rate(1.0, 100, flat=0.5) == pytest.approx(0.02)
    assert Clock(minutes=1, spent=120).progress == 1.0


@pytest.mark.ci_cpu
def test_average_follows_the_parameters() -> None:
    module = torch.nn.Linear(2, 2)
    average = Average(module, decay=0.9)
    with torch.no_grad():
        module.weight += 1
    before = average.values["weight"].clone()
    average.update(module, step=1000)
    torch.testing.assert_close(average.values["weight"], before + 0.1)


@pytest.mark.ci_cpu
def test_thinned_captions_stay_tokens_in_order() -> None:
    rng = np.random.default_rng(0)
    tokens = np.array([2, 7, 15, 24, 33, 4, 2, 8, 6, 0, 0, 0], np.uint8)
    drawn = [thin(tokens, rng) for _ in range(2000)]
    empty = sum(not row.any() for row in drawn) / len(drawn)
    whole = sum(np.array_equal(row, tokens) for row in drawn) / len(drawn)
    assert 0.07 < empty < 0.12
    assert 0.8 < whole < 0.88
    for row in drawn:
        words = [word for word in row[row > 0] if word != VOCABULARY.index(UNK)]
        rest = iter(tokens)
        assert len(row) == TEXT_LEN
        assert all(word in rest for word in words)


@pytest.mark.ci_cpu
@pytest.mark.parametrize("resample", [False, True])
def test_flow_loss_reaches_every_parameter(resample: bool) -> None:
    torch.manual_seed(0)
    model, teacher = TrainingModel(), TrainingModel().requires_grad_(False)
    torch.nn.init.normal_(model.network.head.head.weight, std=0.05)
    for group in FlowPlan().groups:
        batch = random_batch(group.length)
        group_loss(model, teacher, group, batch, FlowPlan(), resample).mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.ci_cpu
def test_a_student_equal_to_its_teacher_has_nothing_to_learn_from_one_substep() -> None:
    torch.manual_seed(0)
    model = TrainingModel().requires_grad_(False)
    torch.nn.init.normal_(model.network.head.head.weight, std=0.05)
    other = TrainingModel().requires_grad_(False)
    for group in DistillPlan().groups:
        batch = random_batch(group.length)
        torch.testing.assert_close(
            distill_loss(model, model, group, batch, DistillPlan(substeps=1, guidance=1.0)),
            torch.zeros(2, len(group.packing.targets)),
        )
        assert (distill_loss(model, other, group, batch, DistillPlan(substeps=2)) > 0).all()


def random_batch(length: int) -> Batch:
    return Batch(
        torch.randn(2, length, 12, 8, 8), torch.randint(0, 6, (2, length, 4)), torch.randint(0, 37, (2, TEXT_LEN))
    )


@pytest.mark.ci_cpu
def test_packaged_weights_unpack_into_checkpoints_and_export_to_the_same(tmp_path: Path) -> None:
    unpack(WEIGHTS, tmp_path / "out")
    export(tmp_path / "out", tmp_path / "weights")
    for file in WEIGHTS.glob("*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / "weights" / file.name)
        assert before.keys() == after.keys()
        for key, value in before.items():
            torch.testing.assert_close(after[key], value, rtol=2e-3, atol=1e-6)


@pytest.mark.manual
def test_whole_chain_runs_from_nothing(tmp_path: Path) -> None:
    """About four minutes: every stage for seconds, then files that load."""
    command = [sys.executable, "-m", "tiny_world.train", "--minutes", "1", "--shards", "1"]
    subprocess.run([*command, "--out", tmp_path / "out", "--weights", tmp_path / "weights"], check=True)
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 3
