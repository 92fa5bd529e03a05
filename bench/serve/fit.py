"""Finds out, before the measurement, which fields a server accepts and how it counts tokens.

Servers differ: some refuse unknown fields (``ignore_eos``, ``stream_options``), and only the server's own tokenizer gives the
length of a prompt.
"""

import math
from collections.abc import Mapping
from typing import Any

from tightwire.bench.client import BenchClient, Prompt
from tightwire.bench.serve.workload import GeneratedWorkload, WordScale
from tightwire.server.cli.remote import RemoteError

_FIT_ATTEMPTS = 8
_SHRINK = 4
_REFUSED = ("HTTP 400", "HTTP 422")


async def send_accepted_fields(
    client: BenchClient, body: Mapping[str, Any], probe: Prompt
) -> tuple[dict[str, Any], list[str]]:
    """Make ``client`` send those fields of ``body`` that the server accepts; returns them, and the names it refused.

    Raises:
        RemoteError: it refuses the request in every form; has its answer to the full request.
    """
    without = {name: value for name, value in body.items() if name != "ignore_eos"}
    first_error: str | None = None
    for fields, asks_usage in [(dict(body), True), (dict(body), False), (without, True), (without, False)]:
        client.send_fields(fields, asks_usage=asks_usage)
        sample = await client.measure(probe)
        if sample.error is None:
            lost = [name for name in body if name not in fields]
            return fields, [*lost, *([] if asks_usage else ["stream_options"])]
        first_error = first_error or sample.error
        if not sample.error.startswith(_REFUSED):
            break
    raise RemoteError(f"a trial request failed: {first_error}")


async def fit_scale(client: BenchClient, workload: GeneratedWorkload) -> None:
    """Set ``workload.scale`` so that the server counts ``input_len`` tokens in a prompt, chat template included.

    Unchanged for a server that sends no count.

    Raises:
        RemoteError: the server refuses the prompt, or no number of words comes within 2 % of the length (if a word is many
            tokens: within the difference between prompts of equally many words).
    """
    input_len, words = workload.input_len, workload.input_len
    tokens_per_word = 1.0
    error: str | None = None
    trials: list[tuple[int, int]] = []
    for attempt in range(_FIT_ATTEMPTS):
        sample = await client.measure(workload.probe(words, attempt))
        if error := sample.error:
            if error.startswith(_REFUSED) and not trials and words >= _SHRINK:
                # A word may be many tokens here, so the prompt exceeds the context although input_len tokens do not.
                words //= _SHRINK
                continue
            raise RemoteError(f"a trial request failed: {error}")
        counted = sample.num_prompt
        if not sample.usage:
            return
        if words == 1 and counted > input_len:
            raise RemoteError(f"one word is already {counted} prompt tokens here, more than --input-len {input_len}")
        # The slope between two trials excludes the template's tokens; trials close to each other would give noise.
        if not trials:
            tokens_per_word = counted / words
        elif abs(words - trials[-1][0]) > 2 and (slope := (counted - trials[-1][1]) / (words - trials[-1][0])) > 0:
            tokens_per_word = slope
        trials.append((words, counted))
        if counted == input_len:
            break
        words = max(1, words + round((input_len - counted) / max(1.0, tokens_per_word)))
    if not trials:
        raise RemoteError(f"a trial request failed: {error}")
    words, counted = min(trials, key=lambda trial: abs(trial[1] - input_len))
    # Random words have different lengths, so prompts of equally many words differ by a fraction of this; it exceeds 2 % if
    # a word is many tokens (of a byte tokenizer, for example).
    spread = tokens_per_word * math.sqrt(words)
    if abs(counted - input_len) > max(2, 0.02 * input_len, spread):
        raise RemoteError(f"cannot make prompts of {input_len} tokens for this server; the nearest had {counted}")
    workload.scale = WordScale(tokens_per_word=tokens_per_word, overhead=input_len - tokens_per_word * words)
