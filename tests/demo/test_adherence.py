"""The demo's measure: whether a video shows what its prompt asks for."""

import numpy as np

from longtake.demo.shapes import render
from longtake.evaluation.extra_measures import load_extras, measure_extra


def test_a_preset_of_the_demo_can_name_it_and_its_mean_is_a_share() -> None:
    """1 where all is as asked for, else 0; nothing for other prompts, and for single pictures."""
    extras = load_extras(["longtake.demo.adherence:Adherence"])
    clip = render("square", "red", "right", np.random.default_rng(0))
    prompts = ["a red square moving right", "a blue square moving right", "a dog", "a red square"]
    found, of_set = measure_extra(extras, [clip, clip, clip, clip[:1]], prompts, 8.0)
    assert found == [{"adherence": 1.0}, {"adherence": 0.0}, {}, {}]
    assert of_set == {}
