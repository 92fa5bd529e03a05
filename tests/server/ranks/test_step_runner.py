"""Steps grow while they wait for streamed layers."""

from tightwire.server.ranks.step_runner import StepSize


def test_full_steps_that_wait_make_the_next_ones_larger() -> None:
    size = StepSize(512, 2048)
    size.learn(512, step_s=1.0, waited_s=0.8)
    assert size.tokens == 1024
    size.learn(1000, step_s=1.0, waited_s=0.5)
    assert size.tokens == 2048
    size.learn(2048, step_s=1.0, waited_s=0.5)
    assert size.tokens == 2048


def test_steps_that_do_not_wait_or_are_small_say_nothing() -> None:
    size = StepSize(512, 2048)
    size.learn(512, step_s=1.0, waited_s=0.05)
    size.learn(8, step_s=1.0, waited_s=0.99)
    assert size.tokens == 512
