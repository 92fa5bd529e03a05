"""Names and shapes of a model's tensors, in Hugging Face's names, and the reader of those that files keep stacked."""

import re
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from tightwire.kernels.spec.packed import Matrix
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.reader import CheckpointReader

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# Without these tensors answers are the same: tables that the configuration gives, and scales of activations and of caches.
_HARMLESS = re.compile(
    r"rope_(freqs|factors_(short|long))\.weight|.*rot(_embd|ary_emb)\..*|.*[._](input|output|act|[qkv]|kv)_(scale(_ub)?|zero_point)"
)
_STORED = re.compile(r"\.(qweight|qzeros|scales|(weight_)?g_idx|weight_(packed|scale|scale_inv|shape|zero_point))$")

# By the places of norms: the tensors of a layer's norms, by their fields in ``LayerWeights``. A result's norm is used when
# the result is added to the residual.
NORMS = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attention_result": "post_attention_layernorm", "mlp_result": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_result": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_result": "post_feedforward_layernorm",
    },
}
_GGUF_NORMS = {
    "attention_norm": "attn_norm",
    "attention_result": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_result": "post_ffw_norm",
}
_GGUF_OUTER = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_GGUF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_BY_NORMS = {
    places: _GGUF_LAYER | {name: _GGUF_NORMS[role] for role, name in roles.items()} for places, roles in NORMS.items()
}


def gguf_name(hf_name: str, norms: str = "before") -> str | None:
    """Return e.g. ``blk.3.ffn_up.weight`` for ``model.layers.3.mlp.up_proj.weight``; None if there is no such name.

    ``norms``: the places of the model's norms.
    """
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(\w+)", hf_name)
    if match is None or (own_name := _GGUF_BY_NORMS[norms].get(match[2])) is None:
        return _GGUF_OUTER.get(hf_name)
    return f"blk.{match[1]}.{own_name}.{match[3]}"


def expected_tensors(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every tensor that the model needs, with its unsplit shape; stacked ones as their parts."""
    hidden = config.hidden_size
    yield EMBEDDING, (config.vocab_size, hidden)
    for index in range(config.num_layers):
        for name, shape in _layer_tensors(config):
            yield f"model.layers.{index}.{name}", shape
    yield FINAL_NORM, (hidden,)
    if not config.tied_embeddings:
        yield HEAD, (config.vocab_size, hidden)


def _layer_tensors(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, mlp = config.hidden_size, config.mlp_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name in NORMS[config.norms].values():
        yield f"{name}.weight", (hidden,)
    if config.qk_norm != "none":
        by_head = config.qk_norm == "heads"
        yield "self_attn.q_norm.weight", (config.head_dim if by_head else query,)
        yield "self_attn.k_norm.weight", (config.head_dim if by_head else kv,)
    matrices = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "mlp.gate_proj": (mlp, hidden, config.mlp_bias),
        "mlp.up_proj": (mlp, hidden, config.mlp_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.down_proj": (hidden, mlp, config.mlp_bias),
    }
    for name, (rows, columns, has_bias) in matrices.items():
        yield f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{name}.bias", (rows,)


def check_tensors(reader: CheckpointReader, config: LlamaConfig) -> None:
    """Raise ModelError if a tensor is missing, has another shape, or has an unsupported type."""
    for name, want in expected_tensors(config):
        found = reader.shape(name)
        if found != want:
            raise ModelError(f"tensor {name} has shape {found}, but the model's configuration requires {want}")


def unused_of(names: Iterable[str], config: LlamaConfig, read: Callable[[str], Tensor] | None = None) -> list[str]:
    """Return those of a file's tensors that are in no module of the model; transformers ignores such too.

    ModelError: others that no layer uses: without a bias or norm answers are wrong. ``read``: None: of a .gguf, all are refused.
    """
    stored = set(stored_tensors(config))
    used = stored if read else {gguf_name(name, config.norms) for name in stored}
    modules = set(map(_module, stored))
    unused = {name for name in names if _STORED.sub(".weight", name) not in used and not _HARMLESS.fullmatch(name)}
    if read:  # files of GPTQ have biases of zeros
        unused = {name for name in unused if not name.endswith(".bias") or read(name).any()}
    if own := sorted(name for name in unused if not read or _module(name) in modules):
        raise ModelError(
            f"it has {len(own)} tensors that a {config.family} model of its configuration does not use, such as "
            f"{', '.join(own[:3])}; supported: files without them. Is its configuration another model's?"
        )
    return sorted(unused)


def _module(name: str) -> str:
    """Return the layer that a tensor belongs to, or its module outside of layers."""
    return ".".join(name.split(".")[: 3 if name.startswith("model.layers.") else -1])


class StackedParts:
    """The places of parts in the tensors that a family's files keep stacked by rows."""

    def __init__(self, config: LlamaConfig) -> None:
        rows = {name.removesuffix(".weight"): shape[0] for name, shape in _layer_tensors(config)}
        self._places: dict[str, tuple[str, range]] = {}
        for stacked, parts in config.entry.stacked.items():
            stop = 0
            for part in parts:
                start, stop = stop, stop + rows[part]
                self._places[part] = stacked, range(start, stop)

    def find(self, name: str) -> tuple[str, range | None]:
        """Return the name in the file of a tensor or module, and its rows there; None: it is stored by itself."""
        match = re.fullmatch(r"(model\.layers\.\d+)\.(.+?)(\.weight|\.bias)?", name)
        if match is None or match[2] not in self._places:
            return name, None
        stacked, rows = self._places[match[2]]
        return f"{match[1]}.{stacked}{match[3] or ''}", rows


def stored_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by the names in Hugging Face files, parts of stacked ones together."""
    parts, shapes = StackedParts(config), dict[str, tuple[int, ...]]()
    for name, shape in expected_tensors(config):
        stored, rows = parts.find(name)
        before = shapes[stored][0] if rows is not None and stored in shapes else 0
        shapes[stored] = (before + shape[0], *shape[1:])
    return shapes


class PartsReader:
    """``CheckpointReader`` that also finds the parts of stacked tensors by their own names."""

    def __init__(self, reader: CheckpointReader, config: LlamaConfig) -> None:
        self._reader, self._parts, self._shapes = reader, StackedParts(config), stored_tensors(config)

    def shape(self, name: str) -> tuple[int, ...]:
        stored, rows = self._parts.find(name)
        shape = self._reader.shape(stored)
        if rows is None:
            return shape
        if shape != self._shapes[stored]:
            raise ModelError(f"tensor {stored} has shape {shape}, but the model requires {self._shapes[stored]}")
        return (len(rows), *shape[1:])

    def stored_as(self, name: str) -> str:
        return self._reader.stored_as(self._parts.find(name)[0])

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        stored, part = self._parts.find(name)
        start = 0 if part is None else part.start
        self._reader.read_into(out, stored, rows=range(rows.start + start, rows.stop + start), columns=columns)
