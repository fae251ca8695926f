"""All kinds of models, in the order of the guide's table."""

from tests.families import (
    release_flux,
    release_flux2,
    release_flux3,
    release_hunyuan_video15,
    release_ideogram4,
    release_krea2,
    release_ltx2,
    release_minimax_h3,
    release_qwen_image,
    release_qwen_image21,
    release_qwen_image_edit,
    release_wan,
    release_z_image,
)
from tests.families.row import Row

from longtake.models.base import family

ROWS = (
    *release_wan.ROWS,
    *release_hunyuan_video15.ROWS,
    *release_ltx2.ROWS,
    *release_minimax_h3.ROWS,
    *release_flux.ROWS,
    *release_flux2.ROWS,
    *release_flux3.ROWS,
    *release_z_image.ROWS,
    *release_krea2.ROWS,
    *release_ideogram4.ROWS,
    *release_qwen_image.ROWS,
    *release_qwen_image_edit.ROWS,
    *release_qwen_image21.ROWS,
)


def transformer_class(row: Row) -> str:
    """Of diffusers."""
    name: str = getattr(family(row.family), "transformer_class")  # noqa: B009
    return name


ONE_OF_EACH = tuple({transformer_class(row): row for row in ROWS}.values())
"""The last row of each transformer: the suite runs for these, and for the others as drills."""
