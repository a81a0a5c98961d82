"Files as buffers: rules A10, H1, H2, H3, and weights in files, against NumPy and the safetensors library"
import errno
import gc
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

from tinysched import GlobalCounters, Tensor, dtypes, nn, run_linear
from tinysched.frontend import gradient  # noqa: F401  teaches tensors backward()
from tinysched.frontend.state import live, unsaved
from tinysched.helpers import Context
from tinysched.ir.spec import state_of
from tinysched.ir.uop import KernelInfo, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.runtime import disk, realize
from tinysched.runtime.device import Device, buffer_of
from tinysched.schedule.callify import one_range, place
from tinysched.schedule.kernels import get_kernel_graph, on_one_device, whole_copy
from tinysched.schedule.linearize import create_schedule
from tinysched.schedule.memory import memory_plan_rewrite
from tinysched.schedule.pipeline import schedule
from tinysched.schedule.prepare import prepare

ALL = [name for name in ('PYTHON', 'CPU', 'CL') if not Device.failure(name)]
on_all = pytest.mark.parametrize('device', ALL)
U8, F32 = dtypes.uint8, dtypes.float32
posix = pytest.mark.skipif(os.name != 'posix', reason='limits and permissions of POSIX')


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    "Each test has a folder of its own, so that names of files are short"
    monkeypatch.chdir(tmp_path)
    return tmp_path


def file(name, array):
    "A tensor over a new file that holds the array"
    array = np.asarray(array)
    array.tofile(name)
    return Tensor.empty(*array.shape, dtype=array.dtype, device=f'DISK:{name}')


def octets(n=64): return np.arange(n, dtype=np.uint8)
def held(name, dtype=np.uint8): return np.fromfile(name, dtype)
def bodies(linear): return [c.src[0].op for c in linear.src]
def is_bulk(linear): return set(bodies(linear)) == {Ops.STORE}


# ---- A10: reading

@on_all
def test_A10_a_region_at_an_odd_offset_is_one_bulk_transfer(device):
    d = file('f', octets())
    for at in (0, 1, 3, 31, 63):
        y = d[at:].to(device)
        linear = y.schedule_linear()
        assert bodies(linear) == [Ops.STORE] and linear.src[0].src[2].shape == (64 - at,)
        run_linear(linear)
        np.testing.assert_array_equal(y.numpy(), octets()[at:])


@on_all
def test_A10_a_copy_is_pushed_below_movement(device):
    a = octets().reshape(4, 4, 4)
    d = file('f', a)
    views = {'permute': lambda t: t.permute(2, 0, 1) if isinstance(t, Tensor) else t.transpose(2, 0, 1),
             'flip': lambda t: t.flip(0, 2) if isinstance(t, Tensor) else np.flip(t, (0, 2)),
             'pad': lambda t: t.pad(((1, 0), (0, 2), (0, 0))) if isinstance(t, Tensor)
                    else np.pad(t, ((1, 0), (0, 2), (0, 0))),
             'expand': lambda t: t.reshape(1, 4, 4, 4).expand(3, 4, 4, 4) if isinstance(t, Tensor)
                       else np.broadcast_to(t, (3, 4, 4, 4)),
             'steps': lambda t: t[::2, 1:, ::-1]}
    for name, view in views.items():
        y = view(d).to(device)
        linear = y.schedule_linear()
        assert bodies(linear).count(Ops.STORE) == 1, name
        assert linear.src[0].src[0].op is Ops.STORE, name      # the transfer comes first
        run_linear(linear)
        np.testing.assert_array_equal(y.numpy(), view(a), name)
        np.testing.assert_array_equal(view(d).numpy(), view(a), name)


def test_A10_a_copy_pushed_below_movement_in_the_graph():
    f = UOp.buffer('DISK:f', (4, 6), F32)
    u = UOp(Ops.COPY, F32, (f.permute((1, 0)).flip((0,)),), 'CPU')
    out = UOp.buffer('CPU', (6, 4), F32)
    order = prepare(UOp.sink(out.after(out.store(u)))).toposort()
    copies = [n for n in order if n.op is Ops.COPY]
    assert [c.src for c in copies] == [(f,)]
    assert not any(n.op is Ops.STAGE for n in order)


def test_A10_only_the_range_that_is_needed_is_read():
    d = file('f', octets(100).reshape(10, 10))
    y = d[3:5, 2:4].to('PYTHON')
    linear = y.schedule_linear()
    assert linear.src[0].src[2].shape == (12,)     # from row 3, column 2 to row 4, column 3
    run_linear(linear)
    assert y.tolist() == [[32, 33], [42, 43]]
    flipped = d.reshape(100).flip(0)[:3].to('PYTHON').schedule_linear()
    assert flipped.src[0].src[2].shape == (3,)


def test_A10_a_copy_out_of_a_file_gets_storage_once():
    d = file('f', octets())
    x = d.to('PYTHON')
    p, q = x + 1, x.reshape(8, 8).sum(0)
    linear = p.schedule_linear(q)
    assert bodies(linear).count(Ops.STORE) == 1
    run_linear(linear)
    assert x.uop.op is Ops.BUFFER and x.uop.device == 'PYTHON'
    assert not is_bulk(p.schedule_linear()) or not p.schedule_linear().src


@on_all
def test_A10_values_of_every_dtype_cross_at_odd_places(device):
    rng = np.random.default_rng(0)
    for dt in ('bool', 'int8', 'uint8', 'int16', 'uint16', 'float16', 'bfloat16', 'int32', 'uint32', 'float32',
               'int64', 'uint64', 'float64'):
        dtype = getattr(dtypes, dt)
        a = rng.integers(0, 2 if dt == 'bool' else 50, 9)
        x = Tensor(a.tolist(), dtype=dtype, device=device)
        whole = Tensor.empty(200, dtype=U8, device='DISK:f')
        whole[5:5 + 9 * dtype.itemsize].bitcast(dtype).assign(x).realize()
        back = whole[5:5 + 9 * dtype.itemsize].bitcast(dtype)
        assert back.dtype is dtype and back.to(device).tolist() == x.tolist() == back.tolist()
        assert (back[2:].to(device) == x[2:]).all().item()
        os.unlink('f')


def test_A10_a_view_of_bytes_as_floats_is_no_kernel():
    d = file('f', octets())
    v = d[3:35].bitcast(F32)
    y = v.to('PYTHON')
    linear = y.schedule_linear()
    assert bodies(linear) == [Ops.STORE]
    run_linear(linear)
    assert y.numpy().tobytes() == octets()[3:35].tobytes() == v.numpy().tobytes()
    d[0:1] = 5                     # now the program writes the file, and the view is no argument of its own
    z = v.to('PYTHON')
    linear = d.schedule_linear(z)
    assert [c.src[0].op for c in linear.src if c.src[1].device == 'PYTHON' and z.shape == c.src[1].shape] == [Ops.STORE]
    assert one_range(v.uop).offset == 3
    run_linear(linear)
    assert z.numpy().tobytes() == octets()[3:35].tobytes()


# ---- A10: writing

@on_all
def test_A10_a_copy_to_a_file_makes_the_region_the_result(device):
    x = Tensor([1.0, 2, 3, 4], device=device).realize()
    y = x.to('DISK:f')
    linear = y.schedule_linear()
    assert bodies(linear) == [Ops.STORE]
    assert linear.src[0].src[1].storage.device == 'DISK:f'
    run_linear(linear)
    assert state_of(y.uop).op is Ops.BUFFER and y.device == 'DISK:f' and y.uop.storage.device == 'DISK:f'
    assert held('f', np.float32).tolist() == [1, 2, 3, 4] == y.tolist() == y.to(device).tolist()


def test_A10_a_copy_to_a_file_in_the_graph_is_an_effect():
    x, f = UOp.buffer('PYTHON', (4,), F32), 'DISK:f'
    buffer_of(x).copyin(np.float32([1, 2, 3, 4]).data)
    there = UOp(Ops.COPY, F32, (x + 1,), f)
    back = UOp(Ops.COPY, F32, (there,), 'PYTHON')
    placed = place([back])
    assert placed.became[there].device == f
    run_linear(schedule(placed.sink))
    assert held('f', np.float32).tolist() == [2, 3, 4, 5]
    assert buffer_of(placed.became[back]).numpy().tolist() == [2, 3, 4, 5]


@on_all
def test_A10_a_part_of_a_file_is_computed_elsewhere_and_copied_in_one_piece(device):
    d = file('f', np.arange(8, dtype=np.float32))
    x = Tensor([10.0, 20], device=device).realize()
    d[3:5].assign(x * 2 + 1)
    linear = d.schedule_linear()
    assert bodies(linear) == [Ops.SINK, Ops.STORE]
    assert {a.device for a in linear.src[0].src[1:]} == {x.device}
    run_linear(linear)
    assert held('f', np.float32).tolist() == [0, 1, 2, 21, 41, 5, 6, 7]


def test_A10_constants_lists_and_setitem():
    d = file('f', np.arange(8, dtype=np.int32))
    d[1:3].assign(Tensor.full((2,), 99, dtype=dtypes.int32)).realize()
    d[3:4].assign([7]).realize()
    d[4:6] = 5
    d.reshape(4, 2)[3] = Tensor([1, 2])
    d.realize()
    assert held('f', np.int32).tolist() == [0, 99, 99, 7, 5, 5, 1, 2]
    d.assign(3).realize()
    assert held('f', np.int32).tolist() == [3] * 8
    d[2:4] = np.int32([8, 9])
    assert d.tolist() == [3, 3, 8, 9, 3, 3, 3, 3]


def test_A10_a_stage_on_a_file_is_nothing():
    d = file('f', octets())
    for t in (d.contiguous(), d[3:9].contiguous(), d.flip(0).contiguous(), d.clone()):
        assert len(t.schedule_linear().src) == 0 and t.device == 'DISK:f'
    f = UOp.buffer('DISK:f', (64,), U8)
    for view in (f.shrink(((3, 9),)), f.shrink(((3, 9),)).flip((0,))):
        staged = UOp(Ops.STAGE, U8, (view,))
        placed = place([staged])
        assert placed.became[staged] is view and not placed.sink.src
    out = UOp.buffer('CPU', (6,), U8)
    ready = prepare(UOp.sink(out.after(out.store(UOp(Ops.COPY, U8, (staged,), 'CPU')))))
    assert not any(u.op is Ops.STAGE for u in ready.toposort())


def test_A10_computing_in_a_file_is_refused_and_nothing_is_lost():
    d = file('f', np.arange(4, dtype=np.float32))
    for wrong in (lambda: d + 1, lambda: 1 - d, d.sum, d.max, lambda: d.cast('int32'), lambda: -d,
                  d.exp, lambda: d @ d, lambda: d.where(1, 0), lambda: d[Tensor([0, 1])], lambda: d[[0, 1]],
                  lambda: d.__iadd__(1), lambda: d.__setitem__(Tensor([0, 1]), 5.0)):
        with pytest.raises(RuntimeError, match=r"DISK:f.*\.to\('CPU'\)"): wrong()
    assert d.tolist() == [0, 1, 2, 3] == held('f', np.float32).tolist()
    assert (d.to('PYTHON') + 1).tolist() == [1, 2, 3, 4]


def test_A10_computing_in_a_file_is_refused_in_the_graph():
    f = UOp.buffer('DISK:f', (4,), F32)
    for sink in (UOp.sink(f.after(f.store(f + 1))), UOp.sink(f.after(f.flip((0,)).store(f))),
                 UOp.sink(f.after(f.store(UOp.const(F32, 1.0)._stretch((4,)))))):
        with pytest.raises(RuntimeError, match='computing on DISK:f.*Copy'): schedule(sink)


def test_A10_a_scattered_write_is_refused_and_nothing_is_lost():
    d = file('f', octets(16).reshape(4, 4))
    for view in (d[::2], d[:, 1:3], d.flip(0), d.permute(1, 0), d[1:3, :2]):
        with pytest.raises(ValueError, match='scattered places of DISK:f.*one piece'): view.assign(0)
    with pytest.raises(ValueError, match='scattered'): d[:, 0] = 1
    with pytest.raises(ValueError, match='expand'): d.reshape(1, 16).expand(2, 16).assign(1)
    d.realize()
    assert d.tolist() == octets(16).reshape(4, 4).tolist()


def test_A10_words_that_compute_do_not_make_files():
    for wrong in (lambda: Tensor([1, 2], device='DISK:f'), lambda: Tensor.zeros(3, device='disk:f'),
                  lambda: Tensor.rand(3, device='DISK:f'), lambda: Tensor.arange(3, device='DISK:f'),
                  lambda: Tensor.full((2,), 1, device='DISK:f')):
        with pytest.raises(ValueError, match='DISK:f.*elsewhere'): wrong()
    d = file('g', octets(4))
    for t in (d.zeros_like(), d.ones_like(), d.empty_like(), d.full_like(3)): assert t.device == Device.DEFAULT
    assert d.to('PYTHON').rand_like(dtype='float32').device == 'PYTHON'
    assert held('g').tolist() == [0, 1, 2, 3] and not os.path.exists('f')


# ---- one file, one state

def test_M2_tensors_over_one_file_are_aliases():
    a, b = Tensor.empty(4, dtype=F32, device='DISK:f'), Tensor.empty(16, dtype=U8, device='disk:f')
    a.assign(Tensor([1.0, 2, 3, 4]))
    assert b.numpy().view(np.float32).tolist() == [1, 2, 3, 4]     # though nobody realized a
    b[4:8].bitcast(F32).assign(9.0)
    assert a.tolist() == [1, 9, 3, 4]
    Tensor([7.0]).to('DISK:f')
    assert a[0].item() == 7


def test_M3_readers_of_a_file_keep_what_they_read():
    d = file('f', np.arange(8, dtype=np.float32))
    plus, wide = d.to('PYTHON') + 1, d[2:3].to('PYTHON').expand(100) * 2
    lazy, snap, flipped, framed = d[1:3].to('PYTHON'), d[4:].contiguous(), d.flip(0).clone(), d[:2].pad((1, 1))
    d.assign(Tensor.zeros(8)).realize()
    assert held('f', np.float32).tolist() == [0] * 8 == d.tolist()
    a = np.arange(8.)
    assert plus.tolist() == (a + 1).tolist() and wide.tolist() == [4.0] * 100 and lazy.tolist() == [1, 2]
    assert snap.tolist() == [4, 5, 6, 7] and flipped.tolist() == a[::-1].tolist() and framed.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize('first', ['reader', 'written'])
def test_M7_reads_and_writes_of_a_file_in_any_order_of_realize(first):
    d = file('f', octets(8))
    before = d[2:5].to('PYTHON') + 1
    d[3:6] = 100
    after = d[2:5].to('PYTHON') + 1
    d[2:3] = 50
    Tensor.realize(*((before, after, d) if first == 'reader' else (d, after, before)))
    assert before.tolist() == [3, 4, 5] and after.tolist() == [3, 101, 101]
    assert held('f').tolist() == [0, 1, 50, 100, 100, 100, 6, 7]


def test_M4_a_snapshot_of_a_file_can_be_written_and_the_file_is_not():
    d = file('f', octets(8))
    s, t = d.contiguous(), d[::2].contiguous()
    s[1:3] = 99
    t.assign(Tensor([5, 6, 7, 8], dtype=U8))
    s.realize(t)
    assert held('f').tolist() == list(range(8)) == d.tolist()
    assert s.tolist() == [0, 99, 99, 3, 4, 5, 6, 7] and t.tolist() == [5, 6, 7, 8]


def test_M7_a_pending_write_is_known_after_its_tensor_is_gone():
    d = file('f', octets(4))
    d[0:2] = 9
    y = d.to('PYTHON')
    del d
    gc.collect()
    e = Tensor.empty(4, dtype=U8, device='DISK:f')
    assert e.tolist() == [9, 9, 2, 3] == y.tolist()


def test_writes_in_one_file_that_overlap_move_as_in_numpy():
    a, d = octets(16), file('f', octets(16))
    for dst, src in ((slice(1, 9), slice(0, 8)), (slice(0, 8), slice(1, 9)), (slice(4, 8), slice(4, 8)),
                     (slice(3, 4), slice(15, 16))):
        a[dst] = a[src].copy()
        d[dst] = d[src]
        assert d.tolist() == a.tolist()
    d[0:8] = d[::2]
    a[0:8] = a[::2].copy()
    assert held('f').tolist() != [] and d.realize().tolist() == a.tolist() == held('f').tolist()


def test_a_file_that_was_replaced_is_another_one():
    d = file('f', octets(4))
    assert d.tolist() == [0, 1, 2, 3]
    np.arange(10, 14, dtype=np.uint8).tofile('g')
    os.replace('g', 'f')
    assert d.tolist() == [0, 1, 2, 3]      # it holds on to what it opened
    e = Tensor.empty(4, dtype=U8, device='DISK:f')
    assert e.tolist() == [10, 11, 12, 13] and d.cell is not e.cell
    with pytest.raises(OSError, match='replaced'): d.assign(0).realize()
    assert held('f').tolist() == [10, 11, 12, 13]


# ---- H

def test_H1_a_kernel_that_moves_everything_between_devices_is_a_bulk_copy():
    for n in (1, 2, 6):
        x = UOp.buffer('PYTHON', (n,), F32)
        buffer_of(x).copyin(np.arange(n, dtype=np.float32).data)
        for there in ('PYTHON:1', 'DISK:f'):
            y = UOp.buffer(there, (n,), F32)
            linear = schedule(UOp.sink(y.after(y.store(x))))     # a STORE and no COPY
            assert bodies(linear) == [Ops.STORE], (n, there)
            run_linear(linear)
            assert buffer_of(y).numpy().tolist() == list(range(n))
        back = UOp.buffer('PYTHON', (n,), F32)
        linear = schedule(UOp.sink(back.after(back.store(y))))
        assert bodies(linear) == [Ops.STORE]
        run_linear(linear)
        assert buffer_of(back).numpy().tolist() == list(range(n))


def test_H1_is_recognised_after_simplification():
    x, y = (UOp.buffer(d, (2, 3), F32) for d in ('PYTHON', 'PYTHON:1'))
    buffer_of(x).copyin(np.arange(6, dtype=np.float32).data)
    winding = x.flip((0,)).permute((1, 0)).permute((1, 0)).flip((0,)).reshape((6,)).reshape((2, 3)) + 0.0 * 1
    for value in (winding.src[0] if winding.op is Ops.ADD else winding, x.pad(((1, 1), (0, 0))).shrink(((1, 3), (0, 3)))):
        linear = schedule(UOp.sink(y.after(y.store(value))))
        assert bodies(linear) == [Ops.STORE]
    single = [UOp.buffer(d, (1, 1), F32) for d in ('PYTHON', 'PYTHON:1')]
    linear = schedule(UOp.sink(single[0].after(single[0].store(single[1].flip((0, 1)).permute((1, 0))))))
    assert bodies(linear) == [Ops.STORE]


@pytest.mark.parametrize('n', [1, 5])
def test_H1_copies_between_devices_move_each_byte_once(n):
    x = Tensor(list(range(n)), device='PYTHON').realize()
    for there in ('PYTHON:1', 'CPU', 'DISK:f'):
        linear = x.to(there).schedule_linear()
        assert bodies(linear) == [Ops.STORE]
        GlobalCounters.reset()
        run_linear(linear)
        assert (GlobalCounters.kernel_count, GlobalCounters.global_mem) == (0, 2 * 4 * n)


def moving(steps, to, source, index=lambda r: r, joins=None):
    "A kernel that stores elements of one buffer into another"
    r, (a, b) = UOp.range(steps, 0), (UOp.param(i, dtypes.float32, (n,)) for i, n in enumerate((to, source)))
    return UOp(Ops.STORE, dtypes.void, (a.index(r), b.index(index(r))), joins).end(r).sink(arg=KernelInfo('moving'))


def test_H1_only_what_moves_all_of_both_is_a_bulk_copy():
    assert whole_copy(moving(4, 4, 4))
    others = moving(3, 4, 4), moving(4, 8, 4), moving(4, 4, 8), moving(4, 4, 4, lambda r: r * -1 + 3), moving(4, 4, 4, joins=Ops.ADD)
    assert not any(map(whole_copy, others))
    for body in others:
        places = [UOp.buffer(d, p.shape, p.dtype) for d, p in zip(('CPU', 'PYTHON'), sorted(
            (u for u in body.toposort() if u.op is Ops.PARAM), key=lambda p: p.arg.slot))]
        with pytest.raises(RuntimeError, match='CPU and PYTHON'): on_one_device(body.call(*places))


def test_H2_whatever_else_mixes_devices_is_refused_by_name():
    x, y = UOp.buffer('PYTHON', (4,), F32), UOp.buffer('PYTHON:1', (4,), F32)
    part = UOp.buffer('PYTHON:1', (6,), F32)
    for target, value in ((y, x + 1), (y, x.flip((0,))), (y, x.cast(dtypes.int32).cast(F32)),
                          (part.shrink(((1, 5),)), x), (y, x.shrink(((0, 2),)).pad(((0, 2),))),
                          (y, x.shrink(((0, 1),)).expand((4,)))):
        state = target.storage
        with pytest.raises(RuntimeError, match='PYTHON:1 and PYTHON: copy to one device'):
            schedule(UOp.sink(state.after(target.store(value))))
    with pytest.raises(RuntimeError, match='PYTHON and on PYTHON:1'): Tensor([1, 2], device='PYTHON') + \
        Tensor([1, 2], device='PYTHON:1')


def test_H3_the_same_device_stays_a_kernel_files_excepted():
    x, y = (UOp.buffer('PYTHON', (4,), F32) for _ in range(2))
    assert bodies(schedule(UOp.sink(y.after(y.store(x))))) == [Ops.SINK]
    f, g = (UOp.buffer('DISK:f', (4,), F32) for _ in range(2))
    assert bodies(schedule(UOp.sink(g.after(g.store(f))))) == [Ops.STORE]
    assert bodies(file('a', octets()).to('DISK:b').schedule_linear()) == [Ops.STORE]    # file to file
    d = file('c', octets())
    d[0:4] = d[8:12]
    assert bodies(d.schedule_linear()) == [Ops.STORE]


def test_D3_a_copy_to_the_same_file_is_not_nothing():
    f = UOp.buffer('DISK:f', (8,), U8)
    low, high = f.shrink(((0, 4),)), f.shrink(((4, 8),))
    sink = UOp.sink(f.after(low.store(UOp(Ops.COPY, U8, (high,), 'DISK:f'))))
    assert bodies(schedule(sink)) == [Ops.STORE]
    x = UOp.buffer('CPU', (8,), U8)
    assert prepare(UOp.sink(x.after(x.store(UOp(Ops.COPY, U8, (x,), 'CPU'))))).src == ()


def test_K1_files_are_never_planned():
    x = UOp.buffer('PYTHON', (4,), F32)
    there = UOp(Ops.COPY, F32, (x + 1,), 'DISK:f')
    graph = get_kernel_graph(prepare(UOp.sink(x.after(x.store(UOp(Ops.COPY, F32, (there,), 'PYTHON'))))))
    planned = memory_plan_rewrite(create_schedule(graph))
    assert [a for c in planned.src for a in c.src[1:] if a.op is Ops.ALLOC and a.device == 'DISK:f']
    y = Tensor([1.0, 2]).to('DISK:g')
    assert all(a.storage.device != 'DISK:g' or a.storage.arg.shape == (disk.MOST,)
               for c in y.schedule_linear().src for a in c.src[1:])


# ---- files that are not as they should be

def test_a_missing_file_is_not_made_by_reading():
    d = Tensor.empty(4, device='DISK:none')
    for read in (d.numpy, d.to('PYTHON').realize, d.flip(0).numpy):
        with pytest.raises(FileNotFoundError, match='none'): read()
    with pytest.raises(FileNotFoundError): Tensor(pathlib.Path('none'))
    assert not os.path.exists('none')
    assert d.assign(Tensor([1.0, 2, 3, 4])).tolist() == [1, 2, 3, 4]


def test_a_folder_and_a_folder_that_is_missing(folder):
    os.mkdir('sub')
    for name, error in (('sub', IsADirectoryError), ('sub/none/f', FileNotFoundError)):
        d = Tensor.empty(4, device=f'DISK:{name}')
        with pytest.raises(error): d.numpy()
        with pytest.raises(error): d.assign(1).realize()
    with pytest.raises(IsADirectoryError): Tensor(pathlib.Path('sub'))


def test_a_file_that_is_too_short():
    file('f', octets(10))
    d = Tensor.empty(16, dtype=U8, device='DISK:f')
    assert d[:10].tolist() == list(range(10))
    for read in (d.numpy, d.to('PYTHON').realize, d[8:12].numpy):
        with pytest.raises(ValueError, match='has 10 bytes; wanted bytes'): read()
    d[12:14] = 7       # grows to the length that was asked for
    assert d.tolist() == [*range(10), 0, 0, 7, 7, 0, 0] and os.path.getsize('f') == 16


def test_a_file_that_is_longer_than_the_tensor_keeps_the_rest():
    file('f', octets(10))
    d = Tensor.empty(4, dtype=U8, device='DISK:f')
    assert d.assign(9).realize().tolist() == [9] * 4
    assert held('f').tolist() == [9] * 4 + list(range(4, 10))


@posix
def test_a_file_that_may_only_be_read(monkeypatch):
    d = file('f', octets(4))
    opened = disk.made
    def refuse(path, new): raise PermissionError(errno.EACCES, 'Permission denied', path)
    monkeypatch.setattr(disk, 'made', refuse)
    assert d.tolist() == [0, 1, 2, 3]
    y = d.to('PYTHON') + 1
    d[0:2] = 9
    with pytest.raises(PermissionError): d.realize()
    with pytest.raises(PermissionError): d.tolist()        # the write is not forgotten
    assert y.tolist() == [1, 2, 3, 4] and held('f').tolist() == [0, 1, 2, 3]
    monkeypatch.setattr(disk, 'made', opened)
    assert d.tolist() == [9, 9, 2, 3] == held('f').tolist()


@posix
def test_no_permission():
    code = '''
import os, sys
from tinysched import Tensor
Tensor.empty(4, dtype='uint8', device='DISK:mine').assign(1).realize()
if os.getuid() == 0: os.setuid(65534)
d = Tensor.empty(4, dtype='uint8', device='DISK:locked')
for act in (d.numpy, lambda: d.assign(1).realize()):
    try: act()
    except PermissionError as e: print(type(e).__name__)
'''
    file('locked', octets(4))
    os.chmod('locked', 0)
    os.chmod('.', 0o755)
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env={**os.environ, 'DEV': 'PYTHON'},
                         check=False)
    assert out.stdout.split() == ['PermissionError'] * 2, out.stderr


def test_size_zero():
    d = Tensor.empty(0, 3, device='DISK:f')
    assert d.numpy().shape == (0, 3) and d.to('PYTHON').tolist() == [] and d.contiguous().tolist() == []
    d.assign(Tensor.empty(0, 3)).realize()
    e = Tensor(np.zeros((0, 2), np.float32)).to('DISK:f').realize()
    assert e.shape == (0, 2) and not os.path.exists('f')
    whole = file('g', octets(8))
    assert whole[3:3].tolist() == [] and whole[3:3].bitcast(F32).shape == (0,)
    whole[3:3] = 1
    assert whole.tolist() == list(range(8))
    open('empty', 'w').close()
    assert Tensor(pathlib.Path('empty')).tolist() == []


def test_a_file_is_no_larger_than_files_can_be():
    with pytest.raises(ValueError, match='DISK:f: .* bytes; wanted at most'): Tensor.empty(1 << 50, device='DISK:f')


def test_a_shape_with_a_variable_has_no_length():
    n = UOp.variable('n', 1, 4).bind(2)
    with pytest.raises(ValueError, match='DISK:f.*length'): Tensor.ones(4)[:n].to('DISK:f')


@posix
def test_a_full_disk_loses_nothing():
    code = '''
import resource, signal, numpy as np
from tinysched import Tensor
d = Tensor.empty(100_000, dtype='uint8', device='DISK:f')
d[:1000].assign(7).realize()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
big = Tensor.empty(300_000, dtype='uint8', device='DISK:g')
reader = d[:4].to('PYTHON') + 1
x = Tensor([1.0, 2]).realize()
big.assign(Tensor.full((300_000,), 3, dtype='uint8'))
d[:4].assign(9)
y = x + 1
for t in (big, big.to('PYTHON')):
    try: t.realize(d, y)
    except OSError as e: print('refused', e.errno, e.filename)
print(x.tolist(), y.tolist(), reader.tolist(), d[:5].tolist())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
print(set(big.tolist()), np.fromfile('g', np.uint8).sum())
'''
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env={**os.environ, 'DEV': 'PYTHON'},
                         check=False)
    lines = out.stdout.splitlines()
    assert lines[:2] == [f'refused {errno.EFBIG} g'] * 2, out.stderr
    assert lines[2:] == ['[1.0, 2.0] [2.0, 3.0] [8, 8, 8, 8] [9, 9, 9, 9, 7]', '{3} 900000'], out.stderr


def test_a_disk_that_fails_in_the_middle_of_a_write(monkeypatch):
    d = file('f', octets(8))
    real, left = disk.write_some, [3]
    def failing(f, data, at):
        if not left[0]: raise OSError(errno.EIO, 'Input/output error')
        n = real(f, data[:left[0]], at)
        left[0] -= n
        return n
    x = Tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=U8).realize()
    monkeypatch.setattr(disk, 'write_some', failing)
    d.assign(x)
    with pytest.raises(OSError, match='Input/output'): d.realize()
    assert x.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(OSError, match='Input/output'): d.tolist()     # half of it is not a value
    monkeypatch.setattr(disk, 'write_some', real)
    assert d.tolist() == x.tolist() == held('f').tolist()


def test_short_reads_and_writes_go_on(monkeypatch):
    read, write = disk.read_some, disk.write_some
    monkeypatch.setattr(disk, 'read_some', lambda f, room, at: read(f, room[:3], at))
    monkeypatch.setattr(disk, 'write_some', lambda f, data, at: write(f, data[:2], at))
    d = Tensor(octets(20)).to('DISK:f').realize()
    assert d.tolist() == list(range(20)) == d.to('PYTHON').tolist()


def test_systems_without_pread_and_fallocate(monkeypatch):
    for name in ('preadv', 'pwrite', 'posix_fallocate'): monkeypatch.delattr(os, name, raising=False)
    d = Tensor(octets(20)).to('DISK:f').realize()
    d[3:5] = 9
    assert d[2:].tolist() == [2, 9, 9, *range(5, 20)] and held('f').tolist() == d.tolist()


def test_what_another_process_wrote_is_read():
    d = file('f', octets(4))
    assert d.tolist() == [0, 1, 2, 3]
    y = d.to('PYTHON').realize()
    subprocess.run([sys.executable, '-c', "f = open('f', 'r+b'); f.write(b'abcd')"], check=True)
    assert d.tolist() == list(b'abcd') == d.to('PYTHON').tolist() and y.tolist() == [0, 1, 2, 3]


def handles():
    return len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else 0


def test_files_are_closed_when_tensors_die():
    gc.collect()
    before = handles()
    many = [Tensor(octets(4)).to(f'DISK:f{i}').realize() for i in range(20)]
    snaps = [t.contiguous() for t in many]
    for t in many: t.assign(9).realize()
    assert [s.tolist() for s in snaps[:2]] == [[0, 1, 2, 3]] * 2
    del many, snaps, t
    gc.collect()
    assert handles() == before
    assert not [c for c in live() if str(c.device).startswith('DISK') and c not in unsaved]


def test_a_file_is_no_memory_in_use():
    gc.collect()
    before = GlobalCounters.mem_used
    d = file('f', octets())
    d.numpy(), d.assign(1).realize()
    gc.collect()
    assert GlobalCounters.mem_used == before


@posix
def test_large_files_cost_no_memory():
    with open('large', 'wb') as f:
        f.truncate(8 << 30)
        f.seek((5 << 30) + 3)
        f.write(np.arange(4, dtype=np.float32).tobytes())
    d = Tensor(pathlib.Path('large'))
    assert d.shape == (8 << 30,)
    tracemalloc.start()
    try:
        assert d[(5 << 30) + 3:(5 << 30) + 19].bitcast(F32).to('PYTHON').tolist() == [0, 1, 2, 3]
        rows = d.reshape(8 << 10, 1 << 20)
        assert rows[5 << 10, 3:8].tolist() == [0, 0, 0, 0, 0]
        assert rows[(5 << 10):(5 << 10) + 2, 9:11].numpy().tolist() == [[128, 63], [0, 0]]
        assert d.flip(0)[:5].tolist() == [0] * 5
        d[6 << 30:(6 << 30) + 4] = 7
        assert d[(6 << 30) - 1:(6 << 30) + 5].tolist() == [0, 7, 7, 7, 7, 0]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally: tracemalloc.stop()
    assert os.stat('large').st_blocks * 512 < 1 << 20


def test_file_to_file_goes_in_pieces(monkeypatch):
    monkeypatch.setattr(realize, 'PIECE', 1000)
    a = np.random.default_rng(0).integers(0, 256, 12_345, dtype=np.uint8)
    d = file('f', a)
    whole = Tensor.empty(13_000, dtype=U8, device='DISK:g')
    whole[3:3 + 12_345].assign(d)
    tracemalloc.start()
    whole.realize()
    tracemalloc.stop()
    assert held('g')[3:3 + 12_345].tobytes() == a.tobytes()


def test_threads_write_and_read_files():
    def work(i, out):
        d = Tensor.empty(1000, dtype=U8, device=f'DISK:f{i % 2}')
        part = d[i * 100:(i + 1) * 100]
        for n in range(5): part.assign(n + i).realize()
        out[i] = set(part.tolist())
    found: dict = {}
    threads = [threading.Thread(target=work, args=(i, found)) for i in range(6)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert found == {i: {4 + i} for i in range(6)}


# ---- names and paths

def test_names_are_kept_exactly(folder):
    name = 'My Weights: 1.bin'
    d = Tensor([1, 2]).to(f'dIsK:{name}').realize()
    assert d.device == f'DISK:{name}' and os.path.exists(name) and d.shape == (2,)
    assert repr(d) == f'<Tensor (2,) int32 on DISK:{name}, stored>'
    assert Tensor.empty(2, dtype='int32', device=f'Disk:{folder / name}').tolist() == [1, 2]


def test_a_path_makes_a_tensor_of_bytes():
    file('f', octets(10))
    t = Tensor(pathlib.Path('f'))
    assert (t.dtype, t.shape) == (U8, (10,)) and t.device == f'DISK:{os.path.realpath("f")}'
    assert t.tolist() == list(range(10))
    assert Tensor(pathlib.Path('f'), dtype='int32').shape == (2,)
    assert Tensor(pathlib.Path('f'), device='PYTHON').device == 'PYTHON'
    assert Tensor(pathlib.Path('f'), device='PYTHON').tolist() == list(range(10))


def test_a_nameless_file():
    d = Tensor([1.0, 2]).to('DISK').realize()
    assert d.tolist() == [1, 2] and os.listdir('.') == []
    assert Tensor.empty(2, device='DISK:').cell is not d.cell


def test_copies_and_pickles_of_a_file_are_in_memory():
    import copy
    d = file('f', octets(3))
    twin = copy.deepcopy(d)
    assert twin.tolist() == [0, 1, 2] and twin.device == Device.DEFAULT


def test_no_grad_is_lost_on_the_way_to_a_file():
    w = Tensor([1.0, 2], requires_grad=True)
    (w * w).sum().backward()
    w.grad.to('DISK:g').realize()
    assert held('g', np.float32).tolist() == [2, 4]


# ---- random programs

DTYPES = [np.uint8, np.int8, np.uint16, np.int16, np.float16, np.int32, np.float32, np.int64, np.float64]
SIZE = 96


def equal(a, b):
    "Equal, of NaNs too; which NaN it is may change where a kernel moves it"
    return np.array_equal(a, b, equal_nan=a.dtype.kind == 'f')


class Story:
    "Random reads and writes of one file, by tensors and by NumPy"
    def __init__(self, seed):
        self.rng, self.seed = random.Random(seed), seed
        self.memory = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
        self.memory.tofile('story')
        self.values = []      # (tensor, array) that must stay equal

    def whole(self): return Tensor.empty(SIZE, dtype=U8, device='DISK:story'), self.memory

    def region(self):
        "Some range of the file in some dtype, at any offset"
        t, a = self.whole()
        dt = np.dtype(self.rng.choice(DTYPES))
        n = self.rng.randint(1, SIZE // dt.itemsize)
        at = self.rng.randint(0, SIZE - n * dt.itemsize)
        end = at + n * dt.itemsize
        t, a = t[at:end].bitcast(getattr(dtypes, dt.name)), a[at:end].view(dt)
        for k in (2, 3, 4):
            if n % k == 0 and self.rng.random() < .4: return t.reshape(k, n // k), a.reshape(k, n // k)
        return t, a

    def cut(self, t, a):
        "One range of it: leading rows"
        if self.rng.random() < .5: return t, a
        lo = self.rng.randrange(a.shape[0])
        hi = self.rng.randint(lo + 1, a.shape[0])
        return t[lo:hi], a[lo:hi]

    def moved(self, t, a):
        "Any view of it"
        for _ in range(self.rng.randint(0, 3)):
            match self.rng.randrange(6):
                case 0: t, a = t.flip(0), np.flip(a, 0)
                case 1 if a.ndim == 2: t, a = t.permute(1, 0), a.T
                case 2: t, a = t[::2], a[::2]
                case 3 if a.ndim == 2: t, a = t[:, :1], a[:, :1]
                case 4: t, a = t.reshape(1, *a.shape).expand(2, *a.shape), np.broadcast_to(a, (2, *a.shape))
                case 5: t, a = t.pad(((1, 0), *[(0, 0)] * (a.ndim - 1))), np.pad(a, ((1, 0), *[(0, 0)] * (a.ndim - 1)))
            if a.ndim > 2: break
        return t, a

    def read(self):
        t, a = self.moved(*self.cut(*self.region()))
        match self.rng.randrange(4):
            case 0: assert equal(t.numpy(), a), self.seed
            case 1: self.values.append((t.to('PYTHON'), a.copy()))
            case 2 if a.dtype.kind != 'f': self.values.append((t.to('PYTHON') + 1, a + a.dtype.type(1)))
            case _: self.values.append((t.contiguous(), a.copy()))

    def write(self):
        t, a = self.cut(*self.region())
        v = np.random.default_rng(self.rng.randrange(10**6)).integers(0, 100, a.shape).astype(a.dtype)
        match self.rng.randrange(5):
            case 0: t.assign(Tensor(v, device='PYTHON')); a[...] = v
            case 1: t.assign(7); a[...] = 7
            case 2:
                s, b = self.moved(*self.region())
                flat, want = s.flatten(), b.flatten().copy()
                raw = want.view(np.uint8)
                n = min(len(raw) // a.dtype.itemsize, a.shape[0]) if a.ndim == 1 else 0
                if n and s.dtype.itemsize == a.dtype.itemsize and s.dtype.kind != 'float' and a.dtype.kind != 'f':
                    n = min(n, len(want))
                    t[:n].assign(flat[:n].bitcast(t.dtype))
                    a[:n] = want[:n].view(a.dtype)
            case 3 if a.dtype.kind in 'iu':
                t.assign(t.to('PYTHON') * 3); a[...] = a * a.dtype.type(3)
            case _: t[:1] = Tensor(v[:1], device='PYTHON'); a[:1] = v[:1]

    def check(self):
        for t, a in self.values:
            assert t.shape == a.shape and equal(t.numpy(), a), self.seed

    def run(self):
        with np.errstate(all='ignore'):
            for _ in range(self.rng.randint(2, 9)):
                self.rng.choice((self.read, self.write))()
                if self.values and self.rng.random() < .2: self.rng.choice(self.values)[0].realize()
                if self.rng.random() < .2: self.whole()[0].realize()
                if self.values and self.rng.random() < .1: self.values.pop(0)
            if self.rng.random() < .5: self.check()
            t, a = self.whole()
            assert t.realize().numpy().tobytes() == a.tobytes() == open('story', 'rb').read(), self.seed
            self.check()


@pytest.mark.parametrize('block', range(6))
def test_A10_random_regions_of_one_file_fuzz(block):
    first = random.randrange(10**9) if os.environ.get('FUZZ') else block * 100
    with Context(DEV='PYTHON'):
        for seed in range(first, first + 100): Story(seed).run()


# ---- weights in files

def arrays():
    rng = np.random.default_rng(0)
    return {'a.weight': rng.standard_normal((3, 5)).astype(np.float32), 'half': rng.standard_normal(7).astype(np.float16),
            'flag': np.array([True, False, True]), 'scalar': np.array(5, np.int64), 'none': np.zeros((0, 4), np.float32),
            'bytes': rng.integers(0, 256, 5, dtype=np.uint8), 'wide': rng.standard_normal(2)}


def test_safetensors_of_the_library_are_read():
    safetensors.numpy.save_file(arrays(), 'w.safetensors', metadata={'made': 'there'})
    found = nn.state.safe_load('w.safetensors')
    assert found.keys() == arrays().keys()
    for name, a in arrays().items():
        t = found[name]
        assert t.shape == a.shape and t.device.startswith('DISK:')
        assert t.numpy().tobytes() == a.tobytes() and t.to('PYTHON').numpy().tobytes() == a.tobytes()
    _, start, header = nn.state.safe_load_metadata(pathlib.Path('w.safetensors'))
    assert header['__metadata__'] == {'made': 'there'} and header['flag']['dtype'] == 'BOOL' and start % 8 == 0


def test_the_library_reads_what_we_save():
    nn.state.safe_save({k: Tensor(a) for k, a in arrays().items()}, 'w.safetensors', {'made': 'here'})
    found = safetensors.numpy.load_file('w.safetensors')
    for name, a in arrays().items():
        assert found[name].dtype == a.dtype and found[name].shape == a.shape and found[name].tobytes() == a.tobytes()
    with safetensors.safe_open('w.safetensors', 'np') as f: assert f.metadata() == {'made': 'here'}
    again = nn.state.safe_load('w.safetensors')
    assert list(again) == list(arrays())
    assert os.listdir('.') == ['w.safetensors']


def test_bfloat16_round_trip():
    x = Tensor([1.5, -2.0, 3e38], dtype=dtypes.bfloat16)
    nn.state.safe_save({'x': x}, 'w')
    y = nn.state.safe_load('w')['x']
    assert y.dtype is dtypes.bfloat16 and y.to('PYTHON').tolist() == x.tolist()


def test_loading_reads_nothing_but_the_header():
    big = np.zeros((1000, 1000), np.float32)
    safetensors.numpy.save_file({'big': big, 'small': big[0]}, 'w')
    GlobalCounters.reset()
    before = GlobalCounters.mem_used
    tracemalloc.start()
    found = nn.state.safe_load('w')
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20 and GlobalCounters.mem_used == before and GlobalCounters.global_mem == 0
    assert found['big'].shape == (1000, 1000)


@on_all
def test_weights_go_from_the_file_to_the_model_in_one_copy_each(device):
    model = {'one': nn.Linear(4, 3), 'two': nn.Linear(3, 2)}
    with_values = nn.state.get_state_dict(model)
    nn.state.safe_save(with_values, 'w')
    fresh = {'one': nn.Linear(4, 3), 'two': nn.Linear(3, 2)}
    for t in nn.state.get_parameters(fresh): t.assign(Tensor.zeros(*t.shape)).realize()
    given = nn.state.safe_load('w')
    loaded = nn.state.load_state_dict(fresh, given, consume=True, realize=False)
    linear = loaded[0].schedule_linear(*loaded[1:])
    assert is_bulk(linear) and len(linear.src) == 4 and given == {}
    run_linear(linear)
    for name, t in nn.state.get_state_dict(fresh).items(): assert t.tolist() == with_values[name].tolist()


def test_saving_onto_the_file_that_the_weights_come_from():
    nn.state.safe_save({'x': Tensor([1.0, 2]), 'y': Tensor([3.0])}, 'w')
    old = nn.state.safe_load('w')
    plus = old['x'].to('PYTHON') + 1
    nn.state.safe_save({'y': old['x'], 'more': old['y'].to('PYTHON') * 2, 'pad': Tensor.ones(50)}, 'w')
    new = nn.state.safe_load('w')
    assert new['y'].tolist() == [1, 2] and new['more'].tolist() == [6] and plus.tolist() == [2, 3]
    assert old['x'].tolist() == [1, 2] and os.listdir('.') == ['w']


@posix
def test_a_save_that_fails_leaves_the_old_file(monkeypatch):
    nn.state.safe_save({'x': Tensor([1.0, 2])}, 'w')
    def full(f, at, nbytes): raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr(disk, 'reserve', full)
    x = Tensor([5.0])
    with pytest.raises(OSError, match='No space'): nn.state.safe_save({'x': x * 2}, 'w')
    monkeypatch.undo()
    gc.collect()
    assert x.tolist() == [5] and [n for n in os.listdir('.') if n.startswith('w')] in (['w'], [])


def header(**entries): return json.dumps(entries).encode()
def entry(dtype='F32', shape=(2,), at=(0, 8)): return dict(dtype=dtype, shape=list(shape), data_offsets=list(at))
def safe(head, data=b'\0' * 8, length=None): return struct.pack('<Q', len(head) if length is None else length) + head + data


BAD = {
    'no bytes': b'', 'too few': b'\1\0\0', 'header beyond the end': safe(header(x=entry()), length=10_000),
    'huge header': safe(header(x=entry()), length=2**63), 'no JSON': safe(b'{"x": '), 'no object': safe(b'[1, 2]'),
    'no text': safe(b'\xff\xfe'), 'deep': safe(b'[' * 50_000), 'unknown dtype': safe(header(x=entry('F31'))),
    'no shape': safe(header(x=dict(dtype='F32', data_offsets=[0, 8]))), 'no offsets': safe(header(x=dict(dtype='F32', shape=[2]))),
    'negative size': safe(header(x=entry(shape=(-2,)))), 'a fraction': safe(header(x=entry(shape=(2.0,)))),
    'a truth value': safe(header(x=entry(shape=(2, True)))), 'shape is text': safe(header(x=dict(dtype='F32', shape='2', data_offsets=[0, 8]))),
    'too many bytes': safe(header(x=entry(shape=(1,)))), 'beyond the end': safe(header(x=entry(shape=(4,), at=(0, 16)))),
    'negative offsets': safe(header(x=entry(at=(-8, 0)))), 'reversed': safe(header(x=entry(at=(8, 0)))),
    'overlap': safe(header(x=entry(), y=entry())), 'hole': safe(header(x=entry(at=(8, 16))), b'\0' * 16),
    'bytes after': safe(header(x=entry()), b'\0' * 9), 'twice': safe(b'{"x":%b,"x":%b}' % ((header(**entry()),) * 2)),
    'entry is a list': safe(header(x=[1, 2])), 'dtype is a list': safe(header(x=entry(['F32']))),
    'three offsets': safe(header(x=entry(at=(0, 4, 8)))), 'overflow': safe(header(x=entry(shape=(2**62, 8), at=(0, 0)))),
}


@pytest.mark.parametrize('what', BAD)
def test_bad_safetensors_are_refused_as_the_library_does(what):
    pathlib.Path('w').write_bytes(BAD[what])
    with pytest.raises(ValueError, match='safetensors'): nn.state.safe_load('w')
    if what != 'twice':   # of a name that occurs twice, the library silently takes one
        with pytest.raises(Exception, match='.'): safetensors.numpy.load_file('w')
    with pytest.raises(ValueError, match='safetensors'): nn.state.safe_load(Tensor(BAD[what]))


def test_safetensors_that_are_unusual_and_fine():
    good = {'spaces': safe(header(x=entry()) + b' ' * 5), 'empty': safe(b'{}', b''),
            'no elements': safe(header(x=entry(shape=(0, 3), at=(0, 0))), b''),
            'any order': safe(header(y=entry(at=(8, 16)), x=entry()), b'\0' * 16)}
    for what, data in good.items():
        pathlib.Path('w').write_bytes(data)
        ours, theirs = nn.state.safe_load('w'), safetensors.numpy.load_file('w')
        assert {k: t.tolist() for k, t in ours.items()} == {k: a.tolist() for k, a in theirs.items()}, what
        os.unlink('w')


def test_bad_arguments_of_safe_save_write_nothing():
    x = Tensor([1.0])
    for args in (({1: x}, 'w'), ({'__metadata__': x}, 'w'), ({'x': x}, 'w', {'n': 3})):
        with pytest.raises(TypeError, match='safe_save'): nn.state.safe_save(*args)
    with pytest.raises(FileNotFoundError): nn.state.safe_save({'x': x}, 'nowhere/w')
    with pytest.raises(ValueError, match='wanted the path'): nn.state.safe_load(Tensor([1.0]))
    assert os.listdir('.') == [] and x.tolist() == [1]


def test_a_thousand_paths_leave_nothing_behind():
    "Files are devices; who reads many of them does not want to pay for each of them for ever"
    known, live = list(Device.opened), octets(4)
    held_on = file('held on', live)
    for i in range(1000): Device[f'DISK:{i}']
    for i in range(20): assert file(f'{i}', live).to('PYTHON').tolist() == live.tolist()
    gc.collect()
    assert Device['DISK:held on'] is Device['DISK:held on']
    assert not list(Device.files) and list(Device.opened) == known
    assert held_on.to('PYTHON').tolist() == live.tolist()
