"""An engine client in this process with the real engine and sampler over a model without weights."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from helpers.server.draft_engine import Constant
from helpers.server.fake_engine import INFO, VOCAB_SIZE, FakeEngine, byte_tokenizer
from helpers.server.fake_runner import FakeDraftRunner, FakeRunner

from tightwire.model.sampling.grammar import GrammarMasks
from tightwire.model.sampling.sampler import Sampler
from tightwire.model.text.tokenizer import END_OF_TURN_ID
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import DRAFTERS, Drafter
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.model_drafts import ModelDrafter
from tightwire.server.engine.request import RequestRules
from tightwire.server.ipc.messages import AddRequest, Output

_LIMITS = Limits(
    max_model_len=INFO.plan.max_model_len, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=200, block_size=16
)


@dataclass(kw_only=True)
class SamplingEngine(FakeEngine):
    """Each call of ``submit`` runs a new engine to its end. ``speculation``: as the flag; a model that drafts costs no time."""

    speculation: str = "none"
    plan_ahead: bool = False

    async def submit(self, requests: Sequence[AddRequest]) -> AsyncGenerator[Output, None]:
        self.submitted += requests
        grammars = GrammarMasks(VOCAB_SIZE, [END_OF_TURN_ID], byte_tokenizer().backend.to_str)
        if (drafter := _drafter(self.speculation)) is not None:
            drafter.grammars = grammars
        engine = Engine(
            runner=FakeRunner(_LIMITS, VOCAB_SIZE),
            sampler=Sampler(VOCAB_SIZE, grammars=grammars),
            limits=_LIMITS,
            rules=RequestRules(
                vocab_size=VOCAB_SIZE,
                max_model_len=INFO.plan.max_model_len,
                eos_token_ids=frozenset([END_OF_TURN_ID]),
                has_grammars=True,
            ),
            drafter=drafter,
            plan_ahead=self.plan_ahead,
        )
        for request in requests:
            engine.add(request)
        while engine.has_work():
            for output in engine.step().outputs:
                self.num_outputs += 1
                yield output


def _drafter(speculation: str) -> Drafter | None:
    match speculation:
        case "none":
            return None
        case "ngram":
            return Drafter(max_tokens=4, longest=2, shortest=1)
        case "draft":
            runner = FakeDraftRunner(_LIMITS, VOCAB_SIZE)
            drafter = ModelDrafter(runner, _LIMITS, VOCAB_SIZE)  # pyright: ignore[reportArgumentType]
            drafter.times, drafter._token_times = Constant(1.0), Constant(0.0)
            return drafter
        case _:
            return DRAFTERS[speculation]()
