"""python -P -m longtake.monitor RUN: watch this node's part of a run, as `train` starts it."""

from longtake.monitor.watcher import run_as_program

if __name__ == "__main__":
    run_as_program()
