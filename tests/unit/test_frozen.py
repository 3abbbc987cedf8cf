"""`Frozen` does what `dataclass` would have written for each class."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from inspect import signature

import pytest

import hpcenv.submission.submit  # noqa: F401  (with it come the classes that a submission loads)
from hpcenv.frozen import Frozen, frozen_dataclass
from hpcenv.project.document import Document
from hpcenv.records.manifest import Bind, Manifest
from hpcenv.submission.plan import Plan, Request


@dataclass(frozen=True, kw_only=True)
class _Written:
    name: str
    hidden: str = field(default="x", repr=False)
    ignored: int = field(default=0, compare=False)
    unhashed: list[int] = field(default_factory=list, hash=False)


@frozen_dataclass
class _Inherited(Frozen):
    name: str
    hidden: str = field(default="x", repr=False)
    ignored: int = field(default=0, compare=False)
    unhashed: list[int] = field(default_factory=list, hash=False)


def classes(kind: type = Frozen) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from classes(one)


def test_no_class_has_methods_that_python_compiled_beside_these() -> None:
    found = list(classes())
    assert {Document, Manifest, Plan, Request} <= set(found)
    own = {"__eq__", "__hash__", "__repr__", "__setattr__", "__delattr__"}
    assert [one.__name__ for one in found if own & vars(one).keys()] == []
    # Without the decorator, or with a method that only the constructor of `dataclass` calls, values would be ignored.
    ignored = [
        one.__name__ for one in found if "__dataclass_fields__" not in vars(one) or hasattr(one, "__post_init__")
    ]
    assert ignored == []
    assert [one.name for kind in found for one in fields(kind) if not one.init] == []


def test_equality_is_that_of_dataclass() -> None:
    for kind in (_Written, _Inherited):
        one = kind(name="a", unhashed=[1])
        assert one == kind(name="a", unhashed=[1], ignored=2)
        assert one != replace(one, name="b")
        assert one != replace(one, hidden="y")
        assert one != replace(one, unhashed=[2])
        assert one != ("a", "x", 0, [1])
    assert _Written(name="a") != _Inherited(name="a")


def test_nothing_can_be_assigned_or_deleted() -> None:
    for kind in (_Written, _Inherited):
        one = kind(name="a")
        for name in ("name", "ignored", "unknown"):
            with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
                setattr(one, name, "b")
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'name'"):
            del one.name  # type: ignore[misc]
        assert one == kind(name="a")
        with pytest.raises(TypeError, match="argument .nam."):
            kind(name="a", nam="a")
        with pytest.raises(TypeError, match="argument:? .name."):
            kind()
        with pytest.raises(TypeError, match="positional argument"):
            kind("a")


def test_hash_and_text_are_those_of_dataclass() -> None:
    written, inherited = _Written(name="a", unhashed=[1]), _Inherited(name="a", unhashed=[1])
    assert hash(inherited) == hash(written)
    assert repr(inherited) == repr(written).replace("_Written", "_Inherited")
    binds = {Bind(source="/a", target="/a"), Bind(source="/a", target="/a"), Bind(source="/b", target="/a")}
    assert len(binds) == 2


def test_a_constructor_has_the_signature_of_its_fields() -> None:
    parameters = signature(_Written).parameters
    assert list(parameters) == ["name", "hidden", "ignored", "unhashed"]
    assert parameters["name"].default is parameters["name"].empty
    assert parameters["hidden"].default == "x"
