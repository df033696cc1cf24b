"""What a compiled program sends over the wire."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from onebit_jax.audit import hlo

#: Bytes a device sends for an operand of ``size`` bytes in a group of ``g``.
_SENT = {
    "all-reduce": lambda size, g: 2 * (g - 1) * size // g,
    "all-gather": lambda size, g: (g - 1) * size,
    "reduce-scatter": lambda size, g: (g - 1) * size // g,
    "all-to-all": lambda size, g: (g - 1) * size // g,
    "collective-permute": lambda size, g: size if g > 1 else 0,
    "collective-broadcast": lambda size, g: size if g > 1 else 0,
    # Only the data knows how much, so this is the most.
    "ragged-all-to-all": lambda size, g: size if g > 1 else 0,
}


class Collective(NamedTuple):
    """One exchange in a compiled program.

    Attributes:
      operation: for example ``"all-reduce"``.
      dtype: JAX's name of what goes over the wire, for example ``"float32"``.
      shape: of the operand, that is what one device puts in: the whole array of
        an all-reduce, reduce-scatter or all-to-all, the device's shard of an
        all-gather. ``(entries,)`` in all where there are several operands.
      operands: how many arrays the operation takes at once. An all-to-all on
        CPU takes one for each device of the group.
      groups: the device numbers of each group that exchanges, or the pairs of
        source and target of a collective-permute.
      bytes_each: what a device sends in one run, by the usual ring formulas.
      trips: how often it runs, or None if it is in a loop of unknown length.
      bytes: what a device sends in all its runs; a loop of unknown length counts
        as one turn.
      branch: None if it runs for certain, else the branches of conditionals and
        the loops of unknown length that it stands in.
      source: where it comes from in the traced function.
    """

    operation: str
    dtype: str
    shape: tuple[int, ...]
    operands: int
    groups: tuple[tuple[int, ...], ...]
    bytes_each: int
    trips: int | None
    bytes: int
    branch: str | None
    source: str

    @property
    def group_size(self) -> int:
        """Devices that exchange with one another; of the largest group if they differ."""
        if self.operation == "collective-permute":
            return len({device for pair in self.groups for device in pair})
        return max(len(group) for group in self.groups)


class WireReport(NamedTuple):
    """What :func:`wire_report` has found.

    Attributes:
      collectives: in the order of the program's text.
    """

    collectives: tuple[Collective, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes a device sends if all branches run and unknown loops turn once."""
        return sum(c.bytes for c in self.collectives)

    def bytes_by_dtype(self) -> dict[str, int]:
        """The same by JAX's name of the dtype; ``"float32"`` is full precision."""
        return self._sums([c.dtype for c in self.collectives])

    def bytes_by_branch(self) -> dict[str | None, int]:
        """The same by branch; None is what is sent for certain."""
        return self._sums([c.branch for c in self.collectives])

    def _sums(self, keys: list) -> dict:
        sums = dict.fromkeys(keys, 0)
        for key, c in zip(keys, self.collectives, strict=True):
            sums[key] += c.bytes
        return sums

    def __str__(self) -> str:
        lines = [f"{len(self.collectives)} collectives, a device sends {self.total_bytes:,} bytes"]
        head = ("operation", "dtype", "operand", "devices", "runs", "bytes", "branch", "source")
        rows = [head] + [
            (
                c.operation, c.dtype, str(c.shape), str(c.group_size),
                "?" if c.trips is None else str(c.trips), f"{c.bytes:,}", c.branch or "-", c.source,
            )
            for c in self.collectives
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows if self.collectives else []:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        if any(c.trips is None for c in self.collectives):
            lines.append("runs ?: in a loop of unknown length, counted as one turn")
        if any(c.branch for c in self.collectives):
            lines.append("the sum counts all branches; it is not known which of them run:")
            for branch, n in self.bytes_by_branch().items():
                lines.append(f"  {n:,} bytes in {branch or 'what always runs'}")
        return "\n".join(lines)


def wire_report(compiled: Any) -> WireReport:
    """Lists the collectives of a compiled program and the bytes they send.

    Read from what the compiler has made, not from what was asked for: a bfloat16
    all-reduce that the CPU widens to float32 is a float32 all-reduce. Plain
    ``send`` and ``recv`` and copies to the host are not collectives.

    Args:
      compiled: from ``jax.jit(f).lower(...).compile()``, or its ``as_text()``.

    Returns:
      A :class:`WireReport`; printed, it is a table.

    Raises:
      TypeError: if it is neither.
      ValueError: if the text is not that of a compiled program.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
      >>> tx = onebit_jax.onebit_adam(1e-3, "data")
      >>> step = onebit_jax.make_train_step(lambda p, x: jnp.mean(x @ p), tx, mesh)
      >>> with jax.set_mesh(mesh):
      ...     state = (jnp.zeros(64), tx.init(jnp.zeros(64)))
      >>> report = onebit_jax.wire_report(step.lower(state, jnp.ones((8, 64))).compile())
      >>> report.total_bytes  # one device has nobody to send to
      0
    """
    text = compiled if isinstance(compiled, str) else getattr(compiled, "as_text", lambda: None)()
    if not isinstance(text, str):
        raise TypeError(
            "expected a compiled program, jax.jit(f).lower(...).compile(), or its as_text(), "
            f"found {type(compiled).__name__}"
        )
    found: list[Collective] = []
    for module in hlo.parse(text):
        found.extend(_walk(module, module.entry, 1, ()))
    return WireReport(tuple(found))


def _walk(
    module: hlo.Module, name: str, trips: int, branch: tuple[str, ...], known: bool = True
) -> Iterator[Collective]:
    """The collectives of a computation that runs ``trips`` times, and of what it calls."""
    scope = module.computations[name]
    for i in scope.values():
        operation = i.op.removesuffix("-start")
        if operation in _SENT:
            for c in _collectives(module, scope, i, operation):
                yield c._replace(
                    trips=trips if known else None,
                    bytes=trips * c.bytes_each,
                    branch=" > ".join(branch) or None,
                )
        elif i.op == "while":
            turns = hlo.trip_count(module, scope, i)
            inside = branch if turns is not None else (*branch, f"{i.name} (unknown turns)")
            n, still = (1, False) if turns is None else (turns, known)
            yield from _walk(module, i.called("body")[0], trips * n, inside, still)
            # The condition is asked once more than the body runs, and so at least once.
            n = 1 if turns is None else turns + 1
            yield from _walk(module, i.called("condition")[0], trips * n, inside, still)
        elif i.op == "conditional":
            for label, callee in _branches(i):
                yield from _walk(module, callee, trips, (*branch, f"{i.name} {label}"), known)
        elif not i.op.endswith(("-update", "-done")):
            callees = i.called("calls") + i.called("called_computations")
            for callee in callees + (i.called("to_apply") if i.op == "call" else []):
                yield from _walk(module, callee, trips, branch, known)


def _branches(conditional: hlo.Instruction) -> list[tuple[str, str]]:
    """A label and the computation of each branch."""
    listed = conditional.called("branch_computations")
    if listed:
        return [(f"branch {i}", name) for i, name in enumerate(listed)]
    return [(side, conditional.called(f"{side}_computation")[0]) for side in ("true", "false")]


def _collectives(
    module: hlo.Module, scope: hlo.Computation, i: hlo.Instruction, operation: str
) -> Iterator[Collective]:
    """One for each dtype among the operands, most often one; run once."""
    operands = [a for name in i.operands for a in hlo.arrays(scope[name].type)]
    if operation == "ragged-all-to-all":
        operands = operands[:1]
    groups = hlo.groups(i, module.devices)
    if operation == "collective-permute":
        g = 2 if any(source != target for source, target in groups) else 1
    else:
        g = max(len(group) for group in groups)
    source = i.attributes.partition('op_name="')[2].partition('"')[0]
    for dtype in dict.fromkeys(dtype for dtype, _ in operands):
        shapes = [shape for d, shape in operands if d == dtype]
        entries = sum(math.prod(shape) for shape in shapes)
        sent = _SENT[operation](-(-entries * hlo.bits(dtype) // 8), g)
        shape = shapes[0] if len(shapes) == 1 else (entries,)
        name = hlo.dtype_name(dtype)
        yield Collective(
            operation, name, shape, len(shapes), groups, sent, 1, sent, None, source
        )
