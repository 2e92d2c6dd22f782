"""The launch record: how the kernels of a plan are launched, as data.

A record is JSON. It is part of a plan's identity, so its digest is the ABI between a cubin and the runtime; no version
number is kept by hand. It has

* ``kernels``, in launch order: ``name``; ``grid`` (CTAs, an expression), ``block`` (threads) and ``shared_bytes``
  (dynamic shared memory); ``parameters``, in the kernel's order; optionally ``when``, the call that it is launched for;
* ``buffers``: scratch of a launch: ``name``, ``bytes`` (an expression), optionally ``when`` it is needed, and ``else``,
  the tensor that stands in for it when not; the name ``ticket`` is for the counter from which rows are drawn;
* optionally ``values``, further launch values: ``name`` and ``value`` (an expression over those before it).

Parameter types: ``pointer`` (the tensor or buffer of that name), ``int32`` and ``float32`` (the launch value of that
name) and ``tensor_map`` (a CUtensorMap over the tensor of that name: ``element`` dtype, ``extents`` innermost first,
``box``, ``swizzle_bytes``; the tensor is contiguous).

Expressions are integers, launch values, ``+ * //``, ``min``, ``max`` and ``ceil_div``, nothing else. They are compiled
once, when a plan is loaded. A grid of 0 means that the kernel has nothing to do.

Standard library only.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from dsa_planner.errors import shown

__all__ = [
    "LAUNCH_VALUES",
    "PARAMETER_BYTES",
    "Buffer",
    "KernelLaunch",
    "LaunchRecord",
    "Parameter",
    "TensorMap",
    "compile_expression",
]

TENSORS = (
    "index_q", "weights", "index_k", "attn_score", "index_score", "topk_indices", "grad_loss", "d_index_q", "d_weights",
    "d_index_k",
)  # fmt: skip
"""The tensors of ``indexer_backward``, in argument order."""

LAUNCH_VALUES: Mapping[str, str] = {
    "rows": "batch * S_q, the number of queries",
    "keys": "batch * S_k",
    "s_q": "queries of a batch element",
    "heads": "H",
    "head_dim": "D",
    "topk": "slots of a row",
    "multiprocessors": "SMs of the device",
    "id_limit": "first invalid id: S_k for local ids, keys for global ones",
    "id_offset": "added to a valid id for each batch element: S_k for local ids, 0 for global ones",
    "sm_scale": "the softmax scale",
    "loss_scale": "loss_coeff / rows",
}
_FLOATS = frozenset({"sm_scale", "loss_scale"})
CALL_FACTS = ("d_index_k",)
DTYPES = ("bf16", "fp32")
SWIZZLES = (0, 32, 64, 128)
_LONGEST_EXPRESSION = 200  # characters; bounds the nesting too
_LONGEST_BOX = 256
PARAMETER_BYTES = {"pointer": 8, "int32": 4, "float32": 4, "tensor_map": 128}

Expression = Callable[[Mapping[str, int]], int]


@dataclass(frozen=True)
class TensorMap:
    """The shape of a CUtensorMap: extents are expressions, innermost first."""

    element: str
    extents: tuple[Expression, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter."""

    name: str
    type: str
    tensor_map: TensorMap | None = None


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel of a plan and how it is launched."""

    name: str
    grid: Expression
    block: int
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    when: Mapping[str, str]


@dataclass(frozen=True)
class Buffer:
    """Scratch memory of one launch. Where ``when`` does not hold, the tensor ``otherwise`` stands in for it."""

    name: str
    bytes: Expression
    when: Mapping[str, str]
    otherwise: str | None


@dataclass(frozen=True)
class LaunchRecord:
    """A launch record, checked and with its expressions compiled."""

    kernels: tuple[KernelLaunch, ...]
    buffers: tuple[Buffer, ...]
    values: tuple[tuple[str, Expression], ...] = ()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> LaunchRecord:
        """Check a record and compile its expressions.

        Raises:
            ValueError: it is malformed; the message names the place.
        """
        _keys(data, "launch record", {"kernels", "buffers"}, {"values"})
        integers = set(LAUNCH_VALUES) - _FLOATS
        values = []
        for entry in _list(data.get("values", []), "values"):
            _keys(entry, "value", {"name", "value"})
            name = _name(entry, "value")
            if name in integers | _FLOATS:
                raise ValueError(f"two values have the name {name}")
            values.append((name, compile_expression(entry["value"], integers)))
            integers.add(name)
        buffers = tuple(_buffer(entry, integers) for entry in _list(data["buffers"], "buffers"))
        names = _Names({*TENSORS, *(buffer.name for buffer in buffers)}, integers)
        kernels = tuple(_kernel(entry, names) for entry in _list(data["kernels"], "kernels"))
        for what, found in (("kernels", kernels), ("buffers", buffers)):
            if len({entry.name for entry in found}) != len(found):
                raise ValueError(f"two {what} have one name")
        return cls(kernels, buffers, tuple(values))

    def complete(self, values: dict[str, Any]) -> None:
        """Add the record's own values to those of a launch."""
        for name, expression in self.values:
            values[name] = expression(values)


@dataclass(frozen=True)
class _Names:
    """What parameters may be: tensors and buffers, and integer launch values."""

    memory: Container[str]
    integers: Container[str]


def compile_expression(text: str, names: Container[str] = frozenset(LAUNCH_VALUES) - _FLOATS) -> Expression:
    """Compile an expression over integer launch values.

    Raises:
        ValueError: it is not of the language; nothing of it was run.
    """
    if not isinstance(text, str) or len(text) > _LONGEST_EXPRESSION:
        raise ValueError(f"expression {shown(text)}: it has to be text of at most {_LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"expression {text!r}: {error.msg}") from None
    _check_expression(tree.body, text, names)
    lambda_tree = ast.Expression(
        ast.Lambda(
            ast.arguments(posonlyargs=[], args=[ast.arg("values")], kwonlyargs=[], kw_defaults=[], defaults=[]),
            _Subscripts(names).visit(tree.body),
        )
    )
    code = compile(ast.fix_missing_locations(lambda_tree), f"<{text}>", "eval")
    function: Expression = eval(code, {"__builtins__": {}, "min": min, "max": max, "ceil_div": _ceil_div})
    return function


def holds(when: Mapping[str, str], call: Mapping[str, str]) -> bool:
    """Whether a condition holds for a call, described for example as {"d_index_k": "bf16"}."""
    return all(call[name] == value for name, value in when.items())


class _Subscripts(ast.NodeTransformer):
    """Names of launch values become lookups in the lambda's argument."""

    def __init__(self, names: Container[str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.names:
            return node
        return ast.Subscript(ast.Name("values", ast.Load()), ast.Constant(node.id), ast.Load())


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _check_expression(node: ast.AST, text: str, names: Container[str]) -> None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return
    if isinstance(node, ast.Name) and node.id in names:
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult, ast.FloorDiv)):
        _check_expression(node.left, text, names)
        _check_expression(node.right, text, names)
        return
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("min", "max", "ceil_div")
        and len(node.args) == 2
        and not node.keywords
    ):
        for argument in node.args:
            _check_expression(argument, text, names)
        return
    raise ValueError(f"expression {text!r}: {ast.unparse(node)!r} is not part of the language")


def _kernel(entry: Any, names: _Names) -> KernelLaunch:
    _keys(entry, "kernel", {"name", "grid", "block", "shared_bytes", "parameters"}, {"when"})
    name = _name(entry, "kernel")
    return KernelLaunch(
        name=name,
        grid=compile_expression(entry["grid"], names.integers),
        block=_number(entry, "block", f"kernel {name}", range(1, 1025)),
        shared_bytes=_number(entry, "shared_bytes", f"kernel {name}", range(1 << 20)),
        parameters=tuple(_parameter(parameter, names) for parameter in _list(entry["parameters"], "parameters")),
        when=_when(entry, f"kernel {name}"),
    )


def _parameter(entry: Any, names: _Names) -> Parameter:
    _keys(entry, "parameter", {"name", "type"}, {"element", "extents", "box", "swizzle_bytes"})
    name, type_ = _name(entry, "parameter"), entry["type"]
    if not isinstance(type_, str) or type_ not in PARAMETER_BYTES:
        raise ValueError(f"parameter {name}: type {shown(type_)} is none of {sorted(PARAMETER_BYTES)}")
    known = {"int32": names.integers, "float32": _FLOATS}.get(type_, names.memory)
    if name not in known:
        raise ValueError(f"parameter {name}: there is no {type_} of that name")
    map_keys = {"element", "extents", "box", "swizzle_bytes"}
    _keys(entry, "parameter", {"name", "type"} | (map_keys if type_ == "tensor_map" else set()))
    if type_ != "tensor_map":
        return Parameter(name, type_)
    extents, box = _list(entry["extents"], "extents"), _list(entry["box"], "box")
    if len(extents) != len(box):
        raise ValueError(f"parameter {name}: {len(extents)} extents and a box of {len(box)}")
    if not all(type(size) is int and 0 < size <= _LONGEST_BOX for size in box):
        raise ValueError(f"parameter {name}: box {shown(box)} is not of sizes up to {_LONGEST_BOX}")
    if entry["element"] not in DTYPES or _number(entry, "swizzle_bytes", f"parameter {name}") not in SWIZZLES:
        raise ValueError(f"parameter {name}: element is one of {DTYPES}, swizzle_bytes one of {SWIZZLES}")
    tensor_map = TensorMap(
        entry["element"],
        tuple(compile_expression(extent, names.integers) for extent in extents),
        tuple(box),
        entry["swizzle_bytes"],
    )
    return Parameter(name, type_, tensor_map)


def _buffer(entry: Any, integers: Container[str]) -> Buffer:
    _keys(entry, "buffer", {"name", "bytes"}, {"when", "else"})
    name, otherwise = _name(entry, "buffer"), entry.get("else")
    if otherwise is not None and otherwise not in TENSORS:
        raise ValueError(f"buffer {name}: there is no tensor {shown(otherwise)}")
    return Buffer(name, compile_expression(entry["bytes"], integers), _when(entry, f"buffer {name}"), otherwise)


def _when(entry: Mapping[str, Any], what: str) -> Mapping[str, str]:
    when = entry.get("when", {})
    if not isinstance(when, Mapping) or not all(key in CALL_FACTS and when[key] in DTYPES for key in when):
        raise ValueError(f"{what}: when is {shown(when)}; it maps {' or '.join(CALL_FACTS)} to one of {DTYPES}")
    return dict(when)


def _name(entry: Mapping[str, Any], what: str) -> str:
    name = entry["name"]
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{what} name {shown(name)} is not a name")
    return name


def _number(entry: Mapping[str, Any], key: str, what: str, allowed: range = range(1 << 31)) -> int:
    value = entry[key]
    if type(value) is not int or value not in allowed:
        raise ValueError(f"{what}: {key} is {shown(value)}, not a number from {allowed[0]} to {allowed[-1]}")
    return value


def _list(value: Any, what: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} is {shown(value)}, not a list")
    return value


def _keys(entry: Any, what: str, required: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    if not isinstance(entry, Mapping):
        raise ValueError(f"{what} is {shown(entry)}, not an object")
    missing, unknown = required - set(entry), set(entry) - required - optional
    if missing or unknown:
        raise ValueError(f"{what} {entry.get('name', '')}: missing {sorted(missing)}, unknown {sorted(unknown)}")
