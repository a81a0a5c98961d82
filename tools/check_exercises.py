#!/usr/bin/env python3
"""Check a notebook's exercises four ways: the stub and every wrong answer are refused, the folded solution is accepted.

    check_exercises.py NOTEBOOK ...      exit 1 where a check is too weak, too strong or incomplete

Conventions: a stub cell marked `#| exercise`, then a cell marked `#| check` that reports through
`verdict('Exercise N')` (whose last word is "correct." only on success), then a cell with folded hint and solution. A hidden cell
at the end defines `wrong_answers`: at least two for each exercise. Cells run in one namespace, in order, so run it on trusted notebooks.
"""
import contextlib, io, json, re, sys

def says(ns, *sources):
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    for s in sources: exec(s, ns)
  return out.getvalue().strip()

def check(path):
  cells = [(c["cell_type"], "".join(c["source"])) for c in json.load(open(path))["cells"]]
  ns, bad, n = {"__name__": "__main__", "display": lambda *a: None}, [], 0
  says(ns, *(s for k, s in cells if k == "code"))
  for i, (kind, stub) in enumerate(cells):
    if kind != "code" or not re.search(r"^#\|\s*exercise", stub, re.M): continue
    n += 1
    checker, after = cells[i + 1][1], cells[i + 2][1]
    name = (re.search(r"verdict\('(.*?)'\)", checker) or [None, f"cell {i}"])[1]
    solution = re.search(r"<summary>Solution</summary>.*?```python\n(.*?)```", after, re.S)
    if not re.search(r"^#\|\s*check", checker, re.M): bad.append(f"{name}: no check cell after the stub"); continue
    if "<summary>Hint</summary>" not in after or not solution: bad.append(f"{name}: no folded hint or solution"); continue
    wrong = ns.get("wrong_answers", {}).get(name, [])
    if len(wrong) < 2: bad.append(f"{name}: {len(wrong)} wrong answers, two wanted")
    for what, answer in [("stub", stub), *((f"wrong answer {j}", w) for j, w in enumerate(wrong, 1)), ("solution", solution[1])]:
      said = says(ns, stub, answer, checker)
      if said.endswith("correct.") != (what == "solution"): bad.append(f"{name}: {what}: {said[-100:]!r}")
  return n, bad

if __name__ == "__main__":
  worst = 0
  for path in sys.argv[1:]:
    n, bad = check(path)
    print(f"{path}: {n} exercises, {len(bad)} faults", *bad, sep="\n  " if bad else "")
    worst |= bool(bad)
  sys.exit(worst)
