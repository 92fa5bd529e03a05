"""Predicted times: the formulas of docs/layouts.md, and what wins where."""

from dataclasses import replace

import pytest

from tightwire.comm.link.link import Link
from tightwire.comm.policy.schedule import HostRates, parse_rates
from tightwire.server.plan.layout_times import (
    CROWD,
    CROWD_PROMPT,
    CROWD_TOKENS,
    REQUEST,
    Predictor,
    RowWork,
)

HOST = HostRates(read=10e9, few_flops=60e9, many_flops=100e9, attention_flops=100e9)
WORK = RowWork(
    num_layers=32,
    row_elems=4096,
    layer_bytes=120e6,
    layer_flops=436e6,
    pair_flops=16384,
    head_bytes=0.3e9,
    head_flops=1e9,
)
STAGES = ((0, 16), (16, 32))


def predictor(num: int = 2, latency_s: float = 50e-6, rate: float | None = 118e6) -> Predictor:
    return Predictor(work=WORK, hosts=[HOST] * num, shares=[1 / num] * num, link=Link("", rate, latency_s))


def free(phase: str, rows: int) -> list[tuple[float, float]]:
    return [(0.0, 0.0)] * 65


def slow(phase: str, rows: int) -> list[tuple[float, float]]:
    """A round of 5 ms, and a row of 8 KiB at 100 Mbit/s."""
    return [(0.0, 5e-3 + rows * 8192 / 12e6)] * 65


def test_row_alone_reads_and_many_rows_compute() -> None:
    assert HOST.seconds(120e6, 436e6, 1) == pytest.approx(120e6 / 10e9)
    assert HOST.seconds(120e6, 436e6, 16) == pytest.approx(0.012 + 15 * 436e6 / 60e9)
    assert HOST.seconds(120e6, 436e6, 116) == pytest.approx(0.012 + 15 * 436e6 / 60e9 + 100 * 436e6 / 100e9)


def test_tensors_halve_computing_and_add_sums() -> None:
    alone = Predictor(work=WORK, hosts=[HOST], shares=[1.0], link=Link("", None)).times("one host", "", None)
    split = predictor().times("tensor", "auto", free)
    assert split.token_s == pytest.approx(alone.token_s / 2, rel=0.01)
    assert split.ttft_s[512] == pytest.approx(alone.ttft_s[512] / 2, rel=0.05)
    assert predictor().times("tensor", "auto", slow).token_s == pytest.approx(split.token_s + 65 * (5e-3 + 8192 / 12e6))


def test_prompts_by_stages_do_not_know_the_sums() -> None:
    hybrid = predictor().times("hybrid", "auto", slow, STAGES)
    tensor = predictor().times("tensor", "auto", slow)
    alone = Predictor(work=WORK, hosts=[HOST], shares=[1.0], link=Link("", None)).times("one host", "", None)
    assert hybrid.token_s == tensor.token_s
    assert alone.ttft_s[4096] / 2 < hybrid.ttft_s[4096] < 1.3 * alone.ttft_s[4096] / 2
    slower = predictor().times("tensor", "auto", lambda phase, rows: [(0.0, 1.0)] * 65)
    assert hybrid.ttft_s[4096] < slower.ttft_s[4096]


def test_keys_and_values_take_the_wire_of_hidden_states_in_hybrid() -> None:
    handing = Predictor(
        work=replace(WORK, handed_bytes=8192), hosts=[HOST] * 2, shares=[0.5] * 2, link=Link("", 1e6, 0.0)
    )
    sent_s = REQUEST[0] * (16 * 8192 + 4 * WORK.row_elems) / 1e6
    hybrid, pipeline = handing.times("hybrid", "auto", free, STAGES), handing.times("pipeline", "", None, STAGES)
    assert pipeline.ttft_s[REQUEST[0]] < hybrid.ttft_s[REQUEST[0]] < sent_s, "they take half of the wire"
    assert hybrid.ttft_s[REQUEST[0]] + hybrid.handed_s > sent_s, "the second token waits for all"
    assert pipeline.handed_s == 0 == handing.times("tensor", "auto", free).handed_s
    assert hybrid.request_s == hybrid.ttft_s[REQUEST[0]] + hybrid.handed_s + REQUEST[1] * hybrid.token_s


def test_matrices_in_two_parts_and_copied_keys_and_values_slow_the_stages_of_hybrid() -> None:
    times = [
        Predictor(work=replace(WORK, handed_bytes=handed), hosts=[HOST] * 2, shares=[0.5] * 2, link=Link("", None, 0.0))
        .times("hybrid", "auto", free, STAGES)
        .ttft_s[512]
        for handed in (0.0, 1e-9, 8192.0)
    ]
    assert 1.14 < times[1] / times[0] < 1.25, "0.15 of a layer's time, and 0.2 ms"
    assert times[2] - times[1] == pytest.approx(512 * 16 * 8192 * 5e-9, rel=0.5)


def test_pipeline_pays_a_hop_where_tensors_pay_two_sums_a_layer() -> None:
    pipeline = predictor(latency_s=5e-3).times("pipeline", "", None, STAGES)
    tensor = predictor(latency_s=5e-3).times("tensor", "auto", slow)
    assert pipeline.token_s < 32 * 0.012 + 0.03 + 3 * 6e-3 < tensor.token_s
    # A crowd keeps both stages busy: each computes half of the rows while the other computes the other half.
    crowd_s = CROWD * CROWD_TOKENS / pipeline.crowd_tokens_per_s
    prompts_s = CROWD * CROWD_PROMPT * 32 * WORK.layer_flops / 100e9 / 2
    half_s = 16 * WORK.layer_s(HOST, CROWD / 2, CROWD_PROMPT) + WORK.head_s(HOST, CROWD / 2)
    assert crowd_s == pytest.approx(prompts_s + CROWD_TOKENS * 2 * half_s, rel=0.2)


def test_slowest_host_decides() -> None:
    slower = HostRates(*(rate / 3 for rate in (HOST.read, HOST.few_flops, HOST.many_flops, HOST.attention_flops)))
    mixed = Predictor(work=WORK, hosts=[HOST, slower], shares=[0.5, 0.5], link=Link("", None))
    weighed = Predictor(work=WORK, hosts=[HOST, slower], shares=[0.75, 0.25], link=Link("", None))
    assert weighed.times("tensor", "auto", free).token_s == pytest.approx(
        mixed.times("tensor", "auto", free).token_s / 2, rel=0.01
    )


def test_request_is_its_prompt_and_its_tokens() -> None:
    times = predictor().times("tensor", "auto", free)
    assert times.request_s == times.ttft_s[REQUEST[0]] + REQUEST[1] * times.token_s


def test_speed_is_stated_as_bytes_and_operations() -> None:
    rates = parse_rates("50GB/s,1.2TFLOP/s")
    assert (rates.read, rates.many_flops) == (50e9, 1.2e12)
    assert str(rates) == "50GB/s,1.2e+03GFLOP/s"


@pytest.mark.parametrize("text", ["50GB/s", "50,300", "0GB/s,300GFLOP/s", "300GFLOP/s,50GB/s", ""])
def test_other_speeds_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host's speed; write .*: 50GB/s,300GFLOP/s"):
        parse_rates(text)
