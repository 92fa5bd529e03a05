"""The verbs ``serve``, ``generate``, ``chat``, ``prepare``, ``pull`` and ``explain``, one file each; open serve first."""
