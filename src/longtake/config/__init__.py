"""The recipe: every key of a run, validated when it is loaded; torch-free.

A recipe is a TOML file. `load` reads it, applies `--set a.b=c` overrides, and returns a frozen
`Recipe`. All problems are reported as one `RecipeError` that names each key and suggests the
nearest existing key for a misspelt one. Paths in a recipe are relative to the current directory.
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
from longtake.config.load import changed, dump, kept, load, parse, parse_section, parse_value
from longtake.config.model import (
    EXPERT_FOLDERS,
    AdapterRule,
    CodecSection,
    Expert,
    ModelSection,
    ModuleSection,
    PooledSection,
    Quantization,
    TextSection,
    TrainableSection,
    is_one_file,
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
    other_length,
)
from longtake.config.sampling import (
    EvaluationSection,
    PresetSection,
    PromptSection,
    SamplingSection,
)
from longtake.config.training import (
    CheckpointSection,
    EmaProfile,
    EmaSection,
    FlowSection,
    GuardSection,
    ObjectiveSection,
    OptimizerSection,
    ParallelSection,
    RateRule,
    RecomputeSection,
    TrackingSection,
    WatchSection,
)
from longtake.config.values import AUDIO, AudioFormat, Shift, memory_bytes
