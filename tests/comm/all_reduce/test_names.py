"""The table of names and the algorithms' files agree; the table is read without torch."""

import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules

from tightwire.comm import all_reduce
from tightwire.comm.all_reduce.entry import Entry
from tightwire.comm.all_reduce.make import ALL_REDUCE
from tightwire.comm.all_reduce.names import NAMES, main_preset_names, preset_names, split_all_reduce_names

_WRITTEN_IN_THE_TABLE = [field.name for field in fields(Entry)][: [f.name for f in fields(Entry)].index("make")]


def test_every_file_of_an_algorithm_has_a_row_and_every_row_a_file() -> None:
    modules = [f"{all_reduce.__name__}.{found.name}" for found in iter_modules(all_reduce.__path__)]
    with_entry = {module for module in modules if hasattr(import_module(module), "ENTRY")}
    assert with_entry == {row.module for row in NAMES.values()} - {NAMES["auto"].module}
    assert set(NAMES) == set(ALL_REDUCE)


def test_the_files_add_to_their_rows_and_change_nothing_in_them() -> None:
    for name, row in NAMES.items():
        entry: Entry = import_module(row.module).ENTRY
        assert {own: getattr(entry, own) for own in _WRITTEN_IN_THE_TABLE} == {
            own: getattr(row, own) for own in _WRITTEN_IN_THE_TABLE
        }, name
        assert entry.make is not None and (name == "auto") == (entry.work is None)


def test_names_are_read_without_torch() -> None:
    code = (
        "import sys, tightwire.comm.all_reduce.names, tightwire.server.config.parallel; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_main_presets_have_falling_bits() -> None:
    names = main_preset_names()
    assert names == sorted(names, reverse=True) and set(names) < set(preset_names())


def test_names_with_commas_and_blanks() -> None:
    split = split_all_reduce_names("ring, flash:int4,int8 ,flash:int6, int6,policy:mix.json")
    assert split == ("ring", "flash:int4,int8", "flash:int6,int6", "policy:mix.json")


def test_an_empty_name_is_kept_for_whoever_refuses_it() -> None:
    assert split_all_reduce_names("") == ("",)
    assert split_all_reduce_names("ring,") == ("ring", "")
