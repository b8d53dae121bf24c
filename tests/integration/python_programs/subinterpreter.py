"""The main thread enters another interpreter, and sleeps there."""

try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters


def enter():
    other = interpreters.create()
    interpreters.run_string(
        other, "def inner():\n    import time\n    print('ready', flush=True)\n    time.sleep(9999)\ninner()\n"
    )


enter()
