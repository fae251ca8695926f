"""The text that a sample is trained with: trigger word, prefix and shuffled tags, torch-free.

A pure function of the clip's caption, the recipe and the sample's seed, so that a resumed run
trains the same texts.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from longtake.config import TRIGGER, CaptionsSection, DataSection
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.order import derive, permuted

_PLAIN = CaptionsSection()


def with_sample_caption(clip: Clip, source: str, data: DataSection, seed: int) -> Clip:
    """A clip with the caption of one of its samples."""
    text = sample_caption(clip.caption, source, data, seed)
    return clip if text == clip.caption else replace(clip, caption=text)


def sample_caption(caption: str, source: str, data: DataSection, seed: int) -> str:
    """The caption of a sample of a catalog; an empty one stays empty."""
    how = data.captions.get(source, _PLAIN)
    if how.shuffle_tags:
        tags = _tags(caption)
        free = tags[how.keep_tags :]
        places = permuted(np.arange(len(free)), len(free), seed, "tags")
        caption = ", ".join([*tags[: how.keep_tags], *(free[place] for place in places)])
    prefix = how.prefixes[derive(seed, "prefix") % len(how.prefixes)] if how.prefixes else ""
    return _assembled(caption, prefix, how, data)


def caption_variants(captions: Iterable[str], source: str, data: DataSection) -> Iterator[str]:
    """Each caption as samples of a catalog may have it, once for each prefix; tags in order."""
    how = data.captions.get(source, _PLAIN)
    if how == _PLAIN and not data.trigger:
        return iter(captions)
    if how.shuffle_tags:
        captions = (", ".join(_tags(caption)) for caption in captions)
    return (
        _assembled(caption, prefix, how, data)
        for caption in captions
        for prefix in how.prefixes or ("",)
    )


def all_captions(catalogs: dict[str, Catalog], data: DataSection) -> list[str]:
    """`caption_variants` of all catalogs, for a vocabulary or to count tokens."""
    return [
        text
        for source, catalog in catalogs.items()
        for text in caption_variants(catalog.captions(), source, data)
    ]


def _tags(caption: str) -> list[str]:
    return [tag for part in caption.split(",") if (tag := part.strip())]


def _assembled(caption: str, prefix: str, how: CaptionsSection, data: DataSection) -> str:
    if not caption:
        return caption
    text = f"{prefix} {caption}" if prefix else caption
    trigger = data.trigger if how.trigger is None else how.trigger
    if not trigger:
        return text
    if TRIGGER in text:
        return text.replace(TRIGGER, trigger)
    has_it = re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text)
    return text if has_it else f"{trigger}, {text}"
