"""Items of ``bench quality``: the same set each time, judged as they say."""

import pytest
import torch

from tightwire.bench.quality.items import (
    CHOICE_TOKENS,
    ROW_TOKENS,
    TaskItem,
    accuracy,
    batches,
    digest,
    judge,
    make_items,
)
from tightwire.model.text.tokenizer import Tokenizer, byte_backend


def _tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend(260), chat_template=None, special_tokens={}, bos_token_id=None, eos_token_ids=())


def test_items_are_fixed_and_of_all_kinds_and_sources() -> None:
    items = make_items(_tokenizer(), 27)
    assert digest(items) == digest(make_items(_tokenizer(), 27)) != digest(items[1:])
    assert {item.source for item in items} == {"prose", "code", "chat"}
    kinds = [len(item.rows_RL) for item in items]
    assert kinds.count(1) == 18 and kinds.count(4) == 9
    for item in items:
        assert all(len(row) == ROW_TOKENS for row in item.rows_RL) and 1 <= item.num_asked <= CHOICE_TOKENS
        assert len({row[: -item.num_asked] for row in item.rows_RL}) == 1


def test_a_cloze_needs_every_token_and_a_choice_the_likeliest_row() -> None:
    cloze = TaskItem("prose", ((0, 1, 2, 3),), 2)
    choice = TaskItem("code", ((0, 1, 2, 3), (0, 1, 3, 2)), 2, answer=1)
    ((batch, rows_RL),) = batches([cloze, choice], 8)
    hidden_RLD = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 0], [1, 0, 0, 0], [1, 3, 2, 0]]), 4).float()
    assert judge(batch, rows_RL, hidden_RLD, torch.eye(4)) == [True, True]
    hidden_RLD[0, 2], hidden_RLD[2] = torch.eye(4)[0], -hidden_RLD[2]
    assert judge(batch, rows_RL, hidden_RLD, torch.eye(4)) == [False, False]


def test_batches_hold_all_items_in_order() -> None:
    items = [TaskItem("prose", ((number,) * 4,) * (1 + 3 * (number % 2)), 1) for number in range(6)]
    parts = list(batches(items, 5))
    assert [item for batch, _ in parts for item in batch] == items
    assert [len(rows) for _, rows in parts] == [5, 5, 5]


def test_the_interval_is_wilsons() -> None:
    share, reach = accuracy([True] * 150 + [False] * 150)
    assert share == 0.5 and reach == pytest.approx(0.0562, abs=1e-3)
