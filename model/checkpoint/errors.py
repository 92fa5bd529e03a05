"""Errors of models. Every message says what was given and what works."""


class ModelError(ValueError):
    """The model cannot be opened or served: not found, damaged, or not supported."""


class ChatTemplateError(ValueError):
    """These messages cannot be rendered: there is no chat template, or it refuses them."""


class WeightsError(RuntimeError):
    """A layer of a served model does not arrive, or is damaged; the pass cannot finish."""


class PrepareError(RuntimeError):
    """A prepared folder could not be finished; nothing of it is left."""


class CacheError(RuntimeError):
    """Keys and values of a layer do not arrive from the host; the pass cannot finish."""
