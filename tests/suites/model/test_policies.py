"""Several policies in one model: each request gets the text and the messages of its own policy."""

from collections import Counter
from pathlib import Path

import pytest
from helpers.comm.fixed_policy import fixed_policy
from helpers.server.local_engine import continue_prompts, local_engine, run_to_end
from tiny import make_tiny

from tightwire.comm.policy.rules import DROP, FileRule, PolicyFile, apply, one_for_all
from tightwire.model.open import open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.ipc.messages import AddRequest

_POLICIES = {name: fixed_policy(name) for name in ("one-shot", "flash:int4-g64,int4-g64", "ring")}
_PROMPTS = [[5], [72, 101, 108, 108, 111], list(range(40, 100))]


def test_requests_of_different_policies_get_the_text_of_a_server_with_that_policy(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    alone = {}
    for name in _POLICIES:
        with local_engine(checkpoint, tp=2, all_reduce=name, max_model_len=128) as local:
            alone[name] = continue_prompts(local.engine, _PROMPTS, max_tokens=12)
    settings = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with local_engine(checkpoint, tp=2, all_reduce=_POLICIES, max_model_len=128, max_num_batched_tokens=64) as local:
        for number, prompt in enumerate(_PROMPTS):
            for name in (None, *_POLICIES):  # None: the first
                local.engine.add(AddRequest(f"{number} {name}", prompt, settings, allreduce=name))
        outputs = run_to_end(local.engine)
        counted = {count.algorithm for count in local.groups[1].ledger.counters.counts() if count.op == "all_reduce"}
    assert counted == set(_POLICIES)
    for name in (None, *_POLICIES):
        texts = [[t for out in outputs[f"{n} {name}"] for t in out.token_ids] for n in range(len(_PROMPTS))]
        assert texts == alone[name or "one-shot"], name
    assert alone["flash:int4-g64,int4-g64"] != alone["one-shot"], "the codec shows in the text"


@pytest.mark.parametrize("phases", [("prefill", "decode"), ("decode",), ("prefill",)])
def test_dropped_sums_send_nothing_and_a_text_does_not_depend_on_other_requests(
    phases: tuple[str, ...], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    rules = tuple(FileRule(site="o_proj", phase=phase, algorithm=DROP) for phase in phases)  # pyright: ignore[reportArgumentType]
    policies = {"dropped": apply(one_for_all("one-shot"), PolicyFile(rules=rules))}
    with local_engine(checkpoint, tp=2, all_reduce="one-shot", max_model_len=128) as local:
        exact = continue_prompts(local.engine, _PROMPTS, max_tokens=12)
    with local_engine(checkpoint, tp=2, all_reduce=policies, max_model_len=128) as local:
        alone = [continue_prompts(local.engine, [prompt], max_tokens=12)[0] for prompt in _PROMPTS]
        calls: Counter[str] = Counter()
        for count in local.groups[1].ledger.counters.counts():
            if count.op == "all_reduce":
                calls[count.phase] += count.calls
    with local_engine(checkpoint, tp=2, all_reduce=policies, max_model_len=128, max_num_batched_tokens=64) as local:
        together = continue_prompts(local.engine, _PROMPTS, max_tokens=12)
    assert together == alone, "decode rows alone, in the decode kernel, and among prompt rows"
    assert alone != exact
    num_layers = checkpoint.config.num_layers
    for phase, num_steps in (("prefill", 3), ("decode", 3 * 11)):
        assert calls[phase] == num_steps * (1 + num_layers * (1 if phase in phases else 2)), phase


def test_an_unknown_policy_ends_only_its_request(tmp_path: Path) -> None:
    settings = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with local_engine(open_checkpoint(str(make_tiny(tmp_path))), max_model_len=64) as local:
        local.engine.add(AddRequest("wrong", [1], settings, allreduce="ring"))
        local.engine.add(AddRequest("right", [1], settings, allreduce="fixed"))
        outputs = run_to_end(local.engine)
    assert outputs["wrong"][0].finish_reason == "error"
    assert outputs["wrong"][0].message == "there is no allreduce 'ring' here; this server has fixed"
    assert outputs["right"][-1].finish_reason == "length"
