"""What Z-Image refuses, beside what each family promises."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.families import release_z_image

from longtake.config import ModelSection
from longtake.errors import RecipeError
from longtake.models.base import LatentShape
from longtake.models.z_image import ZImage

_SHAPE = LatentShape(4, 1, 8, 12)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"siglip_feat_dim": 8}, "siglip_feat_dim 8: it is Z-Image Omni's"),
        ({"all_patch_size": [4]}, r"all_patch_size \[4\] .* lack the patch of 1 x 2 x 2"),
        ({"axes_lens": [64, 64, 64]}, "positions for 64 tokens of text .* but 66 are needed"),
        ({"axes_lens": [1024, 3, 64]}, "positions for 3 rows of tokens, but 4 are needed"),
    ],
)
def test_what_it_cannot_take_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    sizes = {**release_z_image.SIZES, **config}
    section = ModelSection(family="z_image", config=sizes)
    text: Any = SimpleNamespace(embed_dim=sizes["cap_feat_dim"], pooled_dim=None, max_tokens=64)
    with pytest.raises(RecipeError, match=message):
        ZImage().build(section, [_SHAPE], text, weights=False)
