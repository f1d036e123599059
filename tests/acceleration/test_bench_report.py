"""Sampling, tables, JSON and comparisons of ``flashdreams bench``, on clocks of our own."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import torch.nn.functional as F

from flashdreams.acceleration.bench.bound import Bound, CallRecorder, work
from flashdreams.acceleration.bench.report import Entry, Report, compare
from flashdreams.acceleration.bench.sampling import Plan, interleave, percentile

pytestmark = pytest.mark.ci_cpu


def report(command: str = "step", scale: float = 1.0, **settings) -> Report:
    entries = (
        Entry("eager", tuple(scale * s for s in (0.2, 0.3, 0.4)), (0.1, 0.2, 0.2), flops=4 * 10**9, note="as it is"),
        Entry("compiled", (scale, scale, scale)),
    )
    return Report(command, settings, entries, {"cpu": "A", "load": 3.0}, {"difference": 1e-7})


def test_cases_run_in_turn_and_warm_up_does_not_count():
    order, now = [], itertools.count()
    cases = {name: lambda name=name: order.append(name) for name in ("bound", "eager")}
    times = interleave(cases, Plan(repeat=2, warmup=1, clock=lambda: float(next(now) ** 2)))
    assert order == ["bound", "eager"] * 3
    assert times == {"bound": (5**2 - 4**2, 9**2 - 8**2), "eager": (7**2 - 6**2, 11**2 - 10**2)}


def test_the_device_is_waited_for_before_each_reading_of_the_clock():
    order = []

    def clock() -> float:
        order.append("clock")
        return 0.0

    interleave({"case": lambda: order.append("case")}, Plan(1, 0, clock), lambda: order.append("wait"))
    assert order == ["wait", "clock", "case", "wait", "clock"]


@pytest.mark.parametrize(("repeat", "warmup"), [(0, 1), (1, -1)])
def test_a_plan_measures_something(repeat: int, warmup: int):
    with pytest.raises(ValueError, match=f"repeat={repeat}, warmup={warmup}; expected at least 1, and 0 or more"):
        Plan(repeat, warmup)


def test_percentiles_lie_on_a_line_between_the_nearest():
    values = [4.0, 1.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0, 0.5, 0.9, 1)] == pytest.approx([1, 2.5, 3.7, 4])
    assert percentile([7.0], 0.99) == 7


def test_the_ratio_is_the_median_of_the_rounds_own():
    entry = report().entries[0]
    assert entry.ratio == pytest.approx(2.0), "of 2.0, 1.5 and 2.0; medians apart would give 1.5"
    facts = entry.to_dict()
    assert (facts["min_s"], facts["p50_s"], facts["bound_p50_s"]) == (0.2, 0.3, 0.2)
    assert facts["p90_s"] == pytest.approx(0.38) and facts["gflops_per_s"] == pytest.approx(4 / 0.3)
    assert "over_bound" not in report().entries[1].to_dict()


def test_the_table_has_a_line_for_each_entry():
    head, eager, compiled, *rest = report().table().splitlines()
    assert head.split("  ")[-1] == "GFLOP/s"
    assert eager.split() == ["eager", "300.000", "380.000", "398.000", "200.000", "200.000", "2.000", "13.3"]
    assert compiled.split() == ["compiled", "1000.000", "1000.000", "1000.000", "1000.000"]
    assert rest == ["eager: as it is", "difference: 1e-07", "3 rounds; cpu A, load 3.0"]


def test_a_report_compares_with_its_own_json():
    earlier = json.loads(json.dumps(report(dim=8).to_dict()))
    ratios, notes = compare(report(scale=0.5, dim=16), earlier)
    assert ratios == {"eager": 0.5, "compiled": 0.5}
    assert notes == ["dim is 16, was 8"], "how busy the machine was is no difference"


def test_entries_of_one_report_alone_are_named():
    earlier = report().to_dict()
    earlier["entries"][0]["name"] = "other"
    ratios, notes = compare(report(), earlier)
    assert ratios == {"compiled": 1.0}
    assert notes == ["eager is only in the present report", "other is only in the earlier report"]


@pytest.mark.parametrize(
    ("earlier", "message"),
    [
        ({}, "it has format None; expected a report of `flashdreams bench`"),
        (report("vae").to_dict(), "it is of `bench vae`; this is `bench step`"),
    ],
)
def test_other_files_are_refused(earlier, message: str):
    with pytest.raises(ValueError, match=message):
        compare(report(), earlier)


def test_a_bound_repeats_products_convolutions_and_attention_and_nothing_else():
    x, weight, bias = torch.randn(1, 6, 8), torch.randn(4, 8), torch.randn(4)
    video, kernel, patch = torch.randn(1, 2, 3, 8, 8), torch.randn(4, 2, 3, 3, 3), torch.randn(4, 2, 1, 2, 2)
    q, k = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 10, 4)
    with CallRecorder() as recorder:
        F.linear(x.relu() + 1, weight, bias)
        F.conv3d(video, kernel, padding=1)
        F.conv3d(video, patch, bias, stride=(1, 2, 2))
        F.scaled_dot_product_attention(q, k, k).softmax(-1)
    calls = recorder.take()
    assert not recorder.calls
    assert [call.kind for call in calls] == ["linear", "convolution", "linear", "attention"]
    assert [call.flops for call in calls] == [
        2 * 6 * 8 * 4,
        2 * 3 * 8 * 8 * 4 * 2 * 27,
        2 * 3 * 4 * 4 * 4 * 8,
        4 * 2 * 6 * 10 * 4,
    ]
    assert work(calls) == sum(call.flops for call in calls)
    with CallRecorder() as again:
        Bound().prepare(calls)()
    assert [(call.kind, call.inputs) for call in again.take()] == [(call.kind, call.inputs) for call in calls]
