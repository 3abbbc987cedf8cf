"""Our dataclasses beside those of the standard library: whoever uses one sees no difference."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from hpcenv.dataclass import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Ours."""

    name: str
    count: int = 1
    words: dict[str, str] = field(default_factory=dict)
    hidden: str = field(default="x", repr=False, compare=False)

    @property
    def twice(self) -> int:
        return 2 * self.count


@dataclass(frozen=True, kw_only=True)
class OursBelow(Ours):
    more: tuple[str, ...] = ()
    count: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theirs:
    """Theirs."""

    name: str
    count: int = 1
    words: dict[str, str] = dataclasses.field(default_factory=dict)
    hidden: str = dataclasses.field(default="x", repr=False, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TheirsBelow(Theirs):
    more: tuple[str, ...] = ()
    count: int = 2


@dataclass(frozen=True)
class Placed:
    first: str
    second: str = "2"


def described(kind: Any) -> list[Any]:
    return [
        (f.name, f.type, f.default, f.default_factory, f.repr, f.compare, f.kw_only) for f in dataclasses.fields(kind)
    ]


@pytest.mark.parametrize(("ours", "theirs"), [(Ours, Theirs), (OursBelow, TheirsBelow)])
def test_fields_and_objects_are_those_of_the_standard_library(ours: Any, theirs: Any) -> None:
    assert dataclasses.is_dataclass(ours)
    assert described(ours) == described(theirs)
    one, other = ours(name="a", words={"b": "c"}), theirs(name="a", words={"b": "c"})
    assert repr(one) == repr(other).replace("Theirs", "Ours")
    assert dataclasses.asdict(one) == dataclasses.asdict(other)
    assert vars(dataclasses.replace(one, count=5)) == vars(dataclasses.replace(other, count=5))


def test_objects_are_equal_where_their_compared_values_are() -> None:
    assert Ours(name="a", hidden="1") == Ours(name="a", hidden="2")
    assert Ours(name="a") != Ours(name="b")
    assert Ours(name="a", count=2) != OursBelow(name="a")
    assert Ours(name="a") != Theirs(name="a")
    assert hash(Placed("a")) == hash(Placed("a")) != hash(Placed("b"))
    with pytest.raises(TypeError, match="unhashable"):
        hash(Ours(name="a"))


def test_no_two_objects_share_what_a_factory_made() -> None:
    assert Ours(name="a").words is not Ours(name="a").words


@pytest.mark.parametrize("change", [lambda one: setattr(one, "name", "b"), lambda one: delattr(one, "name")])
def test_an_object_cannot_be_changed(change: Any) -> None:
    one = Ours(name="a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        change(one)
    assert one.name == "a"


@pytest.mark.parametrize("words", [{}, {"name": "a", "nmae": "b"}, {"nmae": "a"}])
def test_arguments_must_fit(words: dict[str, str]) -> None:
    with pytest.raises(TypeError, match="argument"):
        Ours(**words)  # type: ignore[arg-type]


def test_arguments_by_place_only_where_that_is_said() -> None:
    assert Placed("1") == Placed(first="1", second="2") == Placed("1", "2")
    for places, words in ((("1", "2", "3"), {}), (("1",), {"first": "1"})):
        with pytest.raises(TypeError):
            Placed(*places, **words)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Ours("a")  # type: ignore[misc]


def test_objects_can_be_copied_and_pickled() -> None:
    one = OursBelow(name="a", words={"b": "c"}, more=("d",))
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == copy.copy(one) == one
    assert one.twice == 4


def test_one_that_is_not_frozen_is_made_the_ordinary_way() -> None:
    @dataclass(kw_only=True)
    class Open:
        name: str

    one = Open(name="a")
    one.name = "b"
    assert one == Open(name="b")


def test_what_a_constructor_takes_can_be_asked() -> None:
    assert str(inspect.signature(Placed)) == "(first: 'str', second: 'str' = '2')"
    ours, theirs = inspect.signature(OursBelow).parameters, inspect.signature(TheirsBelow).parameters
    assert [(p.name, p.kind, p.annotation) for p in ours.values()] == [
        (p.name, p.kind, p.annotation) for p in theirs.values()
    ]
    required = [name for name, parameter in ours.items() if parameter.default is inspect.Parameter.empty]
    assert required == ["name"]
