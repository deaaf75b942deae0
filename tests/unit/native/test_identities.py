from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch

from elasticstate._native import Identities, integers_of
from elasticstate.compat.torch_tensors import version_descriptor


def test_containers_are_compared_by_identity() -> None:
    one, other = object(), object()
    for container, change, undo in [
        ({"a": one}, lambda c: c.update(a=other), lambda c: c.update(a=one)),
        (defaultdict(dict, {"a": one}), lambda c: c["b"], lambda c: c.pop("b")),
        (OrderedDict(a=one), lambda c: c.clear(), lambda c: c.update(a=one)),
        ([one], lambda c: c.append(one), lambda c: c.pop()),
        ([one], lambda c: c.__setitem__(0, other), lambda c: c.__setitem__(0, one)),
        ([], lambda c: c.append(one), lambda c: c.pop()),
    ]:
        found = Identities([{}, container, [one]])
        assert found.unchanged()
        change(container)
        assert not found.unchanged()
        undo(container)
        assert found.unchanged()


def test_every_change_of_a_dict_is_found_at_once_and_again_after_equal_looks() -> None:
    class Owner:
        def __init__(self) -> None:
            self.a, self.b = 1.5, 2.5

    def attribute(found: dict[str, float]) -> None:
        owner.a = 3.5

    for change in (
        lambda d: d.__setitem__("a", float("3.5")),
        lambda d: d.__delitem__("a"),
        lambda d: d.setdefault("c", 3.5),
        lambda d: d.popitem(),
        lambda d: d.pop("b"),
        lambda d: d.update(c=3.5),
        lambda d: d.__ior__({"b": 3.5}),
        lambda d: d.clear(),
        attribute,
    ):
        owner = Owner()
        items = vars(owner)
        found = Identities([items])
        same = dict(items)
        items["a"] = same["a"]
        assert found.unchanged()
        assert found.unchanged()
        change(items)
        assert not found.unchanged()
        assert not found.unchanged()
        items.clear()
        items.update(same)
        assert found.unchanged()
        assert found.unchanged()


def test_other_containers_are_refused() -> None:
    with pytest.raises(TypeError, match="dict or a list"):
        Identities([()])


def test_items_are_kept_alive_and_cycles_are_collected() -> None:
    class Thing:
        pass

    thing: Any = Thing()
    items = {"thing": thing}
    thing.found = Identities([items])
    alive = weakref.ref(thing)
    items.clear()
    del thing
    assert alive() is None or not items
    gc.collect()
    assert alive() is None


def test_integers_of_an_attribute_are_read() -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    tensors[1].add_(1).add_(1)
    found = integers_of(tensors, version_descriptor())
    assert [int.from_bytes(found[i : i + 8], "little") for i in (0, 8, 16)] == [0, 2, 0]
    with pytest.raises(TypeError, match="descriptor"):
        integers_of(tensors, 3)
    with torch.inference_mode():
        tensors.append(torch.zeros(2))
    with pytest.raises(RuntimeError, match="version counter"):
        integers_of(tensors, version_descriptor())
