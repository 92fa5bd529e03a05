"""One sequence inside the engine, from its arrival to its last token."""

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from tightwire.model.sampling.candidates import candidates_needed
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.engine.step_times import Reading
from tightwire.server.ipc.messages import AddRequest, TokenLogprob


@dataclass(slots=True, eq=False)
class Request:
    """Tokens so far, how many of them are in the cache, and where.

    One view serves prefill, decode and recomputation: ``token_ids`` is prompt then output, ``num_computed`` of them
    have keys and values in ``blocks``, or will have when the steps launched so far are done, and the rest is to be
    computed. When nothing is left to compute after a step, that step's last row of logits gives the next token. While it
    is not known the last of ``token_ids`` may be a reference to it (``model/references``).
    """

    id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    stop_ids: frozenset[int]
    arrival_s: float
    arm: int = 0  # its steps are summed by this one of the model's sets of AllReduces
    replica: int = 0  # that computes it
    cache_salt: str = ""  # requests of unlike salts share no cached prefix
    first_scheduled_s: float | None = None
    at_first_step: Reading | None = None  # the engine's times when its first step began
    num_computed: int = 0
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    was_preempted: bool = False
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache unless it was preempted
    num_entered_blocks: int = 0  # the first so many of ``blocks`` are known to the prefix cache
    prefix: Hashable = None  # what the prefix cache knows the last of them by
    token_bytes: bytearray = field(default_factory=bytearray)  # token_ids as int32, as far as a draft has needed them
    draft_limit: int = 0  # the longest draft worth making after how the last one fared; 0: not known yet
    # Entries so far, the first None; None when not asked for, or already sent.
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_candidates: int = 0  # so many of the best logits decide its next token; 0: all may

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_known(self) -> int:
        """Tokens without the reference that may stand at the end."""
        return len(self.token_ids) - (self.token_ids[-1] < 0)

    @property
    def in_prompt(self) -> bool:
        """Whether the next token to compute is one of the prompt's."""
        return self.num_computed < self.num_prompt_tokens

    def rows_to_score(self, start: int, end: int) -> range:
        """Positions in [start, end) whose logits score the prompt token after them and were not scored before."""
        if self.prompt_logprobs is None:
            return range(0)
        first = max(start, len(self.prompt_logprobs) - 1)
        return range(first, max(first, min(end, self.num_prompt_tokens - 1)))


def make_request(message: AddRequest, eos_token_ids: Iterable[int], arrival_s: float, arm: int = 0) -> Request:
    params = message.params
    stop_ids = frozenset(params.stop_token_ids)
    return Request(
        id=message.id,
        params=params,
        token_ids=list(message.prompt_token_ids),
        num_prompt_tokens=len(message.prompt_token_ids),
        stop_ids=stop_ids if params.ignore_eos else stop_ids.union(eos_token_ids),
        arrival_s=arrival_s,
        arm=arm,
        cache_salt=message.cache_salt,
        prompt_logprobs=None if params.prompt_logprobs is None else [None],
        num_candidates=candidates_needed(params),
    )


def why_refused(message: AddRequest, *, vocab_size: int, max_model_len: int, arms: Sequence[str]) -> str | None:
    """What makes this request impossible to run here; None when it can run.

    The HTTP side has checked ranges already. This is what would harm others if it slipped through.
    """
    prompt, params = message.prompt_token_ids, message.params
    if not prompt:
        return "the prompt has no tokens; send at least one"
    for what, ids in (("prompt", prompt), ("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        outside = next((i for i in ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            return f"token id {outside} in {what} is outside the vocabulary; ids are 0 to {vocab_size - 1}"
    if message.allreduce is not None and message.allreduce not in arms:
        return f"there is no allreduce {message.allreduce!r} here; this server has {', '.join(arms)}"
    if params.max_tokens < 0:
        return f"max_tokens must be at least 0, got {params.max_tokens}"
    if len(prompt) + params.max_tokens > max_model_len:
        room = max_model_len - len(prompt)
        return (
            f"{len(prompt)} prompt tokens and max_tokens={params.max_tokens} exceed the context of {max_model_len} "
            f"tokens; " + (f"ask for at most {room}" if room > 0 else "shorten the prompt")
        )
    if min(params.logprobs or 0, params.prompt_logprobs or 0) < 0:
        return f"logprobs must be at least 0, got {params.logprobs} and prompt_logprobs {params.prompt_logprobs}"
    return None
