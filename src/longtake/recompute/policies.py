"""Named ways to decide, for every block of a model, what is kept and what is computed again."""

from collections.abc import Mapping, Sequence
from itertools import cycle

from longtake.recompute.apply import Option

Options = Mapping[str, Option]
"""What is done with each block, by its name; those that are not named are kept."""

POLICIES = ("none", "all", "all-but-first", "alternate", "save-attention")


def options_of(policy: str, blocks: Sequence[str]) -> dict[str, Option]:
    """What a named policy does with each of a model's blocks, given in their order."""
    rest: list[Option] = ["recompute"] * (len(blocks) - 1)
    chosen: dict[str, Sequence[Option]] = {
        "none": ["keep"] * len(blocks),
        "all": ["recompute"] * len(blocks),
        "all-but-first": ["keep", *rest],
        "alternate": [option for option, _ in zip(cycle(_KEEP_THEN_NOT), blocks, strict=False)],
        "save-attention": ["save-attention"] * len(blocks),
    }
    return dict(zip(blocks, chosen[policy], strict=True))


_KEEP_THEN_NOT: tuple[Option, Option] = ("keep", "recompute")
