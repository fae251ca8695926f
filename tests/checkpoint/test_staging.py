"""A copy of a state, which is nobody else's memory."""

import torch
from torch import Tensor, nn

from longtake.checkpoint.staging import Staging


def _state() -> dict[str, object]:
    weights = torch.arange(12.0).reshape(3, 4)
    return {
        "model": {
            "weight": nn.Parameter(weights),
            "transposed": weights.T,
            "scalar": weights[0, 0],
        },
        "optimizer": {"lr": 1e-3, "betas": (0.9, 0.99), "seen": [1, 2], "none": None},
    }


def test_a_copy_stays_what_it_was() -> None:
    """Training goes on changing tensors and lists in place."""
    state = _state()
    copied = Staging().copy(state)
    with torch.no_grad():
        state["model"]["weight"].zero_()  # type: ignore[index]
    state["optimizer"]["seen"].append(3)  # type: ignore[index]
    torch.testing.assert_close(copied, _detached(_state()), rtol=0, atol=0)


def test_the_room_is_used_again() -> None:
    """The second copy costs no memory, and has the second state's values."""
    staging, state = Staging(), {"weight": torch.zeros(5)}
    first: Tensor = staging.copy(state)["weight"]
    state["weight"].fill_(1)
    second: Tensor = staging.copy(state)["weight"]
    assert second.data_ptr() == first.data_ptr()
    assert second.tolist() == [1.0] * 5


def test_a_state_may_change_its_form() -> None:
    """Such as an optimizer's, which has no averages before its first step."""
    staging = Staging()
    staging.copy({"a": torch.zeros(2), "b": torch.zeros(2)})
    copied = staging.copy({"a": torch.ones(3, dtype=torch.float64), "c": torch.ones(1)})
    assert copied["a"].tolist() == [1.0] * 3
    assert copied["a"].dtype == torch.float64
    assert copied.keys() == {"a", "c"}


def _detached(thing: object) -> object:
    if isinstance(thing, dict):
        return {key: _detached(value) for key, value in thing.items()}
    return thing.detach() if isinstance(thing, Tensor) else thing
