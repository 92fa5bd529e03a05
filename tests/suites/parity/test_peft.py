"""Answers of PEFT's own model in float32: logits close, greedy tokens equal, split or not."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.lora import make_adapter
from helpers.model.transformers_reference import greedy, logits
from helpers.server.local_engine import continue_prompts, local_engine
from tiny import VARIANTS, make_tiny
from transformers import LlamaForCausalLM

from tightwire.model.open import open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.ipc.messages import AddRequest

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed (pip install peft)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),  # PEFT calls what transformers will remove
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

_PROMPTS = [[5], [72, 101, 108, 108, 111], list(range(40, 140)), [200, 3, 17] * 11]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "rank": 6},
        {"targets": ["q_proj", "v_proj"], "rank": 8, "alpha": 4},
        {"ranks": {"down_proj": 2, "q_proj": 7}, "alpha": 9},
    ],
    ids=str,
)
def test_logits_and_tokens_equal_those_of_peft(settings: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    folder = make_tiny(tmp_path / "model", **VARIANTS["odd-heads"])
    checkpoint = open_checkpoint(str(folder))
    adapter = make_adapter(tmp_path / "adapter", checkpoint.config, **settings)
    theirs: Any = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter
    ).eval()
    wanted = [greedy(theirs, prompt, 16) for prompt in _PROMPTS]
    for tp in (1, 2, 3):
        with local_engine(checkpoint, tp=tp, max_model_len=256, max_num_batched_tokens=64, adapters=[adapter]) as local:
            assert continue_prompts(local.engine, _PROMPTS, [1] * len(_PROMPTS), max_tokens=16) == wanted, f"tp={tp}"
            params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
            local.engine.add(AddRequest(id="scored", prompt_token_ids=_PROMPTS[2], params=params, adapter=1))
            scored = [output.prompt_logprobs for output in _outputs(local.engine) if output.prompt_logprobs]
            want = logits(theirs, _PROMPTS[2]).log_softmax(-1)
            for position, entry in enumerate(scored[0][1:]):
                assert entry is not None
                assert abs(entry.logprob - want[position, _PROMPTS[2][position + 1]]) < 1e-3


def _outputs(engine: Any) -> list[Any]:
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    return outputs
