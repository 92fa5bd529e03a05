import pytest

from tightwire.bench.client import Sample
from tightwire.bench.serve.slo import Slo, parse_slo


def sample(**fields: object) -> Sample:
    values: dict[str, object] = {"ttft_s": 0.2, "e2e_s": 1.2, "num_generated": 11, **fields}
    return Sample(**values)  # type: ignore[arg-type]


def test_durations_have_units() -> None:
    assert parse_slo("ttft=500ms, tpot=50000us,e2e=2") == Slo(ttft_s=0.5, tpot_s=0.05, e2e_s=2.0)
    assert parse_slo("e2e=1.5s") == Slo(e2e_s=1.5)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=-1s", "ttft=0", "p99=1s", "ttft=1s,ttft=1s", "ttft=1min"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as ttft=500ms"):
        parse_slo(text)


@pytest.mark.parametrize(
    ("slo", "fields", "meets"),
    [
        (Slo(ttft_s=0.2, tpot_s=0.1, e2e_s=1.2), {}, True),
        (Slo(ttft_s=0.19), {}, False),
        (Slo(tpot_s=0.099), {}, False),
        (Slo(e2e_s=1.1), {}, False),
        (Slo(tpot_s=0.01), {"num_generated": 1}, True),  # no token after the first, so none was late
        (Slo(ttft_s=9.0), {"ttft_s": None}, False),
        (Slo(e2e_s=9.0), {"error": "HTTP 500"}, False),
    ],
)
def test_a_request_meets_all_limits_or_does_not(slo: Slo, fields: dict[str, object], meets: bool) -> None:
    assert slo.meets(sample(**fields)) is meets


def test_goodput_is_of_all_that_were_sent() -> None:
    goodput = Slo(ttft_s=0.5).goodput([sample(), sample(ttft_s=0.6), sample(error="gone"), sample()], 2.0)

    assert (goodput["met"], goodput["share"], goodput["requests_per_s"]) == (2, 0.5, 1.0)
