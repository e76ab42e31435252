"""Short names of kernels: what tells two instantiations apart, on one line."""

from __future__ import annotations

import ctypes
import functools
import re

_WORDS = {
    "(anonymous namespace)::": "",
    "(cute_kernels::format::Role)0": "key",
    "(cute_kernels::format::Role)1": "value",
    "half_t": "f16",
    "bfloat16_t": "bf16",
}


@functools.cache
def _demangler() -> ctypes._CFuncPtr:
    function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle  # which the extension itself needs
    function.restype = ctypes.c_void_p
    return function


def demangle(symbol: str) -> str:
    """A C++ symbol in words; other symbols as they are."""
    status = ctypes.c_int()
    text = _demangler()(symbol.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or text is None:
        return symbol
    try:
        return ctypes.string_at(text).decode()
    finally:
        libc = ctypes.CDLL(None)
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(text)


def short_name(symbol: str) -> str:
    """sm80::sparse_qk_kernel<WarpTraits<key,f16,128,8>>.

    Without parameters, repeated arguments, and namespaces other than those of an architecture (sm90).
    """
    text = demangle(symbol)
    if text == symbol:
        return symbol
    for long, short in _WORDS.items():
        text = text.replace(long, short)
    text = re.sub(r"\b(?!sm\d+::)[A-Za-z_]\w*::", "", text.removeprefix("void ")).replace(" ", "")
    text = re.sub(r"StoredOperand<BitmapTile,(?:Fp16|Bf16)Codec,(\w+)>", r"\1", text)  # the codec says no more
    text = re.sub(r"ScaledOperand<BitmapTile,(\w+)Codec>", lambda of: of[1].lower(), text)
    text = re.sub(
        r"(?:Stored|Scaled)Operand<TwoOfFour(Bitmap)?Tile,(\w+)Codec(?:,\w+)?>",
        lambda of: f"{'at-most-' if of[1] else ''}2of4-{of[2].lower()}",
        text,
    )
    text = re.sub(r",(?:BitmapTile|TwoOfFourTile|TwoOfFourBitmapTile)>", ">", text)  # which the operand says
    name, arguments = _split(text)
    said: list[str] = []
    for argument in arguments:
        for before in said:
            argument = argument.replace(before, "")
        said.append(re.sub(r"<,*>", "", argument) or "same")
    return f"{name}<{','.join(said)}>" if said else name


def _split(text: str) -> tuple[str, list[str]]:
    """A function without its parameters: its name, and its template arguments."""
    depth, begin, arguments = 0, 0, []
    for i, character in enumerate(text):
        if character == "(" and depth == 0:
            return text[:i], arguments
        if character == "<":
            depth += 1
            if depth == 1:
                name, begin = text[:i], i + 1
        elif character == ">":
            depth -= 1
            if depth == 0:
                return name, [*arguments, text[begin:i]]
        elif character == "," and depth == 1:
            arguments.append(text[begin:i])
            begin = i + 1
    return text, arguments
