"""The mix by layer: bytes kept, KL as low as a search through all mixes finds it, and predictions that come true."""

import itertools

import pytest

from tightwire.bench.quality.search import Offer, choose, choose_within


def _offers(sensitivity: float) -> list[Offer]:
    """KL falls by four with each bit more, as noise power does."""
    kinds = (("int8", 8.25, 8), ("int6", 6.25, 6), ("int5", 5.25, 5), ("int4", 4.25, 4), ("poor", 6.0, 3))
    return [Offer(algorithm=name, num_bytes=size, kl=sensitivity * 4.0**-bits) for name, size, bits in kinds]


OFFERS = {("o_proj", layer): _offers(value) for layer, value in enumerate((1.0, 30.0, 0.01, 4.0))}


@pytest.mark.parametrize("limit", [17.0, 20.0, 25.0, 33.0, 100.0])
def test_no_mix_of_as_few_bytes_is_better_by_more_than_one_step(limit: float) -> None:
    mix = choose(OFFERS, limit).values()

    assert sum(offer.num_bytes for offer in mix) <= limit
    every = [
        (sum(offer.num_bytes for offer in offers), sum(offer.kl for offer in offers))
        for offers in itertools.product(*OFFERS.values())
    ]
    best = min(kl for num_bytes, kl in every if num_bytes <= limit)
    # What a step up the hull needs at most is 2 bytes: the best mix of so much less cannot be better than this one.
    less = min((kl for num_bytes, kl in every if num_bytes <= limit - 2), default=float("inf"))
    assert best <= sum(offer.kl for offer in mix) <= less


def test_the_sensitive_place_gets_the_bytes_and_nobody_a_dominated_offer() -> None:
    chosen = {layer: offer.algorithm for (_, layer), offer in choose(OFFERS, 22.0).items()}
    assert chosen == {0: "int5", 1: "int6", 2: "int4", 3: "int5"} or chosen[1] > chosen[2]
    assert "poor" not in chosen.values()


def test_too_few_bytes_are_refused_with_the_fewest_that_go() -> None:
    with pytest.raises(ValueError, match="the cheapest sends 17"):
        choose(OFFERS, 16.9)


def test_within_a_kl_budget_a_harmless_sum_is_dropped_first() -> None:
    harmless, harmful = Offer(algorithm="drop", num_bytes=0.0, kl=1e-6), Offer(algorithm="drop", num_bytes=0.0, kl=5.0)
    offers = {place: [*own, harmless if place[1] == 2 else harmful] for place, own in OFFERS.items()}
    mix = choose_within(offers, 0.05)
    assert sum(offer.kl for offer in mix.values()) <= 0.05
    assert [layer for (_, layer), offer in mix.items() if offer.algorithm == "drop"] == [2]
    assert sum(offer.num_bytes for offer in mix.values()) < sum(
        offer.num_bytes for offer in choose_within(offers, 1e-3).values()
    )
