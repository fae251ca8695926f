"""What rsync and ssh say, in one sentence; their words are those of rsync 3.2.7, OpenSSH 9.2."""

import pytest

from longtake.evaluation.sync.address import parse
from longtake.evaluation.sync.said import error_of, is_fine
from longtake.evaluation.sync.transport import GoneError

_CUT_OFF = """
rsync: connection unexpectedly closed (0 bytes received so far) [Receiver]
rsync error: error in rsync protocol data stream (code 12) at io.c(232) [Receiver=3.2.7]
"""


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (12, "Host key verification failed." + _CUT_OFF, "does not know its host key"),
        (12, "me@c: Permission denied (publickey)." + _CUT_OFF, "without a password"),
        (12, "ssh: Could not resolve hostname c: x" + _CUT_OFF, "no such host"),
        (12, "ssh: connect to host c port 22: No route to host" + _CUT_OFF, "No route to host"),
        (12, "bash: line 1: rsync: command not found" + _CUT_OFF, "not installed there"),
        (12, _CUT_OFF, "cannot be reached"),
        (30, "rsync error: timeout in data send/receive (code 30) at io.c(204)", "cannot be"),
        (
            11,
            'rsync: [receiver] write failed on "/m/x": No space left on device (28)\n'
            "rsync error: error in file IO (code 11) at receiver.c(401) [receiver=3.2.7]\n"
            "rsync: [sender] write error: Broken pipe (32)\n",
            'a disk is full (rsync: [receiver] write failed on "/m/x"',
        ),
        (
            23,
            'rsync: [sender] send_files failed to open "/r/x": Permission denied (13)\n'
            "rsync error: some files/attrs were not transferred (code 23)\n",
            "may not be read or written",
        ),
        (255, "", "status 255"),
    ],
)
def test_the_cause_is_told_and_not_its_consequences(status: int, said: str, words: str) -> None:
    """One sentence, that begins with what was given."""
    told = str(error_of(parse("me@c:/runs"), status, said))
    assert words in told
    assert told.startswith("me@c:/runs: ")
    assert "\n" not in told
    assert "Broken pipe" not in told


def test_what_is_not_there_is_another_matter() -> None:
    """It may have been deleted just now."""
    said = 'rsync: [sender] change_dir "/r" failed: No such file or directory (2)\nrsync error: x\n'
    assert isinstance(error_of(parse("me@c:/runs"), 23, said), GoneError)
    mixed = said + 'rsync: [sender] opendir "/r/x" failed: Input/output error (5)\n'
    assert not isinstance(error_of(parse("me@c:/runs"), 23, mixed), GoneError)


def test_a_link_that_leads_nowhere_stops_nothing() -> None:
    """Nor does a file that was deleted meanwhile; any other complaint beside it does."""
    said = 'symlink has no referent: "/r/latest"\nrsync error: some files (code 23)\n'
    assert is_fine(23, said)
    assert is_fine(24, "file has vanished: x\n")
    assert not is_fine(23, said + "rsync: [sender] opendir failed: Input/output error (5)\n")
    assert not is_fine(23, "")
