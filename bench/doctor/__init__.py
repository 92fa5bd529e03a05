"""``tightwire doctor``: examines this machine, tests devices, measures speed, suggests options; or a model. Start at ``cli.py``.

``model`` is about a model; ``host`` and ``gpus`` collect facts, ``probing`` runs probes that may hang or crash, ``advice`` derives the verdict.
"""
