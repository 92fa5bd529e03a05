"""Every configuration variant against transformers, in seconds, on a seeded two-layer Llama."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.quantized_folders import SCHEMES, make_quantized
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.model.transformers_reference import greedy, logits, reference_of
from helpers.server.local_engine import continue_prompts, local_engine, prompt_logits
from tiny import VARIANTS, make_tiny
from transformers import LlamaForCausalLM

from tightwire.comm.all_reduce.names import plain_names
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.server.engine.drafts import Drafter

_PROMPTS = [[5], [72, 101, 108, 108, 111], list(range(40, 140)), [200, 3, 17] * 11]
_NUM_TOKENS = 13  # of an answer: the second one goes on into another block of the cache


# Each variant on 1 and 4 ranks, and in turns on 2 or 3; odd heads are on all of them with every algorithm.
_TURNS = {variant: 2 + place % 2 for place, variant in enumerate(sorted(VARIANTS))}


def _reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_and_tokens_equal_transformers_on_one_rank_and_split(variant: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, **VARIANTS[variant])
    checkpoint, model = open_checkpoint(str(folder)), _reference(folder)
    wanted = [greedy(model, prompt, _NUM_TOKENS) for prompt in _PROMPTS]

    for tp in (1, _TURNS[variant], 4):
        with local_engine(checkpoint, tp=tp, max_model_len=256, max_num_batched_tokens=64) as local:
            assert continue_prompts(local.engine, _PROMPTS, max_tokens=_NUM_TOKENS) == wanted, f"tp={tp}"
            if tp == 1:
                for prompt in _PROMPTS:
                    worst = (prompt_logits(local.runners[0], prompt) - logits(model, prompt)).abs().max()
                    assert worst <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1"])
def test_packed_weights_answer_as_transformers_does_with_the_same_numbers(
    quant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Greedy tokens are those of the weights that the blocks stand for, however many ranks hold them."""
    path = make_tiny_gguf(tmp_path / "m.gguf", quant, head_dim=32)
    checkpoint = open_checkpoint(str(path))
    model = reference_of(checkpoint)
    wanted = [greedy(model, prompt, _NUM_TOKENS) for prompt in _PROMPTS]

    for tp in (1, 2, 3, 4):
        with local_engine(checkpoint, tp=tp, max_model_len=256, max_num_batched_tokens=64, dtype=dtype) as local:
            assert continue_prompts(local.engine, _PROMPTS, max_tokens=_NUM_TOKENS) == wanted, f"tp={tp}"


@pytest.mark.parametrize("scheme", ["awq", "gptq", "gptq-8", "w4a16", "w8a16", "w8a8-int"])
def test_other_projects_quantized_folders_answer_as_the_numbers_they_stand_for(scheme: str, tmp_path: Path) -> None:
    make_quantized(tmp_path / "m", SCHEMES[scheme])
    checkpoint = open_checkpoint(str(tmp_path / "m"))
    _assert_tokens_on_ranks(checkpoint, reference_of(checkpoint))


@pytest.mark.parametrize("scheme", ["w8a8-fp8", "fp8-blocks", "gptq-act-order"])
def test_folders_rounded_again_answer_as_their_numbers_if_expanded_and_else_as_their_blocks(
    scheme: str, tmp_path: Path
) -> None:
    make_quantized(tmp_path / "m", SCHEMES[scheme])
    checkpoint = open_checkpoint(str(tmp_path / "m"))
    _assert_tokens_on_ranks(checkpoint, reference_of(checkpoint), quantization="none")
    _assert_tokens_on_ranks(checkpoint, reference_of(checkpoint, of_blocks=True))


def _assert_tokens_on_ranks(checkpoint: Checkpoint, model: LlamaForCausalLM, **options: Any) -> None:
    wanted = [greedy(model, prompt, _NUM_TOKENS) for prompt in _PROMPTS]
    for tp in (1, 2, 3):
        with local_engine(checkpoint, tp=tp, max_model_len=256, max_num_batched_tokens=64, **options) as local:
            assert continue_prompts(local.engine, _PROMPTS, max_tokens=_NUM_TOKENS) == wanted, f"tp={tp}"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_quantized_when_it_is_read_does_not_depend_on_the_split(quantization: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, head_dim=32)))
    answers = []
    for tp in (1, 2, 4):
        with local_engine(checkpoint, tp=tp, quantization=quantization, max_model_len=256) as local:
            answers.append(continue_prompts(local.engine, _PROMPTS, max_tokens=_NUM_TOKENS))
    assert answers[1:] == answers[:1] * 2


@pytest.fixture(scope="module")
def odd_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, list[list[int]]]:
    """A model, and transformers' answers to the prompts."""
    folder = make_tiny(tmp_path_factory.mktemp("odd-heads"), **VARIANTS["odd-heads"])
    model = _reference(folder)
    return open_checkpoint(str(folder)), [greedy(model, prompt, _NUM_TOKENS) for prompt in _PROMPTS]


@pytest.mark.parametrize("algorithm", plain_names())
def test_tokens_do_not_depend_on_the_algorithm(algorithm: str, odd_heads: tuple[Checkpoint, list[list[int]]]) -> None:
    checkpoint, wanted = odd_heads
    for tp in (2, 3, 4):
        with local_engine(checkpoint, tp=tp, all_reduce=algorithm, max_model_len=256) as local:
            assert continue_prompts(local.engine, _PROMPTS, max_tokens=_NUM_TOKENS) == wanted, f"tp={tp}"


def test_unequal_shares_change_the_split_and_not_the_tokens(odd_heads: tuple[Checkpoint, list[list[int]]]) -> None:
    checkpoint, wanted = odd_heads
    with local_engine(checkpoint, tp=2, shares=(1, 2), max_model_len=256) as local:
        got = continue_prompts(local.engine, _PROMPTS, max_tokens=_NUM_TOKENS)

    first, second = make_layout(checkpoint.config, 2, (1, 2)).shards
    assert first.local_kv_heads < second.local_kv_heads
    assert got == wanted


def test_two_all_reduces_per_layer_one_for_the_embedding_one_gather(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    num_steps = 5

    with local_engine(checkpoint, tp=2, max_model_len=256) as local:
        continue_prompts(local.engine, [[1, 2, 3]], max_tokens=num_steps)

    for group in local.groups:  # read when the follower has finished its last step too
        calls = {(count.op, count.phase): count.calls for count in group.ledger.counters.counts()}
        per_step = 2 * checkpoint.config.num_layers + 1
        assert calls == {
            ("all_reduce", "prefill"): per_step,
            ("all_gather", "prefill"): 1,
            ("all_reduce", "decode"): per_step * (num_steps - 1),
            ("all_gather", "decode"): num_steps - 1,
        }


@pytest.mark.parametrize("max_num_batched_tokens", [7, 16, 100])
def test_chunked_prefill_changes_nothing(max_num_batched_tokens: int, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    checkpoint, model = open_checkpoint(str(folder)), _reference(folder)
    wanted = [greedy(model, prompt, 16) for prompt in _PROMPTS]

    with local_engine(
        checkpoint, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens
    ) as local:
        assert continue_prompts(local.engine, _PROMPTS, max_tokens=16) == wanted


@pytest.mark.parametrize(
    ("prefix_cache", "dtype"), [("prompts", torch.bfloat16), ("prompts", torch.float32), ("all", torch.float32)]
)
def test_what_the_prefix_cache_has_changes_no_bit(prefix_cache: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Chats that go on from their own answers, side by side, against each turn computed from nothing."""
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    settings = {"temperature": 1.0, "seed": 7, "max_tokens": 14}

    def turns(prefix_cache: str) -> tuple[list[list[list[int]]], int]:
        answers, hits = [], 0
        chats = [_PROMPTS[1] * 3, _PROMPTS[1] * 3 + [5], _PROMPTS[2]]
        with local_engine(
            checkpoint,
            tp=2,
            dtype=dtype,
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=20,
            prefix_cache=prefix_cache,
        ) as local:
            for _ in range(3):
                answers.append(continue_prompts(local.engine, chats, **settings))
                chats = [chat + answer + [3, 4] for chat, answer in zip(chats, answers[-1], strict=True)]
            hits = local.engine.stats().counters.num_prefix_hit_tokens
        return answers, hits

    (computed, none), (cached, some) = turns("none"), turns(prefix_cache)
    assert none == 0 and some > 100
    assert cached == computed


@pytest.mark.parametrize("all_reduce", ["two-shot", "flash:int8-g64,int4-g64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computing_one_half_while_the_other_is_summed_changes_no_bit(
    dtype: torch.dtype, all_reduce: str, tmp_path: Path
) -> None:
    """Long prompts beside short ones and generated tokens, so that steps are cut inside sequences and between them."""
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    prompts = [[(7 * i + n) % 200 for i in range(n)] for n in (150, 3, 70, 64, 90)]
    settings = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    texts, calls = [], []
    for overlap in (False, True):
        with local_engine(
            checkpoint, tp=2, dtype=dtype, all_reduce=all_reduce, max_num_batched_tokens=100, overlap=overlap
        ) as local:
            texts.append(continue_prompts(local.engine, prompts, **settings))
            calls.append(
                sum(count.calls for count in local.groups[0].ledger.counters.counts() if count.op == "all_reduce")
            )
    assert texts[0] == texts[1]
    assert calls[1] > calls[0], "no step was cut"


_NGRAM = partial(Drafter, max_tokens=4, longest=3, shortest=1)
_SUFFIX = partial(Drafter, max_tokens=16, longest=16, shortest=1, num_places=32, num_recent=500)


@pytest.mark.parametrize("all_reduce", ["one-shot", "two-shot", "flash:int8-g64,int4-g64"])
@pytest.mark.parametrize(
    ("make_drafter", "temperature", "dtype"),
    [
        (_NGRAM, 0.0, torch.bfloat16),
        (_NGRAM, 1.0, torch.float32),
        (_SUFFIX, 0.0, torch.float32),
        (_SUFFIX, 1.0, torch.bfloat16),
    ],
    ids=["ngram, greedy", "ngram, drawn", "suffix, greedy", "suffix, drawn"],
)
def test_guessed_tokens_change_no_bit(
    make_drafter: Callable[[], Drafter], temperature: float, dtype: torch.dtype, all_reduce: str, tmp_path: Path
) -> None:
    """A row is whole groups of the codecs, so rows of guesses change no row that is summed with them."""
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    settings = {"temperature": temperature, "seed": 7, "max_tokens": 48, "frequency_penalty": -1.0}  # repeats itself
    options: dict[str, Any] = {"tp": 2, "dtype": dtype, "all_reduce": all_reduce, "max_model_len": 256}
    texts = []
    for drafter in (None, make_drafter()):
        with local_engine(checkpoint, **options, max_num_seqs=4, drafter=drafter) as local:
            texts.append(continue_prompts(local.engine, _PROMPTS, **settings))
    assert texts[0] == texts[1]
    stats = local.engine.stats()
    assert 0 < stats.counters.num_accepted_draft_tokens < stats.counters.num_draft_tokens


@pytest.mark.parametrize("num_blocks", [64, 16], ids=["room-for-all", "preempted"])
def test_bfloat16_text_is_the_same_alone_and_in_a_crowd(num_blocks: int, tmp_path: Path) -> None:
    """Sampled with a seed: neighbours, chunks, arrival order and preemption leave every bit of a row as it was."""
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    settings = {"temperature": 1.0, "seed": 7, "max_tokens": 32}

    with local_engine(checkpoint, tp=2, dtype=torch.bfloat16, max_model_len=256) as local:
        alone = [continue_prompts(local.engine, [prompt], **settings)[0] for prompt in _PROMPTS]
    with local_engine(
        checkpoint,
        tp=2,
        dtype=torch.bfloat16,
        max_model_len=256,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=20,
    ) as local:
        together = continue_prompts(local.engine, _PROMPTS, **settings)

    assert (local.engine.stats().counters.num_preemptions > 0) == (num_blocks == 16)
    assert together == alone
