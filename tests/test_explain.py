"""Decisions can be read, turned round, and every stage looked at (L1, and decisions as values)."""
import os
import subprocess
import sys

import numpy as np
import pytest

from tinysched import Context, GlobalCounters, Tensor, explain, flip
from tinysched.frontend.explain import page
from tinysched.frontend.state import live
from tinysched.ir import draw
from tinysched.ir.dtype import dtypes
from tinysched.ir.pattern import Step
from tinysched.ir.uop import UOp
from tinysched.ir.vocabulary import Ops
from tinysched.schedule.pipeline import viewers, watching

R = np.random.default_rng(0)


def real(*shape): return Tensor(R.standard_normal(shape).astype(np.float32)).realize()


def test_explaining_changes_nothing_and_runs_nothing():
    x = real(4, 4)
    y = (x - x.mean(0)).softmax(1)
    x.assign(x + 1)
    before, ran = {c: c.state for c in live()}, GlobalCounters.kernel_count
    e = explain(y, x)
    assert len(e) and GlobalCounters.kernel_count == ran
    assert all(c.state is s for c, s in before.items())


@pytest.mark.parametrize('make', [lambda x: x - x.mean(0), lambda x: x.softmax(0), lambda x: x.softmax(1), lambda x: x @ x @ x,
                                  lambda x: (x.sum(0) * x.sum(1)).exp() + x.std(0)])
def test_every_choice_can_be_turned_round(make):
    x = real(6, 6)
    y = make(x)
    want = make(real(6, 6)).shape
    e = explain(y)
    turned = [flip(i, y) for i, d in enumerate(e.decisions) if d.free]
    assert turned and y.shape == want
    for f in turned:
        fewer = f.after.kernels < f.before.kernels
        assert fewer == bool(f.decision.reason) and f.after.kernels != f.before.kernels


def test_a_rule_that_leaves_no_choice_is_named():
    y = real(3) + 1
    with pytest.raises(ValueError, match='no choice.*A1'): flip(0, y)


def test_flip_refuses_a_program_that_assigns():
    x = real(4)
    x.assign(x.sum() + x)
    i = next(i for i, d in enumerate(explain(x).decisions) if d.free)
    with pytest.raises(ValueError, match='realize it first'): flip(i, x)


def test_operations_inside_loops_they_do_not_depend_on_count_each_time():
    x = real(8, 8)
    f = flip(0, x @ x @ x)
    assert f.before.ops == 2 * 2 * 8**3 and f.after.ops == 2 * 8**4 + 2 * 8**3


def test_L1_a_stage_tells_its_rewrites_with_file_and_line():
    x = real(4)
    with Context(SCACHE=0), watching() as stages: (x.detach() * 2).realize()
    assert [s.name for s in stages] == ['program', 'call', 'prepare', 'kernels', 'linearize', 'memory']
    rules = [step.rule for s in stages for step in s.rewrites]
    assert any(rule.startswith('prepare.py:') for rule in rules)
    assert f'1. {rules[0]}' in page(stages).html


def test_L1_viz_writes_a_page_for_each_new_schedule(tmp_path):
    code = ('import tinysched as ts\nx = ts.Tensor([1.0, 2.0], device="PYTHON").realize()\n'
            'for _ in range(3): (x * 2 + 1).sum().realize()\n')
    env = os.environ | dict(VIZ='1', XDG_CACHE_HOME=str(tmp_path), DEV='PYTHON')
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=True)
    pages = sorted((tmp_path / 'tinysched' / 'viz').iterdir())
    assert done.stderr.count('VIZ: ') == len(pages) >= 1
    text = pages[-1].read_text()
    assert text.startswith('<!doctype html>') and 'linearize' in text and '<script' not in text
    assert pages[0].parent.stat().st_mode & 0o077 == 0


def test_L1_off_means_no_page_and_no_folder(tmp_path):
    assert viewers
    env = os.environ | dict(VIZ='0', XDG_CACHE_HOME=str(tmp_path), DEV='PYTHON')
    code = 'import tinysched as ts; (ts.Tensor([1.0], device="PYTHON") * 2).realize()'
    subprocess.run([sys.executable, '-c', code], env=env, check=True)
    assert not (tmp_path / 'tinysched' / 'viz').exists()


def test_L1_a_long_log_says_how_much_of_it_is_shown():
    n = UOp.variable('n', 0, 9)
    log = [Step(n + i, f'here.py:{i}', n) for i in range(1, 4)]
    shown = draw.rewrites(log, most=2)._repr_mimebundle_()
    words = shown['text/plain'].splitlines()
    assert [line.split(':')[:2] for line in words[:2]] == [['1. here.py', '1'], ['2. here.py', '2']] and words[2:] == ['showing 2 of 3 rewrites']
    assert shown['text/html'].count('<details') == 2 and '<p>showing 2 of 3 rewrites</p>' in shown['text/html']
    assert 'showing' not in repr(draw.rewrites(log, most=3))


def test_L1_a_graph_without_a_program_that_lays_it_out_is_words(monkeypatch):
    monkeypatch.setattr(draw.shutil, 'which', lambda program: None)
    shown = draw.graph(UOp.variable('n', 0, 9) + 1)._repr_mimebundle_()
    assert 'image/svg+xml' not in shown
    assert 'pip install graphviz-pure' in shown['text/plain'] and 'digraph {' in shown['text/plain'] and 'PARAM n' in shown['text/plain']


def test_L1_a_broken_node_is_a_question_mark_in_the_picture():
    x = UOp.variable('n', 0, 9)
    broken = UOp(Ops.PERMUTE, dtypes.int32, (x,), (3,))   # of no axes, the fourth
    with pytest.raises(IndexError): draw.caption(broken)
    assert [draw.told(u, draw.caption) for u in (x, broken)] == ['PARAM n\nindex', 'PERMUTE ?']
    assert '>PERMUTE ?<' in draw.graph(broken)._repr_mimebundle_()['image/svg+xml']
