"""Options of ``serve`` as the flags that give them: for the server that is started, and for the line to paste."""

from collections.abc import Collection, Sequence

from tightwire.server.config.serve import ServeConfig, option_fields


def to_argv(config: ServeConfig, groups: Sequence[str], leave_out: Collection[str] = ()) -> list[str]:
    """Flags for every option of ``groups`` that is not at its default, in words that ``serve`` reads back."""
    argv: list[str] = []
    for name, (group, field) in option_fields().items():
        value = getattr(getattr(config, group), name)
        if group in groups and name not in leave_out and value != field.default:
            argv.extend(_flag(name, value))
    return argv


def _flag(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, (tuple, list)):
        return [flag, ",".join(_number(part) for part in value)]
    return [flag, _number(value)]


def _number(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)
