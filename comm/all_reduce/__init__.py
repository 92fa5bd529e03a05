"""Ways to sum a tensor over ranks; each file implements the ``AllReduce`` seam once, over any transport."""
