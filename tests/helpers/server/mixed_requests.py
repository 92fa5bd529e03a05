"""Requests with common beginnings and all kinds of sampling parameters, and everything that an engine tells of one."""

import random
from collections.abc import Sequence
from typing import Any

from helpers.server.local_engine import run_to_end
from tiny import banned_ids

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.engine.engine import Engine
from tightwire.server.ipc.messages import AddRequest, Output

_KINDS: list[dict[str, Any]] = [
    {"min_p": 0.1, "temperature": 1.0},
    {"logit_bias": {7: 4.0, 9: -100.0}, "prompt_logprobs": 1},
    {"allowed_token_ids": tuple(range(60, 90)), "bad_words": banned_ids([66, 67], [70])},
    {"presence_penalty": 0.7, "repetition_penalty": 1.3},
    {"stop_token_ids": tuple(range(0, 256, 4)), "min_tokens": 12},
    {},
]


def mixed_requests() -> list[AddRequest]:
    """Two of each kind, greedy and drawn with seeds, of up to 80 tokens and as long answers, whose tokens have scores."""
    rng = random.Random(3)
    stems = [[rng.randrange(256) for _ in range(60)] for _ in range(3)]
    requests = []
    for number in range(2 * len(_KINDS)):
        prompt = rng.choice(stems)[: rng.randint(1, 60)] + [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        params: dict[str, Any] = {
            "max_tokens": rng.choice([1, 40, 70]),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": number,
            "top_k": rng.choice([0, 5]),
            "frequency_penalty": rng.choice([0.0, 0.5]),
            "logprobs": rng.choice([0, 2]),
            "ignore_eos": True,
        }
        params |= _KINDS[number % len(_KINDS)]
        requests.append(AddRequest(str(number), prompt, SamplingParams(**params)))
    return requests


def scores_of_mixed_load(
    engine: Engine, rng: random.Random, beginnings: Sequence[list[int]], ids: range, num_requests: int
) -> dict[str, list[Any]]:
    """Tokens and scores of requests that run together: long and short, drawn and greedy, each with one of the ``beginnings``."""
    for index in range(num_requests):
        prompt = rng.choice(beginnings) + [rng.choice(ids) for _ in range(rng.choice([1, 4, 30, 90]))]
        params = SamplingParams(
            max_tokens=rng.choice([3, 12, 40]),
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=index,
            ignore_eos=True,
            logprobs=2,
        )
        engine.add(AddRequest(id=str(index), prompt_token_ids=prompt, params=params))
    return {
        name: [score for output in outputs for score in output.logprobs or []]  # each has its token
        for name, outputs in run_to_end(engine).items()
    }


def tokens_and_scores(outputs: list[Output]) -> tuple[list[int], list[Any], list[Any]]:
    """The tokens of a request, their scores, and those of its prompt if they were asked for."""
    tokens = [token for output in outputs for token in output.token_ids]
    scores = [score for output in outputs for score in output.logprobs or ()]
    return tokens, scores, [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
