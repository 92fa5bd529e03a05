"""How many tokens a step may take where layers stream: more, as long as full steps wait for them.

Every step brings all streamed layers in, so a prompt in steps that take less time than the layers' way costs their way again and
again. Steps grow to where computing takes as long, the break-even, and find it by what they wait.
"""

_FULL = 0.9  # of a step's tokens taken: smaller steps say nothing about larger ones
_WAITING = 0.1  # of a step's time


class StepSize:
    """``tokens`` grows from ``least`` to ``most``, by twos."""

    def __init__(self, least: int, most: int) -> None:
        self.tokens, self._most = least, most

    def learn(self, num_tokens: int, step_s: float, waited_s: float) -> None:
        """Of a step: its tokens, its time, and the part of that in which nothing was computed for want of a layer."""
        if num_tokens >= _FULL * self.tokens and waited_s > _WAITING * step_s:
            self.tokens = min(2 * self.tokens, self._most)
