"""How much Python does, counted in function calls: the same on a machine that has time and on one that has none."""
import sys


def effort(fn, *args):
    "Calls and returns of functions, Python's and C's, while `fn` runs"
    n, before = 0, sys.getprofile()

    def count(frame, event, arg):
        nonlocal n
        n += 1
    sys.setprofile(count)
    try: fn(*args)
    finally: sys.setprofile(before)
    return n
