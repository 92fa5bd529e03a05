"""``--label``: how the names of a run's files begin."""

_MAX_CHARS = 100  # a file's name has at most 255 bytes, and a date follows


def check_label(label: str) -> None:
    """Found out before anything is measured, and so that nothing is written outside of ``--output``.

    Raises:
        ValueError: no file's name can begin so.
    """
    if not label.isprintable() or "/" in label or not 0 < len(label) <= _MAX_CHARS:
        raise ValueError(
            f"--label begins the names of files, so it has 1 to {_MAX_CHARS} characters and no slash, got {label!r}; the "
            "folder is --output's"
        )
