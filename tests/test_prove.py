"""Proofs that kernels stay inside their buffers (CHECK_OOB): sound, complete on what we make, and asked for everywhere."""
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tinysched import Context, Device, Tensor, Variable
from tinysched.codegen.prove import Translation, accesses, check_bounds, escape
from tinysched.ir.dtype import dtypes
from tinysched.ir.symbolic import evaluate, simplify
from tinysched.ir.uop import KernelInfo, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.runtime.realize import compile_kernels

SIZES = 3, 4


@st.composite
def indexes(draw):
    "An index expression over two loops, with every operation that index arithmetic has"
    loops = [UOp.range(n, i) for i, n in enumerate(SIZES)]
    u = draw(st.sampled_from(loops))
    for _ in range(draw(st.integers(1, 5))):
        c = draw(st.integers(-4, 6))
        v = draw(st.sampled_from([*loops, UOp.const(dtypes.index, c)]))
        u = draw(st.sampled_from([u + v, u - v, u * c, u // (abs(c) + 1), u % (abs(c) + 1), u.maximum(v), (u < v).where(u, v)]))
    return u


@given(indexes(), st.integers(1, 12), st.one_of(st.none(), st.integers(-2, 8)))
def test_escapes_are_those_that_trying_finds(at, size, limit):
    loops = [UOp.range(n, i) for i, n in enumerate(SIZES)]
    gate = () if limit is None else (loops[0] + at < limit,)
    u = UOp(Ops.INDEX, dtypes.float32, (UOp.param(0, dtypes.float32, (size,)), at, *gate))
    steps = [dict(zip(loops, s)) for s in product(*map(range, SIZES))]
    out = [s for s in steps if all(evaluate(g, s) for g in gate) and not 0 <= evaluate(at, s) < size]
    found = escape(Translation(u), u)
    assert (found is not None) == bool(out)
    if found: assert any(all(found.example.get(r, n) == n for r, n in s.items()) for s in out)


@given(indexes(), st.integers(1, 12))
def test_simplifying_changes_no_escape(at, size):
    p = UOp.param(0, dtypes.float32, (size,))
    a, b = p.index(at), p.index(simplify(at))
    assert (escape(Translation(a), a) is None) == (escape(Translation(b), b) is None)


def reading(at, n=10, *loops):
    "Kernel that copies x[at] to each place of 10"
    i = UOp.range(10, 0)
    return UOp.sink(UOp.param(0, dtypes.float32, (10,)).index(i).store(
        UOp.param(1, dtypes.float32, (n,)).index(at(i))).end(i), arg=KernelInfo())


@pytest.mark.parametrize('device', ['PYTHON', 'CPU', 'CL', 'NULL'])
def test_a_device_compiles_no_kernel_that_leaves_its_buffer(device):
    bad, good = reading(lambda i: i + 1), reading(lambda i: i + 1, 11)
    with Context(CHECK_OOB=1):
        with pytest.raises(IndexError, match=r'element r0 \+ 1 of argument 1, which has 10: at r0 = 9, index = 10'):
            compile_kernels(Device[device], {bad.key: bad})
        assert compile_kernels(Device[device], {good.key: good})
    with Context(CHECK_OOB=0): assert compile_kernels(Device[device], {bad.key: bad})


def test_optimized_kernels_are_proved_too(monkeypatch):
    from tinysched.codegen import render
    from tinysched.codegen.optimize import Target
    monkeypatch.setattr(render, 'optimize', lambda ast, target, reasons: reading(lambda i: i + 1))
    with Context(CHECK_OOB=1), pytest.raises(IndexError): render.kernel(reading(lambda i: i), Target(), 'C')


def test_switching_the_setting_on_proves_what_was_compiled_before(monkeypatch):
    from tinysched.runtime import realize
    asked = []
    monkeypatch.setattr(realize, 'check_bounds', asked.extend)
    x = Tensor(np.arange(37, dtype=np.float32), device='PYTHON').realize()
    with Context(CHECK_OOB=0): (x * 3.5).realize()
    assert not asked
    with Context(CHECK_OOB=1):
        (x * 3.5).realize()
        (x * 3.5).realize()
    assert len(asked) == 1


def test_programs_with_variables_pads_and_gathers_are_proved():
    r = np.random.default_rng(0).standard_normal((12, 9)).astype(np.float32)
    with Context(CHECK_OOB=1):
        x = Tensor(r).realize()
        for k in (1, 5, 12):
            n = Variable('n', 1, 12).bind(k)
            np.testing.assert_allclose(x[:n].sum(0).numpy(), r[:k].sum(0), rtol=1e-4)
        np.testing.assert_allclose(x.pad(((2, 1), (0, 3))).sum(1).numpy(), np.pad(r, ((2, 1), (0, 3))).sum(1), rtol=1e-4)
        np.testing.assert_array_equal(x[Tensor([3, -1, 0])].numpy(), r[[3, -1, 0]])


def test_without_z3_the_error_says_what_to_install():
    code = ('import sys; sys.modules["z3"] = None\n'
            'from tinysched import Context, Tensor\n'
            'x = Tensor([1.0, 2.0], device="PYTHON")\n'
            'try:\n    with Context(CHECK_OOB=1): (x + 1).realize()\n'
            'except ImportError as e: assert "tinysched[verify]" in str(e), e\n'
            'else: raise SystemExit("no error")\n'
            'with Context(CHECK_OOB=0): assert (x + 1).tolist() == [2.0, 3.0]\n')
    subprocess.run([sys.executable, '-c', code], check=True)


def test_a_gate_that_the_prover_cannot_decide_is_an_error_not_a_pass(monkeypatch):
    from tinysched.codegen import prove
    monkeypatch.setattr(prove, 'LIMIT', 1)
    i = UOp.range(1000, 0)
    hard = UOp.param(0, dtypes.float32, (77,)).index((i * i * i + i * 7) % 1001 // 13)
    monkeypatch.setattr(prove, 'proved', set())
    assert accesses(hard) == [hard]
    with pytest.raises(IndexError, match='cannot prove'): check_bounds([hard])
