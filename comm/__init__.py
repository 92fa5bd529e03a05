"""Floor 1: ranks and the bytes between them. Knows nothing of layers, requests or gradients.

An algorithm (``all_reduce/``) is written once against the ``Transport`` seam (``protocols``) and so runs over
in-process ranks, a torch.distributed group, and whatever transport comes next.
"""
