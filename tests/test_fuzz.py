"""Random graphs against NumPy: movement, arithmetic, reductions and several outputs, small and large enough for vectors.

What kernels compute is tested here; what assignment means, in test_programs. Integers wrap alike, so every comparison is
exact. FUZZ=1 runs the full number of graphs.
"""
import os

import numpy as np
import pytest
from eager import OURS, Model
from hypothesis import HealthCheck, given, settings, strategies as st

from tinysched import Device, Tensor, Variable, run_linear

FULL = os.environ.get('FUZZ') == '1'
GRAPHS = {'PYTHON': 1000, 'CPU': 1000, 'CL': 200} if FULL else {'PYTHON': 60, 'CPU': 25, 'CL': 10}


def cut(rng, n):
    lo = rng.randint(0, n - 1)
    return lo, rng.randint(lo + 1, n)


def basic_index(rng, shape):
    "An index of slices, with steps of either sign, and integers; nothing is empty"
    index = []
    for n in shape:
        lo, hi = cut(rng, n)
        step = rng.choice([1, 1, 2, 3, -1, -2])
        if rng.random() < .15: index.append(rng.randint(-n, n - 1))
        elif step > 0: index.append(slice(lo, hi, step))
        else: index.append(slice(hi - 1, lo - 1 if lo else None, step))
    return tuple(index)


def factors(rng, shape):
    n, out = int(np.prod(shape)), []
    while n > 1 and len(out) < 3:
        f = rng.choice([d for d in range(1, n + 1) if n % d == 0])
        out.append(f); n //= f
    return tuple(out + [n])


def moved(rng, m):
    "A view of a tensor"
    kind = rng.choice(['reshape', 'permute', 'flip', 'shrink', 'index', 'expand', 'bitcast', 'detach'])
    t, at, shape = m.tensor, m.at, m.shape
    if kind == 'reshape': new = factors(rng, shape); return m.view(t.reshape(new), at.reshape(new))
    if kind == 'bitcast' and m.dtype in (np.int32, np.uint32):
        other = np.dtype('uint32' if m.dtype == np.int32 else 'int32')
        return m.bitcast(t.bitcast(OURS[other]), other)
    if kind == 'detach' or not shape: return m.view(t.detach(), at)
    if kind == 'permute':
        order = tuple(rng.sample(range(len(shape)), len(shape)))
        return m.view(t.permute(order), at.transpose(order))
    if kind == 'flip':
        axis = rng.randrange(len(shape)); return m.view(t.flip(axis), np.flip(at, axis))
    if kind == 'expand' and at.size < 40:
        axis, n = rng.randint(0, len(shape)), rng.randint(2, 3)
        new = (*shape[:axis], n, *shape[axis:])
        return m.view(t.unsqueeze(axis).expand(new), np.broadcast_to(np.expand_dims(at, axis), new), wide=True)
    if kind == 'index': index = basic_index(rng, shape); return m.view(t[index], np.asarray(at[index]))
    spans = tuple(cut(rng, n) for n in shape)
    return m.view(t.shrink(spans), at[tuple(slice(a, b) for a, b in spans)])


def padded(rng, m):
    if not m.shape: return m
    pads = tuple((rng.randint(0, 2), rng.randint(0, 2)) for _ in m.shape)
    return Model.fresh(m.tensor.pad(pads), np.pad(m.value, pads))


def reduced(rng, m):
    if not m.shape: return m
    axis, keep = rng.randrange(len(m.shape)), rng.random() < .5
    if rng.random() < .2: axis = tuple(range(len(m.shape)))
    if rng.random() < .6: return Model.fresh(m.tensor.sum(axis, keepdim=keep), m.value.sum(axis, keepdims=keep, dtype=m.dtype))
    return Model.fresh(m.tensor.max(axis, keepdim=keep), m.value.max(axis, keepdims=keep))


def back(rng, m):
    "A reduction spread over the tensor again"
    if not m.shape: return m
    axis = rng.randrange(len(m.shape))
    return Model.fresh(m.tensor - m.tensor.sum(axis, keepdim=True), m.value - m.value.sum(axis, keepdims=True, dtype=m.dtype))


def mapped(rng, m):
    kind = rng.choice(['add', 'mul', 'neg', 'max', 'where', 'square', 'cast', 'narrow', 'bound'])
    t, v, k = m.tensor, m.value, m.number(rng.randint(-3, 3))
    if kind == 'add': return Model.fresh(t + int(k), v + k)
    if kind == 'mul': return Model.fresh(t * int(k), v * k)
    if kind == 'neg': return Model.fresh(-t, -v)
    if kind == 'square': return Model.fresh(t * t, v * v)
    if kind == 'max': return Model.fresh(t.maximum(int(k)), np.maximum(v, k))
    if kind == 'where': return Model.fresh((t < int(k)).where(t, int(k)), np.where(v < k, v, k))
    if kind == 'bound' and m.dtype == np.int32:
        n = Variable(f'n{rng.randrange(10**9)}', -3, 3).bind(int(k))
        return Model.fresh(t * n + n, v * k + k)
    new, narrow = (np.dtype(rng.choice(c)) for c in (['int32', 'int64', 'uint32'], ['int8', 'uint8', 'int16']))
    if kind == 'narrow': t, v = t.cast(OURS[narrow]), v.astype(narrow)
    return Model.fresh(t.cast(OURS[new]), v.astype(new))


def alike(m, others): return [o for o in others if o.shape == m.shape and o.dtype == m.dtype]


def joined(rng, m, others):
    o, c = rng.choice(alike(m, others)), rng.choice([x for x in others if x.shape == m.shape])
    kind = rng.choice(['add', 'add', 'mul', 'where', 'cat', 'sub'])
    if kind == 'mul': return Model.fresh(m.tensor * o.tensor, m.value * o.value)
    if kind == 'sub': return Model.fresh(m.tensor - o.tensor, m.value - o.value)
    if kind == 'where': return Model.fresh((c.tensor > 0).where(m.tensor, o.tensor), np.where(c.value > 0, m.value, o.value))
    if kind == 'cat' and m.shape: return Model.fresh(m.tensor.cat(o.tensor, dim=0), np.concatenate([m.value, o.value]))
    return Model.fresh(m.tensor + o.tensor, m.value + o.value)


def taken(rng, m):
    "Rows by a tensor of indices"
    if not m.shape: return m
    rows = np.array([rng.randrange(m.shape[0]) for _ in range(rng.randint(1, 4))], np.int32)
    return Model.fresh(m.tensor[Tensor(rows, device=m.tensor.device)], m.value[rows])


def kept(rng, m):
    how = rng.choice(['contiguous', 'clone', 'away'])
    if how == 'away':   # to another device and back
        other = 'PYTHON' if m.tensor.device != 'PYTHON' else 'CPU' if 'CPU' in Device.available() else 'PYTHON'
        return Model.fresh((m.tensor.to(other) + 0).to(m.tensor.device) + 1, m.value + m.number(1))
    return Model.fresh(getattr(m.tensor, how)(), m.value)


def write(m, ours, theirs):
    "Both sides of a write; through EXPAND it is refused and changes nothing"
    if not m.wide: ours(); theirs(); return
    with pytest.raises(ValueError, match='expand'): ours()


def assigned(rng, m, others):
    "Write into a tensor, through whatever view it is"
    same = alike(m, others)
    source = rng.choice(same) if same and rng.random() < .7 else None
    if source is None: new, value = m.tensor + 1, m.value + m.number(1)
    else: new, value = source.tensor * 2 + m.tensor, source.value * m.number(2) + m.value
    write(m, lambda: m.tensor.assign(new), lambda: m.write(value))


def filled(rng, m, others):
    "Write a number, or another tensor, into a part"
    if not m.shape: return
    index = basic_index(rng, m.shape)
    at = m.at[index]
    fitting = [o for o in others if o.shape == at.shape and o.dtype == m.dtype]
    o, k = rng.choice(fitting or [None]), m.number(rng.randint(-5, 5))
    value = k if o is None else o.value
    write(m, lambda: m.tensor.__setitem__(index, int(k) if o is None else o.tensor), lambda: m.write(value, index))


def scattered(rng, m):
    "Write numbers into rows given by a tensor; of equal ones the last counts"
    if not m.shape or m.at.size > 60: return
    rows = np.array([rng.randrange(m.shape[0]) for _ in range(rng.randint(1, 3))], np.int32)
    k = m.number(rng.randint(-5, 5))
    ours = Tensor(rows, device=m.tensor.device)
    write(m, lambda: m.tensor.__setitem__(ours, int(k)), lambda: m.write(k, rows))


def run(rng, pool):
    "Compute some of the tensors now, in one of the ways there are"
    some = [[o.tensor for o in rng.sample(pool, rng.randint(1, min(4, len(pool))))] for _ in range(2)]
    kind = rng.random()
    if kind < .6: return Tensor.realize(*some[0])
    if kind < .7: return run_linear(*Tensor.linear_with_vars(*some[0]))
    linears = [Tensor.schedule_linear(*ts) for ts in some[:1 + (kind > .85)]]
    for linear in linears: run_linear(linear)


def step(rng, pool):
    m, kind = rng.choice(pool), rng.random()
    with np.errstate(all='ignore'):
        if kind < .20: pool.append(moved(rng, m))
        elif kind < .25: pool.append(padded(rng, m))
        elif kind < .33: pool.append(reduced(rng, m))
        elif kind < .38: pool.append(back(rng, m))
        elif kind < .52: pool.append(mapped(rng, m))
        elif kind < .63: pool.append(joined(rng, m, pool))
        elif kind < .65: pool.append(taken(rng, m))
        elif kind < .69: pool.append(kept(rng, m))
        elif kind < .79: assigned(rng, m, pool)
        elif kind < .86: filled(rng, m, pool)
        elif kind < .87: scattered(rng, m)
        elif kind < .93: run(rng, pool)
        elif len(pool) > 2: pool.remove(m)


def graph(rng, device):
    "A pool of tensors, to which steps are applied at random"
    pool, large = [], rng.random() < .2   # large enough for vectors, threads and unrolled loops
    for _ in range(rng.randint(1, 3)):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        if large: shape = (*shape[:1], rng.choice([5, 8, 17, 32, 64]), rng.choice([1, 3, 16, 33]))
        value = np.array([rng.randint(-4, 4) for _ in range(int(np.prod(shape)))], np.int32).reshape(shape)
        pool.append(Model.fresh(Tensor(value, device=device), value))
    for _ in range(rng.randint(2, 16)): step(rng, pool)
    rng.shuffle(pool)
    if rng.random() < .5: run(rng, pool)
    for m in pool: m.check()


@pytest.mark.parametrize('device', list(GRAPHS))
def test_fuzz_graphs(device):
    if device not in Device.available(): pytest.skip(f'{device} does not work here')

    @settings(max_examples=GRAPHS[device], deadline=None, derandomize=not FULL, database=None,
              suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def run(rng): graph(rng, device)
    run()
