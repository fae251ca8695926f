"""Captions as samples are trained with them: one of several, with trigger, prefix, shuffled tags.

They are a pure function of the clip's caption, the recipe and the sample's seed, so that a resumed
run trains the same texts.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc

from longtake.config import TRIGGER, CaptionsSection, DataSection
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, captions_of
from longtake.data.order import derive, permuted
from longtake.errors import DataError

_PLAIN = CaptionsSection()


def with_sample_caption(clip: Clip, source: str, data: DataSection, seed: int) -> Clip:
    """Return a clip with its caption as one sample is trained with it."""
    text = sample_caption(clip.caption, source, data, seed)
    return clip if text == clip.caption else replace(clip, caption=text)


def sample_caption(caption: str, source: str, data: DataSection, seed: int) -> str:
    """Return one of a clip's captions, with trigger word, prefix and shuffled tags of one sample.

    An empty caption stays empty.
    """
    several = captions_of(caption)
    # Each choice is derived with a name of its own, so that it does not depend on the others.
    caption = several[derive(seed, "caption") % len(several)]
    how = data.captions.get(source, _PLAIN)
    if how.shuffle_tags:
        # The first `keep_tags` tags keep their place, the others are permuted.
        tags = _tags(caption)
        free = tags[how.keep_tags :]
        places = permuted(np.arange(len(free)), len(free), seed, "tags")
        caption = ", ".join([*tags[: how.keep_tags], *(free[place] for place in places)])
    prefix = how.prefixes[derive(seed, "prefix") % len(how.prefixes)] if how.prefixes else ""
    return _assembled(caption, prefix, how, data)


def caption_variants(captions: Iterable[str], source: str, data: DataSection) -> Iterator[str]:
    """Yield each caption with each prefix that samples of a catalog may have; tags in order."""
    how = data.captions.get(source, _PLAIN)
    captions = (each for caption in captions for each in captions_of(caption))
    if how == _PLAIN and not data.trigger:
        return captions
    if how.shuffle_tags:
        captions = (", ".join(_tags(caption)) for caption in captions)
    return (
        _assembled(caption, prefix, how, data)
        for caption in captions
        for prefix in how.prefixes or ("",)
    )


def all_captions(catalogs: dict[str, Catalog], data: DataSection) -> list[str]:
    """Return all captions that samples may have, for a vocabulary or to count tokens."""
    return [
        text
        for source, catalog in catalogs.items()
        for text in caption_variants(catalog.captions(), source, data)
    ]


def _tags(caption: str) -> list[str]:
    return [tag for part in caption.split(",") if (tag := part.strip())]


def refuse_unset_trigger(name: str, catalog: Catalog, data: DataSection) -> None:
    """Raise DataError if no trigger word replaces `[trigger]`, which would be trained literally."""
    how = data.captions.get(name, _PLAIN)
    if _trigger(how, data):
        return
    num_captions = pc.sum(pc.match_substring(catalog.table["caption"], TRIGGER)).as_py() or 0
    if num_captions or any(TRIGGER in prefix for prefix in how.prefixes):
        what = f"{num_captions} captions have" if num_captions else "a prefix has"
        raise DataError(
            f"In the catalog {name} {what} {TRIGGER}, and there is no trigger word that replaces "
            f'it. Set data.trigger, such as "sks dog", or data.captions.{name}.trigger.'
        )


def _trigger(how: CaptionsSection, data: DataSection) -> str:
    return data.trigger if how.trigger is None else how.trigger


def _assembled(caption: str, prefix: str, how: CaptionsSection, data: DataSection) -> str:
    if not caption:
        return caption
    text = f"{prefix} {caption}" if prefix else caption
    if not (trigger := _trigger(how, data)):
        return text
    if TRIGGER in text:
        return text.replace(TRIGGER, trigger)
    # A caption that has the trigger as a whole word keeps it in its place.
    has_it = re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text)
    return text if has_it else f"{trigger}, {text}"
