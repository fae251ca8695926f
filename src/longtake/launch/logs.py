"""Where the ranks of a node say what they say: each in a file of its own, in the run directory."""

import os
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from longtake.failures import LOG_VARIABLE
from longtake.fsio import file_time
from longtake.node_dir import NodeDirectory
from longtake.process import LAUNCHER_VARIABLE

# Both streams of a rank go to one file: by one description of it, or each would write over the
# other, which torch opens by itself.
IN_ONE_FILE: Final = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh")
"""Before a command: what it says on stderr goes to where stdout goes."""


class RankLogs(LogsSpecs):
    """Gives each rank of each start a file; and shows the first one's.

    Args:
        node: whose ranks they are.
        tee: whether rank 0 is shown on stderr as well.

    Attributes:
        paths: of the newest start, by rank.
    """

    def __init__(self, node: NodeDirectory, *, tee: bool) -> None:
        super().__init__()
        self._node = node
        self._shows = tee
        self.paths: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        """The folder of all of them."""
        return str(self._node.logs_path)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files for a start; `envs` are the ranks' environments, by local rank."""
        time = file_time()
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        self.paths = {rank: self._node.rank_log_path(time, rank) for rank in ranks.values()}
        texts = {local: str(self.paths[rank]) for local, rank in ranks.items()}
        for local, text in texts.items():
            Path(text).parent.mkdir(parents=True, exist_ok=True)
            launcher = {LAUNCHER_VARIABLE: str(os.getpid())}
            envs[local] |= {LOG_VARIABLE: text, "PYTHONUNBUFFERED": "1", **launcher}
        shown = {local: texts[local] for local, rank in ranks.items() if rank == 0}
        nowhere = dict.fromkeys(texts, "")
        return LogsDest(
            stdouts=texts,
            stderrs=nowhere,
            tee_stderrs=shown if self._shows else {},
            error_files=nowhere,
        )
