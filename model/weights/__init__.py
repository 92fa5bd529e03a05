"""Where a rank's tensors come from: one seam (``source``), several kinds of source behind it."""
