"""Loads LoRA adapters into one rank, and reports the result to the HTTP process."""

import logging
from pathlib import Path

from tightwire.model.adapters.peft import open_adapter
from tightwire.model.adapters.product import AdapterProducts
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.server.ipc.messages import AdapterLoaded, LoadSlot
from tightwire.server.ranks.reporter import Reporter

_log = logging.getLogger(__name__)


class AdapterLoader:
    """Loads adapters on one rank. ``products`` is None if adapters are off."""

    def __init__(self, products: AdapterProducts | None, model: LlamaConfig, reporter: Reporter) -> None:
        self._products, self._model, self._reporter = products, model, reporter

    def load(self, message: LoadSlot) -> None:
        """Load an adapter between two steps. A folder that is refused leaves the slot empty."""
        self._reporter.begin(f"loading the adapter in {message.folder}")
        refusal = "this server has no adapter slots"
        if self._products is not None:
            try:
                self._products.load(
                    message.slot, open_adapter(Path(message.folder), self._model, self._products.room.max_rank)
                )
                refusal = ""
            except Exception as error:  # noqa: BLE001 - a bad folder must not end the rank
                self._products.clear(message.slot)
                refusal = str(error)
                if not isinstance(error, ModelError):
                    _log.exception("the adapter in %s cannot be loaded", message.folder)
                    refusal = f"the adapter in {message.folder} cannot be loaded: {error!r}"
        self.answer(message.id, refusal)

    def answer(self, adapter: int, refusal: str) -> None:
        """Tell the HTTP process what became of a ``LoadAdapter``."""
        self._reporter.send(AdapterLoaded(rank=self._reporter.rank, id=adapter, refusal=refusal))
