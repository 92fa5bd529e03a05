"""Spares Triton's interpreter what it repeats at each call of a device function, half of a kernel's time: to search the language
for what it replaces and to replace it again, and to make a table of NumPy's types."""

import inspect
from functools import cache
from typing import Any


def quicken_interpreter() -> None:
    """Keep what it finds, in this process. Before its first kernel: in one, what is replaced is not found."""
    from triton import language as tl
    from triton.runtime import interpreter

    is_builtin, patch_lang, find_type = tl.core.is_builtin, interpreter._patch_lang, interpreter._get_np_dtype
    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    names = {place: [name for name, member in inspect.getmembers(place) if is_builtin(member)] for place in places}
    types = dict[str, Any]()

    def patch_builtin(place: Any, *how: Any) -> None:
        for name in names[place]:
            if is_builtin(member := getattr(place, name)):
                interpreter._patch_attr(place, name, member, *how)

    @cache
    def languages(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch_once(fn: Any) -> Any:
        """The kernel that calls ``fn`` has replaced all, or ``fn`` is the kernel."""
        if any(is_builtin(language.load) for language in languages(fn)):
            return patch_lang(fn)
        return interpreter._LangPatchScope()

    def numpy_type(dtype: Any) -> Any:
        if (name := dtype.scalar.name) not in types:
            types[name] = find_type(dtype)
        return types[name]

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
    interpreter._get_np_dtype = numpy_type
