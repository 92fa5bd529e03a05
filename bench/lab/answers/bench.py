"""``tightwire bench lab answers``: how near the answers of running servers are to the model in float32.

Each server gets a prompt with the first k tokens of transformers' greedy answer in float32, for several k, and returns its 20
most probable next tokens, so one deviation does not spread. The result is KL(reference || server) over those tokens, and
over the rest as one: a lower bound of the divergence over the whole vocabulary.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from tightwire.bench.client import ask
from tightwire.bench.lab.answers.options import AnswersOptions
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.hf_config import config_to_hf
from tightwire.model.checkpoint.tensors import stored_tensors
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.text.tokenizer import Tokenizer
from tightwire.remote import Remote, RemoteError, connect

_PROMPTS = Path(__file__).with_name("prompts.txt")
_BATCH = 10  # prompts that transformers answers together
_TOP = 20  # tokens that a server reports; the limit of most
CLEAR_MARGIN = 0.25  # in logit: five times what bfloat16 activations change it by (RMS 0.048, at most 0.20: RESULTS.md)
_LEAST_PROBABILITY = 1e-12  # of the rest, which rounding of the reported numbers may make negative


class AnswersBench(Bench[AnswersOptions]):
    verb = "answers"
    of_lab = True
    metrics = (Metric(name="kl", unit="nats", better="nearer", worse="farther"),)
    columns = (
        Column("server", "name"),
        Column("KL", "kl", ".6f"),
        Column("first tokens equal, %", "first_equal", ".1f", 100),
        Column("where the margin is clear, %", "first_clear_equal", ".1f", 100),
        Column("all tokens equal, %", "equal", ".2f", 100),
        Column("answers equal in all of them, %", "answers_equal", ".0f", 100),
        Column("contexts", "contexts", "d"),
    )
    failures = ((ModelError, 2), (RemoteError, 1))

    def measure(self) -> None:
        options = self.options
        checkpoint = open_checkpoint(options.model)
        prompts = read_prompts(checkpoint.tokenizer(), options.prompts)
        servers = {
            name: connect(url, flag="--servers")
            for name, _, url in (server.partition("=") for server in options.servers)
        }
        with self.progress:
            task = self.progress.add_task("transformers, float32", total=len(prompts))
            model, answers = float32_model(checkpoint), []
            for start in range(0, len(prompts), _BATCH):
                some = dict(islice(prompts.items(), start, start + _BATCH))
                answers += answer(model, some, options.tokens)
                self.progress.advance(task, len(some))
            del model
            for name, remote in servers.items():
                task = self.progress.add_task(name, total=len(answers))
                compared: list[Compared] = []
                for each in answers:
                    compared += compare(remote, each, options.every)
                    self.progress.advance(task)
                self.measured.append(summary(name, compared))
                self.keep()
        self.print_table(Table(title="Answers against float32", columns=self.columns, rows=self.measured))


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt's greedy continuation."""

    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs_TV: Tensor  # float32, before each token

    def margin(self, position: int) -> float:
        """The difference between the largest logit and the second."""
        first, second = self.log_probs_TV[position].topk(2).values.tolist()
        return first - second


def read_prompts(tokenizer: Tokenizer, num_prompts: int) -> dict[str, list[int]]:
    """The first prompts of each kind, chat messages and text, as token ids by text. Half are of each kind."""
    prompts: dict[str, list[int]] = {}
    for kind in ("chat", "text"):
        lines = [line for line in _PROMPTS.read_text().splitlines() if line.startswith(f"{kind} ")]
        for line in lines[: num_prompts // 2]:
            text = line.removeprefix(f"{kind} ")
            prompts[text] = (
                tokenizer.encode_chat([{"role": "user", "content": text}]) if kind == "chat" else tokenizer.encode(text)
            )
    return prompts


def float32_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """The checkpoint in transformers, unpacked to float32: 4 bytes of memory for each weight."""
    config, reader = checkpoint.config, checkpoint.reader()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_to_hf(config)), dtype=torch.float32).eval()
    tensors = model.state_dict()
    for name in stored_tensors(config):
        reader.read_into(tensors[name], name, rows=range(len(tensors[name])))
    return model


@torch.inference_mode()
def answer(model: PreTrainedModel, prompts: Mapping[str, Sequence[int]], num_tokens: int) -> list[Answer]:
    """The model's greedy answers, computed together; no end token stops one."""
    longest = max(map(len, prompts.values()))
    padding = [longest - len(ids) for ids in prompts.values()]
    inputs = torch.tensor([[0] * pad + list(ids) for pad, ids in zip(padding, prompts.values(), strict=True)])
    mask = (torch.arange(longest + num_tokens) >= torch.tensor(padding)[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    rows, tokens, stop = list[Tensor](), list[Tensor](), longest
    is_new = "cache" in signature(model.forward).parameters  # since transformers 5.24
    cache = {"cache" if is_new else "past_key_values": DynamicCache(config=model.config)}
    for _ in range(num_tokens):
        start = stop - inputs.shape[1]
        places = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        output = model(inputs, **places, **cache, use_cache=True, logits_to_keep=1)
        stop += 1
        rows.append(output.logits[:, -1].float().log_softmax(-1))
        tokens.append(rows[-1].argmax(-1))
        inputs = tokens[-1][:, None]
    log_probs_NTV, tokens_NT = torch.stack(rows, 1), torch.stack(tokens, 1).tolist()
    return [
        Answer(text, list(ids), tokens_NT[n], log_probs_NTV[n].clone()) for n, (text, ids) in enumerate(prompts.items())
    ]


@dataclass(frozen=True, slots=True)
class Compared:
    """One context: the divergence, whether the most probable token is the reference's, and whether that one is clear."""

    prompt: str
    position: int
    kl: float
    equal: bool
    clear: bool


def compare(remote: Remote, reference: Answer, every: int) -> list[Compared]:
    """Ask for the token after every ``every`` tokens; RemoteError if the server refuses or reports no probabilities."""
    found = []
    for position in range(0, len(reference.token_ids), every):
        theirs = _next_tokens(remote, [*reference.prompt_ids, *reference.token_ids[:position]])
        own_V = reference.log_probs_TV[position]
        kl = divergence({token: float(own_V[token]) for token in theirs}, theirs)
        equal = max(theirs, key=theirs.__getitem__) == reference.token_ids[position]
        found.append(Compared(reference.prompt, position, kl, equal, reference.margin(position) > CLEAR_MARGIN))
    return found


def divergence(p_logs: Mapping[int, float], q_logs: Mapping[int, float]) -> float:
    """KL(p || q) in nats of distributions that are known for some tokens, the same for both; the rest counts as one token."""
    p, q = ([math.exp(logs[token]) for token in p_logs] for logs in (p_logs, q_logs))
    p.append(max(1 - sum(p), _LEAST_PROBABILITY))
    q.append(max(1 - sum(q), _LEAST_PROBABILITY))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def summary(name: str, compared: Sequence[Compared]) -> dict[str, Any]:
    first = [each for each in compared if each.position == 0]
    unequal = {each.prompt for each in compared if not each.equal}
    return {
        "name": name,
        "kl": fmean(each.kl for each in compared),
        "first_equal": fmean(each.equal for each in first),
        "first_clear_equal": fmean(clear) if (clear := [each.equal for each in first if each.clear]) else None,
        "equal": fmean(each.equal for each in compared),
        "answers_equal": 1 - len(unequal) / len(first),
        "contexts": len(compared),
        "samples": {"kl": [each.kl for each in compared]},
    }


async def _ask(remote: Remote, body: Mapping[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(headers=dict(remote.headers), timeout=600, trust_env=remote.trust_env) as http:
        return await ask(http, f"{remote.base}/completions", body)


def _next_tokens(remote: Remote, prompt_ids: list[int]) -> dict[int, float]:
    body = {
        "model": remote.model,
        "prompt": prompt_ids,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": _TOP,
        "return_tokens_as_token_ids": True,  # vLLM's name
        "n_probs": _TOP,  # llama.cpp's
    }
    logprobs = asyncio.run(_ask(remote, body))["choices"][0].get("logprobs")
    if not logprobs:
        raise RemoteError(f"{remote.base} reports no log probabilities; start it with support for logprobs={_TOP}")
    if "content" in logprobs:
        return {entry["id"]: entry["logprob"] for entry in logprobs["content"][0]["top_logprobs"]}
    top = logprobs["top_logprobs"][0]
    return {int(token.removeprefix("token_id:")): log_prob for token, log_prob in top.items()}
