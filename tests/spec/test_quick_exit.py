import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from zerofit.spec.process import run_and_exit

def late():
    time.sleep(0.2)
    print("the thread's last word")

def work():
    atexit.register(print, "a handler's last word")
    threading.Thread(target=late).start()
    WORK

run_and_exit(work)
"""


def run(work, **options):
    program = PROGRAM.replace("WORK", work)
    return subprocess.run([sys.executable, "-c", program], text=True, stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize(
    ("work", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no such model')", 1, "no such model"),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken"),
    ],
)
def test_a_process_ends_with_its_status_and_all_its_output(work, status, said):
    done = run(work, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (status, "the thread's last word\na handler's last word\n")
    assert said in done.stderr and bool(said) == bool(done.stderr)


def test_output_that_cannot_be_written_is_a_failure():
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        assert run("pass", stdout=full, env=buffered).returncode == 120


def test_nothing_is_taken_down_at_the_end():
    done = run("import gc; sys.kept = type('K', (), {'__del__': lambda _: print('down')})()", stdout=subprocess.PIPE)
    assert "down" not in done.stdout and done.returncode == 0
