"""Defines one sequence inside the engine, from arrival to last token, and the checks before it is accepted."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from tightwire.comm.ledger.ledger import Spent
from tightwire.model.sampling.parameters import SamplingParams, TokenScore
from tightwire.server.ipc.messages import AddRequest


class Reading(NamedTuple):
    """Rank 0's totals since start at ``at_s``. ``forward_s`` includes the collectives of ``comm``."""

    at_s: float
    forward_s: float
    sampling_s: float
    comm: Spent


@dataclass(slots=True, eq=False)
class Request:
    """A sequence's tokens, how many of them are in the KV cache, and their blocks.

    ``token_ids``: the prompt, then the output, whose last token may be deferred (``model/step``). The first
    ``num_computed`` have keys and values in ``blocks``, or will have once the launched steps are done: the first block of each
    group of layers, then the second of each; -1 for one that was freed because no later token reads it.
    """

    id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    stop_ids: frozenset[int]
    arrival_s: float
    policy: int = 0  # index of the AllReduce policy that sums its steps
    replica: int = 0  # the replica that computes it
    cache_salt: str = ""  # requests of different salts share no cached prefix
    adapter: int = 0  # id of its LoRA adapter; 0: none
    adapter_slot: int = -1  # where the ranks hold that adapter
    first_scheduled_s: float | None = None
    at_first_step: Reading | None = None  # the engine's times when its first step began
    num_computed: int = 0
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    was_preempted: bool = False
    epoch: int = 0  # rises when its blocks are freed, so that chunks under way count no more
    entered_at: int = 0  # the step in which its last chunk entered the first stage; 0: none has
    ready_at: int = 0  # the first step that may have decode rows: its prompt has passed all stages
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache before any preemption
    num_passed_blocks: int = 0  # the number of blocks, from the first, that groups with a window have freed
    num_entered_blocks: int = 0  # the number of blocks, from the first, that are in the prefix cache
    prefix_keys: list[bytes] = field(default_factory=list)  # of its first blocks in the prefix cache
    token_bytes: bytearray = field(default_factory=bytearray)  # token_ids as int32, extended when a draft is made
    # How often a drafted token was right, by the length of the match before it; that length and the shares of the last draft.
    draft_rates: list[float] = field(default_factory=list)
    draft_basis: tuple[int, list[float]] = (0, [])
    # The classes of its tokens from a model (``ModelDrafter``), before those of the text.
    draft_classes: list[int] = field(default_factory=list)
    # Entries so far, the first None; None if not requested, or already sent.
    prompt_logprobs: list[TokenScore | None] | None = None
    # Its progress as reported: the prompt's tokens in the KV cache, and those that its own steps computed. None: not asked for, or done.
    reported: tuple[int, int] | None = None
    needs_tokens: bool = False  # the sampler needs every token so far, so no step is planned ahead of them

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_known(self) -> int:
        """Number of tokens, not counting a deferred one at the end."""
        return len(self.token_ids) - (self.token_ids[-1] < 0)

    @property
    def in_prompt(self) -> bool:
        """True if the next token to compute belongs to the prompt."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to the first scheduled step; None before it."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    def rows_to_score(self, start: int, end: int) -> range:
        """Positions in [start, end) whose logits score the prompt token after them and were not scored before."""
        if self.prompt_logprobs is None:
            return range(0)
        first = max(start, len(self.prompt_logprobs) - 1)
        return range(first, max(first, min(end, self.num_prompt_tokens - 1)))

    def take_prompt_logprobs(self) -> list[TokenScore | None] | None:
        """The prompt's logprobs on the first call, None afterwards."""
        logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRules:
    """The facts of this engine that a request is checked against. ``policies``: the names it may choose, the server's own first."""

    vocab_size: int
    max_model_len: int
    policies: Sequence[str] = ("auto",)
    has_grammars: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if outside := [i for i in self.eos_token_ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"end tokens {outside} are outside the vocabulary of {self.vocab_size}")

    def find_problem(self, message: AddRequest) -> str | None:
        """The reason this request cannot run here. The HTTP process checks ranges; this protects the other requests."""
        prompt, params = message.prompt_token_ids, message.params
        if not prompt:
            return "the prompt has no tokens; send at least one"
        ids_of = {
            "prompt": prompt,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": chain.from_iterable(step for word in params.bad_words for step in word.steps),
        }
        for name, ids in ids_of.items():
            outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
            if outside is not None:
                return f"token id {outside} in {name} is outside the vocabulary; ids are 0 to {self.vocab_size - 1}"
        if message.allreduce is not None and message.allreduce not in self.policies:
            return f"there is no allreduce {message.allreduce!r} here; this server has {', '.join(self.policies)}"
        if params.grammar and not self.has_grammars:
            return "this engine has no tokenizer, so it cannot follow a grammar"
        if params.max_tokens < 0:
            return f"max_tokens must be at least 0, got {params.max_tokens}"
        if len(prompt) + params.max_tokens > self.max_model_len:
            room = self.max_model_len - len(prompt)
            both = f"{len(prompt)} prompt tokens and max_tokens={params.max_tokens} exceed the context"
            advice = f"ask for at most {room}" if room > 0 else "shorten the prompt"
            return f"{both} of {self.max_model_len} tokens; {advice}"
        if min(params.logprobs or 0, params.prompt_logprobs or 0) < 0:
            return f"logprobs must be at least 0, got {params.logprobs} and prompt_logprobs {params.prompt_logprobs}"
        return None


def make_request(
    message: AddRequest, eos_token_ids: Iterable[int], arrival_s: float, policy: int = 0, adapter_slot: int = -1
) -> Request:
    params = message.params
    return Request(
        id=message.id,
        params=params,
        token_ids=list(message.prompt_token_ids),
        num_prompt_tokens=len(message.prompt_token_ids),
        stop_ids=frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids),
        arrival_s=arrival_s,
        policy=policy,
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        adapter_slot=adapter_slot,
        prompt_logprobs=None if params.prompt_logprobs is None else [None],
        reported=(0, 0) if message.progress else None,
        needs_tokens=params.needs_tokens,
    )
