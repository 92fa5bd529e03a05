"""Devices and this process, as the system states them."""

from tightwire.server.plan import devices


def test_this_process_has_an_age() -> None:
    assert 0 < devices.process_age_s() < 7 * 24 * 3600


def test_no_visible_device_is_no_device() -> None:
    assert devices.cuda_devices("") == []
