"""Exception classes of model loading and serving."""


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
