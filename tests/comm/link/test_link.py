import pytest

from tightwire.comm.link.link import parse_link


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("200mbit", 25e6),
        ("2.5gbit", 312.5e6),
        ("64kbit", 8e3),
        ("300MB/s", 300e6),
        ("1.5 GB/s", 1.5e9),
        ("pcie1x1", 250e6),
        ("PCIe3x4", 4 * 8e9 * 128 / 130 / 8),
        ("pcie5x16", 16 * 32e9 * 128 / 130 / 8),
    ],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    link = parse_link(text)

    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-12)
    assert link.latency_s == 0.0


def test_rate_and_latency_in_any_order() -> None:
    for text in ("1gbit,latency=50us", "latency=50us, 1gbit"):
        link = parse_link(text)
        assert (link.bytes_per_s, link.latency_s) == (125e6, pytest.approx(50e-6))
        assert link.seconds(125e6) == pytest.approx(1.00005)

    alone = parse_link("latency=2ms")
    assert (alone.bytes_per_s, alone.latency_s) == (None, pytest.approx(2e-3))
    assert alone.seconds(1e9) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "200", "200mbps", "0mbit", "1gbit,2gbit", "latency=1us,latency=1us", "1gbit,", "pcie7x4", "pcie3x3"],
)
def test_what_is_not_a_link_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a link; write 200mbit, .*latency=50us"):
        parse_link(text)


@pytest.mark.parametrize("text", ["63kbit", "1gbit,latency=1001ms", "latency=20s"])
def test_what_no_rank_would_wait_for_is_refused_with_the_bounds(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"too slow to sum over: a link's rate is 64kbit or more, its latency 1s or less"
    ):
        parse_link(text)
