"""Settings, marks and the user's line, beyond what their page shows."""
import os
import subprocess
import sys
import threading

import pytest

from effort import effort
from tinysched import helpers
from tinysched.helpers import (DEBUG, PROFILE, Context, ContextVar, GlobalCounters, cache_dir, getenv, profile_events,
                               profile_mark, user_line)


def python(code: str, **env: str) -> str:
    "What a new interpreter prints"
    return subprocess.run([sys.executable, '-c', code], env=os.environ | env, text=True, capture_output=True,
                          check=True).stdout.strip()


def test_every_setting_is_read_from_the_environment():
    for name, var in ContextVar.known.items():
        if type(var.base) is not int: continue
        code = f'from tinysched.helpers import ContextVar; print(ContextVar.known[{name!r}].value)'
        if var.__class__ is ContextVar and name in vars(helpers): assert python(code, **{name: '3'}) == '3'


def test_a_bad_setting_is_named_at_import():
    with pytest.raises(subprocess.CalledProcessError) as e: python('import tinysched.helpers', DEBUG='yes')
    assert 'DEBUG=yes in the environment: wanted int' in e.value.stderr


@pytest.mark.parametrize('text,default,want', [('1', False, True), ('0', True, False), ('', 5, 5), ('2.5', 1.0, 2.5),
                                               ('-3', 0, -3), ('gcc', 'cc', 'gcc')])
def test_getenv_is_typed_by_its_default(monkeypatch, text, default, want):
    monkeypatch.setenv('SOMETHING', text)
    assert getenv('SOMETHING', default) == want and type(getenv('SOMETHING', default)) is type(want)


def test_many_threads_keep_their_settings():
    start, wrong = threading.Barrier(8), []
    def work(mine):
        start.wait()
        for _ in range(300):
            with Context(DEBUG=mine), Context(SPEC=mine + 1):
                if DEBUG != mine: wrong.append(mine)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not wrong and DEBUG.value == DEBUG.base


def test_a_block_is_undone_by_an_error():
    before = DEBUG.value
    with pytest.raises(ZeroDivisionError), Context(DEBUG=5, PROFILE=1): 1 / 0  # noqa: B018
    assert DEBUG == before and PROFILE.value == PROFILE.base


def test_L3_profile_marks_are_bounded_and_nearly_free_when_off():
    profile_events.clear()
    with Context(PROFILE=1):
        for _ in range(5):
            with profile_mark('stage'): pass
    assert [e.name for e in profile_events] == ['stage'] * 5 and all(e.duration >= 0 for e in profile_events)
    assert profile_events.maxlen
    def marked():
        for _ in range(1000):
            with profile_mark('stage'): pass
    assert effort(marked) < 20 * 1000 and len(profile_events) == 5
    profile_events.clear()


def test_L3_counters_reset_history_but_not_memory():
    GlobalCounters.global_ops, used = 7, GlobalCounters.mem_used
    GlobalCounters.reset()
    assert GlobalCounters.global_ops == 0 and GlobalCounters.mem_used == used


def test_C5_user_line_is_outside_the_package():
    inside = {'__name__': 'tinysched.frontend.pretended', 'user_line': user_line}
    exec('def realize(): return helper()\ndef helper(): return user_line()', inside)
    here = sys._getframe().f_lineno + 1
    assert inside['realize']() == f'{os.path.relpath(__file__)}:{here}'


def test_C3_cache_folder_is_private_and_made_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'deep' / 'cache'))
    folder = cache_dir()
    assert not (tmp_path / 'deep').exists()
    assert cache_dir(create=True) == folder and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match='others can write'): cache_dir(create=True)
    monkeypatch.setenv('XDG_CACHE_HOME', 'not/absolute')
    assert cache_dir().is_absolute()
