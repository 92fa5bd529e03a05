"""``tightwire bench lab structured``: asks a running server for JSON of many schemas, and for as many tokens without.

Masks are timed afterwards: the server's own code follows each answer's tokens in this process.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
from jsonschema_rs import ValidationError, validator_for
from prometheus_client.parser import text_string_to_metric_families

from tightwire.bench.client import ask
from tightwire.bench.lab.structured.options import StructuredOptions
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.open import open_checkpoint
from tightwire.model.sampling.grammar import GrammarMasks, make_grammar
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.remote import Remote, RemoteError, connect

Schema = dict[str, Any]

_SCHEMAS = Path(__file__).with_name("schemas.jsonl")
_TIMEOUT_S = 900.0
_COUNTERS = ("tightwire_forced_tokens_total", "tightwire_generation_tokens_total")


@dataclass(frozen=True, slots=True)
class Answer:
    index: int
    token_ids: list[int]
    problem: str | None  # why it is not valid, if it is not


Ask = Callable[[], Awaitable[Answer]]


class StructuredBench(Bench[StructuredOptions]):
    verb = "structured"
    of_lab = True
    metrics = (Metric(name="tokens_per_s", unit="tokens/s", better="faster", worse="slower"),)
    columns = (
        Column("arm", "name"),
        Column("answers", "answers", "d"),
        Column("valid, %", "valid", ".2f", 100),
        Column("tokens", "tokens", "d"),
        Column("tokens/s", "tokens_per_s", ".1f"),
        Column("forced tokens, %", "forced", ".1f", 100),
        Column("mask us, p50", "mask_p50_us", ".0f"),
        Column("p99", "mask_p99_us", ".0f"),
    )
    failures = ((ModelError, 2), (RemoteError, 1))

    def measure(self) -> None:
        options = self.options
        checkpoint = open_checkpoint(options.model)
        schemas = read_schemas(options.schemas)
        remote = connect(options.url, api_key=options.api_key)
        with self.progress:
            answers = asyncio.run(self._measure(remote, schemas))
        structured = self.measured[0]
        grammars = [make_grammar("json", schema) for schema in schemas]
        config, backend = checkpoint.config, checkpoint.tokenizer().backend
        masks = GrammarMasks(config.vocab_size, config.eos_token_ids, backend.to_str)
        mask_us = [us for answer in answers for us in _time_masks(masks, grammars[answer.index], answer.token_ids)]
        structured["mask_p50_us"], structured["mask_p99_us"] = np.percentile(mask_us, (50, 99)).tolist()
        wrong = [answer for answer in answers if answer.problem is not None]
        self.keep()
        self.print_table(Table(title="Answers with and without a schema", columns=self.columns, rows=self.measured))
        if wrong:
            raise BenchFailedError(f"{len(wrong)} answers are invalid; the first, {wrong[0].index}: {wrong[0].problem}")

    async def _measure(self, remote: Remote, schemas: Sequence[Schema]) -> list[Answer]:
        options = self.options
        answers: list[Answer] = []
        structured: dict[str, Any] = {"name": "with schemas", "samples": {"tokens_per_s": []}}
        free: dict[str, Any] = {"name": "without", "samples": {"tokens_per_s": []}}
        self.measured += [structured, free]
        changes = dict.fromkeys(_COUNTERS, 0.0)
        async with httpx.AsyncClient(headers=dict(remote.headers), timeout=_TIMEOUT_S, trust_env=False) as http:
            ask_for = partial(_ask_for, http, remote, options)
            await ask_for(0, None, 2)
            await ask_for(0, {"type": "object"}, 2)  # the server's first grammar
            for part in np.array_split(np.arange(len(schemas)), min(options.rounds, len(schemas))):
                task = self.progress.add_task(f"schemas {part[0]} to {part[-1]}", total=2 * len(part))
                asks = [partial(ask_for, i, schemas[i], options.max_tokens) for i in part.tolist()]
                before = await _counters(http, remote)
                new = await self._all(asks, structured, task)
                after = await _counters(http, remote)
                changes = {name: changes[name] + after[name] - before[name] for name in _COUNTERS}
                answers += new
                structured["valid"] = sum(answer.problem is None for answer in answers) / len(answers)
                structured["problems"] = {answer.index: answer.problem for answer in answers if answer.problem}
                structured["forced"] = changes[_COUNTERS[0]] / changes[_COUNTERS[1]]
                asks = [partial(ask_for, each.index, None, len(each.token_ids)) for each in new]
                await self._all(asks, free, task)
                self.progress.remove_task(task)
                self.keep()
        return answers

    async def _all(self, asks: Sequence[Ask], cell: dict[str, Any], task: Any) -> list[Answer]:
        """The answers in order; ``concurrency`` requests at once. Adds their tokens and times to ``cell``."""
        slots = asyncio.Semaphore(self.options.concurrency)

        async def one(ask: Ask) -> Answer:
            async with slots:
                answer = await ask()
            self.progress.advance(task)
            return answer

        start_s = time.perf_counter()
        answers = await asyncio.gather(*map(one, asks))
        seconds, num_tokens = time.perf_counter() - start_s, sum(len(answer.token_ids) for answer in answers)
        cell["samples"]["tokens_per_s"].append(num_tokens / seconds)
        for name, count in (("answers", len(answers)), ("tokens", num_tokens), ("seconds", seconds)):
            cell[name] = cell.get(name, 0) + count
        cell["tokens_per_s"] = cell["tokens"] / cell["seconds"]
        return answers


def read_schemas(count: int) -> list[Schema]:
    """The first schemas of the bench's file: varied features, bounded so that an answer at temperature 1 ends."""
    return [json.loads(line) for line in _SCHEMAS.read_text(encoding="utf-8").splitlines()[:count]]


async def _ask_for(
    http: httpx.AsyncClient,
    remote: Remote,
    options: StructuredOptions,
    index: int,
    schema: Schema | None,
    max_tokens: int,
) -> Answer:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "made_up", "schema": schema}}}
    body = {
        "model": remote.model,
        "messages": [{"role": "user", "content": f"Invent something, number {index}. Answer with JSON."}],
        "temperature": options.temperature,
        "seed": options.seed + index,
        "max_tokens": max_tokens,
        "tightwire": {"token_ids": True},
        # Each request computes its whole prompt, also the second one with the same prompt.
        "cache_salt": f"{index} {'without' if schema is None else 'with'} a schema",
        **({"ignore_eos": True} if schema is None else form),
    }
    answer = await ask(http, f"{remote.base}/chat/completions", body)
    [choice], [token_ids] = answer["choices"], answer["tightwire"]["token_ids"]
    return Answer(index, token_ids, None if schema is None else _problem(schema, choice))


def _problem(schema: Schema, choice: dict[str, Any]) -> str | None:
    if choice["finish_reason"] != "stop":
        return f"the answer ended by {choice['finish_reason']}"
    try:
        validator_for(schema).validate(json.loads(choice["message"]["content"]))
    except json.JSONDecodeError as error:
        return f"not JSON: {error}"
    except ValidationError as error:
        return error.message
    return None


async def _counters(http: httpx.AsyncClient, remote: Remote) -> dict[str, float]:
    response = await http.get(remote.base.removesuffix("/v1") + "/metrics")
    samples = [each for family in text_string_to_metric_families(response.text) for each in family.samples]
    found = {each.name: each.value for each in samples if not each.labels}
    if missing := [name for name in _COUNTERS if name not in found]:
        raise RemoteError(f"{remote.base} has no counter {missing[0]}; is it a Tightwire server?")
    return {name: found[name] for name in _COUNTERS}


def _time_masks(masks: GrammarMasks, grammar: str, token_ids: Sequence[int]) -> list[float]:
    """Microseconds of CPU time for each mask that the server computed for this answer."""
    params = SamplingParams(max_tokens=len(token_ids), grammar=grammar)
    row: Any = SimpleNamespace(params=params, stop_ids=frozenset(), token_ids=[], num_prompt_tokens=0)
    masks.forced(row)
    taken: list[float] = []
    while len(row.token_ids) < len(token_ids):
        start_s = time.thread_time()
        masks.banned(row)
        taken.append(1e6 * (time.thread_time() - start_s))
        row.token_ids.append(token_ids[len(row.token_ids)])
        row.token_ids += masks.forced(row)
    masks.release(row)
    return taken
