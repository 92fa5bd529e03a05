"""Does a model learn by trial, its control not, and what do quantized sums in its answers change? By GRPO, three seeds each.

pip install matplotlib
python examples/learning.py tasks [FOLDER] [key=value ...]        # three tasks with rewards in code, each beside its control
python examples/learning.py allreduce [FOLDER] [key=value ...]    # two ranks answer together; the AllReduce of their answers differs

key=value: of every run's configuration. Each run is ``tightwire train grpo`` with a reward of this file; in a control answers learn from
each other's rewards. A run that was stopped goes on, and one that ended is not run again. At the end FOLDER has the table and its plot.
"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WORDS = ["river", "apple", "stone", "cloud", "garden", "window", "paper", "silver", "music", "forest", "winter"]
SEEDS = 0, 1, 2
ALLREDUCES = "auto", "flash-int8", "flash-int4", "flash-int3"  # auto loses nothing
NUM_COMPARED = 8  # steps at each end of a run whose mean rewards are compared
T_95 = 4.303  # Student's t, two degrees of freedom: three seeds


def ten_words(completions: Sequence[str], **_: object) -> list[float]:
    """1 for an answer of ten words, 0 for one that is ten or more words off."""
    return [max(0.0, 1 - abs(len(text.split()) - 10) / 10) for text in completions]


def reversed_words(completions: Sequence[str], words: Sequence[list[str]], **_: object) -> list[float]:
    """The share of an answer's words, or of the asked ones if those are more, that stand in the right places."""
    shares = []
    for text, asked in zip(completions, words, strict=True):
        given = text.replace(",", " ").rstrip(". ").lower().split()
        right = sum(one == other for one, other in zip(given, asked[::-1], strict=False))
        shares.append(right / max(len(given), len(asked)))
    return shares


class Arm(NamedTuple):
    """One configuration, which is run with every seed."""

    name: str
    changes: Sequence[str]
    num_ranks: int = 1


Steps = Sequence[Mapping[str, Any]]  # a run's lines of metrics.jsonl
Columns = Mapping[str, Callable[[Steps], float]]


def reward(steps: Steps) -> float:
    return statistics.mean(step["reward"] for step in steps)


def mean_of(name: str, factor: float = 1.0) -> Callable[[Steps], float]:
    return lambda steps: factor * statistics.mean(step[name] for step in steps)


def mean_of_tokens(name: str, factor: float = 1.0) -> Callable[[Steps], float]:
    """Of steps that learned something: a group whose rewards are all equal has no tokens."""
    return lambda steps: mean_of(name, factor)([step for step in steps if step["even_groups"] < 1] or steps)


def tasks(folder: Path) -> tuple[list[Arm], Columns]:
    """The arms of three tasks, with their prompts; those of JSON come with Tightwire."""
    draw = random.Random(0)
    lists = [draw.sample(WORDS, 4) for _ in range(200)]
    asked = [f"Reverse the list: {', '.join(own)}" for own in (WORDS[:4], *lists)]
    # Without an example the model answers nothing like a list.
    example = [{"role": "user", "content": asked[0]}, {"role": "assistant", "content": ", ".join(WORDS[3::-1])}]
    ten = [[{"role": "user", "content": f"Write a sentence of ten words about {a} and {b}."}] for a, b, *_ in lists]
    turned = [[*example, {"role": "user", "content": text}] for text in asked[1:]]
    changes: dict[str, list[str]] = {"json": []}
    for name, prompts in {"ten_words": ten, "reversed_words": turned}.items():
        rows = [{"prompt": prompt, "words": own} for prompt, own in zip(prompts, lists, strict=True)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes[name] = [f"data.files=[{folder}/{name}.jsonl]", f"grpo.rewards=[learning:{name}]"]
    controls = ("", "false"), (" shuffled", "true")
    arms = [
        Arm(f"{name}{end}", [*own, f"grpo.shuffled={is_control}"])
        for name, own in changes.items()
        for end, is_control in controls
    ]
    return arms, {
        "reward of the first answers": lambda steps: reward(steps[:NUM_COMPARED]),
        "of the last": lambda steps: reward(steps[-NUM_COMPARED:]),
        "change": lambda steps: reward(steps[-NUM_COMPARED:]) - reward(steps[:NUM_COMPARED]),
    }


def allreduce(folder: Path) -> tuple[list[Arm], Columns]:
    """The arms of AllReduces. Each rollout is learned from twice: the second time probabilities have changed, and some are clipped."""
    both = "rollout.tp=2", "grpo.updates=2", "batch.micro_sequences=1"
    arms = [
        Arm(name, [*both, f"rollout.allreduce={name}", f"rollout.allreduce_decode={name}"], 2) for name in ALLREDUCES
    ]
    return arms, {
        "mismatch KL, nats": mean_of_tokens("mismatch_kl"),
        "clipped tokens, %": mean_of_tokens("clipped", 100),
        "truncated tokens, %": mean_of_tokens("truncated", 100),
        "reward of the last answers": lambda steps: reward(steps[-NUM_COMPARED:]),
        "s a rollout": mean_of("answer_s"),
        "MB a rollout": mean_of("answer_wire_bytes", 1e-6),
    }


def train(folder: Path, arm: Arm, seed: int, more: Sequence[str]) -> Steps:
    """The steps of a run, which is trained unless it has ended before."""
    run = folder / f"{arm.name.replace(' ', '-')}-{seed}"
    if not (run / "adapter").is_dir():
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arm.num_ranks}"]
        launch = [sys.executable, *(launch if arm.num_ranks > 1 else []), "-m", "tightwire", "train", "grpo"]
        changes = [f"run={run}", f"seed={seed}", *arm.changes, *more]
        subprocess.run([*launch, *changes], check=True, cwd=Path(__file__).parent)
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "reward" in record]


def interval(numbers: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval."""
    return statistics.mean(numbers), T_95 * statistics.stdev(numbers) / len(numbers) ** 0.5


def table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """``found``: the numbers of the seeds, by column and arm."""
    arms = list(next(iter(found.values())))
    lines = [["arm", *found], ["---", *["--:"] * len(found)]]
    lines += [[arm, *("{:.3g} +- {:.2g}".format(*interval(own[arm])) for own in found.values())] for arm in arms]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(found: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(found), 3.4), layout="constrained")
    for axes, (column, arms) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        means, halves = zip(*map(interval, arms.values()), strict=True)
        axes.errorbar(range(len(arms)), means, halves, fmt="o", color="#08519c", capsize=4)
        for place, numbers in enumerate(arms.values()):
            axes.plot([place] * len(numbers), numbers, ".", color="#9ecae1")
        axes.set_xticks(range(len(arms)), arms, rotation=30, ha="right")
        axes.set_title(column, fontsize=10)
        axes.grid(alpha=0.3)
        if column.startswith("mismatch"):
            axes.set_yscale("log")
    figure.savefig(path)


def main() -> None:
    kinds = {"tasks": tasks, "allreduce": allreduce}
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    kind, *given = sys.argv[1:]
    folder = Path(given.pop(0) if given and "=" not in given[0] else f"runs/{kind}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    arms, columns = kinds[kind](folder)
    runs = {(arm.name, seed): train(folder, arm, seed, given) for seed in SEEDS for arm in arms}
    found = {
        column: {arm.name: [number(runs[arm.name, seed]) for seed in SEEDS] for arm in arms}
        for column, number in columns.items()
    }
    print(table(found))
    (folder / "table.md").write_text(table(found))
    plot(found, folder / "plot.svg")


if __name__ == "__main__":
    main()
