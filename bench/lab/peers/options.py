"""The options of ``tightwire bench lab peers`` and ``tightwire bench lab roofline``."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tightwire.bench.lab.peers.arms import ARMS, DEFAULT_ARMS
from tightwire.bench.options import OutputOptions, known_model
from tightwire.model.weights import QUANTIZATIONS
from tightwire.option import MAX_SECONDS, option


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersOptions(OutputOptions):
    description: ClassVar[str] = "Compare servers on the same weights, one after the other under the same load."
    servers: tuple[str, ...] = option(
        DEFAULT_ARMS,
        f"servers to compare: {', '.join(ARMS)}, tightwire-tpN with -q4 (4-bit weights), -int8 (activations), -gloo (transport), "
        "-hybrid or -pipeline (layout) and :ALLREDUCE, or NAME=URL of a running server; the first is the baseline",
        metavar="A,B",
    )
    peers: Path | None = option(None, "the folder that install.sh filled (default: peers in the cache)", metavar="DIR")
    weights: Path | None = option(
        None, "folder for the weights in the formats of the peers (default: weights in --peers)", metavar="DIR"
    )
    model: str = option("smollm2-135m", "a name or a .gguf file", parse=known_model)
    rounds: int = option(5, "number of rounds; below 5 there is no verdict", least=1)
    concurrency: tuple[int, ...] = option((1, 8, 32), "requests in flight", least=1)
    num_requests: tuple[int, ...] = option((3, 8, 32), "requests of a round, for each of --concurrency", least=1)
    input_len: int = option(128, "prompt tokens")
    output_len: int = option(32, "tokens to generate")
    seed: int = option(1, "seed of prompts and of the order of servers")
    time_limit: float = option(math.inf, "start no round that would end later", metavar="S", above=0)
    start_timeout: float = option(900.0, "longest start of a server", metavar="S", above=0, most=MAX_SECONDS)
    wait_for_quiet: float = option(0.0, "longest wait for other programs to finish", metavar="S")
    nnodes: int = option(
        1,
        "hosts: network namespaces of this machine, each with its share of the cores; servers of one process run on the first",
        least=1,
    )
    link: str | None = option(None, "the rate of each host's wire, with --nnodes (default: none)", metavar="LINK")

    def __post_init__(self) -> None:
        if (self.nnodes > 1) != (self.link is not None):
            raise ValueError("--nnodes above 1 and --link, such as --nnodes 2 --link 200mbit, go together")
        if len(self.num_requests) != len(self.concurrency):
            raise ValueError(f"--num-requests takes a number for each of the {len(self.concurrency)} of --concurrency")


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineOptions(OutputOptions):
    description: ClassVar[str] = "Compare serving with the device's own rates and with transformers."
    model: str = option("smollm2-135m", "a model as for `tightwire serve`", flag="model", parse=known_model)
    device: str = option("auto", "auto: cuda if torch has it", choices=("auto", "cuda", "cpu"))
    tp: int = option(1, "ranks", least=1)
    quantization: str = option("auto", "as for `tightwire serve`", choices=QUANTIZATIONS)
    prompt_len: int = option(512, "tokens of the long prompt, at most the model's context", least=1)
    output_len: int = option(64, "tokens to generate", least=4)
    crowd: int = option(8, "requests in flight", least=1)
    batched_tokens: int = option(2048, "--max-num-batched-tokens of the server", least=1)
    rate_size: int | None = option(None, "rows of the products that give a rate (default: 8192, CPU 2048)", least=1)
    server: bool = option(True, "start a server and measure it too")
    peer: bool = option(True, "measure transformers too")
    start_timeout: float = option(240.0, "longest start, or run of transformers, in seconds", above=0, most=MAX_SECONDS)
