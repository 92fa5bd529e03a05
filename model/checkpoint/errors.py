"""Exception classes of model loading and serving, and the file's name before a message."""

from collections.abc import Iterator
from contextlib import contextmanager


class ModelError(ValueError):
    """The model is not found, damaged or not supported."""


class ChatTemplateError(ValueError):
    """The messages cannot be rendered: there is no chat template, or it rejects them."""


class WeightsError(RuntimeError):
    """A layer's weights did not arrive in time or are damaged; the pass cannot finish."""


class PrepareError(RuntimeError):
    """A prepared folder could not be completed; the partial folder was removed."""


class CacheError(RuntimeError):
    """A layer's keys and values did not arrive from the host in time; the pass cannot finish."""


@contextmanager
def naming(path: object, damage: str = "", *types: type[Exception]) -> Iterator[None]:
    """Let messages begin with the file or folder unless they name it; ``types`` become a ModelError that says ``damage``."""
    try:
        yield
    except ModelError as error:
        if str(path) in str(error):
            raise
        raise ModelError(f"{path}: {error}") from None
    except types as error:
        raise ModelError(f"{path}: {damage}: {' '.join(str(error).split())[:200]}") from None
