"""``tightwire doctor``: examines this machine, tests its devices, measures its speed, suggests options. Start at ``cli.py``.

``host`` and ``gpus`` collect facts, ``probing`` runs whatever may hang or crash in a process of its own with a time limit,
``advice`` derives the verdict, problems, notes and options. A failed probe is a problem too.
"""
