"""``tightwire bench stream``: steps with streamed weights against the time that their bytes and their computing take."""
