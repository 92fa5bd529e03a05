import pytest

from tightwire.bench.client import Sample
from tightwire.bench.serve.cells import doubts, summarize
from tightwire.bench.serve.load import Load, LoadRun


def sample(index: int = 0, **fields: object) -> Sample:
    values: dict[str, object] = {
        "index": index, "ttft_s": 0.5, "e2e_s": 1.5, "itl_s": [0.5, 0.5], "num_prompt": 10, "num_generated": 3,
        "usage": True, "finish_reason": "length",
    }  # fmt: skip
    return Sample(**{**values, **fields})  # type: ignore[arg-type]


def arm(*samples: Sample, load: Load | None = None) -> LoadRun:
    arm = LoadRun(load=load or Load(concurrency=1), num_requests=len(samples), duration_s=2.0)
    for each in samples:
        arm.add(each)
    return arm


def test_rates_count_only_what_succeeded() -> None:
    summary = summarize(arm(sample(), sample(1), sample(2, error="HTTP 429: full", num_generated=99)))

    assert (summary["succeeded"], summary["failed"], summary["requested"]) == (2, 1, 3)
    assert summary["output_tokens_per_s"] == 3.0
    assert summary["total_tokens_per_s"] == 13.0
    assert summary["requests_per_s"] == 1.0
    assert summary["mean_in_flight"] == 1.5
    assert summary["ttft_s"]["n"] == 2
    assert summary["itl_s"]["n"] == 4
    assert summary["errors"] == {"HTTP 429: full": 1}


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    assert sample(num_generated=3).tpot_s == 0.5
    assert sample(num_generated=11, itl_s=[1.0]).tpot_s == pytest.approx(0.1)  # several tokens to an event
    assert sample(num_generated=1, itl_s=[]).tpot_s is None
    assert sample(error="broke off").tpot_s is None


def test_a_load_without_success_has_no_latencies() -> None:
    summary = summarize(arm(sample(error="gone")))

    assert summary["ttft_s"] is None
    assert summary["output_tokens_per_s"] == 0.0


def test_clean_figures_raise_no_doubt() -> None:
    assert doubts(arm(sample(), sample(1)), expected_generated=3) == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"usage": False}, "sends no usage"),
        ({"num_cached": 8}, "a prefix cache supplied 8 prompt tokens"),
        ({"num_generated": 2}, "1 of 2 answers ended before their length"),
        ({"ttft_s": None}, "1 of 2 answers have no text"),
    ],
)
def test_doubts_name_their_reason(fields: dict[str, object], says: str) -> None:
    (doubt,) = doubts(arm(sample(), sample(1, **fields)), expected_generated=3)

    assert says in doubt


def test_a_client_that_cannot_hold_the_rate_is_reported() -> None:
    load = Load(request_rate=10.0)

    assert doubts(arm(sample(late_s=0.001), load=load)) == []
    assert "cannot hold the rate" in doubts(arm(sample(late_s=0.05), load=load))[0]
    # Little beside the gaps, and much beside what is measured.
    assert "cannot hold the rate" in doubts(arm(sample(late_s=0.001, ttft_s=0.005), load=load))[0]


def test_ten_failures_in_a_row_stop_a_load_but_scattered_ones_do_not() -> None:
    scattered = arm(*(sample(i, error="full" if i % 2 else None) for i in range(40)))
    in_a_row = arm(*(sample(i, error="connection: refused") for i in range(10)))

    assert scattered.stopped is None
    assert in_a_row.stopped == "10 requests in a row failed; the last: connection: refused"
