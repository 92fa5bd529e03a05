import numpy as np
import pytest
import torch

from tightwire.model.deferred_tokens import num_referred, refer, resolve


def test_references_are_replaced_and_tokens_are_not() -> None:
    token_ids = np.array([refer(1), 7, 0, refer(0), refer(1)], np.int32)
    resolved = resolve(torch.from_numpy(token_ids), torch.tensor([40, 50, 60], dtype=torch.int32))
    assert resolved.tolist() == [50, 7, 0, 40, 50] and resolved.dtype == torch.int32


@pytest.mark.parametrize(("token_ids", "num"), [([5, 0], 0), ([refer(0)], 1), ([3, refer(4), refer(2)], 5)])
def test_as_many_tokens_are_sent_as_the_last_of_those_referred_to(token_ids: list[int], num: int) -> None:
    assert num_referred(np.array(token_ids, np.int32)) == num


def test_where_nothing_could_be_chosen_there_is_a_token_all_the_same() -> None:
    token_ids = torch.tensor([refer(0), refer(1)], dtype=torch.int32)
    assert resolve(token_ids, torch.tensor([-1, -2], dtype=torch.int32)).tolist() == [0, 0]
