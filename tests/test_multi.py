"""Rules J of the scheduler, as tensors show them: the same program on several devices and on one gives the same numbers."""
import copy
import itertools
import os
import pickle
import random

import numpy as np
import pytest

from tinysched import Context, Device, Tensor, dtypes, nn, run_linear, sched_stats, schedule_cache
from tinysched.ir.uop import Sharding
from tinysched.runtime.device import pieces_of
from tinysched.nn.optim import SGD, Adam, AdamW
from tinysched.nn.state import get_parameters, get_state_dict, load_state_dict

DEVICES = [d for d in os.environ.get('TS_DEVICES', 'PYTHON,CPU,CL').split(',') if not Device.failure(d)]
AXES = 0, 1, None
on_each_kind = pytest.mark.parametrize('kind', DEVICES)
each_axis = pytest.mark.parametrize('axis', AXES)
each_count = pytest.mark.parametrize('n', [2, 3])


@pytest.fixture(autouse=True)
def interpreter(request):
    spec = getattr(request.node, 'callspec', None)
    with Context(DEV=spec.params.get('kind', 'PYTHON') if spec else 'PYTHON'): yield


def names(n): return tuple(f'{Device.DEFAULT}:{i}' for i in range(n))
def place(n, axis=None): return Device.sharding(names(n), axis)
def f32(*shape, seed=0): return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def whole(array, axis=None): return Tensor(array)


def over(n):
    "How a program puts an array on n devices"
    return lambda array, axis=None: Tensor(array).shard(names(n), axis)


def numbers(values): return [v.numpy() if isinstance(v, Tensor) else v for v in (values if isinstance(values, (tuple, list)) else [values])]


def same(program, *counts, tol=1e-5):
    "Checks that a program, which is given the function that places arrays, gives the same on one device and on several"
    wanted = numbers(program(whole))
    for n in counts:
        got = numbers(program(over(n)))
        assert len(got) == len(wanted)
        for g, w in zip(got, wanted): np.testing.assert_allclose(g, w, rtol=tol, atol=tol, err_msg=f'{n} devices')


# ---- J1

@on_each_kind
@each_axis
@pytest.mark.parametrize('n', [2, 4])
def test_J1_shard_splits_evenly(kind, n, axis):
    a = f32(12, 24)
    x = Tensor(a).shard(names(n), axis)
    assert (x.place, x.device, x.shape) == (place(n, axis), place(n).devices, (12, 24))
    np.testing.assert_array_equal(x.numpy(), a)
    for i, d in enumerate(place(n).devices):
        part = a if axis is None else np.split(a, n, axis)[i]
        held = x.realize().uop
        np.testing.assert_array_equal(pieces_of(held)[i].numpy().reshape(part.shape), part)
        assert pieces_of(held)[i].device == d


def test_J1_negative_axes_and_other_spellings():
    x = Tensor(f32(4, 6))
    assert x.shard(names(2), -1).uop.axis == 1 and x.shard(list(names(3)), -1).uop.axis == 1
    assert x.shard(('python', 'Python:01'), -2).place == Sharding(('PYTHON', 'PYTHON:1'), 0)
    one = x.shard(('PYTHON:1',), 0)
    assert (one.place, one.uop.axis) == ('PYTHON:1', None)
    assert x.shard('PYTHON:1').device == 'PYTHON:1'


@pytest.mark.parametrize('shape, devices, axis, error, says', [
    ((7, 3), 2, 0, ValueError, ['(7, 3)', 'axis 0', 'PYTHON:1', '7 is no multiple of 2', 'Try .pad()']),
    ((4, 6), 4, -1, ValueError, ['(4, 6)', 'axis 1', '6 is no multiple of 4']),
    ((4, 6), 2, 2, IndexError, ['(4, 6)', 'axis 2', '-2 to 1']),
    ((4, 6), 2, -3, IndexError, ['(4, 6)', 'axis -3']),
    ((), 2, 0, IndexError, ['()', 'axis 0']),
    ((4, 6), 2, 1.5, TypeError, ['(4, 6)', '1.5']),
    ((4, 6), ('PYTHON', 'CPU'), 0, ValueError, ['(4, 6)', 'PYTHON, CPU', 'one kind']),
    ((4, 6), ('PYTHON', 'PYTHON:0'), 0, ValueError, ['(4, 6)', 'PYTHON, PYTHON', 'different']),
    ((4, 6), (), 0, ValueError, ['(4, 6)', '()']),
    ((4, 6), ('DISK:a', 'DISK:b'), 0, ValueError, ['(4, 6)', 'DISK:a', 'computes']),
    ((4, 6), ('NPY', 'NPY:1'), 0, ValueError, ['(4, 6)', 'NPY', 'computes']),
    ((4, 6), ('ABACUS', 'ABACUS:1'), 0, ValueError, ['(4, 6)', 'ABACUS']),
    ((4, 6), ('PYTHON:x', 'PYTHON'), 0, ValueError, ['(4, 6)', 'PYTHON:x', 'number after the colon']),
    ((4, 6), 3.5, 0, TypeError, ['(4, 6)', '3.5', 'names']),
    ((4, 6), None, 0, TypeError, ['(4, 6)', 'None', 'names']),
    ((4, 6), (1, 2), 0, TypeError, ['(4, 6)', 'device 1', 'name']),
    ((4, 6), [['PYTHON', 'PYTHON:1']], 0, TypeError, ['(4, 6)', "['PYTHON', 'PYTHON:1']", 'name'])])
@pytest.mark.parametrize('word', ['shard', 'shard_'])
def test_J1_what_cannot_be_split_is_refused_and_nothing_is_lost(word, shape, devices, axis, error, says):
    a = f32(*shape)
    x = Tensor(a)
    with pytest.raises(error) as e: getattr(x, word)(names(devices) if isinstance(devices, int) else devices, axis)
    for part in says: assert part in str(e.value), (part, str(e.value))
    np.testing.assert_array_equal(x.numpy(), a)
    assert x.device == 'PYTHON'


@pytest.mark.parametrize('make', [
    lambda p: Tensor(f32(3, 3)).shard_like(split_in_columns), lambda p: Tensor(f32(3, 3), device=p), lambda p: Tensor.zeros(3, 3, device=p), lambda p: Tensor(f32(3)).to(p),
    lambda p: Tensor.empty(3, 3, device=p), lambda p: Tensor.rand(3, 3, device=p), lambda p: Tensor.arange(3, device=p), lambda p: Tensor([1.0]).shard_like(split_in_columns)])
def test_J1_a_place_that_comes_from_another_tensor_is_checked(make):
    global split_in_columns
    split_in_columns = Tensor(f32(4, 4)).shard(names(2), 1)
    with pytest.raises((ValueError, IndexError), match=r'split of shape \(.*: (3 is no multiple of 2|axis 1 of a value)'): make(split_in_columns.place)


def test_J1_shard_like_wants_a_tensor():
    with pytest.raises(TypeError, match='shard_like: 3 is a int; wanted a Tensor'): Tensor([1.0]).shard_like(3)


@pytest.mark.parametrize('make', [
    lambda d: Tensor([1.0, 2.0], device=d), lambda d: Tensor.zeros(4, device=d), lambda d: Tensor.rand(4, device=d),
    lambda d: Tensor.empty(4, device=d), lambda d: Tensor.arange(4, device=d), lambda d: Tensor([1.0]).full_like(2, device=d),
    lambda d: Tensor([1.0]).to(d), lambda d: Tensor([1.0]).clone(d), lambda d: Tensor([1.0]).to_(d), lambda d: Tensor.eye(3, device=d)])
def test_J1_device_tuples_are_checked_everywhere(make):
    for bad, why in ((('PYTHON', 'CPU'), 'PYTHON and CPU are different kinds'), (('PYTHON:1', 'PYTHON', 'python:1'), 'PYTHON:1 is named twice'),
                     ((), 'none are named'), (('DISK:a', 'DISK:b'), 'DISK computes nothing'), (('NPY', 'NPY'), 'NPY computes nothing')):
        with pytest.raises(ValueError, match=f'{why}; wanted different ones of one kind'): make(bad)
    for bad in ((('PYTHON', 'PYTHON:1'),), (0, 1)):
        with pytest.raises(TypeError, match='wanted a name'): make(bad)
    x = make(names(2))
    assert x.device == place(2).devices and x.realize().uop.axis is None
    assert x.numpy().shape == x.shape


@on_each_kind
def test_J1_to_several_devices_puts_all_on_each(kind):
    a = f32(3, 5)
    x = Tensor(a).to(names(3))
    assert x.place == place(3)
    np.testing.assert_array_equal((x + 1).numpy(), a + 1)
    assert x.to(names(3)).cell is x.cell            # there already
    split = Tensor(f32(4, 6)).shard(names(2), 0)
    assert split.to(names(2)).cell is split.cell    # as `to(x.device)` is for any x
    assert split.shard(names(2), 0).cell is split.cell and split.shard(names(2)).uop.axis is None
    assert split.shard_like(x).place == place(3) and x.shard_like(Tensor.ones(2)).cell is x.cell


def test_J1_in_place_moves_all_views():
    x = Tensor(f32(4, 6)).realize()
    turned, part, flat, was = x.T, x[1:3], x.reshape(24), x + 0
    assert x.shard_(names(2), 0) is x
    assert [t.place for t in (x, turned, part, flat)] == [place(2, 0), place(2, 1), place(2), place(2, 0)]
    x[0] = 7
    assert turned[0, 0].item() == flat[3].item() == 7 and was.device == 'PYTHON'
    np.testing.assert_array_equal(was.numpy(), f32(4, 6))
    assert x.to_('PYTHON:1') is x and turned.device == 'PYTHON:1'
    x += 1
    assert flat[0].item() == 8 and x.cell.owned is x.realize().uop.storage


def test_J1_a_view_that_moves_leaves():
    x = Tensor(f32(4, 6)).realize()
    row, kept = x[0], x[0]
    assert row.shard_(names(2), 0) is row and (row.place, kept.device, x.device) == (place(2, 0), 'PYTHON', 'PYTHON')
    row += 1
    np.testing.assert_allclose(row.numpy(), f32(4, 6)[0] + 1)
    np.testing.assert_array_equal(kept.numpy(), f32(4, 6)[0])
    d = x.detach()
    assert d.to_('PYTHON:1').requires_grad is False and x.device == 'PYTHON'


def test_J1_a_parameter_moves_with_its_gradient_and_its_mark():
    w = Tensor(f32(4, 6), requires_grad=True)
    (w * w).sum().backward()
    grad = w.grad
    w.shard_(names(2), 1)
    assert w.grad is grad and grad.place == w.place == place(2, 1) and w.requires_grad
    np.testing.assert_allclose(grad.numpy(), 2 * f32(4, 6), rtol=1e-6)
    w.grad = None
    (w * 3).sum().backward()
    assert w.grad.tolist() == np.full((4, 6), 3).tolist() and w.grad.place == w.place


def test_J1_a_loss_from_before_the_move_has_its_gradient():
    w = Tensor(f32(4, 6), requires_grad=True).realize()
    loss = (w * w).sum()
    w.shard_(names(2), 0)
    loss.backward()
    assert w.grad.place == place(2, 0)
    np.testing.assert_allclose(w.grad.numpy(), 2 * f32(4, 6), rtol=1e-6)


def test_J1_one_device_to_another_and_back():
    x = Tensor(f32(4, 6)).shard(names(2), 0)
    for where, axis in itertools.product((names(2), names(3)[1:], tuple(reversed(names(2)))), AXES):
        y = x.shard(where, axis)
        assert y.place == Device.sharding(where, axis)
        np.testing.assert_array_equal((y * 1).numpy(), f32(4, 6))
    with pytest.raises(ValueError, match='no multiple of 3'): x.shard(names(3), 0)


def test_J1_printing_says_where():
    assert repr(Tensor(f32(4, 6)).shard(names(2), 0)) == '<Tensor (4, 6) float32 on PYTHON and PYTHON:1 (axis 0 split), lazy>'


def test_J1_copies_and_pickles_are_split_alike():
    x = Tensor(f32(4, 6)).shard(names(2), 1)
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.clone(), x.contiguous()):
        assert y.place == x.place and y.cell is not x.cell
        np.testing.assert_array_equal(y.numpy(), f32(4, 6))


def test_J1_nothing_to_split():
    x = Tensor(np.zeros((0, 6), np.float32)).shard(names(2), 0)
    assert x.place == place(2, 0) and x.realize().numpy().shape == (0, 6) and x.sum().item() == 0
    y = Tensor(np.zeros((4, 0), np.float32)).shard(names(2), 0)
    assert (y + 1).numpy().shape == (4, 0) and y.sum(1).tolist() == [0] * 4


# ---- constants, which are nowhere

@pytest.mark.parametrize('make', [lambda: Tensor.zeros(4, 6), lambda: Tensor.ones(4, 6) * 2, lambda: Tensor.arange(24).reshape(4, 6)])
@each_axis
def test_J2_a_constant_is_split_as_memory_is(make, axis):
    x, a = make().shard(names(2), axis), make().numpy()
    stored = Tensor(a).shard(names(2), axis).realize()
    words = [lambda t: t, lambda t: t.T, lambda t: t[1], lambda t: t[:, 2:4], lambda t: t[::2, ::-1], lambda t: t + 1, lambda t: t.sum(0),
             lambda t: t.sum(1, keepdim=True), lambda t: t.sum(), lambda t: t.pad(((1, 1), (0, 0))), lambda t: t.reshape(2, 2, 6),
             lambda t: t.reshape(4, 2, 3).permute(2, 0, 1), lambda t: t.flip(1), lambda t: t.cast('float16'), lambda t: t.max(1),
             lambda t: t.unsqueeze(0).expand(3, 4, 6), lambda t: t.detach().T, lambda t: t.cat(t), lambda t: t @ t.T,
             lambda t: t.zeros_like(), lambda t: t.where(t, 1), lambda t: t.bitcast('int32')]
    for k, word in enumerate(words):
        got, wanted = word(x), word(stored)
        assert got.place == wanted.place, k
        np.testing.assert_array_equal(got.numpy(), wanted.numpy())
        held = got.contiguous().realize()
        assert held.place == wanted.place and held.uop.device == wanted.place, k
        np.testing.assert_array_equal(held.numpy(), wanted.numpy())
    for wrong in (lambda t: t.reshape(3, 8), lambda t: t.T.flatten(), lambda t: t + Tensor([1.0] * 6).to('PYTHON:1')):
        if axis == 0: pytest.raises((ValueError, RuntimeError), wrong, x)


@each_axis
def test_J6_a_constant_gets_storage_where_it_is(axis):
    for write in (lambda t: t.assign(Tensor(f32(4, 6)).shard(names(2), 1)), lambda t: t.__setitem__(slice(1, 3), 5.0),
                  lambda t: t.T.__setitem__(0, 5.0), lambda t: t.__iadd__(Tensor(f32(4, 6)).shard(names(2))),
                  lambda t: t[Tensor([1, 2]).shard(names(2))].numpy(), lambda t: t.requires_grad_(), lambda t: t.assign(t + 1)):
        x, y = Tensor.zeros(4, 6).shard(names(2), axis), Tensor.zeros(4, 6)
        write(x), x.realize()
        assert x.place == place(2, axis)
        x[0, 0] = 9
        x.realize()
        assert x.place == x.uop.device == place(2, axis) and x[0, 0].item() == 9
        del y


# ---- J2

@each_axis
def test_J2_reductions_over_and_beside_the_split_axis(axis):
    def program(put):
        x = put(f32(4, 8), axis)
        return [word(x, ax) for word in (Tensor.sum, Tensor.max, Tensor.min, Tensor.prod, Tensor.mean) for ax in (0, 1, None)]
    same(program, 2, 4)


@on_each_kind
def test_J2_on_each_kind_of_device(kind):
    def program(put):
        x, y = put(f32(4, 6), 0), put(f32(4, 6, seed=1), 1)
        z = put(f32(4, 6), 0)
        z[1:3, 2:] = 7.0
        return [x + y, x.sum(0), x.sum(1), x.softmax(0), x @ y.T, x.T @ y, x.flip(0)[1:], z, x.cumsum(0), x[[0, 3]], x.cat(y)]
    same(program, 2)


@each_count
@each_axis
def test_J2_words_that_reduce(n, axis):
    words = [Tensor.softmax, Tensor.log_softmax, Tensor.logsumexp, Tensor.argmax, Tensor.argmin, Tensor.cumsum, Tensor.std, Tensor.var,
             Tensor.any, Tensor.all]
    same(lambda put: [word(put(f32(12, 6), axis), ax) for word in words for ax in (0, 1)], n)
    same(lambda put: [put(f32(12, 6), axis).argmax(), put(f32(12, 6), axis).argmin(keepdim=True)], n)


@each_axis
def test_J2_places_of_results(axis):
    x = Tensor(f32(4, 6)).shard(names(2), axis)
    after = lambda v: v.uop.axis
    if axis is None: return
    assert [after(x + 1), after(x.T), after(x.sum(axis)), after(x.sum(1 - axis, keepdim=True))] == [axis, 1 - axis, None, axis]
    assert after(x.sum(1 - axis)) == 0 and after(x.flip(1 - axis)) == axis and after(x.flip(axis)) is None
    assert after(x.unsqueeze(0)) == axis + 1 and after(x.unsqueeze(0).expand(3, 4, 6)) == axis + 1
    assert after(x.pad(((1, 0), (0, 0)))) == (None if axis == 0 else 1) and after(x.reshape(2, 2, 6)) == (0 if axis == 0 else 2)
    assert after(x.softmax(0)) == after(x.softmax(1)) == after(x.cumsum(1 - axis)) == axis


@pytest.mark.parametrize('lazy', [True, False])
def test_J2_a_reshape_that_moves_items_is_refused(lazy):
    x = Tensor(f32(4, 6)).shard(names(2), 0)
    if not lazy: x.realize()
    for word in (lambda: x.reshape(3, 8), lambda: x.view(3, -1), x.T.flatten, lambda: x.T.reshape(3, 2, 4).flatten(1)):
        with pytest.raises(ValueError, match=r'(?s)axis \d.*PYTHON, PYTHON:1.*Try'): word()
    np.testing.assert_array_equal(x.numpy(), f32(4, 6))
    assert x.shard(names(2)).reshape(3, 8).uop.axis is None


@each_axis
def test_J2_movement(axis):
    def program(put):
        x = put(f32(4, 6), axis)
        return [x.T + 1, x.flip(0, 1), x.pad(((1, 2), (3, 0))), x[1:3], x[:, 1:5], x[::-1, ::-2], x[1:4, 2:3], x[3], x[-1, 2], x[:, None, 1],
                x[1:1], x.unsqueeze(1).expand(4, 3, 6), x.reshape(2, 2, 6).sum(1), x.pad(((1, 1), (0, 0)), value=2.0), x.shrink(((1, 2), None))]
    same(program, 2)


@each_count
@each_axis
def test_J2_words_that_move(n, axis):
    def program(put):
        x, y = put(f32(12, 6), axis), put(f32(12, 6, seed=1), axis)
        return [x.cat(y), x.cat(y, x, dim=1), x.stack(y), x.stack(y, dim=1), x.stack(y, dim=2), *x.split(5, 0), *x.chunk(3, 1), x.tril(), x.triu(1),
                x[::3], x[1::5, ::4], x.T.cat(y.T), x.repeat(2, 3), x.repeat_interleave(2, 0), x.gather(0, put(np.int32([[1, 5]]))), x[:, ::2].T]
    same(program, n)


def test_J2_a_batch_may_be_longer_than_the_devices_are_many():
    same(lambda put: (put(f32(24, 1), 0) * put(f32(24, 1), 0)).sum(), 2, 3, 4, 6, 8)


@pytest.mark.parametrize('dtype', ['float16', 'int64', 'bool', 'uint8'])
def test_J2_half_floats_ints_and_bools(dtype):
    a = (abs(f32(4, 6)) * 5).astype(dtype)
    same(lambda put: [put(a, axis).sum(ax) for axis in AXES for ax in (0, 1, None)] + [put(a, 0).cast('float32') + 1], 2, tol=1e-2)


# ---- J3

@pytest.mark.parametrize('axes', list(itertools.product(AXES, AXES)))
def test_J3_matmul_with_every_split(axes):
    same(lambda put: [put(f32(4, 6), axes[0]) @ put(f32(6, 8, seed=1), axes[1])], 2, tol=1e-4)


@pytest.mark.parametrize('axes', list(itertools.product(AXES, AXES)))
def test_J3_the_last_split_wins(axes):
    a, b = (Tensor(f32(6, 6)).shard(names(3), axis) for axis in axes)
    wanted = axes[1] if axes[1] is not None else axes[0]
    assert [(a + b).uop.axis, (a * 2).maximum(b).uop.axis, (b > 0).where(a, b).uop.axis] == [wanted] * 3
    np.testing.assert_allclose((a + b * 2).numpy(), f32(6, 6) * 3, rtol=1e-6)


@pytest.mark.parametrize('axes', list(itertools.product((0, 1, 2, None), AXES)))
def test_J3_conv_with_every_split(axes):
    image, filters = f32(4, 2, 6, 6), f32(4, 2, 3, 3, seed=1)
    same(lambda put: put(image, axes[0]).conv2d(put(filters, axes[1]), padding=1), 2, tol=1e-4)
    same(lambda put: put(image, axes[0]).conv2d(put(f32(4, 1, 3, 3), 0 if axes[1] == 0 else None), stride=2, groups=2), 2, tol=1e-4)


@pytest.mark.parametrize('axis', [0, 1])
def test_J3_pooling(axis):
    same(lambda put: [put(f32(4, 2, 6, 6), axis).max_pool2d(), put(f32(4, 2, 6, 6), axis).avg_pool2d(3, stride=1)], 2)


BESIDE = {
    'add': lambda x, y: x + y, 'mul': lambda x, y: y * x, 'matmul': lambda x, y: x @ y.T, 'cat': lambda x, y: x.cat(y), 'stack': lambda x, y: y.stack(x),
    'where': lambda x, y: (x > 0).where(x, y), 'assign': lambda x, y: x.assign(y), 'setitem': lambda x, y: x.__setitem__(slice(1, 3), y[:2]),
    'index': lambda x, y: x[y[0].cast('int32')], 'conv2d': lambda x, y: x.reshape(1, 1, 4, 6).conv2d(y.reshape(1, 1, 4, 6)),
    'maximum': lambda x, y: x.maximum(y), 'iadd': lambda x, y: x.__iadd__(y), 'backward': lambda x, y: x.sum(1).backward(y[:, 0])}


@pytest.mark.parametrize('word', BESIDE)
@pytest.mark.parametrize('axis', [0, None])
@pytest.mark.parametrize('other', [Tensor, lambda a: Tensor(a).shard(('PYTHON:2', 'PYTHON:3'), 0),
                                   lambda a: Tensor.ones(4, 6, device='PYTHON:2')])
def test_J3_beside_what_is_elsewhere_is_refused(word, axis, other):
    x, y = Tensor(f32(4, 6)).shard(names(2), axis).requires_grad_(), other(f32(4, 6))
    z = y.numpy()
    with pytest.raises(RuntimeError) as e: BESIDE[word](x, y)
    said = {'iadd': 'add', 'backward': 'gradient', 'maximum': 'max'}.get(word, word)
    for part in (said, 'PYTHON and PYTHON:1', 'Try .shard(', str(y.device)[:8].strip('(\''), 'shapes ('):
        assert part in str(e.value), str(e.value)
    np.testing.assert_array_equal(x.numpy(), f32(4, 6))
    np.testing.assert_array_equal(y.numpy(), z)
    assert x.place == place(2, axis)


def test_J3_numbers_and_constants_go_anywhere():
    x = Tensor(f32(4, 6)).shard(names(2), 0)
    assert (x + Tensor.ones(6) * 2 + 1 + Tensor(3.0)).place == place(2, 0)
    same(lambda put: put(f32(4, 6), 0) * Tensor.arange(6) + Tensor.full((4, 1), 2), 2)


# ---- indexing by values

@each_count
@each_axis
def test_J2_indexing_by_values(n, axis):
    def program(put):
        x, at = put(f32(12, 6), axis), lambda *i, ax=None: put(np.int32(i), ax)
        return [x[[0, 5, 11]], x[[0, 5, 11], [1, 2, 3]], x[:, [1, -1]], x[at(3, -1, 7, 2, 9, 4)], x[at(3, 4, -1, 7, 8, 9, ax=0)], x[1:9][at(1, 2)],
                x[:, at(0, 1, 2, 3, 4, 5, ax=0)], x[at(1, 2), at(3, 4)], x[at(20, 1)], x.T[at(1, 2, 3, 4, 5, 0, ax=0)], x[[[1, 2], [3, 4]]]]
    same(program, n)


@pytest.mark.parametrize('axes', list(itertools.product(AXES, (0, None))))
def test_J2_embedding(axes):
    same(lambda put: put(f32(24, 6), axes[0])[put(np.arange(36, dtype=np.int32).reshape(12, 3) * 5 % 24, axes[1])], 2, 3)


@each_axis
def test_J2_losses(axis):
    def program(put):
        x, y = put(f32(12, 6), axis), put(np.arange(12, dtype=np.int32) % 6, 0 if axis == 0 else None)
        return [x.cross_entropy(y), x.sparse_categorical_crossentropy(y), x.sparse_categorical_crossentropy(y, label_smoothing=0.1),
                x.sigmoid().binary_crossentropy((put(f32(12, 6, seed=1), axis) > 0).cast('float32')), x.cross_entropy(put(f32(12, 6, seed=2), axis))]
    same(program, 2, 3)


# ---- J6: assignment

PARTS = {'row': 3, 'last': -1, 'rows': slice(2, 9), 'columns': (slice(None), slice(1, 5)), 'steps': (slice(1, 12, 3), slice(None)),
         'box': (slice(3, 9), slice(2, 4)), 'point': (5, 3), 'back': (slice(None, None, -1), 3), 'all': slice(None), 'none': slice(3, 3),
         'list': [1, 5, 10], 'points': ([1, 5, 10], [1, 2, 3]), 'twice': [4, 4, 5], 'mask': f32(12, 6) > 0, 'rowmask': f32(12) > 0}


@pytest.mark.parametrize('part', PARTS)
@each_axis
def test_J6_writing_part_of_a_split_axis(part, axis):
    i = PARTS[part]

    def program(put):
        results = []
        for stored, value in itertools.product((False, True), ('number', 'values', 'itself')):
            if value != 'number' and part in ('mask', 'rowmask'): continue
            x = put(f32(12, 6), axis)
            if stored: x.realize()
            if value == 'number': x[i] = 99.0
            elif value == 'values': x[i] = put(f32(12, 6, seed=1))[i]
            else: x[i] = x[i] * 2 + x.sum()
            if put is not whole: assert x.place == place(n, axis)
            results.append(x)
        return results
    for n in (2, 3): same(program, n)


@pytest.mark.parametrize('axes', list(itertools.product(AXES, AXES)))
@pytest.mark.parametrize('stored', [True, False])
def test_J6_assignment_keeps_the_split(axes, stored):
    x, y = (Tensor(f32(4, 6, seed=s)).shard(names(2), axis) for s, axis in enumerate(axes))
    if stored: x.realize()
    view = x.T
    x.assign(y * 2)
    assert x.place == place(2, axes[0])
    np.testing.assert_allclose(x.numpy(), f32(4, 6, seed=1) * 2, rtol=1e-6)
    x.assign(x + x.flip(0) + y)
    np.testing.assert_allclose(view.numpy().T, f32(4, 6, seed=1) * 3 + f32(4, 6, seed=1)[::-1] * 2, rtol=1e-5)
    assert x.uop.device == place(2, axes[0])
    x.assign(7.0)
    assert x.place == place(2, axes[0]) and x.sum().item() == 7 * 24


@each_axis
def test_J6_views_snapshots_and_stale_readers(axis):
    def program(put):
        x = put(f32(4, 6), axis).realize()
        view, part, snap, lazy, copy_ = x.T, x[1:3, 2:], x.contiguous(), (x + 1).sum(0), x.clone()
        x[1] = 5.0
        later = x * 1
        x.assign(x.flip(1) * 2)
        part.assign(part + 1)
        view[0] = -1.0
        x[::2] += 10
        return [view, part, snap, lazy, copy_, later, x]
    same(program, 2)


@each_axis
@pytest.mark.parametrize('order', list(itertools.permutations(range(3))))
def test_J6_answers_do_not_depend_on_the_order_of_realize(axis, order):
    def program(put):
        x = put(f32(4, 6), axis).realize()
        a = x.sum(0)
        x[1:3] = 0.0
        b = x.sum(1)
        x.assign(x + 1)
        out = [a, b, x]
        for k in order: out[k].realize()
        return out
    same(program, 2)


def test_J6_a_write_to_what_is_whole_on_each():
    def program(put):
        x = put(f32(4, 6)).realize()
        x[2:, 1] = put(f32(2), 0)
        x += put(f32(4, 6), 1)
        return [x, x[1:]]
    same(program, 2)


@pytest.mark.parametrize('axes', list(itertools.product(AXES, AXES)))
def test_J6_in_place_operators(axes):
    def program(put):
        x, y = put(f32(4, 6), axes[0]), put(f32(4, 6, seed=1), axes[1])
        x += y
        x *= 2
        x[1:3] -= y[1:3]
        x /= 4
        if put is not whole: assert x.place == place(2, axes[0])
        return x
    same(program, 2)


def test_J6_wrong_values_are_refused_and_nothing_is_lost():
    x = Tensor(f32(4, 6)).shard(names(2), 0).realize()
    for wrong, kind in ((lambda: x.assign(Tensor(f32(3)).shard(names(2))), ValueError), (lambda: x.assign(x.cast('float16')), TypeError),
                        (lambda: x.__setitem__(9, 1.0), IndexError), (lambda: x[:1].expand(4, 6).assign(0.0), ValueError)):
        with pytest.raises(kind): wrong()
    np.testing.assert_array_equal(x.numpy(), f32(4, 6))
    assert x.place == place(2, 0)


# ---- J5

@pytest.mark.parametrize('axes', list(itertools.product(AXES, AXES)))
def test_J5_from_place_to_place(axes):
    x = Tensor(f32(4, 6)).shard(names(2), axes[0])
    for y in (x * 2, x):
        for to in (y.to('PYTHON'), y.to('PYTHON:1'), y.to('PYTHON:3'), y.shard(names(2), axes[1]), y.to(names(3))):
            k = 2 if y is not x else 1
            np.testing.assert_array_equal(to.numpy(), f32(4, 6) * k)
            np.testing.assert_array_equal((to + 1).numpy(), f32(4, 6) * k + 1)


def test_J5_a_gather_reads_what_was_there():
    x = Tensor(f32(4, 6)).shard(names(2), 0).realize()
    gathered = x.to('PYTHON:3')
    x.assign(x * 0)
    x.realize()
    np.testing.assert_array_equal(gathered.numpy(), f32(4, 6))


# ---- J4 as tensors see it

def test_J4_results_are_equal_on_all_devices():
    for n, size in itertools.product((2, 3, 4), (1, 5, 1000)):
        x = Tensor(f32(12, size)).shard(names(n), 0).sum(0).realize()
        assert x.place == place(n)
        first, *rest = (p.numpy() for p in pieces_of(x.uop.storage))
        for other in rest: np.testing.assert_array_equal(first, other)


# ---- random numbers

@pytest.mark.parametrize('make', [
    lambda kw: Tensor.rand(12, 6, **kw), lambda kw: Tensor.randn(12, 6, **kw), lambda kw: Tensor.randint(12, low=0, high=99, **kw),
    lambda kw: Tensor.uniform(12, 6, low=-1, high=3, **kw), lambda kw: Tensor.kaiming_uniform(12, 6, **kw), lambda kw: Tensor.glorot_uniform(6, 6, **kw),
    lambda kw: Tensor.rand(5, dtype='float64', **kw), lambda kw: Tensor.normal(7, std=2.0, **kw)])
def test_J2_random_numbers_do_not_depend_on_devices(make):
    def drawn(kw, put=lambda t: t):
        Tensor.manual_seed(3)
        return [put(make(kw)).numpy(), put(make(kw)).numpy()]
    wanted = drawn({})
    assert (wanted[0] != wanted[1]).any()
    for got in (drawn(dict(device=names(3))), drawn({}, lambda t: t.shard(names(3))), drawn({}, lambda t: t.to('PYTHON:2'))):
        for g, w in zip(got, wanted): np.testing.assert_array_equal(g, w)


@each_axis
def test_J2_random_numbers_like_a_split_tensor(axis):
    def program(put):
        Tensor.manual_seed(4)
        x = put(f32(12, 6), axis)
        with Tensor.train(): made = [x.rand_like(), x.randn_like(), x.dropout(0.4), x.rand_like(dtype='float64')]
        if put is not whole: assert [t.place for t in made] == [place(n, axis)] * 4
        return made
    for n in (2, 3): same(program, n, tol=1e-6)


# ---- gradients

def gradients(put, loss, arrays, axes):
    ts = [put(a, axis).requires_grad_() for a, axis in zip(arrays, axes)]
    loss(*ts).backward()
    for t in ts: assert put is whole or t.grad.place == t.place
    return [t.grad for t in ts]


@pytest.mark.parametrize('axes', list(itertools.product(AXES, AXES, (0, None))))
def test_J2_gradients_of_a_layer(axes):
    arrays = f32(6, 4), f32(4, 6, seed=1), f32(6, seed=2)
    same(lambda put: gradients(put, lambda x, w, b: ((x @ w + b).relu() ** 2).sum(), arrays, axes), 2, tol=1e-4)
    same(lambda put: gradients(put, lambda x, w, b: (x @ w + b).log_softmax()[:, 3].mean(), arrays, axes), 2, tol=1e-4)


SLOPES = {
    'sum': lambda x: (x.sum(0) ** 2).sum(), 'max': lambda x: (x.max(0) ** 2).sum() + x.max(1).sum(), 'prod': lambda x: x.prod(0).sum() + x.prod(1).sum(),
    'slices': lambda x: (x[1:7, ::2] ** 2).sum() + x[5].exp().sum(), 'flip': lambda x: (x.flip(0) * x.pad(((1, 0), (0, 1)))[:-1, 1:]).sum(),
    'index': lambda x: (x[[1, 1, 5]] ** 2).sum(), 'cumsum': lambda x: (x.cumsum(0) ** 2).sum(), 'var': lambda x: x.var(0).sum() + x.std(1).sum(),
    'cat': lambda x: (x.cat(x * 2) ** 2).sum(), 'softmax': lambda x: (x.softmax(0)[2] ** 2).sum(), 'turn': lambda x: (x @ x.T).exp().mean(),
    'min': lambda x: x.min(), 'where': lambda x: (x > 0).where(x, x * 0.1).sum(), 'steps': lambda x: (x[::4, ::3] ** 3).sum()}


@pytest.mark.parametrize('name', SLOPES)
@each_axis
def test_J2_gradients(name, axis):
    same(lambda put: gradients(put, SLOPES[name], [f32(12, 6)], [axis]), 2, 3, tol=1e-4)


@pytest.mark.parametrize('axes', list(itertools.product(AXES, (0, 1))))
def test_J2_gradients_of_convolutions(axes):
    same(lambda put: gradients(put, lambda x, w: (x.conv2d(w, padding=1) ** 2).sum(), (f32(4, 2, 5, 5), f32(4, 2, 3, 3, seed=1)), axes[::-1]), 2, tol=1e-3)


@pytest.mark.parametrize('axes', list(itertools.product(AXES, AXES)))
def test_J5_gradients_go_back_to_where_values_came_from(axes):
    t = Tensor(f32(12, 6), requires_grad=True)
    u = (t.shard(names(2), axes[0]) * 2).shard(names(2), axes[1]) * 3
    (u.to('PYTHON:3') ** 2).sum().backward()
    assert t.grad.device == 'PYTHON'
    np.testing.assert_allclose(t.grad.numpy(), f32(12, 6) * 72, rtol=1e-5)
    given = Tensor(f32(12, 6)).shard(names(2), axes[1])
    (g,) = (t.shard(names(2), axes[0]) * 2).gradient(t, gradient=given)
    np.testing.assert_allclose(g.numpy(), f32(12, 6) * 2, rtol=1e-5)
    assert g.device == 'PYTHON'


@each_axis
def test_J6_gradients_of_an_assigned_state(axis):
    def program(put):
        x, y = put(f32(12, 6), axis).requires_grad_(), put(f32(3, 6, seed=1)).requires_grad_()
        z = x * 1
        z[4:7] = y
        (z ** 2).sum().backward()
        return x.grad, y.grad
    same(program, 2, 3)


# ---- layers and optimizers

def mlp(put, splits):
    Tensor.manual_seed(5)

    class Net:
        def __init__(self): self.a, self.n, self.b = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)
        def __call__(self, x): return self.b(self.n(self.a(x)).relu())
    net = Net()
    if put is not whole:
        for name, p in get_state_dict(net).items(): p.shard_(put(f32(1)).device, splits.get(name))
    return net


SPLITS = {'data': {}, 'tensor': {'a.weight': 0, 'a.bias': 0, 'n.weight': 0, 'n.bias': 0, 'b.weight': 1}, 'odd': {'a.weight': 1, 'b.weight': 0, 'b.bias': 0}}
OPTIMIZERS = {'sgd': lambda p: SGD(p, lr=0.1), 'momentum': lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
              'adam': lambda p: Adam(p, lr=0.01), 'adamw': lambda p: AdamW(p, lr=0.01)}


def trained(put, splits, make, axis, steps=3):
    net, losses = mlp(put, splits), []
    optimizer = make(get_parameters(net))
    with Tensor.train():
        for k in range(steps):
            optimizer.zero_grad()
            x, y = put(f32(12, 6, seed=k), axis), put(np.arange(12, dtype=np.int32) % 6, axis)
            losses.append(net(x).sparse_categorical_crossentropy(y).backward())
            optimizer.step()
    if put is not whole:
        for name, p in get_state_dict(net).items(): assert p.uop.axis == splits.get(name) and p.device == put(f32(1)).device
        for kept in (getattr(optimizer, name, {}) for name in ('b', 'm', 'v')):
            for p in optimizer.params: assert id(p) not in kept or kept[id(p)].place == p.place
    return [*losses, *get_parameters(net)]


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('split', SPLITS)
def test_J7_training_is_equal_to_one_device(split, optimizer):
    axis = None if split == 'tensor' else 0
    same(lambda put: trained(put, SPLITS[split], OPTIMIZERS[optimizer], axis), 2, tol=1e-4)


@pytest.mark.parametrize('kind', [d for d in DEVICES if d != 'PYTHON'])
def test_J7_training_on_other_devices(kind):
    same(lambda put: trained(put, SPLITS['odd'], OPTIMIZERS['momentum'], 0, 1), 2, tol=1e-4)


@pytest.mark.parametrize('split, axis', [('data', 0), ('tensor', None), ('tensor', 0)])
def test_J7_kernels_of_a_step_do_not_depend_on_the_number_of_devices(split, axis):
    def step(put):
        net = mlp(put, SPLITS[split])
        Tensor.realize(*get_parameters(net))
        optimizer = SGD(get_parameters(net), lr=0.1, momentum=0.9)
        x, y = put(f32(12, 6), axis).realize(), put(np.arange(12, dtype=np.int32) % 6, axis).realize()
        Tensor.realize(optimizer.lr)
        with Tensor.train(): net(x).sparse_categorical_crossentropy(y).backward()
        return sched_stats(Tensor.schedule_linear(*optimizer.schedule_step()))
    two, *more = (step(over(n)) for n in (2, 3, 4))
    assert [s['kernels'] for s in more] == [two['kernels']] * 2


A12 = f32(12, 24)
HANDED = {   # values on one device, on the host or in a file, and how they are handed out
    'host': (lambda file: Tensor(A12), 1), 'memory': (lambda file: Tensor(A12).realize(), 1), 'rows': (lambda file: Tensor(A12).realize(), 0),
    'turned': (lambda file: Tensor(A12).realize().T, 0), 'lazy': (lambda file: Tensor(A12).realize() * 2, 0), 'lazy columns': (lambda file: Tensor(A12).realize() * 2, 1),
    'random': (lambda file: Tensor.rand(12, 24), 1), 'file': (lambda file: file, 1), 'turned file': (lambda file: file.T, 0), 'part of a file': (lambda file: file[2:, 1:13], 1),
    'flipped file': (lambda file: file.flip(1), 1), 'file of bytes': (lambda file: file.bitcast(dtypes.uint8), 1), 'later': (lambda file: file.reshape(2, 12, 12).permute(2, 0, 1), 2)}

@pytest.mark.parametrize('name', HANDED)
def test_J7_handing_out_takes_as_many_kernels_on_any_number_of_devices(name, tmp_path):
    make, axis = HANDED[name]
    A12.tofile(tmp_path / 'x')
    def handed(n):
        Tensor.manual_seed(3)
        x = make(Tensor.empty(12, 24, device=f'DISK:{tmp_path}/x'))
        linear = (y := x.shard(names(n), axis)).schedule_linear()
        run_linear(linear)
        np.testing.assert_array_equal(y.numpy(), x.numpy())
        return sched_stats(linear)['kernels']
    assert len({handed(n) for n in (2, 3, 4)}) == 1


@pytest.mark.parametrize('word', ['cumsum', 'sum', 'softmax', 'shrink', 'flip', 'sort_rows', 'concatenate', 'write'])
@pytest.mark.parametrize('axis', [0, 1])
def test_J7_words_take_as_many_kernels_on_any_number_of_devices(word, axis):
    def act(x, y):
        if word == 'cumsum': return x.cumsum(axis)
        if word == 'sum': return x.sum(axis)
        if word == 'softmax': return x.softmax(axis)
        if word == 'shrink': return x[1:-1, 1:-1] * 2
        if word == 'flip': return x.flip(axis) + 1
        if word == 'sort_rows': return x.argmax(axis)
        if word == 'concatenate': return Tensor.cat(x, y, dim=axis)
        x[1:-1, 1:-1] = y[1:-1, 1:-1] * 2
        return x
    def count(n):
        x, y = (Tensor(f32(12, 24, seed=k)).shard(names(n), axis).realize() for k in (1, 2))
        linear = (z := act(x, y)).schedule_linear()
        run_linear(linear)
        np.testing.assert_allclose(z.numpy(), act(Tensor(f32(12, 24, seed=1)), Tensor(f32(12, 24, seed=2))).numpy(), rtol=1e-5, atol=1e-5)
        return sched_stats(linear)['kernels']
    assert len({count(n) for n in (2, 3, 4)}) == 1


def test_J7_the_same_parts_are_one_kernel():
    stats = [sched_stats((Tensor(f32(12, 6)).shard(names(n), 0).realize() * 2 + 1).schedule_linear()) for n in (2, 3, 4)]
    assert [s['kernels'] for s in stats] == [1] * 3
    x = Tensor(f32(12, 6)).shard(names(4), 0).realize()
    x[2:7] = 0.0
    assert sched_stats(x.schedule_linear())['kernels'] == 1


def test_J7_a_second_step_is_the_same_program():
    put = over(2)
    net = mlp(put, {})
    optimizer = SGD(get_parameters(net), lr=0.1, momentum=0.9)
    misses = []
    with Tensor.train():
        for k in range(5):
            before = schedule_cache.misses
            optimizer.zero_grad()
            net(put(f32(12, 6, seed=k), 0)).square().mean().backward()
            optimizer.step()
            misses.append(schedule_cache.misses - before)
    assert misses[2:] == [0, 0, 0]


@pytest.mark.parametrize('axis', AXES)
def test_J2_batch_norm(axis):
    def program(put):
        layer = nn.BatchNorm(6)
        layer.weight.assign(Tensor(f32(6, seed=8)))
        if put is not whole:
            for t in get_state_dict(layer).values(): t.shard_(names(2))
        x = put(f32(4, 6, 3, 3), axis)
        with Tensor.train(): results = [layer(x), layer(x * 2)]
        if put is not whole: assert layer.running_mean.place == place(2)
        return [*results, layer(x), layer.running_mean, layer.running_var]
    same(program, 2, tol=1e-4)


@pytest.mark.parametrize('axes', list(itertools.product(AXES, AXES)))
def test_J3_layers_with_split_weights(axes):
    def program(put):
        Tensor.manual_seed(1)
        linear, table, conv, norm = nn.Linear(6, 4), nn.Embedding(8, 6), nn.Conv2d(2, 4, 3), nn.LayerNorm(6)
        if put is not whole:
            for t in (linear.weight, table.weight, conv.weight): t.shard_(names(2), axes[1])
            for t in (linear.bias, conv.bias): t.shard_(names(2), 0 if axes[1] == 0 else None)
            for t in (norm.weight, norm.bias): t.shard_(names(2), axes[1] and 0)
        at = put(np.arange(12, dtype=np.int32).reshape(4, 3) % 8, 0 if axes[0] == 0 else None)
        x = put(f32(4, 6), axes[0])
        return [linear(x), table(at), conv(put(f32(4, 2, 5, 5), axes[0])), norm(x), linear(norm(table(at)))]
    same(program, 2, tol=1e-4)


def test_J1_state_dicts_keep_places():
    net, other = mlp(over(2), SPLITS['tensor']), mlp(whole, {})
    for p in get_parameters(other): p.assign(p + 1)
    wanted = {name: t.numpy() for name, t in get_state_dict(other).items()}
    load_state_dict(net, get_state_dict(other), verbose=False)
    for name, t in get_state_dict(net).items():
        assert t.place == place(2, SPLITS['tensor'].get(name))
        np.testing.assert_array_equal(t.numpy(), wanted[name])
    load_state_dict(other, get_state_dict(net), verbose=False)
    assert {t.device for t in get_parameters(other)} == {'PYTHON'}
    load_state_dict(net, {name: a * 2 for name, a in wanted.items()}, verbose=False)
    assert net.b.weight.place == place(2, 1) and np.array_equal(net.b.weight.numpy(), wanted['b.weight'] * 2)


# ---- random programs, compared with the unsharded ones

def random_program(seed, n):
    "A chain of random steps over two tensors, split at random"
    r = random.Random(seed)
    steps = []
    for _ in range(r.randint(3, 9)):
        steps.append((r.choice(('alu', 'alu', 'move', 'reduce', 'shard', 'write', 'matmul', 'index', 'assign', 'realize', 'view')), r.random(), r.random()))
    return r.choice(AXES), r.choice(AXES), steps


def applied(step, put, n, x, y):
    "What a step makes of two matrices"
    name, a, b = step
    pick = lambda *choices: choices[int(a * len(choices))]
    if name == 'alu': return pick(lambda: x + y, lambda: x * y - x, lambda: (x > y).where(x, y), lambda: x.maximum(y * 2), lambda: x.sin() + 1, lambda: y - x)()
    if name == 'move': return pick(lambda: x.flip(0), lambda: x.flip(1), lambda: x.T.flip(0).T, lambda: x.pad(((1, 0), (0, 0)))[:-1],
                                   lambda: x[:6].cat(x[6:] * 2), lambda: x[1:].cat(x[:1]), lambda: x[:, ::2].cat(x[:, 1::2], dim=1))()
    if name == 'reduce':
        axis = pick(0, 1)
        return x - x.sum(axis, keepdim=True) * 0.1 if b < 0.5 else x.softmax(axis) + y.max(axis, keepdim=True)
    if name == 'shard': return x + 0 if put is whole else (x + 0).shard(names(n), pick(*AXES))
    if name == 'matmul': return (x @ y) * 0.1
    if name == 'index': return x[[int(a * 12), 3, 11, 0] * 3] + x[int(b * 12)]
    if name == 'realize': return x.realize()
    i, j = sorted((int(a * 12), int(b * 12)))
    if name == 'write': x[i:j + 1] = y[i:j + 1] * 2 if a < 0.5 else 1.5
    elif name == 'assign': x.assign(y + x.flip(1))
    else:
        v = x.T[i:j + 1, ::2]
        v += 1
    return x


@pytest.mark.parametrize('n', [2, 3])
@pytest.mark.parametrize('seed', range(20))
def test_J3_random_programs(seed, n):
    axis, other, steps = random_program(seed, n)

    def program(put):
        x, y = put(f32(12, 12, seed=seed), axis), put(f32(12, 12, seed=seed + 1), other)
        kept = []
        for k, step in enumerate(steps):
            z = applied(step, put, n, x, y)
            kept.append(x * 1 if k % 2 else x)
            x, y = (y, z) if k % 3 == 1 else (z, y)
        return [x, y, *kept]
    same(program, n, tol=2e-3)
