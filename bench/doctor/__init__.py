"""``tightwire doctor``: what this machine has, what of it works, and which options that suggests.

``probing`` runs each probe in a process of its own with a time limit; ``facts`` are what probes find; ``advice`` turns
facts into words; ``page`` shows both. A probe that fails is itself a finding.
"""
