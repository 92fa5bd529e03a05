import pytest
from training_timeline import Timeline


def test_a_timeline_has_a_bar_for_each_piece_of_work_and_says_what_ran_beside_computing() -> None:
    timeline = Timeline()
    timeline("gather", True, "block 1", "weights 1")
    timeline("gather", False, "block 1", "weights 1")
    timeline("reduce", False, "block 9", "gradients 1")  # its begin was before the trace
    timeline.work += [("compute", "block 0", "", 10.0, 12.0), ("compute", "block 0", "", 11.0, 13.0)]
    timeline.work += [("reduce", "block 1", "", 12.0, 16.0)]

    *_, gather, first, _, _ = timeline.chrome(3)["traceEvents"]
    assert (gather["name"], gather["cat"], gather["pid"], gather["args"]) == (
        "block 1",
        "gather",
        3,
        {"buffer": "weights 1"},
    )
    assert (first["ts"], first["dur"], first["tid"]) == (10e6, 2e6, 0)
    assert timeline.hidden("reduce") == pytest.approx(0.25)
    assert timeline.hidden("gather") == 0.0
