"""Splits lists of AllReduce names. Separate from ``registry``, so that reading flags imports no torch."""


def split_all_reduce_names(text: str) -> tuple[str, ...]:
    """Split at commas and strip blanks; the comma inside ``flash:RS,AG`` does not separate names."""
    names: list[str] = []
    for part in map(str.strip, text.split(",")):
        if names and names[-1].startswith("flash:") and "," not in names[-1]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return tuple(names)
