"""What Triton's interpreter does for nothing, left out for tests: most of the time of a case. It computes the same.

A jitted function that another one calls has the language's functions replaced, which the launch of the kernel has done
already. And behind each sum and product of integers come seven operations that make a condition, that of no overflow,
which is then dropped: the interpreter's options have `debug` off.
"""

from __future__ import annotations

from typing import Any


def make_quick() -> None:
    """For this process; a Triton whose interpreter is made otherwise stays as it is."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    try:
        replace, scope = interpreter._patch_lang, interpreter._LangPatchScope
        check = TritonSemantic.binary_op_sanitize_overflow_impl
    except AttributeError:
        return

    def replace_once(fn: Any) -> Any:
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        functions = [tl.tensor.__add__, *(language.load for language in seen)]
        return replace(fn) if not seen or any(map(tl.core.is_builtin, functions)) else scope()

    def check_if_told(self: Any, *given: Any) -> None:
        if self.builder.options.debug:
            check(self, *given)

    interpreter._patch_lang = replace_once
    TritonSemantic.binary_op_sanitize_overflow_impl = check_if_told
