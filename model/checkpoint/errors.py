"""What can be wrong with a model that someone named; every message says what was given and what would work."""


class ModelError(ValueError):
    """The model cannot be opened or served: not found, damaged, or of a kind that is not supported."""


class ChatTemplateError(ValueError):
    """These messages cannot be rendered: there is no chat template, or the template itself refused them."""


class WeightsError(RuntimeError):
    """A layer of a model that is being served does not come, or comes damaged; no pass can be finished without it."""


class PrepareError(RuntimeError):
    """A prepared folder could not be finished; nothing of it is left."""


class CacheError(RuntimeError):
    """Keys and values of a layer do not come from where they are kept; no pass can be finished without them."""
