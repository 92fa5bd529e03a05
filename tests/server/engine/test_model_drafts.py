"""What a model drafts for which sequences, with a model that is always right and costs what a test says."""

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from helpers.server.draft_engine import Constant
from helpers.server.fake_runner import FakeDraftRunner, FakeRunner, greedy_tokens

from tightwire.model.layer_groups import LayerGroups
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import RowTimes
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.model_drafts import ModelDrafter
from tightwire.server.engine.request import Request, RequestRules, make_request
from tightwire.server.ipc.messages import AddRequest

VOCAB = 61
greedy = partial(greedy_tokens, vocab_size=VOCAB)
LIMITS = Limits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=64, block_size=4)
_NAMES = count()


def make_drafter(limits: Limits = LIMITS, row_s: float = 0.0) -> tuple[ModelDrafter, FakeDraftRunner]:
    """A step takes 1 s, a row of the model ``row_s``; nothing is drafted from the text."""
    runner = FakeDraftRunner(limits, VOCAB)
    drafter = ModelDrafter(runner, limits, VOCAB)  # pyright: ignore[reportArgumentType]
    drafter.max_tokens, drafter.times, drafter._token_times = 0, Constant(1.0), _Line(row_s)
    return drafter, runner


class _Line(RowTimes):
    def __init__(self, row_s: float) -> None:
        self._row_s = row_s

    def learn(self, num_rows: int, seconds: float) -> None:
        pass

    def of(self, num_rows: Any) -> np.ndarray:
        return self._row_s * np.asarray(num_rows, float)


def request(tokens: list[int], num_prompt: int | None = None, **params: Any) -> Request:
    """A sequence whose last token was generated, or so many of its tokens."""
    num_prompt = num_prompt or len(tokens) - 1
    given = AddRequest(str(next(_NAMES)), tokens[:num_prompt], SamplingParams(**{"max_tokens": 100, **params}))
    made = make_request(given, (), 0.0)
    made.token_ids += tokens[num_prompt:]
    return made


def drafts(drafter: ModelDrafter, *requests: Request) -> list[list[int]]:
    drafter.prepare(requests, len(requests), len(requests))
    return [drafter.draft(each, 16) for each in requests]


def test_tokens_are_those_that_the_model_finds_most_likely() -> None:
    drafter, _ = make_drafter()
    one, two = [3, 1, 4, 1, 5], [2, 7, 1]
    first, second = drafts(drafter, request(one), request(two))
    assert len(first) > 2 and first == greedy(one, len(first)) and second == greedy(two, len(second))


def test_alike_prompts_that_start_together_are_computed_once() -> None:
    drafter, runner = make_drafter()
    prompt = [i % VOCAB for i in range(150)]
    together = [request([*prompt, last], 150) for last in range(4)]
    found = [drafts(drafter, *together) for _ in range(8)][-1]
    assert [each[:3] for each in found] == [greedy([*prompt, last], 3) for last in range(4)]
    of_prompts = sum(plan.num_rows for plan in runner.plans if plan.num_rows > 5)
    assert of_prompts < 180


def test_a_long_prompt_that_does_not_pay_leaves_the_others_their_drafts() -> None:
    drafter, _ = make_drafter(replace(LIMITS, max_model_len=4096, num_blocks=1024), row_s=0.1)
    near, far = request([3, 1, 4, 1, 5]), request([i % VOCAB for i in range(3000)])
    chat = request([7 * i % VOCAB for i in range(100)])
    first, second, none = [drafts(drafter, near, chat, far) for _ in range(3)][-1]
    assert first == greedy(near.token_ids, len(first)) and first and not none
    assert second == greedy(chat.token_ids, len(second)) and second


def test_a_sequence_that_outgrows_its_cache_leaves_it_to_others() -> None:
    drafter, _ = make_drafter(replace(LIMITS, max_model_len=64, num_blocks=16))
    long, short = request([1] * 60), request([3, 1, 4, 1, 5])
    assert drafts(drafter, long)[0]
    long.token_ids += [1] * 10
    none, found = drafts(drafter, long, short)
    assert found and not none


def test_one_that_finds_no_block_holds_nobody_back() -> None:
    drafter, _ = make_drafter(replace(LIMITS, max_model_len=24, num_blocks=6))
    leader, follower = request([*range(22), 9]), request([*range(9), 8])
    assert drafts(drafter, request([5, 4, 3, 2, 1], max_tokens=3))[0]
    none, found = drafts(drafter, leader, follower)
    assert found and not none


def test_sequences_longer_than_its_cache_get_no_draft() -> None:
    """A target whose layers all have windows holds longer ones in as many blocks."""
    windows = Limits(
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_blocks=32,
        block_size=4,
        groups=LayerGroups(num_full=0, num_sliding=1, window=8),
    )
    drafter, runner = make_drafter(windows)
    short, long = drafts(drafter, request([3, 1, 4, 1, 5]), request([1] * 129))
    assert short and not long
    assert max(max(plan.context_lens) for plan in runner.plans) <= 128
    for _ in range(100):
        assert drafts(drafter, request([1] * 128)) == [[]], "nor is one tried"
    assert drafts(drafter, request([3, 1, 4, 1, 5]))[0]


def test_what_was_cut_of_a_draft_and_proved_right_ends_no_draft() -> None:
    drafter, _ = make_drafter()
    mine = request([3, 1, 4, 1, 5])
    (found,) = drafts(drafter, mine)
    assert len(found) > 2
    mine.token_ids += found[:2]
    assert drafts(drafter, mine)[0][:2] == greedy(mine.token_ids, 2)


def test_nothing_is_drafted_behind_a_stop_token_and_a_right_one_counts() -> None:
    prompt = [3, 1, 4, 1, 5]
    text = greedy(prompt, 9)
    stop = next(token for place, token in enumerate(text) if place > 4 and token not in text[:place])
    drafter, _ = make_drafter()
    draft, drafted = drafter.draft, list[list[int]]()
    drafter.draft = lambda *given: drafted.append(found := draft(*given)) or found  # type: ignore[method-assign]
    engine = Engine(
        runner=FakeRunner(LIMITS, VOCAB),
        sampler=Sampler(VOCAB),
        limits=LIMITS,
        rules=RequestRules(vocab_size=VOCAB, max_model_len=LIMITS.max_model_len),
        drafter=drafter,
    )
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    engine.add(AddRequest("a", prompt, params))
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    assert [token for output in outputs for token in output.token_ids] == text[: text.index(stop) + 1]
    assert stop in drafted[-1] and all(stop not in each[:-1] for each in drafted)
    counters = engine.stats().counters
    assert counters.num_accepted_draft_tokens == counters.num_draft_tokens > 2
    assert sum(output.num_right for output in outputs) == counters.num_draft_tokens


def test_only_what_the_model_chose_tells_which_ids_are_frequent() -> None:
    drafter, _ = make_drafter()
    before = drafter._covered_H.copy()
    drafter.learn(request([1, 2, 3, 0, 0, 0]), 1, 0, [VOCAB - 1])
    assert (drafter._covered_H[1:] < before[1:]).all() and drafter._covered_H[0] == 1
