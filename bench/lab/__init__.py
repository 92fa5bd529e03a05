"""The project's own experiments, ``tightwire bench lab``: other servers, float32 answers, rooflines, JSON. Start at peers/run."""
