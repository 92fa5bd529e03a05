"""Turns a checked body into sequences for the engine: tokens, seeds, and the limits that depend on the model.

Limits that hold for every model are in ``schemas``.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import TypeVar

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.api.errors import ApiError, invalid
from tightwire.server.api.generation import Sequence, TextOptions
from tightwire.server.api.schemas import Body, GenerationBody
from tightwire.server.api.serving import ModelInfo, ServedModel

T = TypeVar("T")

# Tokenizing takes about 0.3 us per character. A thread adds about 0.2 ms on an idle core, too much for short texts.
_INLINE_CHARS = 4000


async def run_off_loop(work: Callable[[], T], num_chars: int) -> T:
    """Run ``work`` in a thread if the text is long, so that other requests' tokens are not delayed."""
    return work() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(work)


def check_model(body: Body, info: ModelInfo) -> None:
    """404 if the body names another model."""
    if body.model is not None and body.model != info.name:
        raise make_unknown_model_error(body.model, info)


def make_unknown_model_error(name: str, info: ModelInfo) -> ApiError:
    message = f"the model {name[:200]!r} does not exist here; this server has {info.name!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def check_count(num_prompts: int, n: int, max_sequences: int) -> None:
    """400 for more sequences than the server can ever accept. Called before tokenizing the prompts."""
    if num_prompts * n > max_sequences:
        raise invalid(
            f"{num_prompts} prompts with n={n} make {num_prompts * n} sequences; this server accepts {max_sequences} "
            "at once: send fewer",
            param="n",
        )


def make_sequences(
    body: GenerationBody,
    model: ServedModel,
    prompts: list[list[int]],
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
    echoes: list[str | None] | None = None,
    after_text: bool = False,
) -> list[Sequence]:
    """``n`` sequences for each prompt, in OpenAI's order of choices.

    Args:
        max_tokens: the client's limit, if it sent one.
        default_max_tokens: the limit otherwise; None: as many as fit the context.
        echoes: the text of each prompt, if answers begin with it.
        after_text: the answer continues the prompt's text (``Detokenizer``).

    Raises:
        ApiError: 400, naming the field.
    """
    _check_options(body, model.info)
    seed = _seed(body, model.info)
    sequences = []
    for position, prompt in enumerate(prompts):
        # Some tokenizers have tokens that were added after training, without an embedding in the model.
        check_ids(prompt, model.info, body.text_param)
        echo = echoes[position] if echoes else None
        asked = _check_length(body, model.info, prompt, max_tokens, default_max_tokens, echo is not None)
        text = TextOptions(body.stop, body.include_stop_str_in_output, echo, after_text, discard_tokens=asked == 0)
        for choice in range(body.n):
            params = _sampling_params(body, max(asked, 1), seed + choice, logprobs, echo is not None)
            sequences.append(Sequence(position * body.n + choice, prompt, params, model.tokens, text))
    return sequences


def _check_options(body: GenerationBody, info: ModelInfo) -> None:
    policy = body.tightwire.allreduce
    if policy is not None and policy not in info.policies:
        why = "it has one rank, which sums nothing" if info.tp == 1 else "start it with --allreduce-extra to add others"
        raise invalid(
            f"tightwire.allreduce: there is no {policy[:200]!r} here; this server has {', '.join(info.policies)}: {why}",
            param="tightwire.allreduce",
        )
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options requires stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs is not available with stream: true; leave out stream", param="prompt_logprobs")
    for name, ids in (("logit_bias", list(body.logit_bias)), ("stop_token_ids", body.stop_token_ids)):
        check_ids(ids, info, name)


def check_ids(ids: list[int], info: ModelInfo, param: str) -> None:
    """400 unless every id is in the vocabulary."""
    bad = next((id_ for id_ in ids if not 0 <= id_ < info.vocab_size), None)
    if bad is not None:
        shown = bad if abs(bad) < 10**40 else "a huge id"
        raise invalid(
            f"{param} has the token id {shown}; the vocabulary of {info.name!r} is 0 to {info.vocab_size - 1}", param
        )


def _check_length(
    body: GenerationBody,
    info: ModelInfo,
    prompt: list[int],
    max_tokens: int | None,
    default_max_tokens: int | None,
    echo: bool,
) -> int:
    """The number of tokens to generate, at most."""
    room = info.max_model_len - len(prompt)
    if not prompt:
        raise invalid(f"{body.text_param} is empty: it has no tokens", param=body.text_param)
    if room < 1:
        raise invalid(
            f"the prompt has {len(prompt)} tokens; the model's context of {info.max_model_len} must hold prompt and "
            f"answer: shorten the prompt to at most {info.max_model_len - 1}",
            param=body.text_param,
            code="context_length_exceeded",
        )
    if max_tokens is None:
        asked = room if default_max_tokens is None else min(default_max_tokens, room)
    else:
        asked = max_tokens
    if asked > room:
        raise invalid(
            f"{len(prompt)} prompt tokens and max_tokens={asked} exceed the model's {info.max_model_len}; "
            f"shorten the prompt or ask for at most {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if asked == 0 and not echo:
        raise invalid("max_tokens must be at least 1; 0 requires echo: true", param="max_tokens")
    if body.min_tokens > asked:
        raise invalid(f"min_tokens={body.min_tokens} is above max_tokens={asked}", param="min_tokens")
    return asked


def _seed(body: GenerationBody, info: ModelInfo) -> int:
    if body.seed is not None:
        return body.seed
    return info.default_seed or secrets.randbits(63)


def _sampling_params(
    body: GenerationBody, max_tokens: int, seed: int, logprobs: int | None, echo: bool
) -> SamplingParams:
    prompt_logprobs = body.prompt_logprobs
    if echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    return body.sampling_params(
        max_tokens=max_tokens,
        seed=(seed + 2**63) % 2**64 - 2**63,  # n answers to a seed near the end of int64 wrap around
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
