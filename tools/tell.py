#!/usr/bin/env python3
"""Tell a notebook in the terminal: its prose, its code and what the code says, run now.

    tell.py NOTEBOOK [--quiet]      --quiet leaves the code out
"""
import ast
import json
import os
import pathlib
import re
import shutil
import sys
import textwrap
from typing import Any

WIDTH = min(100, shutil.get_terminal_size().columns)
COLOUR = sys.stdout.isatty() and 'NO_COLOR' not in os.environ


def tint(text: str, code: int) -> str: return f'\033[{code}m{text}\033[0m' if COLOUR else text


def prose(text: str) -> str:
    "Markdown for the terminal: paragraphs filled, folded parts and markup left out"
    text = re.sub(r'(?s)<details>.*?</details>', '', text)
    text = re.sub(r'\[([^\]]*)\]\([^)]*\)|\*\*([^*]+)\*\*', lambda m: m[1] or m[2], text)
    out = []
    for block in re.split(r'\n\s*\n', text.strip()):
        if block.startswith('#'): out.append(tint(block.lstrip('# '), 1))
        elif re.match(r'[|\-*>]|\d+\.|```', block): out.append(block.replace('```', '').lstrip('> '))
        else: out.append(textwrap.fill(' '.join(block.split()), WIDTH))
    return '\n\n'.join(out)


def show(value: Any) -> None:
    "Print a value as a notebook would, in words"
    bundle = getattr(value, '_repr_mimebundle_', None)
    said = bundle().get('text/plain') if bundle else repr(value)
    if said: print(said)


def run(source: str, names: dict[str, Any], file: str) -> None:
    "Run a cell; the value of its last line is shown"
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(';') \
        else None
    exec(compile(tree, file, 'exec'), names)
    if last is None: return
    value = eval(compile(ast.Expression(last.value), file, 'eval'), names)   # type: ignore[attr-defined]
    if value is not None: show(value)


def tell(path: pathlib.Path, quiet: bool) -> None:
    "Go through the notebook from its first cell to its last"
    names = {'__name__': '__main__', 'display': lambda *values: [show(v) for v in values]}
    for i, cell in enumerate(json.loads(path.read_text())['cells']):
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown': print('\n' + prose(source) + '\n', flush=True); continue
        if cell['cell_type'] != 'code': continue
        code = re.sub(r'(?m)^(#\s*\||%).*\n?', '', source)
        if not quiet and not re.search(r'(?m)^#\s*\|\s*hide\b', source) and code.strip():
            print(tint(textwrap.indent(code.strip(), '    '), 2) + '\n', flush=True)
        run(re.sub(r'(?m)^(#\s*\||%)', '# ', source), names, f'{path.name}[{i}]')


if __name__ == '__main__':
    os.environ.setdefault('MPLBACKEND', 'Agg')
    page = pathlib.Path(next(a for a in sys.argv[1:] if not a.startswith('-'))).resolve()
    os.chdir(page.parent)
    tell(page, '--quiet' in sys.argv)
