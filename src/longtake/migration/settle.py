"""Decides the keys of a recipe that follow from several settings of a configuration together."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from longtake import process
from longtake.config import Expert, ModelSection
from longtake.formatting import join_words
from longtake.migration.clips import settle_clips
from longtake.migration.draft import Draft, default_of, show
from longtake.migration.tables import refusal, shared
from longtake.models import recognition


@dataclass(frozen=True)
class Answers:
    """What a configuration does not say, from the options of `init`."""

    release: str | None = None
    expert: Expert | None = None
    gpus: int | None = None
    memory: str | None = None


def settle(draft: Draft, answers: Answers, name: str, files: str) -> str:
    """Fill in all keys of the draft, and return the title of what is trained.

    Args:
        draft: all settings of the configuration, translated one by one.
        answers: the options of `init`.
        name: name of the run, for its folder and its cache.
        files: the configuration's files as the user gave them, for messages.

    Raises:
        RecipeError: something has to be asked, or is not trained here.
    """
    family, title, kind = model(draft, answers, files)
    draft.set("out", f"runs/{name}")
    set_parts(draft, family)
    set_shift(draft)
    set_defaults(draft)
    count_updates(draft)
    set_trainable(draft, family)
    if draft.values.get("trainable.kind") != "full":
        tool = "diffusers" if family in shared()["export"]["without_comfyui"] else "comfyui"
        draft.set("checkpoint.export", tool, "export", title=draft.tool.title)
        if (dtype := draft.facts.get("export_dtype")) is not None:
            draft.set("checkpoint.export_dtype", dtype)
    set_batches(draft, answers)
    set_length(draft)
    set_noise(draft)
    set_optimizer(draft)
    settle_clips(draft, name, family, kind)
    if answers.memory is not None:
        draft.set("recompute.memory", answers.memory)
    for key, reason in {**shared()["kept"], **draft.tool.kept}.items():
        if key not in draft.values:
            draft.say("kept", key, reason)
    return title


# The model.


def model(draft: Draft, answers: Answers, files: str) -> tuple[str, str, recognition.Kind | None]:
    """Set the release; return its family, title and kind (None if its files are not here)."""
    from longtake.models import base

    facts, tool = draft.facts, draft.tool
    model = str(facts.get("model") or tool.scripts.get(str(facts.get("script")), ""))
    families = tool.families.get(model, tool.families.get(model.partition("/")[0]))
    named = {"files": files, "title": tool.title, "model": show(model)}
    if families is not None and not families:
        raise refusal("untrained", **named, trained=recognition.trained(base.FAMILIES))
    weights = ", ".join(facts.get("weights", ()))
    named_there = "" if weights else str(facts.get("release", ""))
    release = answers.release or named_there or tool.releases.get(model, "")
    release, _, expert = release.partition("@")
    if expert:
        facts["expert"] = expert
    # Unlike those of Path, these raise for no name that a configuration may have.
    is_here = os.path.isdir(os.path.expanduser(release))  # noqa: PTH111, PTH112
    looks_local = release.count("/") != 1 or release[0] in "./~"
    if looks_local and not is_here and answers.release is None:
        ask_for_release(families or (), files, weights, release)
    kind = next((each for each in recognition.KINDS if lists(each, release)), None)
    if kind is not None:
        release = next(e for e in kind.releases if e.lower() == release.lower())
    elif is_here or families is None or len(families) != 1:
        # Its two configurations are read, and no weights.
        kind = recognition.recognise(ModelSection(family="", pretrained=release), base.FAMILIES)
    family = kind.family if kind is not None else (families or ("",))[0]
    if family not in base.FAMILIES or (families and family not in families):
        what = kind.title if kind else "of no family that longtake trains"
        raise refusal("other_release", **named, release=release, kind=what)
    if weights:
        draft.tell("none", weights, "weights", release=release)
    draft.set("model.family", family)
    draft.set("model.pretrained", release)
    set_expert(draft, answers, kind, release, files)
    return family, kind.title if kind is not None else release, kind


def lists(kind: recognition.Kind, release: str) -> bool:
    return release.lower() in (each.lower() for each in kind.releases)


def ask_for_release(families: Sequence[str], files: str, weights: str, release: str) -> None:
    known = [e for kind in recognition.KINDS if kind.family in families for e in kind.releases]
    has = f"{show(release)} is no folder here" if release else "no release is named"
    raise refusal(
        "release",
        files=files,
        has=f"the weights are in another layout ({weights})" if weights else has,
        command=process.command(),
        options=" ".join(f"--from {name}" for name in files.split(", ")),
        known=join_words(known or [recognition.KINDS[0].releases[0]], "or"),
    )


def set_expert(
    draft: Draft, answers: Answers, kind: recognition.Kind | None, release: str, files: str
) -> None:
    has_two = kind is not None and "A14B" in kind.title
    halves = {"high": draft.facts.get("train_high"), "low": draft.facts.get("train_low")}
    named = [half for half, is_trained in halves.items() if is_trained]
    expert = answers.expert or draft.facts.get("expert") or (named[0] if len(named) == 1 else None)
    if not has_two:
        if answers.expert is not None:
            raise refusal("one_expert", release=release)
        return
    if expert is None:
        raise refusal("expert", release=release, files=files)
    draft.set("model.expert", expert)
    if draft.facts.pop("sigma_low", None) is not None or "sigma_high" in draft.facts:
        draft.facts.pop("sigma_high", None)
        draft.tell("differs", "flow.sigma_range", "expert_range", expert=expert)


def set_parts(draft: Draft, family: str) -> None:
    pretrained = draft.values["model.pretrained"]
    for part, kind in (("codec", "autoencoder"), ("text", "transformers")):
        draft.set(f"{part}.kind", kind)
        draft.set(f"{part}.pretrained", pretrained)
    if family in ("flux", "flux_kontext"):
        draft.set("text.pooled", {})
        draft.values.setdefault("model.guidance", 1.0)
    elif draft.values.pop("model.guidance", None) not in (None, 1, 1.0):
        draft.tell("none", "model.guidance", "guidance")
    if family == "ltx2":
        draft.set("model.audio", "off", "audio")
    draft.set("training.device", "cuda")
    draft.values.setdefault("training.precision", "bf16")


def quantized(draft: Draft, key: str, switch: str) -> str | None:
    """Return the bits of weights; some trainers have a switch beside the kind."""
    default = draft.facts.get("quantize_default") if switch in draft.facts else None
    found = draft.facts.get(key, default) if draft.facts.get(switch, True) else None
    return None if found is None else str(found)


# Settings without numbers of clips.


def set_defaults(draft: Draft) -> None:
    """Write the trainer's defaults where the configuration sets nothing."""
    if draft.facts.get("use_ema"):
        decay = draft.facts.get("ema_decay", draft.tool.defaults["fact.ema_decay"])
        interval = draft.facts.get("ema_interval", draft.tool.defaults.get("fact.ema_interval", 1))
        draft.set("ema.decay", round(decay ** (1 / interval), 7))
        if interval != 1:
            draft.tell("differs", "ema.decay", "interval", decay=decay, interval=interval)
    for key, value in draft.tool.defaults.items():
        if key.startswith("fact."):
            fact = key.removeprefix("fact.")
            # A length that is set in epochs replaces the default in steps.
            length, _, unit = fact.rpartition("_")
            other = f"{length}_epochs" if length else "epochs"
            if fact not in draft.facts and not (unit == "steps" and draft.facts.get(other)):
                draft.facts[fact] = value
                if fact == "steps":
                    draft.facts["steps_default"] = True
        elif key not in draft.values and not (
            key == "optimizer.warmup_steps" and "optimizer.warmup_ratio" in draft.values
        ):
            write_default(draft, key, value)


def write_default(draft: Draft, key: str, value: Any) -> None:
    """Set a key to the trainer's default, and say so if it is not ours."""
    ours = default_of(key)
    ours = list(ours) if isinstance(ours, tuple) else ours
    draft.set(key, value)
    if value != ours:
        known = shared()["unset"].get(key, "unset") if ours is None else show(ours)
        draft.set(key, value, "default", title=draft.tool.title, ours=known)
        values = {"value": show(value), "title": draft.tool.title, "ours": known}
        draft.tell("default", key, "default", **values)


def set_shift(draft: Draft) -> None:
    """Choose one of the shifts of a configuration: the first that counts in its trainer."""
    facts, usual = draft.facts, draft.tool.defaults.get("flow.shift")
    static, auto = facts.get("static_shift", usual), facts.get("auto_shift")
    if static and auto:
        draft.tell("differs", "flow.shift", "static_shift", shift=static, auto=auto)
    found = static or auto or facts.get("last_shift")
    if "static_shift" in facts or (found and not usual):
        draft.set("flow.shift", found or 1.0)


def count_updates(draft: Draft) -> None:
    """Divide steps that are micro-batches, as steps are updates here."""
    facts, title = draft.facts, draft.tool.title
    by = int(facts.get(draft.tool.micro_steps, 1))
    if by <= 1:
        return
    facts["accumulation"] = max(by, int(facts.get("accumulation", 1)))
    draft.tell("differs", "gradient_accumulation_steps", "micro_steps", by=by, title=title)
    for name in ("steps", "save_steps", "sample_steps", "optimizer.warmup_steps"):
        table = facts if name in facts else draft.values
        if table.get(name):
            table[name] = max(1, round(table[name] / by))


def set_trainable(draft: Draft, family: str) -> None:
    values, tool = draft.values, draft.tool
    if draft.facts.get("dora") and values["trainable.kind"] == "lora":
        values["trainable.kind"] = "dora"
    if values["trainable.kind"] == "lokr" and "lokr_dim" in draft.facts:
        values["trainable.rank"] = draft.facts["lokr_dim"]
    if values["trainable.kind"] == "lokr" and "lokr_factor" in draft.facts:
        values["trainable.factor"] = draft.facts["lokr_factor"]
    quantize = quantized(draft, "model.quantize", "quantize_on")
    if "quantize_on" in draft.facts:
        draft.facts.setdefault("te_on", draft.facts["quantize_on"])
    if text := quantized(draft, "text.quantize", "te_on"):
        draft.set("text.quantize", text)
    if values.get("trainable.kind") == "full":
        for key in ("rank", "alpha", "targets", "init_from"):
            values.pop(f"trainable.{key}", None)
            draft.comments.pop(f"trainable.{key}", None)
        notes, part = draft.notes, "trainable."
        draft.notes = [n for n in notes if n.kind != "default" or not n.key.startswith(part)]
        values.setdefault("model.dtype", "bf16")
        if quantize:
            draft.tell("none", "model.quantize", "trained_bits")
        return
    # Frozen weights in bf16, as all these trainers have them.
    values["model.dtype"] = "bf16"
    if quantize and values.get("trainable.kind") == "dora":
        draft.tell("none", "model.quantize", "dora_bits")
    elif quantize:
        draft.set("model.quantize", quantize)
    if values.get("trainable.kind") == "lokr" and draft.facts.get("full_matrix"):
        values["trainable.rank"] = 2**14
        values.pop("trainable.alpha", None)  # the scale is 1 whatever it is
    which = draft.facts.get("layers", tool.layers)
    layers = shared()["layers"].get(which, {}).get(family)
    if layers and "trainable.targets" not in values:
        draft.set("trainable.targets", layers, "targets", title=tool.title)
        value = show(layers)
        draft.tell("default", "trainable.targets", "targets_default", value=value, title=tool.title)
    elif "trainable.targets" not in values and which != "attention":
        draft.tell("kept", "trainable.targets", "targets_kept", title=tool.title)


def set_batches(draft: Draft, answers: Answers) -> None:
    facts = draft.facts
    micro, accumulation = int(facts.get("batch", 1)), int(facts.get("accumulation", 1))
    gpus = answers.gpus or facts.get("gpus")
    draft.set("training.micro_batch_size", micro)
    # GPUs that share the tokens of a clip have one batch together.
    groups = int(gpus or 1) // int(draft.values.get("parallel.context", 1)) or 1
    draft.set("training.global_batch_size", micro * accumulation * groups)
    if gpus is None:
        draft.decide("training.global_batch_size", "gpus", title=draft.tool.title)


def set_length(draft: Draft) -> None:
    """Set steps or epochs: of the run, and between its saves and samples."""
    facts = draft.facts
    steps, epochs = facts.get("steps"), facts.get("epochs")
    named = {"steps": steps, "epochs": epochs, "title": draft.tool.title}
    if steps and epochs:
        first = "epochs_first" if facts.get("epochs_first") else "steps_first"
        draft.tell("differs", "epochs", first, **named)
        steps = None if facts.get("epochs_first") else steps
    if epochs and not steps:
        draft.set("training.epochs", int(epochs))
    else:
        draft.set("training.steps", int(steps or 1000))
    if not steps and not epochs:
        draft.decide("training.steps", "length")
    elif steps and facts.get("steps_default"):
        draft.tell("default", "training.steps", "steps_default", value=steps, **named)
    for fact, key in (("save", "checkpoint.every"), ("sample", "sampling.every")):
        if in_steps := facts.get(f"{fact}_steps"):
            draft.set(key, int(in_steps))
        elif in_epochs := facts.get(f"{fact}_epochs"):
            draft.set(f"{key}_epochs", int(in_epochs))


def set_noise(draft: Draft) -> None:
    facts, values = draft.facts, draft.values
    unknown = {"range": "unknown"} if draft.tool.noise else {}
    known: Mapping[str, Any] = draft.tool.noise.get(str(facts.get("noise", "")), unknown)
    for key, value in known.items():
        if key == "note":
            draft.say("differs", str(facts["noise"]), value)
        elif isinstance(value, str) and value.startswith("@"):
            name, _, plus = value[1:].partition("+")
            if (found := facts.get(name)) is not None:
                values.setdefault(key, found + float(plus) if plus else found)
        elif key != "range":
            values.setdefault(key, value)
    if values.get("flow.timestep_sampling", "logit_normal") != "logit_normal":
        for key in ("flow.logit_std", "flow.logit_mean"):
            values.pop(key, None)
    ends = [float(facts.get("sigma_low", 0)), float(facts.get("sigma_high", 1))]
    if ends != [0, 1]:
        set_range(draft, ends, known.get("range", ""))


def set_range(draft: Draft, ends: Sequence[float], meaning: str) -> None:
    """Set the range of noise levels from numbers that mean what `meaning` says.

    `mirrored`: places in a list of levels from 1 down, before the shift; `quantile`: places in a
    sorted sample of logit-normal levels, from 1 down; `before`: levels before the shift;
    `squeezed`: levels after it; empty: the distribution is restricted to them, as it is here.
    """
    values, key = draft.values, "flow.sigma_range"
    if meaning == "unknown":
        draft.decide(key, "range_unknown", low=f"{ends[0]:g}", high=f"{ends[1]:g}")
        return
    if meaning in ("mirrored", "quantile"):
        ends = [1 - ends[1], 1 - ends[0]]
    if meaning == "quantile":
        ends = [1 / (1 + math.exp(-NormalDist().inv_cdf(e))) if 0 < e < 1 else e for e in ends]
    shift = values.get("flow.shift", 1)
    if meaning in ("mirrored", "before") and isinstance(shift, int | float):
        ends = [shift * e / (1 + (shift - 1) * e) for e in ends]
    draft.set(key, [round(e, 6) for e in ends])
    if meaning in ("mirrored", "before") and isinstance(shift, str):
        draft.decide(key, "range_shifted", shift=shift)
    keeps = meaning == "squeezed" and draft.facts.get("keeps_shape")
    keeps = keeps or meaning in ("", "quantile")
    if not keeps and values.get("flow.timestep_sampling", "logit_normal") != "uniform":
        draft.tell("differs", key, "range_squeezed", title=draft.tool.title)


def set_optimizer(draft: Draft) -> None:
    facts, values = draft.facts, draft.values
    known: Mapping[str, Any] = facts.get("optimizer") or {}
    if not known and (name := facts.get("optimizer_default")):
        known = shared()["optimizers"][name]
        values.setdefault("optimizer.kind", known["kind"])
    if "beta1" in facts or "beta2" in facts:
        usual = known.get("betas", [0.9, 0.999])
        values["optimizer.betas"] = [facts.get("beta1", usual[0]), facts.get("beta2", usual[1])]
    if values.get("optimizer.kind") == "prodigy" and values.pop("optimizer.rules", None):
        draft.tell("none", "optimizer.rules", "one_rate")
    for name in ("betas", "weight_decay"):
        key = f"optimizer.{name}"
        if key not in values and name in known:
            write_default(draft, key, known[name])
