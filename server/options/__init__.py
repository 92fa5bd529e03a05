"""The options of ``serve`` in groups, one file each; ``config`` is the tree of them."""
