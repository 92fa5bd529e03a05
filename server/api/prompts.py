"""Turns a checked body into sequences for the engine: tokens, seeds, and the limits that depend on the model."""

import asyncio
import secrets
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tightwire.server.api.errors import invalid
from tightwire.server.api.generation import Prompt, TokenSequence
from tightwire.server.api.request_bodies import ChatBody, CompletionBody, GenerationBody
from tightwire.server.api.serving import ModelInfo, ServedModel
from tightwire.server.api.structured import structured_grammar
from tightwire.server.api.tools import tool_grammar

T = TypeVar("T")

# Tokenizing takes about 0.3 us per character. A thread adds about 0.2 ms on an idle core, too much for short texts.
_INLINE_CHARS = 4000
_MAX_BANNED_CHARS = 16_384  # a rank gets several tokens for each


async def run_off_loop(work: Callable[[], T], num_chars: float) -> T:
    """Run ``work`` in a thread if the text is long, so that other requests' tokens are not delayed."""
    return work() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(work)


def check_options(body: GenerationBody, info: ModelInfo, max_sequences: int) -> None:
    """400 for what this model and server can never do. Called before the prompts are tokenized."""
    num_prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
    if (count := num_prompts * body.n) > max_sequences:
        made = f"{num_prompts} prompts with n={body.n} make {count} sequences"
        raise invalid(f"{made}; this server accepts {max_sequences} at once: send fewer", param="n")
    if body.tightwire.prefill and (info.plan.stages is None or info.plan.is_pipeline):
        how = "passes stages" if info.plan.is_pipeline else "is computed by all ranks together"
        why = f"every prompt {how} here; start the server with --layout hybrid for a choice"
        raise invalid(f"tightwire.prefill: {why}", param="tightwire.prefill")
    policy = info.policy(body.tightwire)
    if policy is not None and policy not in info.plan.policy_names:
        why = "it has one rank, which sums nothing" if info.tp == 1 else "start it with --allreduce-extra to add others"
        names, path = ", ".join(info.plan.policy_names), "tightwire.allreduce"
        raise invalid(f"{path}: there is no {policy[:200]!r} here; this server has {names}: {why}", path)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options requires stream: true", param="stream_options")
    for name in ("prompt_logprobs", "return_token_ids") if body.stream else ():
        if getattr(body, name) not in (None, False):
            raise invalid(f"{name} is not available with stream: true; leave out stream", param=name)
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        check_ids(getattr(body, name) or (), info, name)


def check_ids(ids: Iterable[int], info: ModelInfo, param: str) -> None:
    """400 unless every id is in the vocabulary."""
    bad = next((id_ for id_ in ids if not 0 <= id_ < info.vocab_size), None)
    if bad is not None:
        shown = f"the token id {bad if abs(bad) < 10**40 else 'a huge id'}"
        raise invalid(f"{param} has {shown}; the vocabulary of {info.name!r} is 0 to {info.vocab_size - 1}", param)


def make_sequences(body: GenerationBody, model: ServedModel, prompts: Iterable[Prompt]) -> list[TokenSequence]:
    """``n`` sequences for each prompt, in OpenAI's order of choices. Raises ApiError 400, naming the field."""
    seed = body.seed if body.seed is not None else model.info.default_seed or secrets.randbits(63)
    logprobs, sequences = body.num_logprobs, []
    shared = {**_bans(body, model), "grammar": _grammar(body, model), "logprobs": logprobs}
    for prompt in prompts:
        # Some tokenizers have tokens that were added after training, without an embedding in the model.
        check_ids(prompt.token_ids, model.info, body.text_param)
        asked = _token_limit(body, model.info, len(prompt.token_ids), may_be_0=prompt.echo is not None)
        scored = body.prompt_logprobs
        if prompt.echo is not None and logprobs is not None:
            scored = max(logprobs, scored or 0)
        for choice in range(body.n):
            own = (seed + choice + 2**63) % 2**64 - 2**63  # n answers to a seed near the end of int64 wrap around
            once = scored if choice == 0 else None  # ``generate`` gives the scores to the other choices too
            params = body.sampling_params(max_tokens=max(asked, 1), seed=own, prompt_logprobs=once, **shared)
            sequences.append(TokenSequence(len(sequences), prompt, params, body, model.tokens))
    return sequences


def _grammar(body: GenerationBody, model: ServedModel) -> str:
    """The grammar of the answer; empty: none. Raises ApiError 400."""
    grammar = ""
    if isinstance(body, ChatBody) and body.demands_calls:
        # OpenAI's response_format is the form of an answer's text, and demanded calls are no text.
        if body.structured_outputs is not None:
            raise invalid("tool_choice demands calls, so the answer has no other form; leave one out", "tool_choice")
        grammar = tool_grammar(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    elif body.response_format is not None or body.structured_outputs is not None:
        grammar = structured_grammar(body.response_format, body.structured_outputs)
    if grammar and body.ignore_eos:
        raise invalid("ignore_eos continues an answer whose form says where it ends; leave it out", param="ignore_eos")
    ends = model.tokenizer.eos_token_ids
    if grammar and ends and not set(ends).intersection(body.allowed_token_ids or ends):
        raise invalid(f"allowed_token_ids needs an end token beside a form: one of {ends}", "allowed_token_ids")
    return grammar


def _bans(body: GenerationBody, model: ServedModel) -> dict[str, tuple[Any, ...] | None]:
    """``allowed_token_ids`` and ``bad_words`` as the sampler reads them. 400 if they leave no token."""
    allowed = None if body.allowed_token_ids is None else tuple(sorted(set(body.allowed_token_ids)))
    if (num_chars := sum(map(len, body.bad_words))) > _MAX_BANNED_CHARS:
        raise invalid(f"bad_words has {num_chars} characters; at most {_MAX_BANNED_CHARS} are possible", "bad_words")
    words = tuple(model.tokens.banned(word, model.info.vocab_size) for word in body.bad_words)
    banned = {token_id for word in words for token_id in word.whole}
    if body.min_tokens:
        banned.update(body.stop_token_ids, () if body.ignore_eos else model.tokenizer.eos_token_ids)
    if banned.issuperset(range(model.info.vocab_size) if allowed is None else allowed):
        given = "the whole vocabulary" if allowed is None else f"all {len(allowed)} allowed_token_ids"
        why = f"bad_words and min_tokens, which bans stop tokens, leave no token: they ban {given}; ban fewer"
        raise invalid(why, "bad_words" if allowed is None else "allowed_token_ids")
    return {"allowed_token_ids": allowed, "bad_words": words}


def _token_limit(body: GenerationBody, info: ModelInfo, num_prompt_tokens: int, *, may_be_0: bool) -> int:
    context, given = info.plan.max_model_len, body.token_limit
    room = context - num_prompt_tokens
    if not num_prompt_tokens:
        raise invalid(f"{body.text_param} is empty: it has no tokens", param=body.text_param)
    if room < 1:
        advice = f"must hold prompt and answer: shorten the prompt to at most {context - 1}"
        message = f"the prompt has {num_prompt_tokens} tokens; the model's context of {context} {advice}"
        raise invalid(message, body.text_param, "context_length_exceeded")
    default = body.default_tokens or int(info.sampling.get("max_new_tokens", room))
    asked = min(default, room) if given is None else given
    if asked > room:
        both = f"{num_prompt_tokens} prompt tokens and max_tokens={asked} exceed the model's {context}"
        message = f"{both}; shorten the prompt or ask for at most {room}"
        raise invalid(message, "max_tokens", "context_length_exceeded")
    if asked == 0 and not may_be_0:
        raise invalid("max_tokens must be at least 1; 0 requires echo: true", param="max_tokens")
    if body.min_tokens > asked:
        raise invalid(f"min_tokens={body.min_tokens} is above max_tokens={asked}", param="min_tokens")
    return asked
