"""Fetches a repo of the Hugging Face Hub into the hub's cache: a folder with safetensors, or one quantization's GGUF."""

import contextlib
import glob
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tightwire.model.checkpoint.catalog import CATALOG
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.gguf_header import plain_stem, split_parts

_SMALL_FILES = ["*.json", "tokenizer*", "*.jinja"]
_WEIGHTS = ["model.safetensors", "model-*.safetensors"]
_TIMEOUT_S = 20.0  # for a repo's list of files
# A quantization at the end of a file's name, such as Q4_K_M, UD-Q4_K_XL, IQ4_XS, BF16.
_QUANTIZATION = re.compile(r"(?:^|[-.])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|FP?16|FP?32))$", re.IGNORECASE)


def fetch_folder(repo_id: str, check: Callable[[Path], object]) -> Path:
    """Fetch safetensors and small files. ``check``: called with the small files, and raises before the weights are fetched."""
    from huggingface_hub import snapshot_download  # takes 0.3 s, and most models are local

    with _hub_errors(repo_id):
        folder = Path(snapshot_download(repo_id, allow_patterns=_SMALL_FILES))
        if (folder / "config.json").is_file():
            check(folder)
            folder = Path(snapshot_download(repo_id, allow_patterns=[*_SMALL_FILES, *_WEIGHTS]))
        if not any(folder.glob("*.safetensors")) and (ggufs := _ggufs(repo_id)):
            raise ModelError(f"{repo_id} has no safetensors but GGUF files; name one as {_forms(repo_id, ggufs)}")
        return folder


def fetch_gguf(repo_id: str, quantization: str) -> Path:
    """Fetch the .gguf whose name ends with ``quantization``, and return it, or its first part."""
    from huggingface_hub import snapshot_download

    with _hub_errors(repo_id):
        ggufs = _ggufs(repo_id)
        if not ggufs:
            raise ModelError(f"{repo_id} has no .gguf file, so no {quantization}; leave out :{quantization}")
        found = [first for first in ggufs if _quantization_of(first).lower() == quantization.lower()]
        if len(found) != 1:
            several = f"several .gguf files in {quantization}: {', '.join(found)}"
            what, forms = several if found else f"no .gguf file in {quantization}", _forms(repo_id, ggufs)
            raise ModelError(f"{repo_id} has {what}; download one and give its path, or name one as {forms}")
        escaped = [glob.escape(str(part)) for part in split_parts(Path(found[0]))]
        return Path(snapshot_download(repo_id, allow_patterns=escaped)) / found[0]


def _ggufs(repo_id: str) -> list[str]:
    """The repo's .gguf models, split ones by their first parts; without the hub, those in its cache."""
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        names = [file.rfilename for file in model_info(repo_id, timeout=_TIMEOUT_S).siblings or ()]
    except HfHubHTTPError:
        raise  # the hub's answer
    except Exception as error:
        folder = Path(snapshot_download(repo_id, allow_patterns=["*.gguf"], local_files_only=True))
        names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
        if not names:
            raise ConnectionError from error
    paths = [Path(name) for name in names if name.lower().endswith(".gguf")]
    return sorted({str(split_parts(path)[0]) for path in paths if "mmproj" not in path.name.lower()})


def _quantization_of(name: str) -> str:
    """The quantization in a file's name; empty: it has none."""
    match = _QUANTIZATION.search(plain_stem(Path(name)))
    return "" if match is None else match[1]


def _forms(repo_id: str, ggufs: list[str]) -> str:
    """Every file as it can be named; by itself if its name has no quantization."""
    return ", ".join(f"{repo_id}:{own}" if (own := _quantization_of(name)) else name for name in ggufs)


@contextlib.contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Convert the errors of network, hub and disk to a ModelError."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001 - network, hub and disk raise different types
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        if isinstance(error, (LocalEntryNotFoundError, ConnectionError)):
            reason = f"the Hugging Face Hub ({constants.ENDPOINT}) was not reached and its cache has no such repo"
        raise ModelError(
            f"{repo_id!r} is no folder here, and the repo of that name was not fetched: {reason}; give a folder with config.json "
            f"and safetensors, a .gguf file, or a name: {', '.join(sorted(CATALOG))}"
        ) from None
