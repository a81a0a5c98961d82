"""Programs on several devices that once went wrong, as short as they could be made (J)."""
import numpy as np
import pytest
from eager import same

from tinysched import Tensor, dtypes
from tinysched.ir.uop import Sharding

D = ('PYTHON', 'PYTHON:1')


def split(values, axis=0, dtype='int32', devices=D):
    "A tensor that is split along an axis"
    return Tensor(np.array(values, dtype), device='PYTHON').shard(devices, axis)


def test_J6_pieces_of_what_was_just_brought_move_on():
    t = split([1, 2]).contiguous()
    t[1:] = t[:-1]      # the value is put together from pieces that were put together
    same(t, np.array([1, 1], 'int32'))


def test_J3_what_was_handed_out_is_split_in_another_way():
    t = Tensor(np.arange(4, dtype='int32').reshape(2, 2), device='PYTHON').shard(D) + 0
    same(t.to('PYTHON').shard(D, 1).shard(D, 0), np.arange(4, dtype='int32').reshape(2, 2))


def test_J2_slices_with_steps_cross_borders():
    devices = (*D, 'PYTHON:2')
    t, v = split(np.arange(36).reshape(6, 6), 0, devices=devices), np.arange(36, dtype='int32').reshape(6, 6)
    same(t[1::3, ::-2], v[1::3, ::-2])
    t[::3] = 7
    v[::3] = 7
    same(t, v)


def test_J2_a_reshape_or_bitcast_that_would_move_items_is_refused_at_once():
    t, octets = split(np.zeros((4, 6))), split(np.arange(4), dtype='int8')
    for wrong in (lambda: t.reshape(3, 8), lambda: t.view(3, -1), lambda: octets.bitcast(dtypes.int32)):
        with pytest.raises(ValueError, match='axis 0 of .* is split over PYTHON, PYTHON:1'): wrong()
    same(octets.bitcast(dtypes.int16), np.arange(4, dtype='int8').view('int16'))


def test_J2_places_that_are_computed_are_found_in_all_parts():
    t, v = split([[1, 2], [3, 4]], 1), np.array([[1, 2], [3, 4]], 'int32')
    same(t[:, Tensor([1, 0, 1], device=D)], v[:, [1, 0, 1]])
    t[Tensor([-1], device=D)] = -3
    v[-1] = -3
    same(t, v)
    t[Tensor([1, 0], device=D)] = split([[5, 6], [7, 8]], 1)
    same(t, np.array([[7, 8], [5, 6]], 'int32'))
    v[:] = t.numpy()
    assert t.argmax().item() == v.argmax() and t.place.axis == 1


def test_A5_parts_of_size_0():
    t = split([1, 2]).realize()
    t[1:1] -= t[1:1]
    same(t, np.array([1, 2], 'int32'))
    same(t[2:] + 1, np.zeros(0, 'int32'))
    t = split(np.zeros((0, 0)), 1).contiguous()
    total = t.sum(0).sum(0)
    Tensor.realize(t, total)
    same(total + 1, np.array(1, 'int32'))


def test_A9_other_bytes_of_a_value_that_is_whole_on_each():
    v = np.array([4, 1, 3], 'uint32')
    t = split(v, None, 'uint32').realize()
    same(t.bitcast(dtypes.int8), v.view('int8'))
    same(t[1:].bitcast(dtypes.int8).to(D[1]), v[1:].view('int8'))


def test_D8_copies_of_other_sizes_of_elements_that_are_written_meanwhile():
    t, v = Tensor(np.array([1, 2], 'int32'), device='PYTHON').realize(), np.array([2, 3], 'int32')
    t += 1
    same(t.bitcast(dtypes.int8).to('PYTHON:7'), v.view('int8'))
    t = split([2, 3]).realize()
    same(t.bitcast(dtypes.int8).to('PYTHON:7').to(D), v.view('int8'))


def test_J6_writes_through_a_bitcast_of_what_is_whole_reach_the_right_parts():
    for dtype in ('uint32', 'uint8', 'int64'):
        t, v = split([1, 2, 3, 4, 5, 6, 7, 8]).realize(), np.array([8, 7, 6, 5, 4, 3, 2, 1], 'int32')
        t.flip(0).flip(0).bitcast(dtype).assign(Tensor(v.view(dtype), device=D))
        same(t, v)
        t[2:6].bitcast(dtype)[:1] = 0
        v[2:6].view(dtype)[:1] = 0
        same(t, v)


@pytest.mark.parametrize('ready', [False, True])
def test_J6_assignment_keeps_the_split_whenever_things_are_computed(ready):
    t, whole = split([1, 2, 3, 4]), split([5, 6, 7, 8], None)
    if ready: Tensor.realize(t, whole)
    for value in (t.flip(0), whole + 1, Tensor.zeros(4, dtype='int32', device=D)):
        t.assign(value)
        assert t.place == Sharding(D, 0)


def test_M7_a_view_of_a_constant_is_where_it_will_be():
    for ready in (False, True):
        t = Tensor.zeros((2, 4), dtype='int32', device='PYTHON').shard(D, 1)
        if ready: t.assign(t + 0).realize()
        assert [v.place.axis for v in (t.T, t[:, 1:], t.reshape(2, 4, 1))] == [0, None, 1]
