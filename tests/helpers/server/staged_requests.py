"""Requests of many kinds for engines whose rows pass stages, alone and among neighbours that are cancelled."""

import itertools
import random
from typing import Any

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.engine.engine import Engine
from tightwire.server.ipc.messages import AddRequest

_STEM = [72, 101, 108, 108, 111] * 5
REQUESTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([5, 9, 200], {"temperature": 0.0}),
    "long": (list(range(40, 140)) * 2, {"temperature": 0.0, "logprobs": 2}),
    **{f"n{index}": (_STEM, {"temperature": 1.0, "seed": index + 1}) for index in range(3)},
    "top-k": ([8, 8], {"temperature": 1.0, "top_k": 9, "seed": 4}),
    "top-p": ([9, 8], {"temperature": 1.0, "top_p": 0.8, "seed": 6}),
    "banned": ([9, 9], {"temperature": 0.0, "allowed_token_ids": tuple(range(60, 90))}),
    "penalized": ([8, 10], {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.8, "max_tokens": 9}),
    "echo": (_STEM[:9], {"temperature": 0.0, "prompt_logprobs": 1, "max_tokens": 3}),
    "scored": (list(range(30, 150)), {"prompt_logprobs": 0, "max_tokens": 0}),
}


def params(changes: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a request of up to 14 tokens, with ``changes``."""
    return SamplingParams(**({"max_tokens": 14, "ignore_eos": True} | changes))


def tokens_among_neighbours(engine: Engine, rng: random.Random) -> dict[str, list[int]]:
    """Run ``REQUESTS`` in random order among requests that are cancelled at random; return the tokens of each."""
    told, waiting = dict[str, list[int]](), list(REQUESTS.items())
    for number in itertools.count():
        if waiting and rng.random() < 0.3:
            name, (prompt, changes) = waiting.pop(rng.randrange(len(waiting)))
            engine.add(AddRequest(name, prompt, params(changes)))
        if waiting and rng.random() < 0.7:
            prompt = [rng.randrange(300) for _ in range(rng.choice((3, 20, 90)))]
            engine.add(AddRequest(f"neighbour {number}", prompt, SamplingParams(max_tokens=9, temperature=0.0)))
        engine.cancel([f"neighbour {number - rng.randrange(1, 6)}"])
        for output in engine.step().outputs:
            told.setdefault(output.id, []).extend(output.token_ids)
        if not waiting and not engine.has_work():
            break
    total = engine.stats().total
    assert total.num_free_blocks == total.num_blocks
    return {name: told[name] for name in REQUESTS}
