"""``tightwire doctor``: examines this machine, tests its devices and links, and suggests options. Start at ``cli.py``.

``probing`` runs each probe (``host``, ``gpus``) in its own process with a time limit; ``facts`` are their results; ``advice`` derives
problems, notes and options from them. A failed probe is a finding too.
"""
