"""Every rule of the scheduler has a test that bears its number, and a paragraph that names it."""
import json
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'tools'))
import rules  # noqa: E402

FOUND = rules.tests_by_rule()
TEXTS = [''.join(c['source']) for p in sorted((ROOT / 'nbs').rglob('*.ipynb'))
         for c in json.loads(p.read_text())['cells'] if c['cell_type'] == 'markdown']
PROSE = {rule for text in TEXTS for rule in re.findall(r'\b[A-N]\d+\b', text)}


@pytest.mark.parametrize('rule', rules.RULES)
def test_the_rule_has_a_test(rule):
    assert rule in FOUND, f'no test is called test_{rule}_...'


@pytest.mark.parametrize('rule', rules.RULES)
def test_the_rule_has_a_paragraph(rule):
    assert rule in PROSE, f'no chapter names {rule} in its prose'


def test_no_test_bears_the_number_of_a_rule_that_is_none():
    assert FOUND.keys() <= {*rules.RULES}


def test_the_command_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(rules, 'RULES', ['A1', 'A99'])
    assert rules.main(['--check']) == 1 and 'A99' in capsys.readouterr().out
