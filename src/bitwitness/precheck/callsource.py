"""A call's source taken apart and written anew, so that nothing but literals, tensors and names of torch's gets into a file."""

from __future__ import annotations

import ast
from collections.abc import Collection

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown

_PLAIN_CALLS = ("float", "complex", "slice")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OTHERS = ("getitem", "setitem", "neg", "invert", "eq", "ne", "lt", "le", "gt", "ge")
_OPERATORS = {f"__{prefix}{name}__" for name in _BINARY for prefix in ("", "r", "i")} | {
    f"__{name}__" for name in _OTHERS
}
_FLOATING = (
    "float16",
    "half",
    "bfloat16",
    "float32",
    "float",
    "float64",
    "double",
    "complex32",
    "complex64",
    "complex128",
)
_LONGEST = 1_000_000  # characters: literals of a recorded call have some hundreds
_EXPECTED = 'expected one call such as torch.add(tensors["a"], 2.0), of literals, tensors["name"] and names of torch\'s'


def call_from_literals(source: str, tensors: Collection[str]) -> tuple[str, str]:
    """Return a call as ASCII source of one line, and the same with its floating dtypes as ``wide(torch.float16)``.

    Parameters
    ----------
    source
        An expression; see `write_reproducer`.
    tensors
        Names that it may use.

    Raises
    ------
    UsageError
        For anything else, naming the part that is not wanted.

    """
    try:
        if len(source) > _LONGEST:
            raise ValueError(f"it has {len(source):,} characters")  # noqa: TRY301 - told like Python's own refusals
        body = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"the call {shown(source)} is no Python: {shown(error)}; {_EXPECTED}") from error
    if not isinstance(body, ast.Call):
        raise UsageError(f"{shown(source)} is no call; {_EXPECTED}")
    _check(body, frozenset(tensors))
    plain = ast.unparse(body)
    return _ascii(plain), _ascii(ast.unparse(_Widened().visit(body)))


def _ascii(code: str) -> str:
    # what is not ASCII stands in strings only: names were checked to be
    return code.encode("ascii", "backslashreplace").decode("ascii")


def _check(node: ast.expr, tensors: frozenset[str]) -> None:
    """Raise `UsageError` for what is no literal, tensor, name of torch's or call of one."""
    match node:
        case ast.Constant(value=str() | int() | float() | complex() | None):  # bool is an int
            return
        case ast.List(elts=items) | ast.Tuple(elts=items):
            parts = list(items)
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            parts = list(values)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            parts = [operand]
        case ast.Subscript(value=ast.Name(id="tensors"), slice=ast.Constant(value=str(name))) if name in tensors:
            return
        case ast.Attribute() if _dotted(node):
            return
        case ast.Call(func=func, args=args, keywords=keywords) if _may_be_called(func) and _named(keywords):
            parts = [*args, *(keyword.value for keyword in keywords)]
        case _:
            raise UsageError(f"{shown(ast.unparse(node))} may not be part of a reproducer's call; {_EXPECTED}")
    for part in parts:
        _check(part, tensors)


def _named(keywords: list[ast.keyword]) -> bool:
    return all(one.arg is not None and one.arg.isascii() for one in keywords)


def _may_be_called(func: ast.expr) -> bool:
    return _dotted(func) or (isinstance(func, ast.Name) and func.id in _PLAIN_CALLS)


def _dotted(node: ast.expr) -> bool:
    """Whether this is ``torch.a.b``, all of it public and ASCII; operators with two underscores, as ``__add__``, included."""
    while isinstance(node, ast.Attribute):
        hidden = node.attr.startswith("_") and node.attr not in _OPERATORS
        if hidden or not node.attr.isascii():
            return False
        node = node.value
    return isinstance(node, ast.Name) and node.id == "torch"


class _Widened(ast.NodeTransformer):
    """Wraps each ``torch.float16`` that is given as an argument into ``wide(…)``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.attr in _FLOATING:
            return ast.Call(func=ast.Name("wide", ast.Load()), args=[node], keywords=[])
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node.args = [self.visit(one) for one in node.args]
        node.keywords = [self.visit(one) for one in node.keywords]
        return node
