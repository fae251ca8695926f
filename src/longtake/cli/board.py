"""The commands `board` and `report`: pages of runs, served or written to a file."""

import os
import socket
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from longtake import errors, progress
from longtake.cli import say
from longtake.formatting import format_size, plural


def board(
    folder: Annotated[
        Path, typer.Argument(metavar="[RUNS_DIR]", help="A folder with runs in it, or a run.")
    ] = Path("runs"),
    host: Annotated[
        str,
        typer.Option(help="The address to listen on; one that other machines reach needs a token."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 chooses a free one.")
    ] = 8420,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in this machine's browser.")
    ] = False,
) -> None:
    """Serve pages of all runs in a folder, which update by themselves; Ctrl-C ends it.

    It only reads files, and writes nothing in the folder.
    """
    from longtake.board import server

    if not folder.is_dir():
        raise errors.RunError(
            f"{folder} is not a folder. Expected one that has runs in it, or a run directory."
        )
    sock = server.listen(host, port)
    # Not always `port`: 0 stands for any, and a default that is taken for the next free one.
    bound = sock.getsockname()[1]
    token = None if server.is_loopback(host) else server.new_token()
    url = server.address(host, bound, token=token)
    say.line(f"Board of {folder}: {url}")
    # The board listens on this machine only: a browser elsewhere needs a tunnel.
    if token is None and "SSH_CONNECTION" in os.environ:
        here = socket.gethostname()
        say.line(f"From your machine: ssh -L {bound}:localhost:{bound} {here}, then open {url}")
    say.line("Ctrl-C ends it.")
    if open_browser:
        webbrowser.open(url)
    server.serve(folder, host, sock, token)


def report(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write (.html) [default: RUN-report.html].")
    ] = None,
    media_mib: Annotated[
        float,
        typer.Option(
            min=0, max=4096, help="Maximum size of the embedded videos and pictures, in MiB."
        ),
    ] = 24.0,
    as_json: say.AsJson = False,
) -> None:
    """Write the pages of a run, with its newest videos, to one HTML file that can be sent.

    It contains captions, file names, hosts and the ends of logs: read it before you send it.
    """
    with progress.phase_lines(say.console(), "reading the run's records"):
        from longtake.board.report import write_report

        path = run.resolve()
        target = Path(f"{path.name}-report.html") if out is None else out
        links = write_report(path, target, media_mib)
    size = target.stat().st_size
    if as_json:
        say.result({"report": str(target), "bytes": size, "media_left_out": links.num_left_out})
        return
    say.line(f"wrote {target} ({format_size(size)})")
    if links.num_left_out:
        left = plural(links.num_left_out, "video or picture", "videos and pictures")
        say.line(f"{left} of the run did not fit into --media-mib {media_mib:g} and are not in it.")
