"""Rule -> tests: which tests bear the number of which rule of the scheduler.

    python tools/rules.py            the table
    python tools/rules.py --check    exit 1 where a rule that the project keeps has no test
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
KEPT = ('A1 A2 A3 A4 A5 A6 A7 A8 A9 A11 B1 B2 B3 B4 B5 B6 B7 C1 C2 C4 C5 C6 D3 D4 D5 D7 D9 '
        'E1 E2 E3 E4 E5 E6 E7 E8 E9 E10 F1 F2 F3 F5 F6 F7 G1 G2 G6 I3 K1 K2 K4 K6 L2 L3 '
        'M1 M2 M3 M4 M5 M6 M7 M8 M10 M11').split()


def tests_by_rule() -> dict[str, list[str]]:
    "The names of the tests of each rule, by rule in order of letter and number"
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / 'tests').glob('test_*.py')):
        for name, rule in re.findall(r'^ *def (test_([A-N]\d+)_\w+)', path.read_text(), re.M):
            found.setdefault(rule, []).append(f'{path.stem}::{name}')
    return dict(sorted(found.items(), key=lambda item: (item[0][0], int(item[0][1:]))))


def main(argv: list[str]) -> int:
    found = tests_by_rule()
    missing = [rule for rule in KEPT if rule not in found]
    if '--check' not in argv:
        for rule, names in found.items():
            print(f'{rule:4s} {names[0]}', *(f'\n     {name}' for name in names[1:]))
    if missing: print('rules without a test:', *missing)
    return 1 if '--check' in argv and missing else 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
