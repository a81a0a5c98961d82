"""Rule B7 on random programs: equal up to buffers is one key, any other difference is another key, in every process."""
import os
import pathlib
import random
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinysched.ir.dtype import dtypes
from tinysched.ir.uop import CallInfo, KernelInfo, ParamArg, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.schedule.callify import Limits, canonical, transform_to_call

F32, SHAPE = dtypes.float32, (4, 6)

# ---- programs
#
# A plan is a list of steps, each a tuple (kind, field, ..., [numbers of earlier steps]); the last one's value is stored.

DTYPES = dtypes.float32, dtypes.float64, dtypes.int32
CONSTANTS = 0.0, -0.0, 1.0, 2.5, float('nan'), float('inf')
UNARY, BINARY, REDUCED = (Ops.EXP2, Ops.SQRT, Ops.SIN, Ops.NEG), (Ops.ADD, Ops.MUL, Ops.SUB, Ops.MAX), (Ops.ADD, Ops.MAX, Ops.MUL)
AXES = (0,), (1,), (0, 1)

# what each field of each kind may be
FIELDS = {
    'buffer': (range(3),), 'view': (range(2), (0, 4, 8)), 'constant': (CONSTANTS,), 'number': (DTYPES, (0, 1)),
    'variable': (range(3), (0, 2), (8, 12), (1, 2)), 'unary': (UNARY,), 'binary': (BINARY,), 'reduce': (REDUCED, AXES),
    'flip': (AXES,), 'pad': ((0, 1, 2),), 'through': (DTYPES,), 'stage': (), 'room': ((2.0, 3.0),),
    'kernel': ((1.0, 2.0, -0.0), (Ops.ADD, Ops.MUL)), 'call': ((1.0, 2.0, 0.0), (Ops.ADD, Ops.MUL), (True, False)),
}
LEAVES, SOURCES = ('buffer', 'view', 'constant', 'number', 'variable'), {'binary': 2}


def random_plan(rng, n=8):
    "A plan of up to n steps after the leaves, later steps preferring what nobody has used"
    def fields(kind): return tuple(rng.choice(list(choices)) for choices in FIELDS[kind])
    plan = [(kind, *fields(kind), []) for kind in (rng.choice(LEAVES) for _ in range(rng.randint(1, 4)))]
    inner = [kind for kind in FIELDS if kind not in LEAVES]
    for _ in range(rng.randint(1, n)):
        kind = rng.choice(inner)
        unused = [i for i in range(len(plan)) if not any(i in s[-1] for s in plan)]
        below = [rng.choice(unused) if unused and rng.random() < 0.6 else rng.randrange(len(plan)) for _ in range(SOURCES.get(kind, 1))]
        plan.append((kind, *fields(kind), below))
    return plan


def reached(plan):
    "Numbers of the steps that the last one depends on"
    found = {len(plan) - 1}
    for i in reversed(range(len(plan))):
        if i in found: found |= set(plan[i][-1])
    return found


def filled(scalar): return scalar._movement(Ops.RESHAPE, (1, 1))._movement(Ops.EXPAND, SHAPE)


class World:
    "Buffers, names, values and notes that a plan is written over"
    def __init__(self, name='v', value=4, tag=None, label='mine', shape=SHAPE, dtype=F32, device='CPU'):
        self.name, self.value, self.tag, self.label, self.device = name, value, tag, label, device
        self.buffers = [UOp.buffer(device, SHAPE, F32) for _ in range(3)]
        self.large = [UOp.buffer(device, (24,), F32) for _ in range(2)]   # views are cut out of these
        self.out = UOp.buffer(device, shape, dtype)
        self.views: set = set()

    # leaves
    def buffer(self, k): return self.buffers[k]
    def constant(self, value): return filled(UOp.const(F32, value))
    def number(self, dtype, value): return filled(UOp.const(dtype, value)).cast(F32)
    def variable(self, k, low, high, divisor):
        arg = ParamArg(-1, (), None, f'{self.name}{k}', low, high, divisor)
        return filled(UOp(Ops.PARAM, dtypes.index, (), arg).bind(self.value).cast(F32))
    def view(self, k, start):
        flat = self.large[k]._movement(Ops.SHRINK, ((start, start + 6),))._movement(Ops.RESHAPE, (1, 6))
        self.views.add(flat)
        return flat._movement(Ops.EXPAND, SHAPE)

    # steps
    def unary(self, op, x): return UOp(op, F32, (x,))
    def binary(self, op, x, y): return UOp(op, F32, (x, y))
    def reduce(self, op, axes, x): return UOp(Ops.EXP2, F32, (x,))._reduce(op, axes)._movement(Ops.EXPAND, SHAPE)
    def flip(self, axes, x): return UOp(Ops.EXP2, F32, (x,))._movement(Ops.FLIP, axes)   # a value moves, not a view
    def pad(self, before, x):
        padded = UOp(Ops.EXP2, F32, (x,))._movement(Ops.PAD, ((before, 2 - before), (0, 0)))
        return padded._movement(Ops.SHRINK, ((0, 4), (0, 6)))
    def through(self, dtype, x): return UOp(Ops.NEG, dtype, (x.cast(dtype),)).cast(F32)
    def stage(self, x): return UOp(Ops.STAGE, F32, (x,))
    def room(self, factor, x):
        room = UOp.alloc(self.device, SHAPE, F32)
        return room.after(room.store(x * factor))
    def kernel(self, constant, op, x):
        p, q = (UOp.param(i, F32, SHAPE, self.device) for i in (0, 1))
        i, j = UOp.range(4, 0), UOp.range(6, 1)
        body = p.index(i, j).store(UOp(op, F32, (q.index(i, j), UOp.const(F32, constant)))).end(i, j)
        return self.called(body.sink(arg=KernelInfo(self.label)), x, CallInfo(self.label))
    def call(self, constant, op, precompile, x):
        p, q, room = (UOp.param(0, F32, SHAPE, self.device), UOp.param(1, F32, SHAPE, self.device),
                      UOp.alloc(self.device, SHAPE, F32))
        inner = room.after(room.store(UOp(op, F32, (q, filled(UOp.const(F32, constant))))))
        return self.called(UOp.sink(p.after(p.store(UOp(Ops.SQRT, F32, (inner,))))), x, CallInfo(self.label, precompile))
    def called(self, body, x, info):
        room = UOp.alloc(self.device, SHAPE, F32)
        return room.after(UOp(Ops.CALL, dtypes.void, (body, room, UOp(Ops.STAGE, F32, (x,))), info))


def any_order(plan, rng):
    "Numbers of the steps, each after those it needs, in one of many orders"
    todo, done = set(range(len(plan))), []
    while todo:
        ready = sorted(i for i in todo if todo.isdisjoint(plan[i][-1]))
        done.append(rng.choice(ready) if rng else ready[0])
        todo.remove(done[-1])
    return done


def build(plan, w, rng=None):
    "The program of a plan, its nodes made in some order"
    made = {}
    for i in any_order(plan, rng):
        kind, *fields, below = plan[i]
        made[i] = getattr(w, kind)(*fields, *(made[j] for j in below))
        if w.tag is not None and made[i].op not in (Ops.BUFFER, Ops.AFTER, Ops.STAGE): made[i] = made[i].replace(tag=w.tag)
    value = made[len(plan) - 1].cast(w.out.dtype)
    value = value if w.out.shape == SHAPE else value._movement(Ops.RESHAPE, w.out.shape)
    return w.out.after(w.out.store(value)).sink()


# ---- an oracle: are two graphs the same but for names? Pairs of nodes are compared, with a one-to-one map between names.

def bits(x):
    "An argument with floats by their bits and the class of each part, names of kernels and calls left out"
    if isinstance(x, float): return 'float', struct.pack('<d', x)
    if isinstance(x, KernelInfo): return 'kernel'
    if isinstance(x, CallInfo): return 'call', x[1:]
    if isinstance(x, tuple): return type(x).__name__, *map(bits, x)
    return type(x).__name__, x


def says(u, views):
    "What matters of a node but its sources; None in place of sources for one that is only a name"
    if u.op is Ops.BIND: return 'bind', u.dtype, u.src[0].arg[4:]
    if u.op is Ops.BUFFER or u in views: return 'storage', u.dtype, u.shape, u.device
    if u.op is Ops.ALLOC: return 'alloc', u.dtype, u.shape, u.device
    return u.op, u.dtype, bits(u.arg), len(u.src)


def isomorphic(p, q, views):
    "Whether the graphs are the same but for names of buffers, allocations and variables"
    there, back, todo = {}, {}, [(p, q)]
    while todo:
        u, v = todo.pop()
        if u in there or v in back:
            if there.get(u) is not v or back.get(v) is not u: return False
            continue
        there[u], back[v] = v, u
        a = says(u, views)
        if a != says(v, views): return False
        if a[0] not in ('bind', 'storage', 'alloc'): todo += zip(u.src, v.src)
    return True


def test_the_oracle_knows_what_is_equal():
    a, b, c = (UOp.buffer('CPU', (4,), F32) for _ in range(3))
    def same(x, y): return isomorphic(x, y, set())
    assert same(a + b, b + c) and same(a + a, b + b) and not same(a + a, a + b) and not same(a + b, a * b)
    assert not same(UOp.const(F32, 0.0), UOp.const(F32, -0.0)) and same(a + (b + a), b + (a + b)) and not same(a + (b + a), b + (a + a))


# ---- completeness

rngs = st.randoms(use_true_random=False)


def shuffled(plan, rng):
    "The plan with its buffers, views' bases and variables renamed one to one"
    names = {'buffer': rng.sample(range(3), 3), 'view': rng.sample(range(2), 2), 'variable': rng.sample(range(3), 3)}
    return [(s[0], names[s[0]][s[1]], *s[2:]) if s[0] in names else s for s in plan]


@settings(max_examples=120)
@given(rngs)
def test_B7_complete_whatever_the_buffers_values_names_tags_and_order(rng):
    plan = random_plan(rng)
    p = build(plan, a := World())
    q = build(shuffled(plan, rng), b := World('another', 8, 'a note', 'theirs'), rng)
    one, two = canonical(p), canonical(q)
    assert p is not q and not set(p.toposort()) & {u for u in q.toposort() if u.op in (Ops.BUFFER, Ops.BIND)}
    assert one.key == two.key and one.text == two.text
    assert isomorphic(p, build(shuffled(plan, rng), c := World(), rng), a.views | c.views) and b.views.isdisjoint(a.views)
    assert [(u.op, u.dtype, u.shape) for u in one.args] == [(u.op, u.dtype, u.shape) for u in two.args]


@settings(max_examples=80)
@given(rngs)
def test_B7_complete_one_body(rng):
    plan = random_plan(rng)
    calls = [transform_to_call(build(shuffled(plan, rng), World(name, value), rng)) for name, value in (('v', 4), ('w', 8))]
    assert calls[0].src[0] is calls[1].src[0] and calls[0].src[1:] != calls[1].src[1:]
    assert not {u.op for u in calls[0].src[0].toposort()} & {Ops.BUFFER, Ops.BIND}


# ---- soundness

def mutations(plan):
    "Plans that differ in one field, or in one source, of a step that matters; with what was changed"
    for i in sorted(reached(plan)):
        kind, *fields, below = plan[i]
        for k, choices in enumerate(FIELDS[kind]):
            for c in choices:
                if bits(c) != bits(fields[k]):
                    yield f'{kind} {k}', [*plan[:i], (kind, *fields[:k], c, *fields[k + 1:], below), *plan[i + 1:]]
        for k, j in enumerate(below):
            for other in range(i):
                if other != j: yield 'source', [*plan[:i], (kind, *fields, [*below[:k], other, *below[k + 1:]]), *plan[i + 1:]]


NAMES = {'buffer 0', 'view 0', 'view 1', 'variable 0', 'source'}   # may give the same program under other names


@settings(max_examples=200)
@given(rngs)
def test_B7_sound_one_change_is_another_key(rng):
    plan, w = random_plan(rng), World()
    changed = list(mutations(plan))
    what, other = rng.choice(changed)
    p, q = build(plan, w), build(other, w)
    same = isomorphic(p, q, w.views)
    assert same <= (what in NAMES), f'{what} changed nothing'   # what must be a change, is one
    assert (canonical(p).key == canonical(q).key) == same, f'{what}\n{plan}\n{other}'
    assert (transform_to_call(p).src[0] is transform_to_call(q).src[0]) == same


@pytest.mark.parametrize('kind', [k for k in FIELDS if k != 'view'])
def test_B7_sound_every_field_of_every_kind(kind):
    base = [('buffer', 0, []), ('buffer', 1, []), ('binary', Ops.ADD, [0, 1])]
    fields = tuple(list(choices)[0] for choices in FIELDS[kind])
    if kind in LEAVES: plan = [*base, (kind, *fields, []), ('binary', Ops.MUL, [3, 2])]
    else: plan = [*base, (kind, *fields, [2, 0] if kind == 'binary' else [2])]
    w, tried = World(), 0
    for what, other in mutations(plan):
        if not what.startswith(kind) or (what in NAMES and kind != 'buffer'): continue
        p, q = build(plan, w), build(other, w)
        tried += 1
        if what == 'buffer 0' and isomorphic(p, q, w.views): continue
        assert canonical(p).key != canonical(q).key, (what, other)
    assert tried or not fields


def test_B7_where_a_view_begins_is_the_callers_affair_and_what_it_is_is_not():
    flat, out = UOp.buffer('CPU', (24,), F32), UOp.buffer('CPU', (6,), F32)
    def key(*views):
        value = views[0].cast(F32).reshape((6,))
        for v in views[1:]: value = value * v.cast(F32).reshape((6,))
        return canonical(out.after(out.store(value)).sink()).key
    def part(start, n=6): return flat.shrink(((start, start + n),))
    assert key(part(0)) == key(part(8)) == key(UOp.buffer('CPU', (6,), F32))
    assert key(part(0), part(8)) == key(part(4), part(12)) != key(part(0), part(0)) == key(part(8), part(8))
    assert len({key(part(0)), key(part(0).bitcast(dtypes.int32)), key(part(0).flip((0,)))}) == 3


@settings(max_examples=40)
@given(rngs)
def test_B7_sound_shape_dtype_device_limits_settings(rng):
    plan = random_plan(rng)
    worlds = [World(), World(shape=(24,)), World(shape=(6, 4)), World(dtype=dtypes.float64), World(device='CL'), World(device='CPU:1')]
    keys = [canonical(build(plan, w)).key for w in worlds]
    sink = build(plan, World())
    assert canonical(sink).key == keys[0]
    keys += [canonical(sink, limits).key for limits in (Limits(max_args=8), Limits(view_alignment=1024), Limits(block=512))]
    keys += [canonical(sink, settings=s).key for s in ((True,), (1,), (1.0,), ('1',), (None,), ((),), (1, 1), ((1, 1),))]
    assert len(set(keys)) == len(keys)


@settings(max_examples=120)
@given(rngs)
def test_B7_equal_keys_are_equal_programs(rng):
    w = World()
    p, q = (build(random_plan(rng, 2), w) for _ in range(2))   # small, so that some are equal
    assert (canonical(p).key == canonical(q).key) == isomorphic(p, q, w.views)


def test_B7_equal_programs_are_met_by_chance():
    rng, met = random.Random(1), 0
    w = World()
    programs = [build(random_plan(rng, 1), w) for _ in range(150)]
    keys = [canonical(p).key for p in programs]
    for i, p in enumerate(programs):
        for j in range(i):
            same = isomorphic(p, programs[j], w.views)
            met += same
            assert same == (keys[i] == keys[j])
    assert met > 20


def test_B7_sound_six_constants_in_any_place():
    six = [(dtypes.bool, True), (dtypes.int32, 1), *((F32, v) for v in (1.0, 0.0, -0.0, float('nan')))]
    x, out = (UOp.buffer('CPU', (4,), F32) for _ in range(2))
    def program(constant): return out.after(out.store(x * constant.cast(F32))).sink()
    assert len({canonical(program(UOp.const(*c))).key for c in six}) == 6


# ---- every process

def keys_of(seeds): return [canonical(build(random_plan(random.Random(s)), World())).key.hex() for s in seeds]


def test_B7_keys_are_equal_across_processes_and_hash_seeds():
    tests = pathlib.Path(__file__).parent
    code = '''
import sys; sys.path[:0] = [{tests!r}, {root!r}]
from test_canonical import UOp, dtypes, keys_of
for _ in range({skip}): UOp.buffer('CPU', (1,), dtypes.int8), UOp.alloc('CPU', (1,), dtypes.int8)
print(*keys_of({order}))'''
    seeds = list(range(60))
    expected = dict(zip(seeds, keys_of(seeds)))
    for hash_seed, order in (('0', seeds), ('1', seeds[::-1]), ('123456', seeds[30:] + seeds[:30])):
        text = code.format(tests=str(tests), root=str(tests.parent), skip=int(hash_seed) % 7, order=order)
        out = subprocess.run([sys.executable, '-c', text], env=os.environ | {'PYTHONHASHSEED': hash_seed}, capture_output=True,
                             text=True, check=True).stdout.split()
        assert dict(zip(order, out)) == expected
    assert len(set(expected.values())) > 50
