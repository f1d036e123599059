"""What a training writes down survives whatever ends it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from flashdreams.infra.errors import UserError
from flashdreams.posttrain.journal import FILE, Journal
from flashdreams.posttrain.state import load_state, save_state

pytestmark = pytest.mark.ci_cpu


def test_a_journal_that_goes_on_drops_what_will_be_made_again_and_a_torn_line(tmp_path):
    journal = Journal(tmp_path)
    for iteration in range(4):
        journal.write("train", iteration, {"reward": iteration / 10})
    journal.close()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind": "train", "itera')
    Journal(tmp_path, after=2).close()
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert lines[1] == {"kind": "train", "iteration": 1, "reward": 0.1}
    Journal(tmp_path).close()
    assert (tmp_path / FILE).read_text() == ""


def test_tensorboard_is_given_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    journal = Journal(tmp_path)
    for iteration in range(3):
        journal.write("train", iteration, {"reward": iteration / 8})
    journal.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    events = board.Scalars("train/reward")
    assert [(event.step, event.value) for event in events] == [(0, 0.0), (1, 0.125), (2, 0.25)]


def optimizer(steps: int) -> tuple[torch.nn.Parameter, torch.optim.AdamW]:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    chosen = torch.optim.AdamW([parameter], lr=0.1)
    for _ in range(steps):
        (parameter**2).sum().backward()
        chosen.step()
        chosen.zero_grad()
    return parameter, chosen


def test_a_state_brings_the_optimiser_back_to_the_bit(tmp_path):
    parameter, first = optimizer(3)
    save_state(tmp_path, {"p": parameter.detach()}, first, 3, {"lr": 0.1})
    restored, second = optimizer(0)
    trained, iteration = load_state(tmp_path, second, {"lr": 0.1})
    assert iteration == 3
    restored.data.copy_(trained["p"])
    for each, chosen in ((parameter, first), (restored, second)):
        (each**3).sum().backward()
        chosen.step()
    assert torch.equal(parameter, restored)


def test_a_state_of_other_settings_is_refused_by_their_names(tmp_path):
    parameter, chosen = optimizer(1)
    save_state(tmp_path, {"p": parameter.detach()}, chosen, 1, {"lr": 0.1, "rank": 8})
    with pytest.raises(UserError, match=r"other settings: rank \(8, now 4\); give those, or another folder"):
        load_state(tmp_path, chosen, {"lr": 0.1, "rank": 4})
    assert not list(tmp_path.glob("*.part"))
    assert set(load_file(tmp_path / "state.safetensors")) > {"trained.p", "optimizer.0.exp_avg"}
