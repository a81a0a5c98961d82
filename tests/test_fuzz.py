"""Random programs against NumPy run eagerly: movement, arithmetic, reductions, assignment, several outputs.

The model of a tensor is a flat NumPy array and an array of positions in it, so a view is an alias in the model exactly when
it is one for us. Integers wrap alike, so every comparison is exact. FUZZ=1 runs the full number of programs.
"""
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tinysched import Device, Tensor, dtypes

FULL = os.environ.get('FUZZ') == '1'
PROGRAMS = {'PYTHON': 1000, 'CPU': 1000, 'CL': 200} if FULL else {'PYTHON': 60, 'CPU': 25, 'CL': 10}


class Model:
    "A tensor of ours beside what NumPy says it is"

    def __init__(self, tensor, base, at):
        self.tensor, self.base, self.at = tensor, base, at

    @property
    def value(self): return self.base[self.at]

    @staticmethod
    def fresh(tensor, value):
        value = np.asarray(value, np.int32)
        return Model(tensor, value.reshape(-1).copy(), np.arange(value.size).reshape(value.shape))

    def view(self, tensor, at): return Model(tensor, self.base, at)


def cut(rng, n):
    lo = rng.randint(0, n - 1)
    return lo, rng.randint(lo + 1, n)


def factors(rng, shape):
    n, out = int(np.prod(shape)), []
    while n > 1 and len(out) < 3:
        f = rng.choice([d for d in range(1, n + 1) if n % d == 0])
        out.append(f); n //= f
    return tuple(out + [n])


def moved(rng, m):
    "A view of a tensor"
    shape, kind = m.at.shape, rng.choice(['reshape', 'permute', 'flip', 'shrink'])
    if kind == 'reshape': new = factors(rng, shape); return m.view(m.tensor.reshape(new), m.at.reshape(new))
    if not shape: return m
    if kind == 'permute':
        order = tuple(rng.sample(range(len(shape)), len(shape)))
        return m.view(m.tensor.permute(order), m.at.transpose(order))
    if kind == 'flip':
        axis = rng.randrange(len(shape)); return m.view(m.tensor.flip(axis), np.flip(m.at, axis))
    spans = tuple(cut(rng, n) for n in shape)
    return m.view(m.tensor.shrink(spans), m.at[tuple(slice(a, b) for a, b in spans)])


def padded(rng, m):
    if not m.at.shape: return m
    pads = tuple((rng.randint(0, 2), rng.randint(0, 2)) for _ in m.at.shape)
    return Model.fresh(m.tensor.pad(pads), np.pad(m.value, pads))


def reduced(rng, m):
    if not m.at.shape: return m
    axis, keep = rng.randrange(len(m.at.shape)), rng.random() < .5
    if rng.random() < .6: return Model.fresh(m.tensor.sum(axis, keepdim=keep), m.value.sum(axis, keepdims=keep, dtype=np.int32))
    return Model.fresh(m.tensor.max(axis, keepdim=keep), m.value.max(axis, keepdims=keep))


def back(rng, m):
    "A reduction spread over the tensor again"
    if not m.at.shape: return m
    axis = rng.randrange(len(m.at.shape))
    return Model.fresh(m.tensor - m.tensor.sum(axis, keepdim=True), m.value - m.value.sum(axis, keepdims=True, dtype=np.int32))


def mapped(rng, m):
    k, kind = rng.randint(-3, 3), rng.choice(['add', 'mul', 'neg', 'max', 'where', 'square'])
    t, v = m.tensor, m.value
    if kind == 'add': return Model.fresh(t + k, v + np.int32(k))
    if kind == 'mul': return Model.fresh(t * k, v * np.int32(k))
    if kind == 'neg': return Model.fresh(-t, -v)
    if kind == 'square': return Model.fresh(t * t, v * v)
    if kind == 'max': return Model.fresh(t.maximum(k), np.maximum(v, np.int32(k)))
    return Model.fresh((t < k).where(t, k), np.where(v < k, v, np.int32(k)))


def joined(rng, m, others):
    same = [o for o in others if o.at.shape == m.at.shape] + [m]
    o = rng.choice(same)
    if rng.random() < .3: return Model.fresh(m.tensor * o.tensor, m.value * o.value)
    return Model.fresh(m.tensor + o.tensor, m.value + o.value)


def kept(rng, m):
    how = rng.choice(['contiguous', 'clone'])
    return Model.fresh(getattr(m.tensor, how)(), m.value)


def assigned(rng, m, others):
    "Write into a tensor, through whatever view it is"
    same = [o for o in others if o.at.shape == m.at.shape]
    source = rng.choice(same) if same and rng.random() < .7 else None
    with np.errstate(all='ignore'):
        if source is None: new, value = m.tensor + 1, m.value + np.int32(1)
        else: new, value = source.tensor * 2 + m.tensor, source.value * np.int32(2) + m.value
    m.tensor.assign(new)
    m.base[m.at] = value


def filled(rng, m):
    spans = tuple(cut(rng, n) for n in m.at.shape)
    index = tuple(slice(a, b) for a, b in spans)
    if not index: return
    k = rng.randint(-5, 5)
    m.tensor[index] = k
    m.base[m.at[index]] = k


def step(rng, pool):
    m, kind = rng.choice(pool), rng.random()
    with np.errstate(all='ignore'):
        if kind < .20: pool.append(moved(rng, m))
        elif kind < .27: pool.append(padded(rng, m))
        elif kind < .37: pool.append(reduced(rng, m))
        elif kind < .43: pool.append(back(rng, m))
        elif kind < .60: pool.append(mapped(rng, m))
        elif kind < .72: pool.append(joined(rng, m, pool))
        elif kind < .77: pool.append(kept(rng, m))
        elif kind < .88: assigned(rng, m, pool)
        elif kind < .93: filled(rng, m)
        elif kind < .97: Tensor.realize(*(o.tensor for o in rng.sample(pool, min(2, len(pool)))))
        elif len(pool) > 2: pool.remove(m)


def program(rng, device):
    pool = []
    for _ in range(rng.randint(1, 3)):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        value = np.array([rng.randint(-4, 4) for _ in range(int(np.prod(shape)))], np.int32).reshape(shape)
        pool.append(Model.fresh(Tensor(value, device=device), value))
    for _ in range(rng.randint(2, 14)): step(rng, pool)
    rng.shuffle(pool)
    if rng.random() < .5: Tensor.realize(*(m.tensor for m in pool[:3]))
    for m in pool: np.testing.assert_array_equal(m.tensor.numpy(), m.value)


@pytest.mark.parametrize('device', list(PROGRAMS))
def test_fuzz_programs(device):
    if device not in Device.available(): pytest.skip(f'{device} does not work here')

    @settings(max_examples=PROGRAMS[device], deadline=None, derandomize=not FULL, database=None,
              suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def run(rng): program(rng, device)
    run()
