"""``tightwire doctor``: examines this machine, tests devices, measures speed, suggests options. Start at ``cli.py``.

``host`` and ``gpus`` collect facts, ``probing`` runs probes that may hang or crash, ``advice`` derives the verdict.
"""
