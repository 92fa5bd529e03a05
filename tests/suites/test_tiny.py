"""The tiny model is what it claims: small, and the same every time."""

from pathlib import Path

from tiny import make_tiny


def test_is_small_and_seeded(tmp_path: Path) -> None:
    first, second, other = (make_tiny(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert sum(path.stat().st_size for path in first.iterdir()) < 1_000_000
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
