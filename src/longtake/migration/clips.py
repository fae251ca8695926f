"""Decides the keys of a recipe about clips and samples: catalogs, inputs, buckets, presets."""

import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from longtake.migration.draft import ALPHA, Draft, default_of, show
from longtake.migration.tables import refusal, shared
from longtake.models import recognition

_PLACES = {
    "head": "head",
    "single_beginning": "head",
    "middle": "middle",
    "single_middle": "middle",
}
"""Values of `data.window` by the trainers' names of a clip's only window."""
_REFERENCES = ("flux_kontext", "flux2", "qwen_image_edit", "qwen_image_edit_plus")
"""Families that take reference pictures."""
_ONE_REFERENCE = ("flux_kontext", "qwen_image_edit")


def settle_clips(draft: Draft, name: str, family: str, kind: recognition.Kind | None) -> None:
    """Set the keys of `data` and `evaluation`; `name` is that of the run.

    Raises:
        RecipeError: the configuration has no size for its clips.
    """
    set_clips(draft, name)
    set_conditioning(draft, family, kind)
    set_buckets(draft, family)
    set_windows(draft)
    set_samples(draft, family)


def join_sets(draft: Draft) -> None:
    """Write what the recipe has once for all sets of clips, and say where they differ."""
    usual: dict[str, Any] = {"fact.bucketing": True, "fact.windows": 1, "fact.batch": 1}
    usual |= draft.tool.defaults
    to = {row.fact or row.to: row.to for row in draft.tool.clips.values()}
    for name in dict.fromkeys(name for each in draft.clips for name in each.given):
        is_key = name == to[name]
        table = draft.values if is_key else draft.facts
        otherwise: Any = usual.get(name, default_of(name)) if is_key else usual.get(f"fact.{name}")
        found = [each.given.get(name, table.get(name, otherwise)) for each in draft.clips]
        first = next(each.given[name] for each in draft.clips if name in each.given)
        table[name] = given = min(found) if name == "batch" else first
        other = next((each for each in found if each != given), given)
        if other != given and is_key:
            draft.decide(name, "sets_differ", before=show(given), value=show(other))
        elif other != given:
            draft.tell("differs", to[name], "sets_differ", before=show(given), value=show(other))


def set_clips(draft: Draft, name: str) -> None:
    """Name the catalogs, and set what belongs to each of them."""
    taken: set[str] = set()
    of_sets = draft.facts.get("regularisation_weight", 1)
    for each in draft.clips:
        each.loss_weight *= of_sets if each.is_regularisation else 1
        if not each.loss_weight:
            draft.tell("differs", "data.loss_weights", "no_weight", source=each.source)
    draft.clips = [each for each in draft.clips if each.loss_weight] or draft.clips
    for each in draft.clips:
        last = posixpath.basename(each.source.replace("\\", "/").rstrip("/"))
        stem = re.sub(r"[^a-z0-9_-]+", "_", last.rpartition(".")[0].lower() or last.lower())
        stem = stem.strip("_-") or "clips"
        number = next(n for n in range(1, len(draft.clips) + 2) if numbered(stem, n) not in taken)
        each.name = each.key = numbered(stem, number)
        taken.add(each.name)
    catalogs = {each.name: f"catalogs/{each.name}.parquet" for each in draft.clips}
    if any(each.is_kohya for each in draft.clips):
        draft.decide("data.catalog", "kohya")
    if len(catalogs) == 1:
        draft.set("data.catalog", next(iter(catalogs.values())))
        draft.clips[0].key = "catalog"
    else:
        draft.set("data.catalogs", catalogs)
    repeats = {each.key: each.repeats for each in draft.clips if each.repeats != 1}
    if repeats:
        draft.set("data.repeats", repeats)
    weights = {each.key: each.loss_weight for each in draft.clips}
    if weights := {key: weight for key, weight in weights.items() if weight not in (0, 1)}:
        draft.set("data.loss_weights", weights)
    captions = {each.key: dict(each.captions) for each in draft.clips if each.captions}
    for how in captions.values():
        if not how.get("shuffle_tags"):
            how.pop("keep_tags", None)
            how.pop("shuffle_tags", None)
    captions = {each: how for each, how in captions.items() if how}
    if captions:
        draft.set("data.captions", captions)
    shuffled = any(how.get("shuffle_tags") for how in captions.values())
    if shuffled or draft.values.get("data.random_crop"):
        draft.tell("differs", "data.cache", "not_cached")
    else:
        draft.set("data.cache", f"cache/{name}", "cache")


def numbered(stem: str, number: int) -> str:
    return stem if number == 1 else f"{stem}_{number}"


def set_conditioning(draft: Draft, family: str, kind: recognition.Kind | None) -> None:
    found: dict[str, dict[str, Any]] = {}
    if kind is not None and kind.task == "first frame":
        found["first"] = {"kind": "picture", "frame": "first"}
        if "last frame" in kind.title:
            found["last"] = {"kind": "picture", "frame": "last"}
    for name in dict.fromkeys(name for each in draft.clips for name in each.conditioning):
        patterns = [pattern(each.source, each.conditioning.get(name)) for each in draft.clips]
        if name != "mask" and family not in _REFERENCES:
            draft.tell("none", "control", "no_control", family=family)
            continue
        if name != "mask" and name != "reference" and family in _ONE_REFERENCE:
            draft.tell("none", name, "one_reference", family=family)
            continue
        given = [pattern for pattern in dict.fromkeys(patterns) if pattern is not None]
        found[name] = {"kind": "mask" if name == "mask" else "picture", "path": given[0]}
        if given[0] == ALPHA:
            found[name] = {"kind": "mask", "alpha": True}
        if len(set(patterns)) > 1:
            draft.decide(f"data.conditioning.{name}", "one_pattern")
    if "reference" not in found and kind is not None and kind.task == "edit":
        found["reference"] = {"kind": "picture", "path": "../reference/{stem}.*"}
        draft.decide("data.conditioning.reference", "reference")
    if "mask" in found:
        draft.set("flow.loss_mask", "mask")
    else:
        draft.values.pop("flow.loss_mask_floor", None)
    if found:
        draft.set("data.conditioning", found)


def pattern(source: str, folder: str | None) -> str | None:
    """Return where a clip's further file lies, relative to the clip's folder if both are alike."""
    if folder is None:
        return None
    source, folder = source.replace("\\", "/"), folder.replace("\\", "/")
    if "{" in folder:  # already a pattern
        return folder
    is_table = source.endswith((".jsonl", ".json", ".csv"))
    if not is_table and posixpath.isabs(source) == posixpath.isabs(folder) and source:
        folder = posixpath.relpath(folder, source)
    return f"{folder.rstrip('/')}/{{stem}}.*"


def set_buckets(draft: Draft, family: str) -> None:
    facts = draft.facts
    step = shared()["frame_steps"].get(family, 1)
    frames = sorted({(n - 1) // step * step + 1 for n in facts.get("frames") or {1}})
    if set(frames) != set(facts.get("frames") or {1}):
        told = ", ".join(map(str, frames))
        draft.tell("differs", "frames", "frames", step=step, family=family, frames=told)
    side = max(int(facts.get("side_step", 0)), shared()["side_steps"].get(family, 16))
    draft.values.pop("data.auto_buckets.frames", None)
    if "buckets" in facts:
        draft.set("data.buckets", facts["buckets"])
        return
    areas = facts.get("areas")
    if not areas:
        raise refusal("no_size")
    if len(set(areas)) > 1:
        draft.tell("none", "resolution", "areas")
    if facts.get("bucketing") is False:
        width, height = (max(side, each // side * side) for each in facts["size"])
        size = {"height": height, "width": width}
        draft.set("data.buckets", [{"num_frames": n, **size} for n in frames])
        return
    auto: dict[str, Any] = {"pixels": max(areas), "frames": frames}
    aspects = facts.get("aspects") or spaced(facts)
    if aspects:
        auto["aspects"] = aspects
    if side != 16:
        auto["multiple_of"] = side
    draft.set("data.auto_buckets", auto, "auto_buckets")


def spaced(facts: Mapping[str, Any]) -> list[float]:
    """Return aspect ratios evenly spaced by their logarithms, as a configuration counts them."""
    low, high, count = map(facts.get, ("min_aspect", "max_aspect", "num_aspects"))
    if not (count and low and high and 0 < low <= high):
        return []
    count = min(int(count), 64)
    if count == 1:
        return [1.0]
    ratio = math.log(float(high) / float(low)) / (count - 1)
    return [round(float(low) * math.exp(ratio * number), 4) for number in range(count)]


def set_windows(draft: Draft) -> None:
    auto = draft.values.get("data.auto_buckets") or {}
    buckets = draft.values.get("data.buckets") or []
    longest = max([*auto.get("frames", ()), *(each["num_frames"] for each in buckets)])
    if longest == 1:
        return
    window = str(draft.facts.get("window", ""))
    count = int(draft.facts.get("windows", 1))
    if window in _PLACES:
        draft.set("data.window", _PLACES[window])
        return
    draft.set("data.windows", max(1, count))
    if window:
        name = "spread" if window == "spread" else "window"
        draft.tell("differs", "data.windows", name, window=show(window))


# Samples.


def set_samples(draft: Draft, family: str) -> None:
    """Write a preset of the prompts with the same kinds of pictures and the same frame rate."""
    frames, side = shared()["frame_steps"].get(family, 1), shared()["side_steps"].get(family, 16)
    alike: dict[str, list[dict[str, Any]]] = {}
    for sample in draft.samples:
        values = dict(sample)
        if not values.get("prompt"):
            continue
        for key, step, rest in (("width", side, 0), ("height", side, 0), ("num_frames", frames, 1)):
            if isinstance(values.get(key), int):
                values[key] = (values[key] - rest) // step * step + rest
        pictures = sorted(values.get("conditioning", {}))
        alike.setdefault(repr((values.get("fps"), pictures)), []).append(values)
    groups = {name: preset_of(draft, samples) for name, samples in alike.items()}
    file = draft.facts.get("prompts_file")
    if not groups and file is not None:
        groups["file"] = {"prompts_file": file}
        draft.decide("evaluation.presets.samples.prompts_file", "prompts_file")
    for number, group in enumerate(groups.values(), 1):
        key = f"evaluation.presets.{numbered('samples', number)}"
        draft.set(key, group)
        given = {"mask", *group.get("conditioning", ())}
        needed = [name for name in draft.values.get("data.conditioning", ()) if name not in given]
        # Samples that lack their pictures would be refused before training.
        if needed:
            stop_sampling(draft, needed[0])
    if not groups or draft.facts.get("no_samples"):
        stop_sampling(draft, None)
    if draft.facts.get("at_start") and {"sampling.every", "sampling.every_epochs"} & {
        *draft.values
    }:
        draft.set("sampling.at_start", True)


def preset_of(draft: Draft, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a preset with the settings of the first sample; others stand with their prompts."""
    pictures = [each.pop("conditioning", {}) for each in samples]
    texts = [str(each.pop("prompt")) for each in samples]
    # What one of the prompts leaves unset, the preset must not set for it.
    of_all = [key for key in samples[0] if all(key in each for each in samples)]
    common, prompts = {key: samples[0][key] for key in of_all}, list[Any]()
    for text, sample in zip(texts, samples, strict=True):
        own = {key: value for key, value in sample.items() if common.get(key) != value}
        prompts.append({"prompt": text, **own} if own else text)
    known = [name for name in pictures[0] if name in draft.values.get("data.conditioning", {})]
    files = {name: [each[name] for each in pictures] for name in known}
    return {"prompts": prompts, **common, **({"conditioning": files} if files else {})}


def stop_sampling(draft: Draft, name: str | None) -> None:
    """Unset the interval of samples, and say it if they only lack the pictures of a name."""
    for key in ("sampling.every", "sampling.every_epochs"):
        every = draft.values.pop(key, None)
        if every is not None and name is not None:
            draft.decide(key, "pictures", steps=every, name=name)
