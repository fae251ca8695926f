"""Context-parallel ranks encode each clip once. Run by two ranks, this file is one."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.build import TINY_WAN, MakeRecipe, quiet_session
from torch import Tensor

from longtake import config
from longtake.data.loader import Loader
from longtake.models.components import Components, assemble
from longtake.parallel.collectives import gather_objects
from longtake.parallel.mesh import World, join
from longtake.training.build import build_state
from longtake.training.inputs import InputQueue
from longtake.training.latent_cache import captions_of


@pytest.mark.slow
def test_ranks_that_share_a_clip_encode_it_once(
    small_recipe: MakeRecipe,
    shapes_catalog: Path,
    run_on_two_ranks: Callable[..., str],
    tmp_path: Path,
) -> None:
    """And all have the bits that each would have computed; of three clips one rank encodes two.

    Also one batch ahead, and where one of the ranks has not decoded it yet.
    """
    clips = shapes_catalog.parent / "clips"
    recipe = small_recipe(
        *TINY_WAN,
        f'data.conditioning.depth={{path="{clips}/{{stem}}.mp4", kind="video"}}',
        f'data.conditioning.person={{path="{clips}/{{stem}}.mp4", kind="mask"}}',
        "trainable.kind=full",
        "trainable.modules.own.module=tests.training.test_latent_cache:AddsInputs",
        "data.caption_dropout=0.3",
        "training.global_batch_size=3",
        "parallel.context=2",
    )
    path = tmp_path / "recipe.toml"
    path.write_text(config.dump(recipe))
    run_on_two_ranks(__file__, path)
    counted = json.loads((tmp_path / "counted.json").read_text())
    # Two steps, each of a clip and its further video.
    assert counted == [{"videos": 2 * 2 * 2, "captions": 4}, {"videos": 2 * 2, "captions": 2}]


def _counting(parts: Components, counts: Counter[str]) -> None:
    """Have a run's encoders count what they are given."""

    def counted(name: str, encode: Callable[..., Any]) -> Callable[..., Any]:
        def count(given: Any, *others: Any, **named: Any) -> Any:
            counts[name] += len(given)
            return encode(given, *others, **named)

        return count

    codec: Any = parts.codec
    text: Any = parts.text
    codec.encode = counted("videos", codec.encode)
    text.encode = counted("captions", text.encode)


class _NoStream:
    """In the place of a GPU's second stream, in the order of the calls."""

    running = nullcontext

    def record(self) -> int:
        return 0

    def hand_over(self, *_: object) -> None:
        pass

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor


def _encode(world: World, path: Path) -> None:
    recipe = config.load(path)
    loader = Loader(recipe.data, batch_size=recipe.training.global_batch_size, seed=recipe.seed)
    parts = assemble(recipe, captions_of(loader), None)
    session = quiet_session(recipe, world)
    shared, counts = build_state(session, parts).inputs, Counter[str]()
    alone = InputQueue(parts, recipe, world.device)
    batches = list(loader.batches(2))
    _counting(parts, counts)
    queue: Any = shared
    queue._thread, queue._side, queue.encodes_ahead = ThreadPoolExecutor(1), _NoStream(), True
    found = []
    for number, batch in enumerate(batches):
        is_decoded = number == 1 or world.is_first  # of the first batch by one rank alone
        shared.encode_ahead(batch if is_decoded else None, len(batch.seeds))
        assert (queue._next is None) == (number == 0)
        found += [each.examples for each in shared.micro_batches(batch)]
    every_count = gather_objects(dict(counts), world)
    wanted = [each.examples for batch in batches for each in alone.micro_batches(batch)]
    assert len(found) == 2
    for one, other in zip(found, wanted, strict=True):
        assert one.source == other.source
        tensors = [{**vars(each), "source": None} for each in (one, other)]
        torch.testing.assert_close(*tensors)
        assert torch.equal(one.latents, other.latents)
        assert {"depth_latents", "person"} <= one.conditioning.keys() == other.conditioning.keys()
        assert all(torch.equal(one.conditioning[n], t) for n, t in other.conditioning.items())
    if world.is_first:
        path.with_name("counted.json").write_text(json.dumps(every_count))


if __name__ == "__main__":
    recipe_path = Path(sys.argv[1])
    with join("cpu", config.load(recipe_path).parallel) as joined:
        _encode(joined, recipe_path)
