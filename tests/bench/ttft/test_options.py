import shlex
from pathlib import Path

import pytest

from tightwire.bench.ttft.options import GROUPS, TtftOptions, to_argv
from tightwire.server.config.flags import make_parser, parse


def test_two_ranks_unless_said_otherwise(tmp_path: Path) -> None:
    assert TtftOptions.from_argv([], verb="ttft").config.parallel.tp == 2
    assert TtftOptions.from_argv(["--tp", "4"], verb="ttft").config.parallel.tp == 4
    file = tmp_path / "options.yaml"
    file.write_text("tp: 3\nnodes: 1\n")
    assert TtftOptions.from_argv(["--config", str(file)], verb="ttft").config.parallel.tp == 3


def test_flags_of_the_bench_and_of_serve_stand_side_by_side() -> None:
    options = TtftOptions.from_argv(
        verb="ttft",
        argv=shlex.split(
            "random:llama-3.2-1b --algorithms ring,flash:int4,int8,two-shot --prompt-lens 16,64 --concurrency 2 --repeats 3"
            " --link 1gbit --max-model-len 256 --seed 7 --baseline two-shot"
        ),
    )
    assert options.algorithms == ("ring", "flash:int4,int8", "two-shot")
    assert (options.prompt_lens, options.concurrency, options.repeats) == ((16, 64), (2,), 3)
    assert options.baseline_name == "two-shot"
    assert options.config.model.model == "random:llama-3.2-1b"
    assert options.config.parallel.link == "1gbit"
    assert options.config.engine.max_model_len == 256


def test_the_default_of_serve_is_always_measured_and_the_baseline() -> None:
    options = TtftOptions(algorithms=("flash-int8", "ring"))
    assert options.arms == ("auto", "flash-int8", "ring") and options.baseline_name == "auto"
    assert {"auto", "one-shot"} <= set(TtftOptions().arms) and TtftOptions(algorithms=("auto", "auto")).arms[1:] == (
        "auto",
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tp 1", "a single rank needs no AllReduce"),
        ("--algorithms auto", "needs a name beside auto"),
        ("--algorithms ring,fast", "unknown all-reduce 'fast'; choose one of"),
        ("--algorithms ring,hierarchical", "--algorithms: hierarchical on one node is two-shot; give --nodes"),
        ("--algorithms ring,policy:/no/such.json", "--algorithms: the policy file /no/such.json cannot be read"),
        ("--baseline native --algorithms ring,two-shot", "must be one of --algorithms"),
        ("--repeats 1", "must be at least 2"),
        ("--prompt-lens 0", "must be at least 1"),
        ("--prompt-lens 16,16", "different"),
        ("--concurrency two", "whole numbers"),
        ("--concurrency 65", "raise --max-num-seqs"),
        ("--output-len 1", "at least 2"),
        ("--layouts hybrid", "--layouts must be tensor,hybrid or hybrid,tensor, got hybrid"),
        ("--layouts tensor,hybrid --algorithms ring", "two comparisons; give one of them"),
        ("--allreduce ring", "--allreduce is not for this bench: name AllReduces with --algorithms"),
        (
            "--layout pipeline",
            "--layout is not for this bench: AllReduces are compared in the layout tensor; --layouts",
        ),
        ("--prefix-cache all", "--prefix-cache is not for this bench: every prompt is computed"),
        ("--link 1parsec", "--link"),
        ("--allreduce-decode fast", "--allreduce-decode: unknown all-reduce 'fast'; choose one of"),
        ("smollm9", "no such model: 'smollm9'"),
        ("random:llama-3.2-1b --tp 64", "cannot split 32 query heads over 64 ranks; use --tp 32 or less"),
        ("--nnodes 2", "--nnodes 2 needs --link"),
    ],
)
def test_bad_options_are_refused_in_words(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        TtftOptions.from_argv(flags.split(), verb="ttft")
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_flags_written_out_are_read_back_alike() -> None:
    line = "tiny --tp 3 --tp-split 2,1,0.5 --allreduce-extra flash:int4,int8,ring --link 1gbit"
    line += " --served-model-name mine yours --kv-cache-memory 512KiB"
    config, _ = parse(make_parser("serve", ""), line.split())
    again, _ = parse(make_parser("serve", ""), to_argv(config, GROUPS))
    assert again == config
    assert to_argv(config, GROUPS, leave_out=("link", "tp_split", "allreduce_extra", "model", "served_model_name")) == [
        *("--tp", "3", "--kv-cache-memory", "524288B")
    ]
