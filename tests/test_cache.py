"""Rules C and G6, B4 and B7 of the scheduler: what is scheduled once, and how a program is recognised."""
import contextlib
import gc
import inspect
import pathlib
import re
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinysched import Context, GlobalCounters, Tensor, Variable, no_schedule_cache, schedule_cache
from tinysched.ir.dtype import dtypes
from tinysched.ir.uop import KernelInfo, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.schedule import cache as cache_module
from tinysched.schedule import callify, pipeline
from tinysched.schedule.cache import ScheduleCache, cached, look_up, remember
from tinysched.schedule.callify import canonical

F32 = dtypes.float32


@pytest.fixture(autouse=True)
def oracle():
    "Every test computes on PYTHON, beginning with an empty cache of the usual size"
    most = schedule_cache.most
    schedule_cache.clear()
    with Context(DEV='PYTHON', SCACHE=1): yield
    schedule_cache.most = most


def data(*shape, start=0): return Tensor((np.arange(np.prod(shape, dtype=int), dtype=np.float32) + start).reshape(shape)).realize()


@contextlib.contextmanager
def counted():
    "Hits and misses of the block, once it is over"
    got, before = [], (schedule_cache.hits, schedule_cache.misses)
    yield got
    got += [schedule_cache.hits - before[0], schedule_cache.misses - before[1]]


def two_kernels(x):
    "A reduction that is stored, then used"
    return (x.exp().sum(axis=0).contiguous() * x).realize()


# ---- C2

def test_C2_memory_off_keeps_nothing():
    x = data(3, 4)
    kept = len(schedule_cache)
    with Context(SCACHE=0), counted() as got:
        results = [(x + 1).numpy() for _ in range(3)]
    assert got == [0, 0] and len(schedule_cache) == kept
    assert all((r == x.numpy() + 1).all() for r in results)


def test_C2_memory_keeps_a_schedule_for_the_next_time():
    x, y = data(3, 4), data(3, 4, start=5)
    kept = len(schedule_cache)
    with counted() as got: first, second = (x + 1).numpy(), (y + 1).numpy()
    assert got == [1, 1] and len(schedule_cache) == kept + 1
    assert (first == x.numpy() + 1).all() and (second == y.numpy() + 1).all()


def test_C2_memory_off_neither_reads_nor_writes_what_is_there():
    x = data(4)
    (x + 1).realize()
    kept = dict(schedule_cache.entries)
    with no_schedule_cache(), counted() as got: (x + 1).realize(); (x + 2).realize()
    assert got == [0, 0] and dict(schedule_cache.entries) == kept


def test_C2_memory_says_where_a_schedule_came_from():
    make = UOp.sink
    assert [cached(b'k', make)[1] for _ in range(2)] == ['miss', 'hit']
    with Context(SCACHE=0): assert cached(b'k', make)[1] == 'off'


def test_C2_memory_an_error_leaves_nothing_behind():
    def fails(): raise RuntimeError('no schedule')
    with pytest.raises(RuntimeError, match='no schedule'): cached(b'k', fails)
    assert len(schedule_cache) == 0 and cached(b'k', UOp.sink) == (UOp.sink(), 'miss')


# ---- C5

def lines_of(capsys): return [line for line in capsys.readouterr().out.splitlines() if line.startswith('scheduled')]


LINE = re.compile(r'scheduled +(\d+) kernels? in +[\d.]+ ms, cache (hit|miss|off|disk) +([0-9a-f]{6,}), (\d+) nodes, (.*):(\d+)$')


def test_C5_one_line_for_more_than_one_kernel(capsys):
    x, y = data(3, 4), data(3, 4)
    capsys.readouterr()
    with Context(DEBUG=1):
        first = inspect.currentframe().f_lineno + 1
        (x.exp().sum(axis=0).contiguous() * x).realize()
        (y.exp().sum(axis=0).contiguous() * y).realize()
        (x + 1).realize()   # one kernel: silent
    said = [LINE.match(line).groups() for line in lines_of(capsys)]
    assert [(int(n), where) for n, where, *_ in said] == [(2, 'miss'), (2, 'hit')]
    assert said[0][2] == said[1][2] and int(said[0][3]) > 0   # the same key
    assert [(pathlib.Path(s[4]).name, int(s[5])) for s in said] == [('test_cache.py', first), ('test_cache.py', first + 1)]


def test_C5_debug_3_shows_all_schedules(capsys):
    x = data(4)
    capsys.readouterr()
    with Context(DEBUG=3): line = inspect.currentframe().f_lineno; (x + 1).realize()
    said = [LINE.match(text).groups() for text in lines_of(capsys)]
    assert [(s[0], s[1], pathlib.Path(s[4]).name, int(s[5])) for s in said] == [('1', 'miss', 'test_cache.py', line)]


def test_C5_says_off_and_is_silent_without_debug(capsys):
    x = data(3, 4)
    two_kernels(x)
    assert lines_of(capsys) == []
    with Context(DEBUG=1, SCACHE=0): two_kernels(x)
    assert [LINE.match(line)[2] for line in lines_of(capsys)] == ['off']


def test_C5_the_line_is_the_users_own(capsys):
    def helper(t): return two_kernels(t)
    x = data(3, 4)
    capsys.readouterr()
    with Context(DEBUG=1): helper(x)
    (said,) = (LINE.match(line).groups() for line in lines_of(capsys))
    source, start = inspect.getsourcelines(two_kernels)
    assert pathlib.Path(said[4]).name == 'test_cache.py' and int(said[5]) == start + len(source) - 1


# ---- C6

def test_C6_growth_is_bounded():
    schedule_cache.most, x = 4, data(4)
    for k in range(20): (x * (k + 2)).realize()
    assert len(schedule_cache) == 4
    with counted() as got: assert ((x * 21).numpy() == x.numpy() * 21).all(); (x * 2).realize()
    assert got == [1, 1]   # the youngest is there, the oldest is gone


def test_C6_the_least_recently_used_goes_first():
    cache = ScheduleCache(most=2)
    for key in (b'a', b'b'): remember(cache, key, UOp.sink())
    assert look_up(cache, b'a') is UOp.sink()
    remember(cache, b'c', UOp.sink())
    assert list(cache.entries) == [b'a', b'c'] and look_up(cache, b'b') is None
    assert (cache.hits, cache.misses) == (1, 1)


def test_C6_it_can_be_cleared():
    x = data(4)
    (x + 1).realize()
    schedule_cache.clear()
    assert len(schedule_cache) == 0
    with counted() as got: assert ((x + 1).numpy() == x.numpy() + 1).all()
    assert got == [0, 1]


def test_C6_entries_hold_no_device_memory():
    gc.collect()
    before = GlobalCounters.mem_used
    x = data(64, 64)
    y = two_kernels(x)
    z = (x.flip(0)[2:5] + 1).realize()
    assert GlobalCounters.mem_used >= before + 2 * x.numpy().nbytes
    entries = len(schedule_cache)
    del x, y, z
    gc.collect()
    assert GlobalCounters.mem_used == before and len(schedule_cache) == entries > 0


def test_C6_entries_name_no_buffer_and_no_value():
    x, n = data(3, 4), Variable('n', 1, 9)
    two_kernels(x), (x[1:] * n.bind(3)).realize(), x.assign(x + 1).realize()
    inside = {u.op for linear in schedule_cache.entries.values() for u in linear.toposort()}
    assert not inside & {Ops.BUFFER, Ops.BIND} and {Ops.PARAM, Ops.ALLOC} <= inside


def test_many_threads_one_cache():
    cache, errors = ScheduleCache(most=8), []

    def work(seed):
        try:
            for i in range(500):
                key = b'%d' % ((i * seed) % 20)
                if look_up(cache, key) is None: remember(cache, key, UOp.sink())
        except Exception as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 7, 9)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and len(cache) <= 8 and cache.hits + cache.misses == 2000


# ---- G6

WORK = ['graph_rewrite', 'prepare', 'get_kernel_graph', 'create_schedule', 'save_overtaken', 'memory_plan_rewrite',
        'transform_to_call', 'lower_sink_to_linear', 'rangeify']


@pytest.fixture
def calls(monkeypatch):
    "How often each step of scheduling was called, in whatever module it is used"
    seen = dict.fromkeys(WORK, 0)

    def spy(name, fn):
        def called(*args, **kw):
            seen[name] += 1
            return fn(*args, **kw)
        return called
    for module in [m for name, m in sys.modules.items() if name.startswith('tinysched.schedule.')]:
        for name in WORK:
            if inspect.isfunction(fn := getattr(module, name, None)): monkeypatch.setattr(module, name, spy(name, fn))
    return seen


def test_G6_a_hit_rewrites_nothing(calls):
    x, y = data(3, 4), data(3, 4)
    two_kernels(x)
    assert all(calls[name] for name in WORK), calls
    calls.update(dict.fromkeys(WORK, 0))
    assert (two_kernels(y).numpy() == two_kernels(x).numpy()).all()
    assert not any(calls.values()), calls


def long_program(n):
    x = UOp.buffer('PYTHON', (4,), F32)
    out, u = UOp.buffer('PYTHON', (4,), F32), x
    for k in range(n): u = u * (1 + k % 5) + x
    return out.after(out.store(u)).sink()


def test_G6_a_hit_walks_the_graph_once_for_the_key(monkeypatch):
    programs = [long_program(200) for _ in range(2)]
    pipeline.schedule(programs[0])
    walked, toposort = [], UOp.toposort

    def spy(self, enter=None):
        found = toposort(self, enter)
        walked.append(len(found))
        return found
    monkeypatch.setattr(UOp, 'toposort', spy)
    pipeline.schedule(programs[1])
    assert len([n for n in walked if n > 100]) == 1, walked


def test_G6_after_the_key_a_hit_costs_what_its_kernels_cost(monkeypatch):
    made = []
    for n in (50, 400):
        programs = [long_program(n) for _ in range(2)]
        pipeline.schedule(programs[0])
        count, new = [0], UOp.__new__

        def spy(cls, *args, count=count, new=new, **kw):
            count[0] += 1
            return new(cls, *args, **kw)
        with monkeypatch.context() as m:
            m.setattr(UOp, '__new__', spy)
            linear = pipeline.schedule(programs[1])
        made.append(count[0] / len(linear.src))
    assert max(made) < 40, made   # nodes asked for, per kernel


# ---- B4

def test_B4_another_value_hits_the_same_entry():
    x, n = data(3, 4), Variable('n', 1, 9)
    with counted() as got: results = [(x * n.bind(k)).numpy() for k in range(1, 10)]
    assert got == [8, 1]
    assert all((r == x.numpy() * k).all() for k, r in enumerate(results, 1))


def test_B4_values_in_offsets_and_shapes_hit_too():
    x, n = data(6, 4), Variable('n', 1, 5)
    with counted() as got: results = [float(x.shrink(((0, n.bind(k)), (0, 4))).sum().numpy()) for k in range(1, 6)]
    assert got == [4, 1] and results == [x.numpy()[:k].sum() for k in range(1, 6)]


def test_B4_names_do_not_matter_but_bounds_do():
    x = data(4)
    with counted() as got: (x * Variable('n', 1, 9).bind(2)).realize(); (x * Variable('m', 1, 9).bind(3)).realize()
    assert got == [1, 1]
    with counted() as got: (x * Variable('n', 1, 8).bind(2)).realize(); (x * Variable('n', 0, 9).bind(2)).realize()
    assert got == [0, 2]


def test_B4_two_values_of_one_variable():
    x, n = data(4), Variable('n', 1, 9)
    two = lambda a, b: (x * n.bind(a) + n.bind(b)).numpy()
    with counted() as got: results = [two(2, 3), two(5, 4)]
    assert got == [1, 1]
    assert (results[0] == x.numpy() * 2 + 3).all() and (results[1] == x.numpy() * 5 + 4).all()


def test_python_numbers_are_part_of_the_program():
    x = data(4)
    with counted() as got:
        for k in (2, 3, 4): assert ((x * k).numpy() == x.numpy() * k).all()
    assert got == [0, 3]


# ---- B7 (random programs are in test_canonical.py)

BINARY = [Ops.ADD, Ops.MUL, Ops.SUB]


def test_B7_sound_six_constants():
    def key(dtype, value):
        out = UOp.buffer('CPU', (), dtype)
        return canonical(out.after(out.store(UOp.const(dtype, value).cast(dtype))).sink()).key
    x = UOp.buffer('CPU', (), dtypes.float64)
    inside = {canonical(x.after(x.store(UOp.const(d, v).cast(dtypes.float64))).sink()).key for d, v in
              [(dtypes.bool, True), (dtypes.int32, 1), *((dtypes.float64, v) for v in (1.0, 0.0, -0.0, float('nan')))]}
    assert len(inside) == 6
    assert len({key(F32, v) for v in (1.0, 0.0, -0.0, float('nan'))}) == 4


def test_B7_sound_aliasing():
    a, b, out = (UOp.buffer('CPU', (4,), F32) for _ in range(3))
    def key(x, y, to): return canonical(to.after(to.store(x * y + x)).sink()).key
    keys = [key(a, b, out), key(a, a, out), key(a, b, a), key(a, b, b), key(a, a, a)]
    assert len(set(keys)) == 5
    assert key(b, a, out) == keys[0] and key(out, a, b) == keys[0] and key(b, b, a) == keys[1]


def pattern(xs): return [xs.index(x) for x in xs]


@settings(max_examples=200)
@given(st.integers(2, 5).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 3), min_size=n, max_size=n)] * 2)))
def test_B7_keys_are_equal_exactly_where_aliasing_is(pair):
    def key(which):
        b = [UOp.buffer('CPU', (4,), F32) for _ in range(4)]
        u = b[which[0]]
        for k, i in enumerate(which): u = UOp(BINARY[k % 3], F32, (u, b[i]))
        return canonical(b[0].after(b[0].store(u)).sink()).key
    xs, ys = pair
    assert (key(xs) == key(ys)) == (pattern([0, *xs]) == pattern([0, *ys]))


def test_B7_sound_bodies_of_custom_kernels():
    p, q = UOp.param(0, F32, (4,)), UOp.param(1, F32, (4,))
    r = UOp.range(4, 0)
    def key(value, name='custom'):
        kernel = p.index(r).store(value).end(r).sink(arg=KernelInfo(name))
        x, y = (UOp.buffer('CPU', (4,), F32) for _ in range(2))
        return canonical(x.after(kernel.call(x, y)).sink()).key
    double = key(q.index(r) * 2)
    assert double == key(q.index(r) * 2) == key(q.index(r) * 2, name='another')   # B6
    assert len({double, key(q.index(r) * 3), key(q.index(r) + 2), key(p.index(r) * 2)}) == 4


def test_B7_sound_settings_reach_the_key():
    x = data(3, 4)
    with counted() as got:
        two_kernels(x)
        with Context(NO_MEMORY_PLANNER=1): two_kernels(x)
        two_kernels(x)
    assert got == [1, 2]


def test_B7_a_hit_is_right_whatever_the_aliasing():
    x, y = data(4, start=1), data(4, start=7)
    a, b = x.numpy(), y.numpy()
    for _ in range(2):
        assert ((x * y + x).numpy() == a * b + a).all()
        assert ((x * x + x).numpy() == a * a + a).all()
        assert ((y * x + y).numpy() == b * a + b).all()


def test_the_cache_is_the_one_that_is_public():
    assert schedule_cache is cache_module.schedule_cache and callify.canonical is canonical
