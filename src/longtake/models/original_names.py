"""Converts the authors' names of weights to diffusers' where diffusers has no converter.

The facts are those of diffusers' script `convert_hunyuan_video1_5_to_diffusers.py`, which is no
part of the package.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor


@cache
def _renamings() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _convert(weights: Mapping[str, Tensor], name_of_class: str) -> dict[str, Tensor]:
    converted = dict[str, Tensor]()
    for name, value in weights.items():
        for pattern, new in _renamings()[name_of_class].items():
            name = re.sub(pattern, new, name)
        if ".self_attn_qkv." in name:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                converted[name.replace("self_attn_qkv", f"attn.to_{part}")] = rows
        elif name.startswith("norm_out."):  # shift, then scale
            converted[name] = torch.cat(value.chunk(2)[::-1])
        else:
            converted[name] = value
    return converted


def converter_of(name: str) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None:
    """Return a converter by the name of a transformer's class in diffusers; None without one."""
    return partial(_convert, name_of_class=name) if name in _renamings() else None
