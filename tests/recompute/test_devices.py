"""What cards can do, by name or by numbers."""

import pytest
import torch

from longtake.errors import RecipeError
from longtake.recompute.devices import CPU, DEVICES, device_for, device_named


@pytest.mark.parametrize("name", DEVICES)
def test_known_cards_are_found_by_name(name: str) -> None:
    """However it is written; each faster in bf16 than in fp32, and of more than 23 GiB."""
    card = device_named(f" {name.upper()} ")
    assert card is DEVICES[name]
    assert card.target == "cuda"
    assert card.flops(torch.bfloat16) > card.flops(torch.float32) > card.bandwidth
    assert card.memory_bytes is not None
    assert card.memory_bytes > 23 * 2**30


def test_this_processor_is_a_device() -> None:
    """So that a plan can be held against a run on a computer without a card."""
    assert device_named("cpu") is CPU
    assert CPU.target == "cpu"
    assert CPU.memory_bytes is None


def test_any_card_is_given_by_its_numbers() -> None:
    """bf16 operations and bytes a second; its memory is not known."""
    card = device_named("312e12, 2.0e12")
    assert card.flops(torch.bfloat16) == 312e12
    assert card.flops(torch.float16) == 312e12
    assert card.flops(torch.float32) == 39e12
    assert card.bandwidth == 2e12
    assert card.target == "cuda"
    assert card.memory_bytes is None


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("h10", "h100"), ("a600", "a6000"), ("rtx409", "rtx4090"), ("cpus", "cpu"), ("", None)],
)
def test_unknown_ones_are_refused_with_the_nearest(name: str, nearest: str | None) -> None:
    """One sentence that also names all others, and how to give numbers."""
    with pytest.raises(RecipeError) as raised:
        device_named(name)
    said = str(raised.value)
    assert repr(name) in said
    assert all(known in said for known in (*DEVICES, "cpu", "FLOPS,BANDWIDTH"))
    assert (f"Did you mean {nearest}?" in said) == (nearest is not None)


@pytest.mark.parametrize(
    "name", ["1e12", "1e12,", "0,1e12", "-1e12,2e12", "1,2,3", "1e12,nan", "1e12,inf"]
)
def test_numbers_have_to_be_two_and_positive(name: str) -> None:
    """Anything else is no card."""
    with pytest.raises(RecipeError, match="is not known"):
        device_named(name)


def test_recipes_without_a_card_in_their_name() -> None:
    """A processor where one is wanted; the card at hand, with the memory that it really has."""
    assert device_for("cpu") is CPU
    at_hand = device_for("auto")
    if not torch.cuda.is_available():
        assert at_hand is CPU
    else:
        assert at_hand.target == "cuda"
        assert at_hand.memory_bytes == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="the card at hand is taken")
@pytest.mark.parametrize(
    ("gib", "name"),
    [(None, "rtx4090"), (24, "rtx4090"), (48, "a6000"), (80, "h100"), (141, "h200"), (999, "h200")],
)
def test_a_card_that_is_not_here_is_the_smallest_with_the_memory(
    gib: int | None, name: str
) -> None:
    """Where a recipe wants a card and there is none, its memory says which it may be."""
    assert device_for("cuda", None if gib is None else gib * 2**30) is DEVICES[name]
