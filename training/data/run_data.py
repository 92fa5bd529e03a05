"""Finds a run's documents and makes its training and evaluation blocks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from threading import Event

from tightwire.model.text.tokenizer import Tokenizer
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import DataError, Documents, find_files, is_held_out, training_documents
from tightwire.training.data.read_ahead import until_closed
from tightwire.training.data.sequences import Batch, TokenSequence, endless_sequences, micro_batches, pack_sequences

_MOST_NAMES = 3  # file names in an error message


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The run's documents; ``held_out_documents`` is None if a share of ``documents`` is held out."""

    config: TrainConfig
    documents: Documents
    held_out_documents: Documents | None

    @classmethod
    def find(cls, config: TrainConfig) -> "RunData":
        """Raises DataError: a pattern matches no file."""

        def documents(patterns: list[str]) -> Documents:
            return Documents(files=find_files(patterns), text_key=config.data.text_key, parted_by=config.data.parted_by)

        held_out = config.data.held_out_files
        return cls(
            config=config,
            documents=documents(config.data.files),
            held_out_documents=documents(held_out) if held_out else None,
        )

    def check_documents(self) -> None:
        """Raises DataError: the files contain no document; the message names the files."""
        for key, documents in (("files", self.documents), ("held_out_files", self.held_out_documents)):
            if documents is not None and next(iter(documents), None) is None:
                names = ", ".join(map(str, documents.files[:_MOST_NAMES]))
                more = len(documents.files) - _MOST_NAMES
                rest = f" and {more} more" if more > 0 else ""
                raise DataError(f"data.{key}: there is no document in {names}{rest}; give files with text")

    @property
    def held_out_share(self) -> float:
        return 0.0 if self.held_out_documents is not None else self.config.data.held_out

    def training(self, epoch: int, *, in_order: bool = False) -> Iterable[str]:
        data = self.config.data
        return training_documents(
            self.documents,
            epoch=epoch,
            seed=self.config.seed,
            window=0 if in_order else data.shuffle_documents,
            held_out=self.held_out_share,
        )

    def held_out(self) -> Iterable[str]:
        if self.held_out_documents is not None:
            return self.held_out_documents
        return (text for text in self.documents if is_held_out(text, self.held_out_share))

    def batches(
        self, tokenizer: Tokenizer, end_token_id: int, *, rank: int, world_size: int, position: int, closed: Event
    ) -> Iterator[Batch]:
        """A rank's endless micro-batches from ``position`` on. ``closed`` stops reading."""
        sequences = endless_sequences(
            lambda epoch: until_closed(self.training(epoch), closed),
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            sequence_tokens=self.config.data.sequence_tokens,
            end_token_id=end_token_id,
            rank=rank,
            world_size=world_size,
            position=position,
        )
        return micro_batches(sequences, self.config.batch.micro_sequences)

    def held_out_sequences(self, tokenizer: Tokenizer, end_token_id: int) -> list[TokenSequence]:
        """The evaluation blocks of all ranks. Raises DataError: the held-out documents do not fill one block."""
        sequence_tokens = self.config.data.sequence_tokens
        packed = pack_sequences(
            self.held_out(),
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            sequence_tokens=sequence_tokens,
            end_token_id=end_token_id,
        )
        sequences = list(islice(packed, self.config.evaluation.sequences))
        if not sequences:
            raise DataError(
                f"held-out documents do not fill one sequence of {sequence_tokens} tokens; raise data.held_out (now "
                f"{self.config.data.held_out}), name data.held_out_files, or set evaluation.every=0"
            )
        return sequences
