"""The house rules: what imports what, what a page must hold, what may stand in the tree."""
import ast
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'tools'))
import check_exercises  # noqa: E402
import measure_chapters  # noqa: E402
import notebooks as book  # noqa: E402

CHAPTERS = [p for p in book.notebooks() if p.parent != ROOT]
ids = [str(p.relative_to(ROOT / 'nbs').with_suffix('')) for p in CHAPTERS]
each_chapter = pytest.mark.parametrize('path', CHAPTERS, ids=ids)


def sources(path: pathlib.Path, kind: str = 'code') -> list[str]:
    "Texts of a notebook's cells"
    return [''.join(c['source']) for c in json.loads(path.read_text())['cells'] if c['cell_type'] == kind]


def exports_to(path: pathlib.Path) -> list[str]:
    "Names of the modules that a notebook exports to"
    return re.findall(r'(?m)^#\|\s*default_exp\s+(\S+)', '\n'.join(sources(path)))


ORDER = {f'tinysched.{name}': int(re.match(r'\d+', p.name)[0])   # type: ignore[index]
         for p in CHAPTERS for name in exports_to(p)}


def imports(path: pathlib.Path, package: str) -> set[str]:
    "Full names of what a file imports, `from` imports both as module and as member"
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import): found |= {a.name for a in node.names}
        if isinstance(node, ast.ImportFrom):
            above = package.split('.')[:len(package.split('.')) - node.level + 1] if node.level else []
            module = '.'.join([*above, *([node.module] if node.module else [])])
            found |= {module, *(f'{module}.{a.name}' for a in node.names)}
    return found


# ---- modules

@pytest.mark.parametrize('module', ORDER)
def test_imports_point_backwards_only(module):
    path = ROOT / (module.replace('.', '/') + '.py')
    ours = {n for n in imports(path, module.rpartition('.')[0]) if n in ORDER or n == 'tinysched'}
    ahead = {n: ORDER.get(n) for n in ours if ORDER.get(n, 99) >= ORDER[module]}
    assert not ahead, f'{module} is chapter {ORDER[module]} and imports {ahead}'


def test_helpers_import_nothing_of_ours():
    assert not {n for n in imports(ROOT / 'tinysched/helpers.py', 'tinysched') if n.startswith('tinysched')}


@pytest.mark.parametrize('part', ['ir', 'schedule'])
def test_pure_parts_open_nothing(part):
    walls = 'tinysched.runtime', 'tinysched.frontend', 'subprocess', 'ctypes', 'socket', 'pyopencl', 'shutil'
    for path in (ROOT / 'tinysched' / part).glob('*.py'):
        bad = {n for n in imports(path, f'tinysched.{part}') if n.startswith(walls)}
        if path.name == 'draw.py': bad -= {'shutil'}   # looks for the program that lays out graphs
        assert not bad, f'{path.name} imports {bad}'


def test_one_notebook_one_module():
    exported = [name for p in CHAPTERS for name in exports_to(p)]
    assert len(exported) == len(set(exported))
    assert all(len(exports_to(p)) == (p.parent.name != 'tours') for p in CHAPTERS)
    numbers = [p.name[:2] for p in CHAPTERS]
    assert len(numbers) == len(set(numbers)), 'two chapters have one number'


def test_every_module_comes_from_a_notebook():
    modules = {str(p.relative_to(ROOT).with_suffix('')).replace('/', '.') for p in book.generated(ROOT)}
    assert modules == set(ORDER)
    by_hand = {p.name for p in (ROOT / 'tinysched').rglob('*.py')} - {p.name for p in book.generated(ROOT)}
    assert by_hand <= {'__init__.py', '__main__.py', '_modidx.py'}


def test_import_is_light():
    code = 'import sys, tinysched; print(*sorted({m.split(".")[0] for m in sys.modules}))'
    loaded = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {'matplotlib', 'pyopencl', 'IPython', 'ipykernel', 'jupyter_client', 'graphviz', 'tqdm', 'fastcore',
             'sklearn', 'platformdirs', 'z3'}
    assert 'tinysched' in loaded and not heavy & set(loaded)


def test_import_is_quick(tmp_path):
    "Once its bytecode is there, as for any user after the first time"
    code = 'import time; t = time.process_time(); import numpy; n = time.process_time(); import tinysched; ' \
           'print((time.process_time() - n) / (n - t))'
    env = os.environ | dict(PYTHONPYCACHEPREFIX=str(tmp_path), PYTHONDONTWRITEBYTECODE='')
    run = lambda: float(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                                       env=env).stdout)
    ratios = [run() for _ in range(5)]
    assert min(ratios) < 2, ratios   # in imports of NumPy, which takes 0.1 s of a quick processor


# ---- pages

@each_chapter
def test_page_targets(path, capsys):
    missed = measure_chapters.main(['--check', str(path)])
    said = capsys.readouterr().out
    assert not missed or path.parent.name == 'tours', said


@each_chapter
def test_exercises_four_ways(path):
    wanted = 0 if path.parent.name == 'tours' else 3
    assert len(re.findall(r'(?m)^#\|\s*exercise', '\n'.join(sources(path)))) >= wanted
    code = 'import sys; sys.path.insert(0, sys.argv[1]); import check_exercises as c; n, bad = c.check(sys.argv[2]); ' \
           'print(*bad, sep="\\n"); sys.exit(bool(bad))'
    done = subprocess.run([sys.executable, '-c', code, str(ROOT / 'tools'), str(path)],
                          capture_output=True, text=True, cwd=path.parent, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@each_chapter
def test_page_has_its_parts(path):
    if path.parent.name == 'tours': return
    text = '\n'.join(sources(path, 'markdown'))
    assert text.startswith('# '), 'a title comes first'
    assert '## Exercises' in text and '## Recap' in text and '## Map to tinygrad' in text


def names_there(path: pathlib.Path) -> list[str]:
    "Names in the second column of a page's map"
    table = '\n'.join(sources(path, 'markdown')).partition('## Map to tinygrad')[2].partition('\n## ')[0]
    rows = [line.strip().strip('|').split('|') for line in table.splitlines() if line.startswith('|')]
    return [n for row in rows[2:] if len(row) > 1 for n in re.findall(r'`([^`]+)`', row[1])]


@each_chapter
def test_map_names_exist_in_the_peer(path):
    folder = importlib.util.find_spec('tinygrad').submodule_search_locations[0]   # read, never imported
    text = '\n'.join(p.read_text() for p in pathlib.Path(folder).rglob('*.py'))
    gone = [n for n in names_there(path) if not re.search(rf'\b{re.escape(re.split("[.(]", n)[-1] or n)}\b', text)]
    assert not gone, f'not in the peer: {" ".join(gone)}'


@each_chapter
def test_lines_fit_the_page(path):
    long = [line for s in sources(path) for line in s.splitlines() if len(line) > 100]
    assert not long, long[0]


def public(body: list[ast.stmt], prefix: str = ''):
    "Public functions and classes of a module or class, with their names"
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith('_'):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef): yield from public(node.body, f'{prefix}{node.name}.')


@pytest.mark.parametrize('module', ORDER)
def test_public_names_explain_themselves(module):
    tree = ast.parse((ROOT / (module.replace('.', '/') + '.py')).read_text())
    one_line = lambda node: isinstance(node, ast.FunctionDef) and node.body[-1].end_lineno == node.lineno
    bare = [name for name, node in public(tree.body) if not ast.get_docstring(node)
            and not ('.' in name and (one_line(node) or any('setter' in ast.unparse(d) for d in node.decorator_list)))]
    assert not bare, f'no docstring: {" ".join(bare)}'
    loose = [name for name, node in public(tree.body) if isinstance(node, ast.FunctionDef)
             and (node.returns is None or any(a.annotation is None for a in
                  node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg not in ('self', 'cls')))]
    assert not loose, f'no types: {" ".join(loose)}'


@pytest.mark.parametrize('module', ORDER)
def test_functions_are_short(module):
    path = ROOT / (module.replace('.', '/') + '.py')
    text = path.read_text().splitlines()
    code = lambda n: sum(bool(line.strip()) for line in text[n.body[0].lineno - 1:n.end_lineno])
    long = [f'{n.name} ({code(n)})' for n in ast.walk(ast.parse('\n'.join(text)))
            if isinstance(n, ast.FunctionDef) and code(n) > 15]
    assert not long, f'bodies of more than 15 lines: {" ".join(long)}'


# ---- the tree

def test_no_path_of_one_machine():
    tracked = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard'], cwd=ROOT, capture_output=True,
                             text=True, check=True).stdout.splitlines()
    somewhere = re.compile(r'(?<![\w.$~}])/(?:work|farm|root|home|Users)/\w')
    for name in tracked:
        path = ROOT / name
        if not path.is_file() or path.suffix in ('.png', '.lock'): continue
        found = somewhere.search(path.read_text(errors='replace'))
        assert not found, f'{name}: {found[0] if found else ""}'


def test_no_decoration():
    emoji = re.compile('[\U0001F300-\U0001FAFF\u2600-\u27BF]')
    for path in book.notebooks():
        assert not emoji.search(path.read_text()), path.name


# ---- the checkers check

def notebook(tmp_path: pathlib.Path, *cells: tuple[str, str]) -> pathlib.Path:
    "A notebook made of (kind, source) pairs"
    made = [dict(cell_type=kind, source=text, **(dict(outputs=[]) if kind == 'code' else {})) for kind, text in cells]
    (tmp_path / 'page.ipynb').write_text(json.dumps(dict(cells=made)))
    return tmp_path / 'page.ipynb'


def test_a_bare_page_is_refused(tmp_path, capsys):
    page = notebook(tmp_path, ('code', '#| export\ndef f(): pass'))
    assert measure_chapters.main(['--check', str(page)]) == 1
    assert 'prose before 0%' in capsys.readouterr().out


@pytest.mark.parametrize('check,fault', [("assert answer == 2", None), ("assert answer", 'wrong answer'),
                                         ("assert answer == 3", 'solution'), ("pass", 'stub')])
def test_a_weak_exercise_is_refused(tmp_path, check, fault):
    page = notebook(tmp_path, ('code', 'from tinysched.helpers import verdict'), ('code', '#| exercise\nanswer = None'),
        ('code', f"#| check\nwith verdict('Exercise 1'):\n    {check}"),
        ('markdown', '<summary>Hint</summary> <summary>Solution</summary>\n\n```python\nanswer = 2\n```\n'),
        ('code', "wrong_answers = {'Exercise 1': ['answer = 1', 'answer = 0']}"))
    n, bad = check_exercises.check(page)
    assert n == 1
    assert any(fault in line for line in bad) if fault else not bad
