"""Rule -> tests: which tests bear the number of which rule of the scheduler.

    python tools/rules.py            the table
    python tools/rules.py --check    exit 1 where a rule has no test
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECTIONS = dict(A=15, B=7, C=6, D=9, E=12, F=8, G=6, H=3, I=5, J=7, K=7, L=3, M=11, N=1)   # section -> its rules
RULES = [f'{s}{i + 1}' for s, n in SECTIONS.items() for i in range(n)]


def tests_by_rule() -> dict[str, list[str]]:
    "The names of the tests of each rule, by rule in order of letter and number"
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / 'tests').glob('test_*.py')):
        for name, rule in re.findall(r'^ *def (test_([A-N]\d+)_\w+)', path.read_text(), re.M):
            found.setdefault(rule, []).append(f'{path.stem}::{name}')
    return dict(sorted(found.items(), key=lambda item: (item[0][0], int(item[0][1:]))))


def main(argv: list[str]) -> int:
    found = tests_by_rule()
    missing = [rule for rule in RULES if rule not in found]
    if '--check' not in argv:
        for rule, names in found.items():
            print(f'{rule:4s} {names[0]}', *(f'\n     {name}' for name in names[1:]))
    if missing: print('rules without a test:', *missing)
    return 1 if '--check' in argv and missing else 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
