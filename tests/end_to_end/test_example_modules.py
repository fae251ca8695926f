"""The example modules learn: their own conditioning lowers the loss, another clip's does not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.build import TINY_WAN
from torch import Tensor

from longtake.config import Recipe
from longtake.models.added_module import added_modules
from longtake.models.base import LatentShape, latent_shape
from longtake.models.components import Components, assemble
from longtake.models.objective import FlowBatch, flow_losses

_NUM_CLIPS, _STEPS = 8, 45
_MODULES = {
    "control": "controlnet:ControlNet",
    "look": "ip_adapter:IPAdapter",
    "camera": "camera:Camera",
}
_OPTIONS = {
    "control": "{text_width=TEXT, hidden_size=32, depth=1}",
    "look": "{hidden_size=16, grid=2}",
    "camera": "{width_of_camera=4, hidden_size=32}",
}


def _recipe(make: Callable[..., Recipe], family: str, name: str) -> Recipe:
    """All of the tiny model trains beside the module, as its weights are random."""
    key, text_width = f"trainable.modules.{name}", {"flux": "64", "wan": "16"}[family]
    module: tuple[str, ...] = (
        f"{key}.module=examples.modules.{_MODULES[name]}",
        f"{key}.options={_OPTIONS[name].replace('TEXT', text_width)}",
    )
    frames = {"flux": 1, "wan": 5}[family]
    module += (f"data.buckets=[{{num_frames={frames}, height=16, width=16}}]",)
    if family == "wan":
        return make(*TINY_WAN, "trainable.kind=full", *module)
    narrow = ("model.config.num_attention_heads=2", "model.config.num_layers=1")
    return make(
        *("model.family=flux", "data.conditioning={}", "trainable={kind='full'}"),
        *narrow,
        *module,
    )


def _content(name: str, shape: LatentShape) -> tuple[Tensor, dict[str, Tensor]]:
    """Latents of clips, and the conditioning that they follow from."""
    generator = torch.Generator().manual_seed(0)
    channels, num_frames, *_ = shape
    latents = torch.empty(_NUM_CLIPS, *shape)
    if name == "control":  # the clip is its control's negative
        control = torch.randn(_NUM_CLIPS, *shape, generator=generator)
        return -control, {"control_latents": control}
    if name == "look":  # every frame has the picture's colour
        colours = torch.randn(_NUM_CLIPS, channels, 1, 1, 1, generator=generator)
        return latents.copy_(colours), {"look_latents": latents[:, :, :1].clone()}
    path = torch.randn(_NUM_CLIPS, num_frames, channels, generator=generator)
    latents.copy_(path.mT[..., None, None])  # each frame's colour is the camera's numbers
    return latents, {"camera": path}


def _losses(
    parts: Components, latents: Tensor, conditioning: dict[str, Tensor], seed: int
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(latents.shape, generator=generator)
    sigmas = 0.5 + 0.5 * torch.rand(len(latents), generator=generator)
    batch = FlowBatch(latents, noise, sigmas, conditioning)
    return flow_losses(parts, batch, "fp32", torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODULES)
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_an_example_module_learns_what_its_conditioning_says(
    family: str,
    name: str,
    small_recipe: Callable[..., Recipe],
    tiny_flux: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    recipe = _recipe(small_recipe if family == "wan" else tiny_flux, family, name)
    parts = assemble(recipe, ["a clip"], None)
    shape = latent_shape(parts.codec, recipe.data.buckets[0])
    latents, told = _content(name, shape)
    with torch.no_grad():
        prompts = parts.text.encode(["a clip"] * _NUM_CLIPS)
    guidance = {"guidance": torch.ones(_NUM_CLIPS)}
    [module] = added_modules(parts.model).values()
    optimizer = torch.optim.AdamW(parts.model.parameters(), lr=2e-3)
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss = _losses(parts, latents, prompts | guidance | told, step).mean()
        torch.autograd.backward(loss)
        if step == 1:
            grads = {key: each.grad for key, each in module.named_parameters()}
            assert [key for key, grad in grads.items() if grad is None or not grad.any()] == []
        optimizer.step()
    with torch.no_grad():
        others = {key: each.roll(1, dims=0) for key, each in told.items()}
        seeds = range(_STEPS, _STEPS + 8)
        own, permuted = (
            torch.stack([_losses(parts, latents, prompts | guidance | given, s) for s in seeds])
            for given in (told, others)
        )
    assert own.mean() < 0.8 * permuted.mean()
