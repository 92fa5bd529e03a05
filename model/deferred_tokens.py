"""Tokens that nobody knows yet when a step is planned: the last step, which still runs, is about to choose them.

In a plan such a token is a reference, a negative number: -1 - i is the i-th token that the last step chooses. Ranks put
the tokens in on the device, where they have been chosen, so the host need not wait for them.
"""

import numpy as np
import torch
from torch import Tensor


def refer(index: int) -> int:
    """What stands for the ``index``-th token that the last step chooses."""
    return -1 - index


def num_referred(token_ids_T: np.ndarray) -> int:
    """How many of the last step's tokens, from the first on, are enough for all references; 0: there are none."""
    return max(0, -int(token_ids_T.min()))


def resolve(token_ids_T: Tensor, chosen_R: Tensor) -> Tensor:
    """``token_ids_T`` with the tokens for the references.

    Where nothing could be chosen (``chosen_R`` is negative) it is token 0: nobody reads what comes of it.
    """
    referred_T = (-1 - token_ids_T).clamp_(min=0)
    return torch.where(token_ids_T < 0, chosen_R.clamp(min=0)[referred_T], token_ids_T)
