"""The verbs `board` and `report`: pages of runs, served or written to a file."""

import os
import socket
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from longtake import errors
from longtake.cli import say


def board(
    folder: Annotated[
        Path, typer.Argument(metavar="[RUNS_DIR]", help="A folder with runs in it, or a run.")
    ] = Path("runs"),
    host: Annotated[
        str,
        typer.Option(help="The address to listen on; of others than this machine, with a token."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0: any that is free.")
    ] = 8420,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in this machine's browser.")
    ] = False,
) -> None:
    """Serve pages of all runs in a folder, which show what is new; Ctrl-C ends it.

    It reads files only, and writes nothing in the folder.
    """
    from longtake.board import server

    if not folder.is_dir():
        raise errors.RunError(
            f"{folder} is not a folder. Expected one that has runs in it, or a run directory."
        )
    sock = server.listen(host, port)
    bound = sock.getsockname()[1]
    token = None if server.is_loopback(host) else server.new_token()
    url = server.address(host, bound, token=token)
    say.line(f"Board of {folder}: {url}")
    if token is None and "SSH_CONNECTION" in os.environ:
        here = socket.gethostname()
        say.line(f"From your machine: ssh -L {bound}:localhost:{bound} {here}, then open {url}")
    say.line("Ctrl-C ends it.")
    if open_browser:
        webbrowser.open(url)
    server.serve(folder, host, sock, token)
