"""The recipe: every key of a run, validated when it is loaded; torch-free.

A recipe is a TOML file. `load` reads it, applies `--set a.b=c` overrides, and returns a frozen
`Recipe`; whatever is wrong with it becomes one `RecipeError` that names the key and, for a
misspelt one, the nearest that exists. Paths in a recipe are relative to the folder in which the
command is run.
"""

from longtake.config.data import (
    STEM,
    TRIGGER,
    AutoBucketsSection,
    Bucket,
    CaptionsSection,
    ConditioningSection,
    DataSection,
    Stage,
    StoreSection,
)
from longtake.config.load import changed, dump, kept, load, parse, parse_value
from longtake.config.model import (
    EXPERT_FOLDERS,
    CodecSection,
    Expert,
    ModelSection,
    ModuleSection,
    PooledSection,
    Quantization,
    TextSection,
    TrainableSection,
)
from longtake.config.recipe import Recipe
from longtake.config.resume import (
    DECIDES_ORDER,
    MAY_CHANGE_ON_RESUME,
    decides_order,
    defaults,
    differences,
    flat,
    flatten,
    is_among,
)
from longtake.config.sampling import EvaluationSection, PresetSection, SamplingSection
from longtake.config.training import (
    CheckpointSection,
    EmaProfile,
    EmaSection,
    FlowSection,
    GuardSection,
    OptimizerSection,
    ParallelSection,
    RecomputeSection,
    TrackingSection,
    WatchSection,
)
from longtake.config.values import Shift, memory_bytes

__all__ = [
    "DECIDES_ORDER",
    "EXPERT_FOLDERS",
    "MAY_CHANGE_ON_RESUME",
    "STEM",
    "TRIGGER",
    "AutoBucketsSection",
    "Bucket",
    "CaptionsSection",
    "CheckpointSection",
    "CodecSection",
    "ConditioningSection",
    "DataSection",
    "EmaProfile",
    "EmaSection",
    "EvaluationSection",
    "Expert",
    "FlowSection",
    "GuardSection",
    "ModelSection",
    "ModuleSection",
    "OptimizerSection",
    "ParallelSection",
    "PooledSection",
    "PresetSection",
    "Quantization",
    "Recipe",
    "RecomputeSection",
    "SamplingSection",
    "Shift",
    "Stage",
    "StoreSection",
    "TextSection",
    "TrackingSection",
    "TrainableSection",
    "WatchSection",
    "changed",
    "decides_order",
    "defaults",
    "differences",
    "dump",
    "flat",
    "flatten",
    "is_among",
    "kept",
    "load",
    "memory_bytes",
    "parse",
    "parse_value",
]
