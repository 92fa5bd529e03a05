from tightwire.server.ipc.messages import CommChoice
from tightwire.server.plan.comm_decision import describe_choices


def test_choices_by_size_are_described_with_units_and_in_order() -> None:
    def choice(algorithm: str, up_to_bytes: int | None) -> list[CommChoice]:
        return [
            CommChoice(site=site, phase=phase, up_to_bytes=up_to_bytes, algorithm=algorithm, reason="20 us")
            for site in ("o_proj", "down_proj")
            for phase in ("prefill", "decode")
        ]

    choices = [*choice("one-shot", 36864), *choice("two-shot", None)]
    assert describe_choices(choices) == ["one-shot up to 36KiB: 20 us", "two-shot for larger messages: 20 us"]
    assert describe_choices(choice("one-shot", None)) == ["one-shot: 20 us"]
