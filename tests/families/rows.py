"""All kinds of models, in the order of the guide's table."""

from tests.families import (
    release_flux,
    release_flux2,
    release_qwen_image,
    release_qwen_image_edit,
    release_wan,
    release_z_image,
)

ROWS = (
    *release_wan.ROWS,
    *release_flux.ROWS,
    *release_flux2.ROWS,
    *release_z_image.ROWS,
    *release_qwen_image.ROWS,
    *release_qwen_image_edit.ROWS,
)
