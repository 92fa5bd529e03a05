import pytest

from tightwire.model.stages import StagePlan, divide_layers


@pytest.mark.parametrize(
    ("num_layers", "shares", "layers"),
    [
        (30, (1, 1), ((0, 15), (15, 30))),
        (30, (2, 1), ((0, 20), (20, 30))),
        (5, (1, 1, 1), ((0, 2), (2, 4), (4, 5))),
        (3, (100, 1, 1), ((0, 1), (1, 2), (2, 3))),
    ],
)
def test_layers_are_divided_by_shares_and_none_is_empty(
    num_layers: int, shares: tuple[float, ...], layers: tuple[tuple[int, int], ...]
) -> None:
    plan = divide_layers(num_layers, shares)
    assert plan == StagePlan(layers) and plan.num_stages == len(shares)
    assert [layer for stage in range(len(shares)) for layer in plan.of(stage)] == list(range(num_layers))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be divided into 3 stages; give --layout tensor"):
        divide_layers(2, (1, 1, 1))


def test_work_of_unlike_layers_and_of_the_head_is_divided_evenly() -> None:
    assert divide_layers([1.0] * 30, (1, 1), last=10.0).layers == ((0, 20), (20, 30))
    assert divide_layers([4.0, 1.0, 1.0, 1.0, 1.0], (1, 1)).layers == ((0, 1), (1, 5))
    assert divide_layers([1.0] * 9, (1, 2), last=3.0).layers == ((0, 4), (4, 9))


def test_stage_has_no_more_layers_than_its_memory_holds() -> None:
    assert divide_layers(10, (1, 1, 1), most=(2, 4, 9)).layers == ((0, 2), (2, 6), (6, 10))
    with pytest.raises(ValueError, match="10 layers do not fit: the stages hold 2, 4, 3"):
        divide_layers(10, (1, 1, 1), most=(2, 4, 3))
