"""How one request wants its tokens chosen. Pure data: sent between processes, checked where the request is made."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The knobs of one sequence, as in the OpenAI API and vLLM's extensions of it.

    ``temperature`` 0 is greedy. ``top_k`` 0 keeps all. ``seed`` is always set by the time a request reaches the
    engine: a request without one gets a random one, and n > 1 gets n different ones.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # top-n beside each chosen token; None: no logprobs at all
    prompt_logprobs: int | None = None  # likewise for the prompt's own tokens
    stop_token_ids: tuple[int, ...] = ()  # the model's end tokens are added by the engine unless ignore_eos
    min_tokens: int = 0  # no stop token before this many
    ignore_eos: bool = False


# As in vLLM: below this, float32 logits divided by the temperature leave nothing but the largest one.
_GREEDY_BELOW = 1e-5


def is_greedy(params: SamplingParams) -> bool:
    """Whether the most likely token is taken, whatever the seed."""
    return params.temperature < _GREEDY_BELOW or params.top_k == 1
