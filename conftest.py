"""Settings of all tests: specs are checked, caches are private, notebooks are compared though stored without counts."""
import os
import pathlib
import tempfile

import pytest
from hypothesis import settings

# the same examples on each run; `make fuzz` draws new ones
settings.register_profile('house', deadline=None, derandomize=not os.environ.get('FUZZ'), database=None)
settings.load_profile('house')

_home = tempfile.TemporaryDirectory(prefix='tinysched-tests-')
_folders = iter(range(10**9))
os.environ.setdefault('SPEC', '1')
os.environ.setdefault('CHECK_OOB', '1')      # every kernel of the suite is proved to stay inside its buffers
os.environ.setdefault('TQDM_DISABLE', '1')   # what moves on the screen is not compared
os.environ.setdefault('MPLCONFIGDIR', os.path.join(_home.name, 'matplotlib'))
os.environ['XDG_CACHE_HOME'] = os.path.join(_home.name, 'cache')


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    "Nbval compares only cells that say they have run; clean notebooks do not say so"
    for item in items:
        cell = getattr(item, 'cell', None)
        if cell is not None and cell.get('cell_type') == 'code': cell.execution_count = 1


_current = None


def pytest_runtest_logstart(nodeid: str) -> None:
    "Each notebook's kernel starts with a cache folder of its own"
    global _current
    notebook = nodeid.split('::')[0]
    if pathlib.Path(notebook).suffix == '.ipynb' and notebook != _current:
        _current = notebook
        os.environ['XDG_CACHE_HOME'] = os.path.join(_home.name, f'cache{next(_folders)}')
