"""Opens the model a run starts from: a transformers Llama without weights, a reader of its weights, and its tokenizer."""

import fnmatch
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.kernels.spec.packed import PackedMatrix
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.hf_config import config_from_hf, config_to_hf
from tightwire.model.checkpoint.random import RandomReader
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.layout import keep_layers
from tightwire.model.open import fingerprint, open_checkpoint
from tightwire.model.text.tokenizer import (
    BOS,
    END_OF_TURN,
    EOS,
    MIN_VOCAB_SIZE,
    SPECIAL,
    Tokenizer,
    byte_backend,
    byte_characters,
    tokenizer_from_folder,
    with_template,
)
from tightwire.training.config.learning import LoraConfig
from tightwire.training.config.tree import BPE, BYTES, PACKED, ModelConfig, ShapeConfig, TrainConfig
from tightwire.training.engine.flat_parameters import BucketPlan, plan_buckets
from tightwire.training.start.lora import CRITIC_HEAD, add_lora, base_of, initial_matrix
from tightwire.whole_folder import whole_folder

HEAD_NAME, _LAYERS = "lm_head.weight", "model.layers."
# Values of a new model's config.json that are not configurable.
_FIXED: dict[str, Any] = {"model_type": "llama", "hidden_act": "silu", "dtype": "float32"}
_MOST_CHARACTERS = 1 << 26  # of text to train on; more text changes little and takes minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingModel:
    """A model whose weights are not read yet."""

    name: str
    config: LlamaConfig
    reader: CheckpointReader
    tokenizer: Tokenizer
    lora: LoraConfig | None = None
    seed: int = 0
    head: str = "tokens"
    layers: Sequence[int] = ()  # of the checkpoint; empty: all
    fingerprint: str = ""  # of the checkpoint's weights

    def tempered(self, temperature: float) -> Self:
        """The same model with logits divided by ``temperature``."""
        divisor, cap = self.config.logits_divisor * temperature, self.config.logits_cap / temperature
        return replace(self, config=replace(self.config, logits_divisor=divisor, logits_cap=cap))

    @property
    def end_token_id(self) -> int:
        """The token after each document: the tokenizer's end-of-text token, or else its beginning-of-text token."""
        for token in (*self.tokenizer.eos_token_ids, self.tokenizer.bos_token_id):
            if token is not None:
                return token
        raise ValueError(f"{self.name}: its tokenizer has no end-of-text or beginning-of-text token; use another")

    def read(self, name: str) -> Tensor:
        """Read a whole tensor in float32 by its Hugging Face name; an adapter's matrices have their initial values."""
        if self.lora is not None and (base := base_of(name)) is not None:
            return initial_matrix(name, self.reader.shape(base), self.lora, self.seed)
        if name == CRITIC_HEAD or (self.head == "reward" and name == HEAD_NAME):
            return torch.zeros(1, self.config.hidden_size)  # all rewards and values are 0 at first
        out = torch.empty(self.reader.shape(own := _stored_name(name, self.layers)))
        self.reader.read_into(out, own, rows=range(len(out)))
        return out

    def read_blocks(self, name: str) -> Tensor:
        """Read a whole matrix in the blocks of its file, (rows, bytes of a row)."""
        rows, columns = self.reader.shape(own := _stored_name(name, self.layers))
        packed = PACKED_FORMATS[self.reader.stored_as(own)]
        out = PackedMatrix(torch.empty(rows, packed.row_bytes(columns), dtype=torch.uint8), packed)
        self.reader.read_into(out, own, rows=range(rows))
        return out.blocks_OB


def open_starting_model(
    config: ModelConfig, *, seed: int, keep_in: Path, texts: Callable[[], Iterable[str]], **how: Any
) -> StartingModel:
    """Open the model to continue from, or create a new one. Raises ModelError: there is none, or the sizes are invalid.

    ``keep_in``: existing or new folder of the tokenizer that this run trains on ``texts``; with ``how`` as for ``train_bpe``.
    """
    if config.shape is None:
        checkpoint = open_checkpoint(config.start, seed)
        return StartingModel(
            name=checkpoint.name,
            config=_with_layers(checkpoint.config, config.layers),
            reader=checkpoint.reader(),
            tokenizer=checkpoint.tokenizer(),
            lora=config.lora,
            seed=seed,
            head=config.head,
            layers=config.layers,
            fingerprint=fingerprint(checkpoint),
        )
    if config.tokenizer.startswith(BPE):
        tokenizer = train_bpe(int(config.tokenizer.removeprefix(BPE)), keep_in, texts, **how)
    else:
        tokenizer = _given_tokenizer(config)
    llama = _new_config(config.shape, tokenizer.vocab_size)
    llama = replace(llama, bos_token_id=tokenizer.bos_token_id, eos_token_ids=tokenizer.eos_token_ids)
    return StartingModel(name="new", config=llama, reader=RandomReader(llama, seed), tokenizer=tokenizer)


def config_of(config: ModelConfig) -> LlamaConfig:
    """The model's sizes, without reading weights or training a tokenizer. Raises ModelError as ``open_starting_model``."""
    if config.shape is None:
        return _with_layers(open_checkpoint(config.start).config, config.layers)
    if config.tokenizer.startswith(BPE):
        return _new_config(config.shape, int(config.tokenizer.removeprefix(BPE)))
    return _new_config(config.shape, _given_tokenizer(config).vocab_size)


def build_model(
    config: LlamaConfig,
    *,
    device: torch.device,
    frozen: Iterable[str] = (),
    lora: LoraConfig | None = None,
    head: str = "tokens",
) -> PreTrainedModel:
    """Build the modules with parameters on the meta device, for the engine to replace.

    ``frozen``: name patterns of parameters that need no gradient. Raises ValueError: one matches nothing, or all are frozen.
    ``lora``: only its matrices need gradients, and the head of ``reward``, one number a position, instead of the model's
    own, or that of ``critic``, beside it. Raises ValueError: a target does not exist.
    """
    hf = AutoConfig.for_model(**config_to_hf(config))
    (getattr(hf, "rope_parameters", None) or {}).setdefault("llama_4_scaling_beta", 0.0)  # of Ministral 3
    with torch.device("meta"):
        # torch's fused attention has no cap of scores.
        attention = "eager" if config.score_cap else "sdpa"
        model: Any = AutoModelForCausalLM.from_config(hf, dtype=torch.float32, attn_implementation=attention)
    # Rotary tables and scales are computed from the configuration and are in no checkpoint, so they need real memory here.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    for name, buffer in [each for each in model.named_buffers() if each[1].device.type != device.type]:
        assert name.endswith(".embed_scale"), name
        scale = buffer.new_tensor(config.embedding_scale, device=device)
        model.get_submodule(name.rpartition(".")[0]).embed_scale = scale
    if hf.model_type == "granitemoehybrid":  # the only class that does not see in positions where a sample begins
        model.model.register_forward_pre_hook(_part_samples, with_kwargs=True)
    if lora is not None:
        add_lora(model, lora, critic=head == "critic")
    if head == "reward":
        model.lm_head = nn.Linear(config.hidden_size, 1, bias=False, device="meta")
    # The last positions of sequences (logits_to_keep) have gaps in memory, and torch copies the head for each sequence of such.
    model.lm_head.register_forward_pre_hook(lambda _, given: (given[0].contiguous(),))
    names = [name for name, _ in model.named_parameters()]
    for pattern in frozen:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ValueError(f"model.frozen: {pattern} matches no parameter; the names are {names[0]}, {names[1]}, ...")
        for name in matching:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model.frozen: all parameters are frozen")
    return model


def _part_samples(decoder: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Let each sample of a row attend to itself alone, by the mask that other classes make from positions."""
    inputs_BS1 = given["input_ids"][..., None].float()  # of which the shape is used
    mask = create_causal_mask(decoder.config, inputs_BS1, None, None, given.get("position_ids"))
    return args, given | {"attention_mask": {"full_attention": mask}}


def plan_model(
    config: TrainConfig, llama: LlamaConfig, device: torch.device, shard_ranks: int
) -> tuple[PreTrainedModel, BucketPlan]:
    """``build_model`` and its buckets. Raises ValueError: weights shall be kept in blocks, and the model has none to freeze."""
    own, packed = config.model, {}
    model = build_model(llama, device=device, frozen=own.frozen, lora=own.lora, head=config.head)
    if config.parallel.frozen_codec == PACKED:
        stored_as = open_checkpoint(own.start).reader().stored_as if own.start else lambda _: ""
        for name, parameter in model.named_parameters():
            stored = "" if parameter.requires_grad else stored_as(_stored_name(name, own.layers))
            if stored in PACKED_FORMATS:
                packed[name] = PACKED_FORMATS[stored]
        if not packed:
            raise ValueError(
                f"parallel.frozen_codec: {PACKED} keeps the blocks of frozen matrices of a quantized GGUF, and {own.start or 'a new model'} "
                "has none here; give a codec such as int8, or such a file as model.start with model.lora or model.frozen"
            )
    return model, plan_buckets(model, shard_ranks, packed=packed, per_bucket=config.parallel.blocks_per_bucket)


def _stored_name(name: str, layers: Sequence[int]) -> str:
    """The name in the checkpoint, of which the model has these ``layers``; none: all."""
    if not layers or not name.startswith(_LAYERS):
        return name
    number, _, rest = name.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{layers[int(number)]}.{rest}"


def _with_layers(llama: LlamaConfig, layers: Sequence[int]) -> LlamaConfig:
    """The sizes with these layers alone. Raises ModelError: there is no such layer."""
    if layers and max(layers) >= llama.num_layers:
        raise ModelError(f"model.layers: the model has layers 0 to {llama.num_layers - 1}, got {max(layers)}")
    return keep_layers(llama, layers) if layers else llama


def _new_config(shape: ShapeConfig, vocab_size: int) -> LlamaConfig:
    if shape.vocab_size is not None and shape.vocab_size < vocab_size:
        raise ValueError(
            f"model.shape.vocab_size={shape.vocab_size} is less than the {vocab_size} tokens of the tokenizer; remove "
            "it, or give at least that many"
        )
    try:
        return config_from_hf({**_FIXED, **shape.model_dump(), "vocab_size": shape.vocab_size or vocab_size})
    except ModelError as error:  # whose message names a file, but these values come from model.shape
        raise ModelError(f"model.shape: {str(error).removeprefix('config.json: ')}") from None


def _given_tokenizer(config: ModelConfig) -> Tokenizer:
    """The byte tokenizer or another model's tokenizer."""
    if config.tokenizer in ("", BYTES):
        size = config.shape.vocab_size if config.shape else None
        return with_template(byte_backend(max(size or 0, MIN_VOCAB_SIZE)))  # ids above the bytes' also decode to text
    return open_checkpoint(config.tokenizer).tokenizer()


def train_bpe(
    vocab_size: int, keep_in: Path, texts: Callable[[], Iterable[str]], files: str = "", resumes: bool = False
) -> Tokenizer:
    """Load the tokenizer in ``keep_in``, or train one on ``texts()``, of these ``files`` (a fingerprint), and save it there.

    Ids 0..3 are the special tokens of the byte tokenizer, so its chat template works here too. Raises ValueError: the size is too
    small, there is too little text for it, or a run that ``resumes`` has one of another size or other files.
    """
    least, most = len(SPECIAL) + 256, 1 << 24  # bytes and special tokens; the trainer aborts without memory for all
    if not least <= vocab_size <= most:
        raise ValueError(f"model.tokenizer: bpe:{vocab_size} is not possible; give bpe:{least} to bpe:{most}")
    made_of, path = {"size": vocab_size, "files": files}, keep_in / "made_of.json"
    kept = json.loads(path.read_text()) if path.is_file() else None
    is_kept = (keep_in / "tokenizer.json").is_file() and (kept == made_of or resumes)
    if is_kept and kept not in (made_of, None):  # None: of a version that did not write it
        raise ValueError(
            f"model.tokenizer: the checkpoints have bpe:{kept['size']} of their data.files, not bpe:{vocab_size} of these; restore both, or "
            "give another `run`"
        )
    if not is_kept:
        learned = _learn(vocab_size, texts())
        if learned.get_vocab_size() < vocab_size:
            raise ValueError(
                f"model.tokenizer: the data gives {learned.get_vocab_size()} tokens, not {vocab_size}; use "
                f"bpe:{learned.get_vocab_size()}, or more data"
            )
        with whole_folder(keep_in, check_replaced=lambda _: None) as folder:
            with_template(learned).save(folder)
            (folder / path.name).write_text(json.dumps(made_of))
    ids = [SPECIAL.index(token) for token in (EOS, END_OF_TURN)]
    return tokenizer_from_folder(keep_in, bos_token_id=SPECIAL.index(BOS), eos_token_ids=tuple(ids))


def _learn(vocab_size: int, texts: Iterable[str]) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    backend.train_from_iterator(_limit(texts), trainer)
    return backend


def _limit(texts: Iterable[str]) -> Iterator[str]:
    taken = 0
    for text in texts:
        yield text
        taken += len(text)
        if taken > _MOST_CHARACTERS:
            return
