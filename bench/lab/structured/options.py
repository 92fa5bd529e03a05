"""The options of ``tightwire bench lab structured``."""

from dataclasses import dataclass
from typing import ClassVar

from tightwire.bench.options import OutputOptions, known_model
from tightwire.option import option
from tightwire.remote import parse_key, parse_url

NUM_SCHEMAS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOptions(OutputOptions):
    description: ClassVar[str] = (
        "Ask a running Tightwire server for JSON of many schemas: are all answers valid, what do masks cost, and how fast is the "
        "server with and without them."
    )
    url: str = option("http://127.0.0.1:8000", "address of the server", metavar="URL", parse=parse_url)
    model: str = option("smollm2-135m", "the model that it serves", metavar="MODEL", parse=known_model)
    api_key: str | None = option(None, "sent as a Bearer token", metavar="KEY", parse=parse_key)
    schemas: int = option(NUM_SCHEMAS, f"the first of {NUM_SCHEMAS} schemas", least=1)
    rounds: int = option(4, "parts of the schemas; each is asked with the schemas, then without", least=1)
    concurrency: int = option(1, "requests in flight", least=1)
    temperature: float = option(1.0, "sampling temperature", metavar="T", least=0)
    max_tokens: int = option(1500, "longest answer; a longer one is cut, and counts as not valid", least=1)
    seed: int = option(25, "seed of sampling", least=0)

    def __post_init__(self) -> None:
        if self.schemas > NUM_SCHEMAS:
            raise ValueError(f"--schemas must be at most {NUM_SCHEMAS}, got {self.schemas}")
