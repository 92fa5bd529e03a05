"""Runs the ranks without the HTTP process for one prompt and writes the text as it arrives: ``generate``."""

import asyncio
import secrets
import sys

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.text.tokenizer import Tokenizer
from tightwire.progress import Progress, Speed
from tightwire.server.api.detokenize import Detokenizer, TokenTable
from tightwire.server.cli.start import AnswerOptions, say
from tightwire.server.config.serve import ServeConfig
from tightwire.server.engine.request import RequestRules
from tightwire.server.ipc.engine_client import EngineUnavailableError
from tightwire.server.ipc.messages import AddRequest
from tightwire.server.ranks.processes import Ranks
from tightwire.server.ranks.ranked_engine import RankedEngine, RankFailedError


def generate(config: ServeConfig, ranks: Ranks, progress: Progress, answer: AnswerOptions) -> int:
    """Continue the prompt. Exit code 0; 2 if refused, 1 if a rank is lost."""
    try:
        asyncio.run(_generate(config, ranks, progress, answer))
    except (ValueError, RankFailedError, EngineUnavailableError) as error:
        progress.say(f"tightwire generate: {error}")
        return 2 if isinstance(error, ValueError) else 1
    finally:
        progress.close()
    return 0


async def _generate(config: ServeConfig, ranks: Ranks, progress: Progress, answer: AnswerOptions) -> None:
    async with RankedEngine(config, ranks, progress) as engine:
        _, decision, tokenizer = await engine.start()
        messages, adapters = [{"role": "user", "content": answer.prompt}], decision.plan.adapters
        ids = tokenizer.encode_chat(messages) if answer.chat else tokenizer.encode(answer.prompt)
        seed = config.model.seed or secrets.randbits(63)
        params = SamplingParams(max_tokens=answer.max_tokens, temperature=answer.temperature, seed=seed)
        request = AddRequest("generate", ids, params, adapter=adapters.loaded[0].id if adapters else 0)
        rules = RequestRules(vocab_size=tokenizer.vocab_size, max_model_len=decision.plan.max_model_len)
        if (problem := rules.find_problem(request)) is not None:
            raise ValueError(problem)
        await engine.wait_ready()
        progress.close()
        await engine.guard(_print_answer(engine, request, tokenizer, after_text=not answer.chat))
        await engine.stop()


async def _print_answer(engine: RankedEngine, request: AddRequest, tokenizer: Tokenizer, *, after_text: bool) -> None:
    detokenizer = Detokenizer(TokenTable(tokenizer.backend), after_text=after_text)
    speed, out = Speed(), sys.stdout
    async for output in engine.client.submit([request]):
        if output.finish_reason == "error":
            raise ValueError(output.message)
        out.writelines(detokenizer.push(token_id) for token_id in output.token_ids)
        out.flush()
        speed.count(len(output.token_ids))
    out.write(detokenizer.flush() + "\n")
    out.flush()
    say(speed.describe())
