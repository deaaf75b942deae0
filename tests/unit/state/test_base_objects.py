from __future__ import annotations

import numpy as np
import torch

from elasticstate.state.base import ObjectState


def test_changes_in_place_are_undone() -> None:
    state = ObjectState(epoch=0, history=[1, 2], best={"loss": [0.5]})
    state.commit()
    state.epoch = 3
    state.history.append(3)
    state.best["loss"].clear()
    state.best["accuracy"] = 1.0
    state.restore()
    assert (state.epoch, state.history, state.best) == (0, [1, 2], {"loss": [0.5]})


def test_a_second_restore_gives_the_commit_again() -> None:
    state = ObjectState(history=[1])
    state.commit()
    state.restore()
    state.history.append(2)
    state.restore()
    assert state.history == [1]


def test_tensors_and_arrays_are_restored_in_place() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    state = ObjectState(tensor=tensor, array=array)
    state.commit()
    tensor.fill_(1)
    array.fill(1)
    state.restore()
    assert state.tensor is tensor
    assert state.array is array
    assert tensor.tolist() == array.tolist() == [0, 0, 0]


def test_a_tensor_of_another_shape_is_replaced_by_a_copy() -> None:
    state = ObjectState(tensor=torch.zeros(3))
    state.commit()
    state.tensor = torch.ones(4)
    state.restore()
    state.tensor.fill_(5)
    state.restore()
    assert state.tensor.tolist() == [0, 0, 0]
