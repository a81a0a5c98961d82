#!/usr/bin/env python3
"""Make README.md and its pictures (docs/img/) from index.ipynb; with --check, only say whether they are current."""
import pathlib
import re
import sys

import nbformat
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
IMAGES = pathlib.Path('docs/img')
HIDDEN = re.compile(r'(?m)^#\s*\|\s*hide\b')
SILENT = re.compile(r'(?m)^#\s*\|\s*echo:\s*false\b')
DIRECTIVE = re.compile(r'(?m)^#\s*\|.*\n?')


def page(path: pathlib.Path) -> nbformat.NotebookNode:
    "The notebook without hidden cells, hidden code and directives, its code known to be Python"
    nb = nbformat.read(path, as_version=4)
    nb.metadata['language_info'] = {'name': 'python'}
    nb.cells = [c for c in nb.cells if not (c.cell_type == 'code' and HIDDEN.search(c.source))]
    for c in nb.cells:
        if c.cell_type != 'code': continue
        c.metadata['transient'] = {'remove_source': bool(SILENT.search(c.source))}
        c.source = DIRECTIVE.sub('', c.source)
    nb.cells = [c for c in nb.cells if c.source.strip()]
    return nb


def convert(path: pathlib.Path) -> dict[pathlib.Path, bytes]:
    "File contents by path: the README and its pictures"
    name = '{unique_key}_{cell_index}_{index}{extension}'
    pictures = {'enabled': True, 'output_filename_template': name}
    exporter = MarkdownExporter(config=Config(ExtractOutputPreprocessor=pictures))
    text, resources = exporter.from_notebook_node(page(path), resources={'unique_key': 'index'})
    files = {}
    for old, data in resources.get('outputs', {}).items():
        text = text.replace(f']({old})', f']({IMAGES / old})')
        files[IMAGES / old] = data
    text = re.sub(r'\n{3,}', '\n\n', text).strip() + '\n'
    note = '<!-- made from index.ipynb by `make readme` -->\n\n'
    return {pathlib.Path('README.md'): (note + text).encode(), **files}


def main(argv: list[str]) -> int:
    want = convert(ROOT / 'index.ipynb')
    extra = {p.relative_to(ROOT) for p in (ROOT / IMAGES).glob('index_*')} - want.keys()
    wrong = sorted(str(p) for p, data in want.items()
                   if not (ROOT / p).is_file() or (ROOT / p).read_bytes() != data) + sorted(map(str, extra))
    if '--check' in argv:
        for name in wrong: print(f'{name}: not what index.ipynb gives; `make readme` mends this.')
        return int(bool(wrong))
    for p in extra: (ROOT / p).unlink()
    for p, data in want.items():
        (ROOT / p).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / p).write_bytes(data)
    return 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
