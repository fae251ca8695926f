"""Modules of the user's own that begin as nothing."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn, zeros

from longtake.models.added_module import Attend, BlockCall
from longtake.models.base import AttentionInputs, BlockInputs


class Notes(nn.Module):
    """Keeps what it sees around blocks and attention, and adds a weight to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(zeros(()))
        self.seen: list[BlockInputs] = []
        self.attended: list[str] = []

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        self.seen.append(inputs)
        after = call(inputs)
        return replace(after, tokens=after.tokens + self.weight)

    def around_attention(self, block: str, attend: Attend, inputs: AttentionInputs) -> Tensor:
        self.attended.append(f"{inputs.name} {inputs.query.shape[2]} {inputs.key.shape[2]}")
        return attend(inputs)


class Scales(nn.Module):
    """Scales all that blocks and attention see, with parameters for each block."""

    def __init__(self, blocks: Sequence[str], width: int) -> None:
        super().__init__()
        for name in ("tokens", "text", "temb", "value"):
            size = (width,) if name == "tokens" else ()
            scales = {each.replace(".", "_"): nn.Parameter(zeros(size)) for each in blocks}
            self.add_module(name, nn.ParameterDict(scales))

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        """Its tokens are scaled in the place of what a block does not see."""
        tokens, text, temb = inputs.tokens, inputs.text, inputs.temb
        if text is None:
            tokens = self._scaled(block, "text", tokens)
        else:
            text = self._scaled(block, "text", text)
        if temb is None:
            tokens = self._scaled(block, "temb", tokens)
        else:
            temb = self._scaled(block, "temb", temb)
        after = call(replace(inputs, tokens=tokens, text=text, temb=temb))
        return replace(after, tokens=self._scaled(block, "tokens", after.tokens))

    def around_attention(self, block: str, attend: Attend, inputs: AttentionInputs) -> Tensor:
        return attend(replace(inputs, value=self._scaled(block, "value", inputs.value)))

    def _scaled(self, block: str, name: str, values: Tensor) -> Tensor:
        scale: Tensor = self.get_submodule(name)[block.replace(".", "_")]  # type: ignore[index]
        return values + values * scale
