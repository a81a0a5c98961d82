"""The memory planner on every benchmark graph: bytes of temporaries before, in the arena, the lower bound, the peer's figure.

  python bench/planner_table.py [--only mlp3,encoder1] [--peer tinygrad]

Only schedules are made, on the device NULL; the peer, where it is installed, is asked in a process of its own.
"""
import argparse, os, pathlib, subprocess, sys
import benchlib as B, graphs as G

SYNTHETIC = {
    **{f"chain_{n}": lambda lib, n=n: G.make_chain(lib, n) for n in (10, 100, 1000)},
    **{f"chain2_{n}": lambda lib, n=n: G.make_chain2(lib, n) for n in (10, 100, 1000)},
    **{f"indep_{n}": lambda lib, n=n: G.make_independent(lib, n) for n in (10, 100)},
    **{f"indep_same_{n}": lambda lib, n=n: G.make_independent_same(lib, n) for n in (10, 100)},
    **{f"rchain_{n}": lambda lib, n=n: G.make_reduce_chain(lib, n) for n in (4, 16, 64)}}
GRAPHS = {**SYNTHETIC, **G.MODELS}


def lanes(name):
    "Rows of (device, lane, bytes before, in the arena, lower bound) of one graph, with ours"
    import tinysched
    with tinysched.Context(DEV='NULL'):
        lib = B.load('tinysched')
        linear = tinysched.Tensor.schedule_linear(*GRAPHS[name](lib)())
    return linear.arg.lanes


def peer_bytes(name, peer):
    "Bytes that the peer's planner needs, by its own account"
    code = (f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\n"
            f"import benchlib as B, planner_table as P\nlib = B.load({peer!r})\n"
            f"print('=', lib.describe(P.GRAPHS[{name!r}](lib)).tmp_after)")
    ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env={**os.environ, 'DEV': 'CPU'})
    said = [line[2:] for line in ran.stdout.splitlines() if line.startswith('= ')]
    return None if not said or said[0] == 'None' else float(said[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument('--only', default='')
    ap.add_argument('--peer', default='tinygrad')
    ap.add_argument('--json', default='')
    a = ap.parse_args()
    only, out = [x for x in a.only.split(',') if x], {}
    T = B.Table('graph', 'MB before', 'arena', 'lower bound', 'arena / bound', a.peer or 'peer')
    for name in GRAPHS:
        if only and not any(name.startswith(o) for o in only): continue
        rows = lanes(name)
        before, after, bound = (sum(getattr(r, k) for r in rows) for k in ('before', 'after', 'bound'))
        theirs = peer_bytes(name, a.peer) if a.peer else None
        out[name] = dict(before=before, after=after, bound=bound, peer=theirs)
        T.add(name, B.mb(before), B.mb(after), B.mb(bound), f'{after / bound:.3f}' if bound else '-', B.mb(theirs))
    T.show('temporaries (MB)')
    B.dump(a.json, out)


if __name__ == '__main__': main()
