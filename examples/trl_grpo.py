"""GRPO by TRL, with Tightwire as the server that answers: before each rollout it loads the trainer's newest adapter.

pip install trl peft httpx
tightwire serve MODEL --lora-dir adapters --max-lora-rank 16 --max-loras 2 --dtype float32
python examples/trl_grpo.py MODEL adapters

MODEL: a Hugging Face folder, for both. ``adapters``: a folder that both see; the trainer writes each version of its adapter there.
``Tightwire`` is TRL's ``rollout_func``. TRL's own vLLM client sends all weights by NCCL to vLLM's processes instead.
"""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

ADAPTER = "policy"


class Tightwire:
    """Answers the prompts of a GRPOTrainer that trains an adapter."""

    def __init__(self, url: str, folder: Path) -> None:
        """``folder``: the server's --lora-dir."""
        self._client = httpx.Client(base_url=url, timeout=600)
        self._folder, self._step = folder, -1

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """One answer to each prompt, which TRL repeats, with the log-probabilities that its tokens were drawn with."""
        if trainer.state.global_step != self._step:
            self._step = trainer.state.global_step
            self._load(trainer)
        tokenizer: Any = trainer.processing_class
        prompt_ids = [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
            if isinstance(prompt, list)
            else tokenizer(prompt)["input_ids"]
            for prompt in prompts
        ]
        with ThreadPoolExecutor(len(prompts)) as pool:
            choices = list(pool.map(lambda ids: self._answer(ids, trainer.args), prompt_ids))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
        }

    def _load(self, trainer: GRPOTrainer) -> None:
        """Replace the server's adapter. Answers that run end under the version that they began with."""
        name = f"{ADAPTER}-{self._step}"
        trainer.model.save_pretrained(self._folder / name)
        self._post("/v1/load_lora_adapter", lora_name=ADAPTER, lora_path=name, load_inplace=True)
        shutil.rmtree(self._folder / name)

    def _answer(self, ids: list[int], args: GRPOConfig) -> dict[str, Any]:
        limits = {"max_tokens": args.max_completion_length, "temperature": args.temperature, "top_p": args.top_p}
        wanted = {"return_token_ids": True, "logprobs": 0}
        return self._post("/v1/completions", model=ADAPTER, prompt=ids, **limits, **wanted)["choices"][0]

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self._client.post(path, json=body)
        if response.is_error:
            raise RuntimeError(f"{path}: {response.text}")
        return response.json()


def few_letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward: the share of letters before n."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [sum(letter < "n" for letter in text) / max(1, len(text)) for text in texts]


def make_trainer(model: str, tightwire: Tightwire, output: str, **options: Any) -> GRPOTrainer:
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Write {i} words."}]} for i in range(2, 40)])
    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24, "use_cpu": True}
    return GRPOTrainer(
        model=model,
        reward_funcs=few_letters,
        args=GRPOConfig(output, **{**settings, "max_steps": 20, "logging_steps": 1, "report_to": []} | options),
        train_dataset=prompts,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        rollout_func=tightwire,
    )


if __name__ == "__main__":
    model, folder = sys.argv[1:]
    make_trainer(model, Tightwire("http://127.0.0.1:8000", Path(folder)), "runs/trl").train()
