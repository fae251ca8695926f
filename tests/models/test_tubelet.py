"""What the tubelet transformer promises: a velocity, from the caption, the same every time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.errors import ModelError
from longtake.models.tubelet import TubeletTransformer, from_tubes, to_tubes


def _model(seed: int = 0) -> TubeletTransformer:
    """Return a small model whose zeroed layers are filled, so that every input matters."""
    torch.manual_seed(seed)
    model = TubeletTransformer(
        num_frames=4,
        height=8,
        width=16,
        vocabulary_size=9,
        patch_size=(2, 4, 4),
        hidden_size=24,
        num_blocks=2,
        num_heads=2,
    )
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _inputs(batch_size: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    noisy = torch.randn(batch_size, 3, 4, 8, 16, generator=generator)
    sigmas = torch.linspace(0.3, 1.0, batch_size)
    return noisy, sigmas, torch.randint(1, 9, (batch_size, 6), generator=generator)


def test_an_untrained_model_predicts_a_grey_clip() -> None:
    """The network predicts the clip and starts at zero, so its velocity is noisy / sigma."""
    model = TubeletTransformer(num_frames=8, height=8, width=8, vocabulary_size=9)
    noisy = torch.randn(2, 3, 8, 8, 8)
    sigmas = torch.tensor([0.5, 1.0])
    velocity = model(noisy, sigmas, torch.ones(2, 6, dtype=torch.int64))
    torch.testing.assert_close(velocity, noisy / sigmas[:, None, None, None, None])


def test_velocity_stays_bounded_without_noise() -> None:
    noisy, _, token_ids = _inputs()
    assert _model()(noisy, torch.zeros(2), token_ids).isfinite().all()


@pytest.mark.parametrize("what", ["sigma", "caption", "order of words"])
def test_velocity_depends_on(what: str) -> None:
    model, (noisy, sigmas, token_ids) = _model(), _inputs()
    others = {
        "sigma": (sigmas * 0.9, token_ids),
        "caption": (sigmas, token_ids % 8 + 1),
        "order of words": (sigmas, token_ids.flip(1)),
    }
    clip, other = (
        noisy - levels.view(-1, 1, 1, 1, 1) * model(noisy, levels, ids)
        for levels, ids in ((sigmas, token_ids), others[what])
    )
    assert (clip - other).abs().max() > 1e-3


def test_a_short_caption_is_one_padded_with_zeros() -> None:
    noisy, sigmas, token_ids = _inputs()
    token_ids[:, 4:] = 0
    model = _model()
    assert torch.equal(model(noisy, sigmas, token_ids), model(noisy, sigmas, token_ids[:, :4]))


def test_the_same_inputs_give_the_same_gradients_under_autocast() -> None:
    def gradients() -> list[Tensor]:
        model = _model()
        with torch.autocast("cpu", torch.bfloat16):
            velocity = model(*_inputs())
        velocity.square().mean().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    pairs = list(zip(gradients(), gradients(), strict=True))
    assert len(pairs) == len(list(_model().parameters()))
    assert all(torch.equal(one, two) for one, two in pairs)


def test_autocast_stays_close_to_float32() -> None:
    """Bfloat16 costs the prediction about a hundredth, not its meaning."""
    model = _model()
    with torch.autocast("cpu", torch.bfloat16):
        low = model(*_inputs())
    full = model(*_inputs())
    assert ((low - full).norm() / full.norm()).item() < 0.02
    assert low.dtype == torch.float32


def test_tubes_are_put_back_where_they_were_cut() -> None:
    """Cutting into tubes loses and moves nothing; a tube holds neighbours in space and time."""
    clips = torch.arange(2 * 3 * 4 * 8 * 12).reshape(2, 3, 4, 8, 12)
    tubes = to_tubes(clips, (2, 4, 3))
    assert tubes.shape == (2, 2 * 2 * 4, 3 * 2 * 4 * 3)
    assert torch.equal(tubes[0, 0], clips[0, :, :2, :4, :3].flatten())
    assert torch.equal(from_tubes(tubes, (2, 4, 3), (3, 4, 8, 12)), clips)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"height": 30}, "height 30 is not a multiple of 4"),
        ({"num_frames": 9}, "frames 9 is not a multiple of 8"),
        ({"hidden_size": 100}, "does not divide into 3 heads"),
    ],
)
def test_a_grid_that_does_not_divide_is_refused(changed: dict[str, int], said: str) -> None:
    sizes: dict[str, Any] = {"num_frames": 8, "height": 32, "width": 32, "vocabulary_size": 9}
    with pytest.raises(ModelError, match=said):
        TubeletTransformer(**sizes | changed)


def test_a_clip_of_another_size_and_a_long_caption_are_refused() -> None:
    noisy, sigmas, token_ids = _inputs()
    with pytest.raises(ModelError, match=r"\[3, 4, 8, 8\].*built for \[3, 4, 8, 16\]"):
        _model()(noisy[..., :8], sigmas, token_ids)
    with pytest.raises(ModelError, match=r"7 tokens .* at most 6"):
        _model()(noisy, sigmas, torch.ones(2, 7, dtype=torch.int64))
