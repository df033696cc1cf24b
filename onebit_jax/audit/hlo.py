"""Reads the text of a compiled program: instructions, groups of devices, loops."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

#: How deep an expression is followed to see whether a loop counts.
_DEPTH = 8

_NAMES = {"pred": "bool", "bf16": "bfloat16", "f": "float", "s": "int", "u": "uint", "c": "complex"}


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      type: as written, for example ``f32[8]{0}``.
      op: for example ``all-reduce``.
      arguments: what is in the parentheses after the operation, as written.
      attributes: the rest of the line.
      root: whether it is the result of its computation.
    """

    name: str
    type: str
    op: str
    arguments: str
    attributes: str
    root: bool

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def called(self, attribute: str) -> list[str]:
        """Names of the computations in an attribute, which may be a list in braces."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
        return re.findall(r"%([\w.\-]+)", found[1]) if found else []


Computation = dict[str, Instruction]


class Module(NamedTuple):
    """One compiled program.

    Attributes:
      computations: instructions by their name, by the name of the computation.
      entry: name of the computation that runs.
      devices: how many devices run it.
    """

    computations: dict[str, Computation]
    entry: str
    devices: int


def parse(text: str) -> list[Module]:
    """The programs in a text, most often one.

    Args:
      text: from ``compiled.as_text()``.

    Returns:
      The modules.

    Raises:
      ValueError: if there is none in it.
    """
    parts = re.split(r"^(?=HloModule )", text, flags=re.MULTILINE)
    modules = [_module(part) for part in parts if part.startswith("HloModule ")]
    if not modules:
        start = text.lstrip().splitlines()[0][:60] if text.strip() else "nothing"
        raise ValueError(
            f"expected the text of a compiled program, which starts with HloModule, found "
            f"{start!r}. Compile first: jax.jit(f).lower(...).compile()"
        )
    return modules


def _module(text: str) -> Module:
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line[:1].isspace():
            if current is not None and (instruction := _instruction(line)):
                current[instruction.name] = instruction
        elif head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
    header = text.split("\n", 1)[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    if not entry:
        raise ValueError(f"no ENTRY computation in the program {header[:60]!r}: is the text cut?")
    return Module(computations, entry, math.prod(int(n) for n in counts))


def _instruction(line: str) -> Instruction | None:
    start = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not start:
        return None
    begin = start.end()
    end = _closing(line, begin) if line[begin] == "(" else line.find(" ", begin)
    op = re.compile(r"\s*([\w\-]+)\(").match(line, end)
    if not op:
        return None
    close = _closing(line, op.end() - 1)
    return Instruction(
        start[2], line[begin:end], op[1], line[op.end() : close - 1], line[close:], bool(start[1])
    )


def _closing(line: str, start: int) -> int:
    """The place after the parenthesis that closes the one at ``start``."""
    depth = 0
    for found in re.compile(r"[()]").finditer(line, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(line)


def arrays(type_text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The dtype, as the text spells it, and shape of each array in a type."""
    for dtype, dims in re.findall(r"(\w+)\[([\d,<=]*)\]", type_text):
        yield dtype, tuple(int(d.strip("<=")) for d in dims.split(",") if d)


def bits(dtype: str) -> int:
    """Bits of an entry; 0 of what is not data, such as a token."""
    width = re.match(r"(?:bf|f|s|u|c)(\d+)", dtype)
    return 8 if dtype == "pred" else int(width[1]) if width else 0


def dtype_name(dtype: str) -> str:
    """The name that JAX has for a dtype of the text.

    Args:
      dtype: for example ``"f32"``.

    Returns:
      For example ``"float32"``.

    Example:
      >>> dtype_name("bf16"), dtype_name("u32"), dtype_name("f8e4m3fn")
      ('bfloat16', 'uint32', 'float8_e4m3fn')
    """
    if dtype in _NAMES:
        return _NAMES[dtype]
    parts = re.fullmatch(r"([fsuc])(\d+)(\w*)", dtype)
    if not parts:
        return dtype
    return _NAMES[parts[1]] + parts[2] + ("_" + parts[3] if parts[3] else "")


def groups(instruction: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that exchange among themselves.

    Args:
      instruction: a collective.
      devices: how many devices run the program.

    Returns:
      A tuple of device numbers for each group; of a collective-permute its
      pairs of source and target.

    Raises:
      ValueError: if they are written in a way that is not known here.
    """
    text = instruction.attributes
    lists = re.search(r"\b(?:replica_groups|source_target_pairs)=\{((?:\{[\d, ]*\},? ?)*)\}", text)
    iota = re.search(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    numbers = lambda s: tuple(int(n) for n in s.split(",") if n.strip())
    if iota:
        shape, dims = numbers(iota[1]), numbers(iota[2])
        order = numbers(iota[3]) if iota[3] else range(len(dims))
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape)
        return tuple(tuple(row) for row in ids.tolist())
    if lists:
        found = tuple(numbers(group) for group in re.findall(r"\{([\d, ]*)\}", lists[1]))
        if found or instruction.op.startswith("collective-permute"):
            return found
    elif "replica_groups=" in text:
        written = text.split("replica_groups=", 1)[1][:40]
        raise ValueError(
            f"replica_groups={written!r}... of {instruction.name}: expected lists such as "
            "{{0,1},{2,3}} or the form [2,2]<=[4]; please report it with the version of jaxlib"
        )
    return (tuple(range(devices)),)


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """How often a while loop turns.

    Args:
      module: the program.
      caller: the computation that the loop stands in.
      loop: the instruction.

    Returns:
      What the compiler has noted; or else the bound of a loop that counts from a
      constant to a constant by a constant; or else None.
    """
    known = re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes)
    if known:
        return int(known[1])
    condition, body = (module.computations[loop.called(a)[0]] for a in ("condition", "body"))
    match _value(module, condition, _root(condition)):
        case ("compare", "LT", ("element", int(k)), ("constant", int(end))):
            pass
        case _:
            return None
    first = _value(module, caller, _tuple_item(caller, loop.operands[0], k))
    match first, _value(module, body, _tuple_item(body, _root(body), k)):
        case ("constant", int(start)), (
            ("add", "", ("element", int(j)), ("constant", int(step)))
            | ("add", "", ("constant", int(step)), ("element", int(j)))
        ) if j == k and step > 0:
            return max(-(-(end - start) // step), 0)
    return None


def _root(computation: Computation) -> str:
    return next(i.name for i in computation.values() if i.root)


def _tuple_item(computation: Computation, name: str, index: int) -> str:
    """Name of an item of a tuple, or that of the tuple if it is not made here."""
    made = computation[name]
    return made.operands[index] if made.op == "tuple" else name


def _value(
    module: Module, scope: Computation, name: str, given: tuple = (), depth: int = _DEPTH
) -> tuple[Any, ...]:
    """What an integer is made of, as nested tuples; ``("?",)`` where that is not simple."""
    made = scope[name]
    follow = lambda n: _value(module, scope, n, given, depth - 1)
    match made.op:
        case _ if depth == 0:
            return ("?",)
        case "constant" if re.fullmatch(r"-?\d+", made.arguments):
            return ("constant", int(made.arguments))
        case "parameter" if given:
            return given[int(made.arguments)]
        case "get-tuple-element":
            if scope[made.operands[0]].op == "parameter":
                index = re.search(r"index=(\d+)", made.attributes)
                return ("element", int(index[1])) if index else ("?",)
        case "copy" | "bitcast":
            return follow(made.operands[0])
        case "add" | "compare":
            direction = re.search(r"direction=(\w+)", made.attributes)
            return (made.op, direction[1] if direction else "", *map(follow, made.operands))
        case "fusion" | "call":
            callee = module.computations[(made.called("calls") + made.called("to_apply"))[0]]
            inside = tuple(follow(n) for n in made.operands)
            return _value(module, callee, _root(callee), inside, depth - 1)
    return ("?",)
