import pytest

from tightwire.bench.ttft.measure import Arm, Passages, make_turns
from tightwire.bench.ttft.proof import Cell

ARMS = [Arm(name=name, algorithm=name, is_default=False, lossless=True, error=0.0) for name in ("a", "b", "c")]


def test_every_round_has_every_cell_and_every_cell_every_arm() -> None:
    cells = [Cell(prompt_len=length, concurrency=count) for length in (16, 64) for count in (1, 4)]
    groups = list(make_turns(cells, ARMS, 5, seed=3))
    for number in range(5):
        own = [turns for turns in groups if turns[0].round == number]
        assert {turns[0].cell for turns in own} == set(cells) and len(own) == 4
    assert all({turn.arm for turn in turns} == set(ARMS) and len(turns) == 3 for turns in groups)
    assert len({tuple(turn.arm for turn in turns) for turns in groups}) > 1, "the order of the arms changes"
    assert groups == list(make_turns(cells, ARMS, 5, seed=3)) != list(make_turns(cells, ARMS, 5, seed=4))


def test_passages_begin_at_different_places_whatever_their_length() -> None:
    passages = Passages(range(100), seed=1)
    taken = [passages.take(length) for length in (10, 50, 10, 1, 30) * 3]
    assert all(ids == list(range(ids[0], ids[0] + len(ids))) for ids in taken)
    assert len({ids[0] for ids in taken}) == len(taken)
    assert [len(ids) for ids in taken[:5]] == [10, 50, 10, 1, 30]


def test_passages_are_the_same_for_the_same_seed() -> None:
    assert Passages(range(50), seed=3).take(8) == Passages(range(50), seed=3).take(8)


def test_a_text_without_an_unused_start_is_an_error() -> None:
    passages = Passages(range(10))
    passages.take(10)
    with pytest.raises(ValueError, match="10 tokens and no unused start left for a passage of 10"):
        passages.take(10)
