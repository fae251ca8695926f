"""Launches, and readers of runs, that tests of several packages share."""

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longtake import config, stacks
from longtake.config import Recipe
from longtake.data.tasks import HERE
from longtake.metrics import Metrics
from longtake.models.components import Components
from longtake.models.numerics import Precision
from longtake.models.quantized import quantize_linears
from longtake.models.streamed import StreamedBlocks
from longtake.parallel.mesh import World
from longtake.planner.activation_checkpointing import caller
from longtake.planner.profiler import MeasuredMemory, measured
from longtake.planner.record import BlockOption, is_streamed, quantization_of
from longtake.planner.trace import Subject
from longtake.run_dir import RunDirectory
from longtake.training.session import Session

MakeRecipe = Callable[..., Recipe]
"""Type of `small_recipe` and other fixtures, which take overrides and return a recipe."""


@dataclass(frozen=True)
class Recipes:
    """Recipes of runs of a second: `small_recipe("training.steps=8", name="plain")`.

    Attributes:
        path: the recipe that is changed; runs are made in its folder.
        catalog: its clips.
    """

    path: Path
    catalog: Path

    def __call__(self, *changes: str, name: str = "run") -> Recipe:
        out = self.path.with_name(name)
        return config.load(self.path, (f"out={out}", f"data.catalog={self.catalog}", *changes))

    def trained(self, *changes: str, name: str = "run") -> Recipe:
        """Make a recipe and train it to its end, without a word."""
        from longtake.training.train import train

        recipe = self(*changes, name=name)
        train(recipe, QUIET)
        return recipe


QUIET = Console(quiet=True)
ALONE = World(0, 0, 1, torch.device("cpu"), None)
TINY_T5 = (
    "text.kind=transformers",
    "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
)
TINY_WAN = (
    *TINY_T5,
    "data.buckets=[{num_frames=5, height=32, width=32}]",
    "model.family=wan",
    "model.config={num_layers=2, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}",
    "codec.kind=autoencoder",
    "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
    "temperal_downsample=[true]}",
)


_T = TypeVar("_T")


def not_none(value: _T | None) -> _T:
    """Return what there has to be."""
    assert value is not None
    return value


class LateCopies:
    """Stands in for `CopyStream` without a GPU: copies are made when they are waited for.

    So whatever is read before, or changed meanwhile, has other values.
    """

    def __init__(self, device: torch.device) -> None:
        self._begun: list[tuple[Tensor, Tensor]] = []
        self._num_made = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._begun.append((target, source))

    def mark(self) -> int:
        return len(self._begun)

    @torch.no_grad()
    def wait(self, mark: int | None) -> None:
        for target, source in self._begun[self._num_made : mark or 0]:
            target.copy_(source)
        self._num_made = max(self._num_made, mark or 0)


def wait_until(found: Callable[[], Any], seconds: float = 600.0) -> Any:
    """Return the result of `found` once it is true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.02)
    raise AssertionError(f"still not true after {seconds} s")


def wait_until_still(pid: int) -> None:
    """Return when a process, which has nothing left to do but to sleep, does so or has ended."""
    wait_until(lambda: stacks.state_of(pid) not in ("R", "D"))


def bare_recipe(out: Path, **sections: Any) -> Recipe:
    """A recipe with only the keys that have no default; `sections` add keys or replace them."""
    values: dict[str, Any] = {
        "out": str(out),
        "data": {
            "catalog": "none.parquet",
            "buckets": [{"num_frames": 8, "height": 32, "width": 32}],
        },
        "model": {"family": "tubelet"},
        "training": {"steps": 40, "global_batch_size": 4},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return config.parse(values, "test")


def change_options(*changes: str) -> list[str]:
    """Options that change keys of a verb's recipe."""
    return [part for change in changes for part in ("--set", change)]


_ports = itertools.count(20_000)


def own_address() -> tuple[str, int]:
    """An address on this machine at which nothing listens: of this process alone.

    Its port is none that a system gives to those who ask for any.
    """
    pid = os.getpid()
    return f"127.{64 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}", next(_ports)


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """Addresses at which a process, or this one, and all its descendants listen."""
    top = psutil.Process(pid)
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in (top, *top.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def start_training(
    command: Sequence[str],
    recipe: Recipe,
    program: Sequence[str] = ("-m", "longtake"),
    folder: Path | None = None,
) -> subprocess.Popen[str]:
    """Start `longtake train` with a recipe, by a command that starts ranks, in a folder."""
    path = Path(f"{recipe.out}.toml")
    path.write_text(config.dump(recipe))
    return subprocess.Popen(
        [*command, *program, "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
        cwd=folder,
    )


def train_by(
    command: Sequence[str],
    recipe: Recipe,
    *,
    program: Sequence[str] = ("-m", "longtake"),
    folder: Path | None = None,
    fails: bool = False,
) -> str:
    """Train to the end, and return what was printed."""
    process = start_training(command, recipe, program, folder)
    output, _ = process.communicate(timeout=600)
    assert (process.returncode != 0) is fails, output
    return output


def make_row(step: int, loss: float | None = 0.5, **changes: Any) -> Metrics:
    """Make a row of metrics.jsonl."""
    rates = {"grad_norm": 1.0, "learning_rate": 1e-3}
    seconds = {"step_seconds": 2.0, "data_seconds": 0.0, "time": 0.0}
    row = {"step": step, "epoch": 0, "loss": loss, **rates, **seconds, **changes}
    return cast("Metrics", row)


def forget_after(recipe: Recipe, step: int) -> None:
    """Delete the checkpoints after a step, as if the run had been killed before it saved them."""
    run = RunDirectory(recipe.out)
    for later in run.checkpoint_steps():
        if later > step:
            shutil.rmtree(run.checkpoint_path(later))


def quiet_session(recipe: Recipe, world: World = ALONE, precision: Precision = "fp32") -> Session:
    """What all steps of a training share; it prints nothing."""
    return Session(recipe, RunDirectory(recipe.out), world, QUIET, precision)


def copy_clips(catalog: Path, folder: Path) -> Path:
    """Copy a catalog's captioned clips, for a test that damages some; returns a catalog of them."""
    from longtake.data.index import index

    shutil.copytree(catalog.parent, folder)
    clips, out = folder / "clips", folder / "catalog.parquet"
    index([clips], captions=clips / "captions.jsonl", out=out, work=HERE)
    return out


def losses(recipe: Recipe) -> list[float]:
    """The loss of every step that metrics.jsonl has."""
    return RunDirectory(recipe.out).losses()


def rows(recipe: Recipe, *keys: str) -> list[list[Any]]:
    """Return the values of some keys at every step that metrics.jsonl has."""
    found: list[Any] = RunDirectory(recipe.out).metrics()
    return [[row[key] for key in keys] for row in found]


def saved(recipe: Recipe, step: int, name: str) -> dict[str, Any]:
    """The tensors of a part of a checkpoint: `model`, `ema/main`, `optimizer`."""
    file = recipe.out / "saved.pt"
    dcp_to_torch_save(RunDirectory(recipe.out).checkpoint_path(step) / name, file)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


def all_saved(recipe: Recipe, step: int) -> dict[str, dict[str, Any]]:
    """The tensors of all parts of a checkpoint."""
    return {name: saved(recipe, step, name) for name in ("model", "ema/main", "optimizer")}


def assert_saved_alike(one: Recipe, other: Recipe, step: int) -> None:
    """Two runs have bitwise the same checkpoint of a step."""
    torch.testing.assert_close(all_saved(one, step), all_saved(other, step), rtol=0, atol=0)


def cache_entries(folder: Path) -> dict[tuple[str, str], bytes]:
    """The bytes of each entry of a cache, by its kind and key; none is in two packs."""
    from safetensors import safe_open

    found: dict[tuple[str, str], bytes] = {}
    for kind in ("latents", "conditioning", "prompts"):
        for pack in (folder / kind).glob("[!.]*.safetensors"):
            tensors: dict[str, bytes] = {}
            with safe_open(pack, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    content = file.get_tensor(name).contiguous()
                    described = f"{name} {content.dtype} {list(content.shape)}".encode()
                    raw = content.reshape(-1).view(torch.uint8).numpy().tobytes()
                    key = name.partition(".")[0]
                    tensors[key] = tensors.get(key, b"") + described + raw
            for key, entry in tensors.items():
                assert (kind, key) not in found
                found[kind, key] = entry
    return found


def events(recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    """The run's events of a kind."""
    return [each for each in RunDirectory(recipe.out).events() if each["event"] == kind]


def block_names(parts: Components) -> list[str]:
    """Names of a model's blocks, in the order of the forward pass."""
    names = {module: name for name, module in parts.model.named_modules()}
    return [names[block] for block in parts.family.blocks(parts.model)]


def hold_weights(
    blocks: Mapping[str, nn.Module], options: Mapping[str, BlockOption], device: str = "cpu"
) -> None:
    """Quantise and stream the blocks of a model with values, as options say."""
    for name, block in blocks.items():
        if (kind := quantization_of(options[name].weights)) is not None:
            quantize_linears(block, kind)
    chosen = [block for name, block in blocks.items() if is_streamed(options[name].weights)]
    StreamedBlocks(chosen, torch.device(device))


def fill_weights(model: nn.Module, device: str = "cpu", std: float = 0.1) -> None:
    """Give a model that was to be traced real weights, so that it can be run."""
    generator = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for held in (cast("dict[str, Tensor | None]", module._parameters), module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    values = torch.randn(tensor.shape, generator=generator, device=device)
                    values = values.mul_(std).to(tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    held[name] = (
                        nn.Parameter(values, tensor.requires_grad) if is_parameter else values
                    )


def fill_lora(model: nn.Module) -> None:
    """Give the LoRA of a model random weights: at the start it changes nothing."""
    generator = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) / 8


def measure_step(
    subject: Subject,
    options: Mapping[str, BlockOption],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> MeasuredMemory:
    """Run a step twice; what the allocator handed out in the second, its inputs held.

    Each runs inside of what `around` makes.
    """
    blocks = {subject.blocks[name]: option for name, option in options.items()}
    subject.call_blocks_by(caller(blocks))
    for _ in range(2):
        subject.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        with around(), measured(torch.device("cpu")) as memory:
            inputs = subject.make_inputs()
            for tensor in _tensors(inputs):
                tensor.fill_(0.3 if tensor.is_floating_point() else 3)
            _fill_texts(inputs)
            loss = subject.loss(inputs)
            memory.mark("forward")
            if loss.requires_grad:
                torch.autograd.backward(loss)
            del loss
    return memory


def _fill_texts(inputs: Any) -> None:
    """Have ragged texts as long as they can be, which is what a plan is made for."""
    told = getattr(inputs, "conditioning", {})
    for name, tensor in told.items():
        if name.endswith("_length"):
            tensor.fill_(told[name.replace("_length", "_embeds")].shape[1])


def _tensors(inputs: Any) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    masks = [] if inputs.loss_weights is None else [inputs.loss_weights]
    told = *inputs.conditioning.values(), *inputs.audio.values()
    return [inputs.latents, inputs.noise, inputs.sigmas, *told, *masks]
