"""Refusals of recipes whose family, codec, buckets and inputs do not fit together."""

from collections.abc import Iterator, Mapping

from longtake import config
from longtake.errors import RecipeError
from longtake.models.base import Family, LatentShape, latent_shape
from longtake.models.codec import Codec


def fit_latents(recipe: config.Recipe, chosen: Family, codec: Codec) -> list[LatentShape]:
    """Check a recipe's inputs and buckets against its family; return the buckets' latent shapes."""
    _check_audio_time_and_captions(recipe, chosen)
    if recipe.model.uses_audio and codec.audio is None:
        raise RecipeError(
            f'model.audio is "{recipe.model.audio}", and a codec of the kind {recipe.codec.kind} '
            "has no part for sound. Name a release in codec.pretrained, which has one."
        )
    inputs = recipe.model_inputs()
    needed, taken = chosen.inputs.names(recipe.model)
    for name in (*needed, *(each for each in taken if each in inputs)):
        section = inputs.get(name)
        is_picture = section is not None and (
            section.kind == "picture"
            or (section.frames is not None and name in chosen.inputs.continues)
        )
        if section is None or not is_picture or not section.is_encoded:
            has = "does not have it" if section is None else f'has it as "{section.kind}"'
            if section is not None and is_picture:
                has = "has it with encode = false"
            or_frames = ""
            if name in chosen.inputs.continues:
                or_frames = (
                    f' Or take it from the clip: {{ kind = "picture", frame = "{name}" }}, or as a '
                    'video that is continued { kind = "video", frames = 5 }.'
                )
            raise RecipeError(
                f"The family {recipe.model.family} needs a reference image named {name} for each "
                f"clip, encoded, but data.conditioning {has}. Name its files, such as "
                f'data.conditioning.{name} = {{ kind = "picture", '
                f'path = "../{name}/{{stem}}.png" }}.{or_frames}'
            )
    _refuse_frames(inputs, recipe, codec)
    masks = [name for name, each in recipe.data.conditioning.items() if each.kind == "mask"]
    if masks and codec.shortest > 1:
        raise RecipeError(
            f"data.conditioning.{masks[0]} is a mask, and of a clip of the family "
            f"{recipe.model.family} latent frames stand for unlike numbers of frames. Remove it."
        )
    unused = [name for name in inputs if name not in taken]
    if unused and not recipe.trainable.modules:  # a module may use any of them
        takes = ", ".join(taken)
        raise RecipeError(
            f"data.conditioning has {', '.join(unused)}, which would be read and then not used: "
            f"the family {recipe.model.family} takes {takes or 'no image'}, and there are no "
            "trainable.modules. Remove it, or name the family or module that uses it."
        )
    patch = chosen.patch(recipe.model)
    shapes = [latent_shape(codec, bucket, patch) for bucket in recipe.data.shapes()]
    chosen.check(recipe.model, shapes)
    return shapes


def _refuse_frames(
    given: Mapping[str, config.ConditioningSection], recipe: config.Recipe, codec: Codec
) -> None:
    """Refuse first frames (`frames`) that are a whole clip or cannot be encoded alone."""
    for name, section in given.items():
        if section.frames is None:
            continue
        key = f"data.conditioning.{name}.frames = {section.frames}"
        for bucket in recipe.data.shapes():
            if section.frames >= bucket.num_frames:
                raise RecipeError(
                    f"{key}, but a bucket has {bucket.num_frames} frames: nothing would be left to "
                    "generate. Set fewer, or larger buckets."
                )
            size = {"height": bucket.height, "width": bucket.width}
            try:
                # Given frames are encoded apart from the clip, so their number must divide by
                # itself.
                codec.latent_shape(config.Bucket(num_frames=section.frames, **size))
            except RecipeError as error:
                raise RecipeError(f"{key} cannot be encoded alone. {error}") from None


def _check_audio_time_and_captions(recipe: config.Recipe, chosen: Family) -> None:
    named, audio = f"The family {recipe.model.family}", recipe.model.audio
    if audio is not None and not chosen.inputs.has_audio:
        raise RecipeError(f"{named} has no audio. Remove model.audio, which is {audio!r}.")
    if audio is None and chosen.inputs.has_audio:
        raise RecipeError(
            f'{named} makes videos with audio. Set model.audio = "train" to learn both, "attend" '
            'to learn the video beside the audio of its clips, or "off": both are then isolated '
            "from each other, and the audio's weights stay as they are (docs/guides/families.md)."
        )
    takes_fps = chosen.inputs.takes_fps or recipe.model.uses_audio
    if takes_fps and recipe.data.fps is None:
        raise RecipeError(
            f"{named} needs to know the number of frames per second, and data.fps is unset. "
            "Set it, such as data.fps = 24: videos are then trained at this rate."
        )
    fps = (recipe.data.fps or 0) / recipe.data.frame_stride
    if chosen.inputs.fps not in (None, fps):
        raise RecipeError(
            f"{named} makes {chosen.inputs.fps:g} frames a second, and data.fps / "
            f"data.frame_stride is {fps:g}. Set data.fps = {chosen.inputs.fps:g}, and leave "
            "data.frame_stride out."
        )
    stages = (recipe.in_stage(stage.name).data for stage in recipe.data.curriculum())
    dropped = next((data.caption_dropout for data in stages if data.caption_dropout), None)
    if chosen.unconditional is not None and recipe.model.pretrained and dropped is not None:
        raise RecipeError(
            f"data.caption_dropout is {dropped:g}, but {named.lower()} makes passes without a "
            f"caption by its release's {chosen.unconditional}, which is not trained. Leave it out."
        )


def trained_shapes(recipe: config.Recipe) -> Iterator[tuple[config.FlowSection, config.Bucket]]:
    for stage in recipe.data.curriculum():
        flow = recipe.in_stage(stage.name).flow
        yield from ((flow, bucket) for bucket in stage.buckets or recipe.data.buckets)
