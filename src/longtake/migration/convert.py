"""How settings of other trainers become values of a recipe: the functions that rows name in `how`.

Each takes the draft, the row, the setting's name and its value, and raises ValueError (or what
Python raises for a wrong type) for a value that it does not know. Those for sets of clips change
the last set of the draft.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from longtake.migration.draft import ALPHA, Draft, show
from longtake.migration.reading import plain
from longtake.migration.tables import Row, shared

_SECRET = re.compile(
    r"(?:token|secrets?|passw(?:or)?d|credentials?|api_?key|(?:access|secret)_key)(?:$|\.)", re.I
)
"""Names of settings that no table has, and whose values are secret."""
_SECRET_VALUE = re.compile(r"\b(?:hf|ghp|sk|wandb)_\w{16,}|://[^/\s:]*:[^/\s@]*@")


def apply(draft: Draft, rows: Mapping[str, Row], values: Mapping[str, Any]) -> None:
    """Translate settings by their rows; unknown ones and secrets are named, not their values."""
    for key, value in ((str(name), value) for name, value in values.items()):
        if value is None or value == {}:
            continue
        row = rows.get(key) or row_of_prefix(rows, key)
        holds_secret = _SECRET_VALUE.search(str(value)) is not None
        if row is None or holds_secret:
            is_secret = holds_secret or _SECRET.search(key) is not None
            if not is_secret or value != "":
                draft.say("secret" if is_secret else "unknown", key, "")
        elif row.ignored or is_off(value, row):
            continue
        elif not row.to:
            draft.say("none", key, row.note)
        else:
            converter: Callable[[Draft, Row, str, Any], None] = globals()[row.how]
            try:
                converter(draft, row, key, plain(value))
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
                draft.tell("none", key, "not_understood", value=show(value))
            else:
                if row.note and row.how != "decide":
                    draft.say("differs", key, row.note)


def row_of_prefix(rows: Mapping[str, Row], key: str) -> Row | None:
    """Return the row of a whole table of settings, such as `cloud.*`."""
    parts = key.split(".")
    ends = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((rows[f"{end}.*"] for end in ends if f"{end}.*" in rows), None)


def is_off(value: Any, row: Row) -> bool:
    # `True == 1` in Python, but not in a configuration.
    value = plain(value)
    return any(
        value == each and isinstance(value, bool) is isinstance(each, bool) for each in row.off
    )


def copy(draft: Draft, row: Row, key: str, value: Any) -> None:
    value = [plain(each) for each in value] if isinstance(value, list) else value
    if row.fact and row.how in ("copy", "scaled") and not math.isfinite(value):
        raise ValueError
    if draft.clips:
        draft.clips[-1].given[row.fact or row.to] = value
    elif row.fact:
        draft.facts[row.fact] = value
    else:
        draft.set(row.to, value)


def text(draft: Draft, row: Row, key: str, value: Any) -> None:
    copy(draft, row, key, str(value))


def lookup(row: Row, value: Any) -> Any:
    """Return our value for a trainer's name; names are compared without case and module path."""
    known: Mapping[str, Any] = shared()[row.shared] if row.shared else row.values
    return known[str(value).lower().partition("|")[0].rpartition(".")[2]]


def choice(draft: Draft, row: Row, key: str, value: Any) -> None:
    try:
        copy(draft, row, key, lookup(row, value))
    except KeyError:
        default = row.values.get("else", draft.tool.defaults.get(row.to))
        instead = "longtake's default" if default is None else show(default)
        draft.decide(row.to, "no_equivalent", key=key, value=show(value), instead=instead)
        if default is not None:
            copy(draft, row, key, default)


def when_true(draft: Draft, row: Row, key: str, value: Any) -> None:
    if value is True:
        copy(draft, row, key, row.values["true"])


def quantize(draft: Draft, row: Row, key: str, value: Any) -> None:
    """Bits of frozen weights; some trainers have a switch beside them, so they are a fact."""
    try:
        kind = lookup(row, value)
    except KeyError:
        kind = "nf4"
        draft.decide(row.to, "nearest_bits", key=key, value=show(value))
    draft.facts[row.fact] = kind if row.to == "model.quantize" else kind.removesuffix("_dynamic")


def dtype(draft: Draft, row: Row, key: str, value: Any) -> None:
    name = str(value).lower().replace("_", "")
    draft.set(row.to, "fp32" if name in ("fp32", "float32", "float", "no") else "bf16")
    if "16" in name and not name.startswith("b"):
        draft.decide(row.to, "no_equivalent", key=key, value=show(value), instead="bf16")


def clipping(draft: Draft, row: Row, key: str, value: Any) -> None:
    # 0 means "none" elsewhere, and would scale all gradients to 0 here.
    off = float(value) == 0
    draft.set(row.to, 1e9 if off else value, "no_clipping" if off else "")


def optimizer(draft: Draft, row: Row, key: str, value: Any) -> None:
    name, known = str(value).lower().rpartition(".")[2], shared()["optimizers"]
    found = known.get(name, known["adamw"])
    if name not in known:
        draft.decide(row.to, "own_rate", key=key, value=show(value))
    elif name not in (found["kind"], f"{found['kind']}opt"):
        states = "whose states torchao keeps in 8 bits" if "8bit" in found["kind"] else "in fp32"
        named = {"value": show(value), "kind": found["kind"], "states": states}
        draft.tell("differs", key, "optimizer", **named)
    draft.set(row.to, found["kind"])
    draft.facts["optimizer"] = found


def betas(draft: Draft, row: Row, key: str, value: Any) -> None:
    first, second = value.split(",") if isinstance(value, str) else value
    draft.set(row.to, [float(str(first).strip("([ ")), float(str(second).strip(")] "))])


def batch(draft: Draft, row: Row, key: str, value: Any) -> None:
    if isinstance(value, list):  # [[resolution, batch], ...]
        sizes = ", ".join(f"{number} at {side}" for side, number in value)
        draft.tell("none", key, "batches", value=show(sizes))
        value = min(int(number) for _, number in value)
    copy(draft, row, key, int(value))


def scaled(draft: Draft, row: Row, key: str, value: Any) -> None:
    copy(draft, row, key, float(value) * row.values.get("by", 1) + row.values.get("plus", 0))


def count(draft: Draft, row: Row, key: str, value: Any) -> None:
    """A whole number of at least 1."""
    if int(value) < 1:
        raise ValueError
    copy(draft, row, key, int(value))


def share_or_steps(draft: Draft, row: Row, key: str, value: Any) -> None:
    # One means the whole run in some trainers, and a step in others; here a share is below 1.
    is_share = 0 < value < 1 or value == row.values.get("whole")
    value = min(value, 0.999) if is_share else max(0, int(value))
    draft.set("optimizer.warmup_ratio" if is_share else row.to, value)


def rank(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.set(row.to, min(int(value), 2**14))
    if int(value) > 2**14:  # "as high as it goes", for LoKr of full matrices
        draft.tell("differs", key, "full_matrix", value=int(value))
        draft.facts["full_matrix"] = True


def peft(draft: Draft, row: Row, key: str, value: Any) -> None:
    # OneTrainer has it in configurations of full fine-tuning, too.
    if draft.values.get(row.to) != "full":
        choice(draft, row, key, value)


def noise(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.facts["noise"] = str(value)
    if str(value) not in draft.tool.noise:
        draft.decide(row.to, "no_equivalent", key=key, value=show(value), instead="logit_normal")


def decide(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.decide(row.to, "given", key=key, value=show(value), note=row.note)


def say_only(draft: Draft, row: Row, key: str, value: Any) -> None:
    """Nothing is set; the row's note says what differs."""


def loraplus(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.set(row.to, [{"layers": ["*.lora_B.*"], "factor": float(value)}])


def release(draft: Draft, row: Row, key: str, value: Any) -> None:
    """A release in diffusers' layout: a folder, or a repository's id."""
    if str(value).endswith((".safetensors", ".pth", ".pt", ".ckpt", ".gguf", ".sft", ".bin")):
        weights(draft, row, key, value)
    else:
        draft.facts.setdefault("release", str(value))


def weights(draft: Draft, row: Row, key: str, value: Any) -> None:
    """Weights in another layout, of which the release cannot be told."""
    draft.facts.setdefault("weights", {})[key] = True


def only_file(draft: Draft, row: Row, key: str, value: Any) -> None:
    """A file, or a list of one."""
    (file,) = value if isinstance(value, list) else [value]
    draft.set(row.to, str(file))


def uncaptioned(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.clips[-1].uncaptioned = str(value)


def folder(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.clips[-1].source = str(value)


def kohya_folder(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.clips[-1].source, draft.clips[-1].is_kohya = str(value), True


def repeats(draft: Draft, row: Row, key: str, value: Any) -> None:
    number = float(value) + row.values.get("plus", 0)
    draft.clips[-1].repeats = whole = max(1, round(number))
    if number != whole:
        draft.tell("differs", key, "repeats", value=f"{number:g}", number=whole)


def of_set(draft: Draft, row: Row, key: str, value: Any) -> None:
    """A number or a switch of a set of clips that is a field of `ClipSet`: the row's fact."""
    setattr(draft.clips[-1], row.fact, float(value))


def captions(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.clips[-1].captions[row.to.rpartition(".")[2]] = value


def prefix(draft: Draft, row: Row, key: str, value: Any) -> None:
    if str(value).strip():
        draft.clips[-1].captions["prefixes"] = [str(value).strip()]


def control(draft: Draft, row: Row, key: str, value: Any) -> None:
    inputs = draft.clips[-1].conditioning
    for each in value if isinstance(value, list) else [value]:
        number = 1 + sum(name != "mask" for name in inputs)
        inputs["reference" if number == 1 else f"reference_{number}"] = str(each)


def mask(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.clips[-1].conditioning["mask"] = str(value[0] if isinstance(value, list) else value)


def alpha_mask(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.clips[-1].conditioning.setdefault("mask", ALPHA)


def size_of(value: Any) -> list[int]:
    """Return width and height: of a side, [width, height], "832x480" or "832,480"."""
    if isinstance(value, str):
        value = value.lower().replace("x", ",").split(",")
    sides = [int(side) for side in (value if isinstance(value, list) else [value])]
    width, height = sides if len(sides) > 1 else sides * 2
    return [width, height]


def resolution(draft: Draft, row: Row, key: str, value: Any) -> None:
    size = size_of(value)
    draft.facts.setdefault("areas", []).append(math.prod(size))
    draft.facts["size"] = max(size, draft.facts.get("size", size), key=math.prod)


def sizes(draft: Draft, row: Row, key: str, value: Any) -> None:
    """Several resolutions, of which each clip is trained at every one."""
    given = value if isinstance(value, list) else str(value).split(",")
    found = [size_of(each) for each in given]
    if len(found) > 1:
        sides = ", ".join(str(math.isqrt(math.prod(each))) for each in found)
        draft.tell("none", key, "sizes", sides=sides)
    resolution(draft, row, key, max(found, key=math.prod))


def aspects(draft: Draft, row: Row, key: str, value: Any) -> None:
    sides = [each if isinstance(each, list) else [each, 1] for each in value]
    copy(draft, row, key, [round(float(each[0]) / each[1], 4) for each in sides])


def size_buckets(draft: Draft, row: Row, key: str, value: Any) -> None:
    """[[width, height, frames], ...]."""
    names = ("width", "height", "num_frames")
    copy(draft, row, key, [dict(zip(names, map(int, each), strict=True)) for each in value])


def frames(draft: Draft, row: Row, key: str, value: Any) -> None:
    numbers = value if isinstance(value, list) else [value]
    draft.facts.setdefault("frames", set()).update(max(1, int(each)) for each in numbers)


def seed(draft: Draft, row: Row, key: str, value: Any) -> None:
    if int(value) >= 0:
        draft.set(row.to, [int(value)])


def picture(draft: Draft, row: Row, key: str, value: Any) -> None:
    draft.values.setdefault("conditioning", {})[row.values["name"]] = str(value)


def sample_size(draft: Draft, row: Row, key: str, value: Any) -> None:
    """Of several sizes the first one is sampled."""
    draft.values["width"], draft.values["height"] = size_of(str(value).partition(",")[0])
