"""Spares Triton's interpreter what it repeats at each call of a device function, two thirds of a kernel's time: to search the language
for what it replaces and to replace it again, to make a table of NumPy's types, to check and print a block's shape, and to look for
overflows that are reported in Triton's debug mode alone."""

import inspect
from dataclasses import replace
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
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    _keep_shapes(tl, interpreter.TritonSemantic)


def _keep_shapes(tl: Any, semantic: Any) -> None:
    """A block's type, and a tensor, with the shape that an earlier one has; blocks of one shape are not broadcast."""
    make_type, make_tensor, broadcast = tl.block_type.__init__, tl.tensor.__init__, semantic.broadcast_impl_value
    shapes, blocks, tensors = dict[Any, Any](), dict[Any, dict[str, Any]](), dict[Any, dict[str, Any]]()

    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([each.value if isinstance(each, tl.constexpr) else each for each in shape])
        if (key := (element_ty.name, sizes)) in blocks:
            vars(self).update(blocks[key], element_ty=element_ty)
        else:
            make_type(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            blocks[key] = dict(vars(self))

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        shape = (*type.shape,) if type.is_block() else ()
        if shape in tensors:
            vars(self).update(tensors[shape], handle=handle, type=type, dtype=type.scalar)
        else:
            make_tensor(self, handle, type)
            tensors[shape] = {"shape": self.shape, "numel": self.numel}

    def broadcast_others(self: Any, a: Any, b: Any) -> Any:
        if a.type.is_block() and b.type.is_block() and a.type.shape is b.type.shape:
            return a, b
        return broadcast(self, a, b)

    tl.block_type.__init__, tl.tensor.__init__ = type_once, tensor_once
    semantic.broadcast_impl_value = broadcast_others
