"""Flags of LoRA adapters."""

from dataclasses import dataclass

from tightwire.option import option, require

_LOADABLE = 4  # default number of adapters with --lora-dir
_RANK = 16  # default largest rank with --lora-dir


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions:
    """LoRA adapters, which requests choose by their model name."""

    lora: tuple[str, ...] = option(
        (),
        "a LoRA adapter: a folder that PEFT wrote, and the model name that requests choose it by; may be given several times",
        metavar="NAME=FOLDER",
        repeated=True,
    )
    max_loras: int | None = option(
        None,
        "most adapters loaded at the same time; their memory is reserved at start. Default: as many as --lora names, and at "
        f"least {_LOADABLE} with --lora-dir",
    )
    max_lora_rank: int | None = option(
        None,
        f"largest rank of an adapter. Default: the largest of those that --lora names, and at least {_RANK} with --lora-dir",
    )
    lora_dir: str | None = option(
        None,
        "let clients load and unload adapters of this folder while the server runs (POST /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter); default: they cannot",
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        for given in self.lora:
            name, _, folder = given.partition("=")
            require(bool(name.strip()) and bool(folder), "lora", given, "NAME=FOLDER")
        names = [name for name, _ in self.named]
        doubled = next((name for name in names if names.count(name) > 1), None)
        require(doubled is None, "lora", doubled, "one folder for each name")
        require(self.lora_dir != "", "lora_dir", self.lora_dir, "left out, or not empty")
        for name in ("max_loras", "max_lora_rank"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")
            if not (self.lora or self.lora_dir):
                require(value is None, name, value, "left out without --lora and --lora-dir")
        most, num = self.max_loras, len(self.lora)
        require(most is None or most >= num, "max_loras", most, f"at least {num}, the number of --lora")

    @property
    def named(self) -> list[tuple[str, str]]:
        """Name and folder of each ``--lora``."""
        return [(name, folder) for name, _, folder in (given.partition("=") for given in self.lora)]

    @property
    def num_slots(self) -> int:
        """Most adapters loaded at the same time; 0: there are none."""
        return self.max_loras or max(len(self.lora), _LOADABLE if self.lora_dir else 0)

    def slot_rank(self, largest: int) -> int:
        """The rank that slots have room for, if ``largest`` is the largest of those loaded at start."""
        return self.max_lora_rank or max(largest, _RANK if self.lora_dir else 0)
