#!/usr/bin/env python3
"""Measure notebooks against the page targets (README.md, "The page").

    measure_chapters.py [PATH ...]      files or folders (default: nbs)
    measure_chapters.py --check PATH    exit 1 where a target is missed

A *defining* cell is an exported code cell that defines a function or class. Words per line are counted up to the
exercises. Definitions belong on the page: a hidden exported one is a miss.
"""
import ast, json, pathlib, re, statistics, sys

EXPORT = re.compile(r"(?m)^#\s*\|\s*exporti?\b")
HIDE = re.compile(r"(?m)^#\s*\|\s*hide\b")
CHECK = re.compile(r"\b(?:test_\w+|assert_\w+)\s*\(|^\s*assert\b|pytest\.raises", re.M)
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
PICTURE = ("image/svg+xml", "image/png", "image/jpeg")

def code_of(src): return "\n".join(l for l in src.splitlines() if not re.match(r"\s*[%!]|#\s*\|", l))
def n_lines(src): return sum(1 for l in code_of(src).splitlines() if l.strip() and not l.strip().startswith("#"))
def n_words(src):
  src = re.sub(r"(?ms)^```.*?^```", " ", src)
  return len(WORD.findall(re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>]+>|\]\([^)]*\)", " ", src)))
def defines(src):
  try: body = ast.parse(code_of(src)).body
  except SyntaxError: return False
  return any(isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) for n in body)

def measure(path):
  cells = [c for c in json.loads(path.read_text())["cells"] if "".join(c["source"]).strip()]
  cells = [(c["cell_type"], "".join(c["source"]), c.get("outputs", [])) for c in cells]
  m = dict(sizes=[], before=0, checked=0, shown=0, words=0, loc=0, pictures=0, run=0, exercises=0, hidden=0)
  run, tail = 0, False
  for i, (kind, src, outs) in enumerate(cells):
    if kind == "markdown":
      tail = tail or bool(re.search(r"(?im)^#+\s*(exercises|map to|recap)\b", src))
      if not tail: m["words"] += n_words(src)
      m["exercises"] += len(re.findall(r"(?im)^#+\s*exercise\s+\d", src)); run = 0
      continue
    if kind != "code": continue
    if HIDE.search(src):
      m["hidden"] += bool(EXPORT.search(src) and defines(src) and "Stands in for chapter" not in src)
      continue
    run += 1; m["run"] = max(m["run"], run); m["loc"] += 0 if tail else n_lines(src)
    m["pictures"] += sum(any(k in o.get("data", {}) for k in PICTURE) for o in outs)
    if not (EXPORT.search(src) and defines(src)): continue
    m["sizes"].append(n_lines(src))
    m["before"] += i > 0 and cells[i-1][0] == "markdown"
    near = [(src, outs)] + [(s, o) for k, s, o in cells[i+1:i+4] if k == "code"]
    m["checked"] += any(CHECK.search(s) for s, _ in near)
    m["shown"] += any(CHECK.search(s) or o for s, o in near)
  return m

def main(argv):
  check = "--check" in argv
  roots = [pathlib.Path(a) for a in argv if not a.startswith("-")] or [pathlib.Path("nbs")]
  files = sorted(f for r in roots for f in ([r] if r.is_file() else r.rglob("*.ipynb")) if ".ipynb_checkpoints" not in f.parts)
  print(f"{'notebook':44s} defs  med  p90  prose% check% shown%  words/loc  pics  run  exercises")
  total = dict(sizes=[], before=0, checked=0, shown=0, words=0, loc=0)
  missed = []
  for f in files:
    m = measure(f); n = len(m["sizes"])
    for k in total: total[k] += m[k]
    s = sorted(m["sizes"])
    pct = lambda k: 100 * m[k] / n if n else 100
    med, p90 = (statistics.median(s), s[int(.9 * (n - 1))]) if n else (0, 0)
    wl = m["words"] / max(m["loc"], 1)
    print(f"{str(f)[-44:]:44s} {n:4d} {med:4.0f} {p90:4d}  {pct('before'):5.0f} {pct('checked'):6.0f} {pct('shown'):6.0f} {wl:10.1f} {m['pictures']:5d} {m['run']:4d} {m['exercises']:10d}")
    if n:
      for bad, what in ((med > 8, f"median cell {med:.0f} lines (8)"), (p90 > 20, f"90th percentile {p90} lines (20)"),
                        (pct("before") < 90, f"prose before {pct('before'):.0f}% (90)"), (pct("checked") < 90, f"checked {pct('checked'):.0f}% (90)"),
                        (pct("shown") < 95, f"shown {pct('shown'):.0f}% (95)"), (wl < 2, f"{wl:.1f} words per line (3-6)"),
                        (m["pictures"] < 2, f"{m['pictures']} pictures (2)"), (m["run"] > 2, f"{m['run']} code cells in a row (2)"),
                        (wl > 10, f"{wl:.1f} words per line (3-6)"), (m["hidden"] > 0, f"{m['hidden']} hidden exported definitions (0)")):
        if bad: missed.append(f"{f}: {what}")
  s = sorted(total["sizes"]); n = len(s)
  if n: print(f"{'all':44s} {n:4d} {statistics.median(s):4.0f} {s[int(.9*(n-1))]:4d}  {100*total['before']/n:5.0f} {100*total['checked']/n:6.0f} {100*total['shown']/n:6.0f} {total['words']/max(total['loc'],1):10.1f}")
  if missed: print("\nbelow target:", *missed, sep="\n  ")
  return 1 if check and (missed or not n) else 0

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
