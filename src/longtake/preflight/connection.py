"""Can the processes connect to each other: gloo, and NCCL where each has a card of its own."""

from datetime import timedelta

import torch
import torch.distributed as dist

from longtake.config import Recipe
from longtake.preflight.finding import Judged
from longtake.preflight.meeting import Meeting
from longtake.preflight.setting import Facts, Setting

NAME = "connection"


class Connection:
    """A check that needs to know where all meet.

    Args:
        meeting: of all processes.
        with_cards: whether each process has a card of its own.
    """

    NAME = NAME

    def __init__(self, meeting: Meeting, *, with_cards: bool) -> None:
        self._meeting, self._with_cards = meeting, with_cards

    def measure(self, setting: Setting) -> Facts:
        """Make the process group that other checks talk through."""
        store = self._meeting.store
        assert store is not None
        limit = timedelta(seconds=setting.seconds)
        if self._with_cards:
            torch.cuda.set_device(setting.place.local_rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._with_cards else "gloo",
            store=dist.PrefixStore("preflight/group", store),  # type: ignore[attr-defined]
            rank=setting.place.rank,
            world_size=setting.place.size,
            timeout=limit,
        )
        dist.all_reduce(torch.zeros(1))
        return {"backend": dist.get_backend()}

    def judge(self, facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
        """Whoever could not connect has failed, which is told of any check."""
        return Judged()
