"""Which arrays of a state are special, told by keys of our own and not by names of fields.

A path to a leaf runs through these keys, whatever a user has around the state. Flax NNX
makes dictionaries of tuples but keeps the names of the keys, and no attribute can have
such a name, so that a user's own field called ``sent`` is just a field.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.tree_util import GetAttrKey

PyTree = Any
Fields = TypeVar("Fields", bound=type[tuple])

#: Marks of fields whose arrays differ from worker to worker: they have a leading worker
#: axis, of size 1 inside ``shard_map``, of the number of workers outside.
OWN = " (per worker)"

#: Marks of fields whose arrays are flat, a value for some entries of a leaf each.
SPANS = " (by span)"


class _MarkedKey(GetAttrKey):
    """Looks like the key of the field in the name of a leaf."""

    def __str__(self) -> str:
        return "." + self.name.partition(" ")[0]


#: Classes of states, and the names of their keys by field.
_classes: dict[type, dict[str, str]] = {}

#: Tuples without marks in their places.
_ordinary: dict[type, Any] = {}


def state_class(*, own: tuple[str, ...] = (), spans: tuple[str, ...] = ()) -> Callable:
    """Decorates a NamedTuple of a state: its fields whose arrays are each worker's own, or
    flat by spans."""

    def register(cls: Fields) -> Fields:
        fields = cls._fields  # type: ignore[attr-defined]
        marks = {**dict.fromkeys(own, OWN), **dict.fromkeys(spans, SPANS)}
        keys = [
            _MarkedKey(field + marks[field]) if field in marks else GetAttrKey(field)
            for field in fields
        ]
        jax.tree_util.register_pytree_with_keys(
            cls, lambda x: (tuple(zip(keys, x, strict=True)), None),
            lambda _, children: cls(*children), lambda x: (tuple(x), None),
        )
        _classes[cls] = {field: key.name for field, key in zip(fields, keys, strict=True)}
        _ordinary[cls] = collections.namedtuple(cls.__name__, fields)  # type: ignore[misc]
        return cls

    return register


def marked(path: tuple, mark: str) -> str | None:
    """The field of a state with this mark that a path runs through, if any."""
    for key in path:
        # NNX has keys of dictionaries.
        name = getattr(key, "name", getattr(key, "key", None))
        if isinstance(name, str) and name.endswith(mark):
            return name.removesuffix(mark)
    return None


def class_of(node: Any) -> type | None:
    """Of which of our tuples NNX has made this dictionary, if of any."""
    if not isinstance(node, Mapping):
        return None
    for cls, names in _classes.items():
        # NNX leaves out what has no leaves, which marked fields have.
        needed = {name for field, name in names.items() if name != field} or names.values()
        if set(needed) <= set(node) <= set(names.values()):
            return cls
    return None


def as_tuple(node: Mapping) -> Any:
    """The tuple of which NNX has made a dictionary."""
    cls: Any = class_of(node)
    return cls(*(node.get(name, ()) for name in _classes[cls].values()))


def as_mapping(values: Any, like: Mapping) -> dict:
    """Inverse of :func:`as_tuple`."""
    names = _classes[type(values)].items()
    return {name: getattr(values, field) for field, name in names if name in like}


def typed(state: PyTree) -> PyTree:
    """A state with our tuples where NNX has made dictionaries, and arrays for its variables."""

    def convert(node: Any) -> Any:
        if isinstance(node, Mapping):
            children = {key: typed(value) for key, value in node.items()}
            return as_tuple(children) if class_of(children) else children
        return jax.tree.leaves(node)[0] if _is_variable(node) else node

    is_leaf = lambda node: isinstance(node, Mapping) or _is_variable(node)
    return jax.tree.map(convert, state, is_leaf=is_leaf)


def plain(state: PyTree) -> PyTree:
    """A state with ordinary tuples for ours, whose keys are the names of the fields."""
    is_ours = lambda node: type(node) in _classes

    def convert(node: Any) -> Any:
        if not is_ours(node):
            return node
        return _ordinary[type(node)](*(plain(child) for child in node))

    return jax.tree.map(convert, state, is_leaf=is_ours)


def _is_variable(node: Any) -> bool:
    """Whether it is an array in a container of its own."""
    if isinstance(node, jax.Array) or not hasattr(node, "get_value"):
        return False
    return len(jax.tree.leaves(node)) == 1
