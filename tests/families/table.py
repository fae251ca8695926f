"""The table of docs/guides/families.md: `python -m tests.families.table` writes it anew.

With `--plans` it plans all kinds of models first, or those that are named behind it.
"""

import sys
from pathlib import Path

from tests.families import plans
from tests.families.row import Row
from tests.families.rows import ROWS

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "families.md"
_BEGIN, _END = "<!-- table: written by tests/families/table.py -->", "<!-- end of the table -->"
_RELEASES = {
    "Wan 2.1 T2V": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "Wan 2.1 I2V": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "Wan 2.1 FLF2V": "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    "Wan 2.2 TI2V-5B": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "Wan 2.2 A14B T2V": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "Wan 2.2 A14B I2V": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "HunyuanVideo 1.5 T2V": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    "HunyuanVideo 1.5 I2V": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
    "LTX-2": "Lightricks/LTX-2",
    "LTX-2, first frame": "Lightricks/LTX-2",
    "LTX-2.3": "diffusers/LTX-2.3-Diffusers",
    "LTX-2.3 with sound": "diffusers/LTX-2.3-Diffusers",
    "MiniMax H3": "MiniMaxAI/MiniMax-H3",
    "FLUX.1": "black-forest-labs/FLUX.1-dev",
    "FLUX.1 Kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    "FLUX.2 dev": "black-forest-labs/FLUX.2-dev",
    "FLUX.2 dev, references": "black-forest-labs/FLUX.2-dev",
    "FLUX.2 klein": "black-forest-labs/FLUX.2-klein-base-4B",
    "FLUX.3": "black-forest-labs/flux-3-image-klein-base",
    "FLUX.3, references": "black-forest-labs/flux-3-image-klein-base",
    "Z-Image": "Tongyi-MAI/Z-Image",
    "Krea 2 Turbo": "krea/Krea-2-Turbo",
    "Krea 2": "krea/Krea-2-Raw",
    "Qwen-Image": "Qwen/Qwen-Image",
    "Qwen-Image 2.1": "Qwen/Qwen-Image-2.1",
    "Qwen-Image 2.1, references": "Qwen/Qwen-Image-2.1",
    "Qwen-Image-Edit": "Qwen/Qwen-Image-Edit",
    "Qwen-Image-Edit-2509": "Qwen/Qwen-Image-Edit-2509",
    "Qwen-Image-Edit-2511": "Qwen/Qwen-Image-Edit-2511",
}
_HEAD = (
    *(
        "model",
        "release",
        "`model.family`",
        "task",
        "its `data.conditioning`",
        "sampler like the release",
    ),
    *(f"LoRA in {gib} GiB" for gib in plans.DEVICES),
)


def facts(row: Row) -> list[str]:
    """The cells of a kind of model."""
    pictures = ", ".join(f"`{name}`" for name in row.pictures) or "-"
    release = f"`{_RELEASES[row.kind]}`" if row.kind in _RELEASES else "-"
    described = [row.kind, release, f"`{row.family}`", row.task, pictures, f"`{row.solver}`"]
    return described + plans.cells(plans.known().get(row.kind))


def lines(page: str) -> list[str]:
    """The rows that a page has."""
    table = page.partition(_BEGIN)[2].partition(_END)[0]
    return [line for line in table.splitlines() if line]


def expected() -> list[str]:
    """The rows that it should have."""
    cells = [list(_HEAD), ["---"] * len(_HEAD), *map(facts, ROWS)]
    return [f"| {' | '.join(row)} |" for row in cells]


def page() -> str:
    return _PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    if "--plans" in sys.argv:
        named = sys.argv[sys.argv.index("--plans") + 1 :]
        plans.update([row for row in ROWS if row.kind in named or not named])
    before, _, rest = page().partition(_BEGIN)
    after = rest.partition(_END)[2]
    written = "\n".join(expected())
    _PAGE.write_text(f"{before}{_BEGIN}\n\n{written}\n\n{_END}{after}", encoding="utf-8")
