"""The options of ``tightwire bench lab answers``."""

from dataclasses import dataclass
from typing import ClassVar

from tightwire.bench.options import OutputOptions, known_model
from tightwire.option import REQUIRED, option


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersOptions(OutputOptions):
    description: ClassVar[str] = "Compare the answers of running servers with the model in float32."
    servers: tuple[str, ...] = option(
        REQUIRED,
        "running servers of one model, such as tp2=http://127.0.0.1:8000,llama.cpp=http://127.0.0.1:8080",
        metavar="NAME=URL,...",
    )
    model: str = option("smollm2-135m", "the model that they serve", metavar="MODEL", parse=known_model)
    prompts: int = option(100, "prompts, half chat and half text", least=2)
    tokens: int = option(32, "length of the reference's answers", least=1)
    every: int = option(4, "compare the next token after each N tokens of an answer", least=1)

    def __post_init__(self) -> None:
        for server in self.servers:
            name, _, url = server.partition("=")
            if not name or not url.startswith(("http://", "https://")):
                raise ValueError(f"--servers takes NAME=URL such as mine=http://127.0.0.1:8000, got {server!r}")
