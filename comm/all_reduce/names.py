"""Lists of AllReduce names as people write them. Apart from ``registry``, so that reading flags imports no torch."""


def split_all_reduce_names(text: str) -> tuple[str, ...]:
    """Names have commas between them, maybe blanks too, and ``flash:RS,AG`` has a comma inside."""
    names: list[str] = []
    for part in map(str.strip, text.split(",")):
        if names and names[-1].startswith("flash:") and "," not in names[-1]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return tuple(names)
