"""Runs a command on a node for as long as who asked for it over ssh is there.

    python -m longtake.preflight.leash COMMAND...

ssh ends without a word to what it has started. This program's stdin ends with ssh, and then the
command gets SIGTERM, and SIGKILL some seconds later, with all that it has started.
"""

import os
import signal
import subprocess
import sys
import threading

_SECONDS_TO_END = 5.0


def main() -> None:
    """Run the command, and end with its exit status."""
    if len(sys.argv) < 2:
        raise SystemExit("This is a part of longtake preflight --nodes, which starts it itself.")
    command = subprocess.Popen(  # noqa: S603 - what our own command line says
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True
    )
    threading.Thread(target=_end_with_stdin, args=(command,), daemon=True).start()
    status = command.wait()
    # Not sys.exit: the thread may be in read(2), where the interpreter would wait for it.
    os._exit(status if status >= 0 else 128 - status)


def _end_with_stdin(command: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 4096):
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(command.pid, number)
            command.wait(_SECONDS_TO_END)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    main()
