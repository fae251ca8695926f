"""The metrics of a training step in metrics.jsonl: a table for writer, readers and plots."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, NotRequired, get_args, get_origin, get_type_hints

from pydantic import Field
from typing_extensions import TypedDict

from longtake import fsio
from longtake.config.values import Shape


@dataclass(frozen=True)
class Metric:
    """Storage and plots of one metric of metrics.jsonl; see `METRICS`."""

    label: str = ""
    """Name of the metric in plots; empty: it is not drawn."""
    unit: str = ""
    panel: str = ""
    """Plot in which the metric is drawn: a key of `board.plots.TITLES`."""
    is_extra: bool = False
    """True: the metric is drawn only on request."""
    is_logarithmic: bool = False
    """True: the metric's axis is logarithmic by default."""
    is_sparse: bool = False
    """True: many steps or runs lack the metric. Its line spans the gaps; an empty plot is left
    out."""
    dtype: str = "<f4"
    """NumPy type of the metric's column."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """For a metric that is a list: labels of its items, by the names of their columns."""


_Number = fsio.Finite | None  # None: NaN or infinite


@fsio.with_other_fields
class Metrics(TypedDict):
    """The metrics of one training step: a line of metrics.jsonl.

    `inspection.rows` keeps each field that has a `Metric` as a column. A step that is run again
    (after a resume or a rollback) has another line; earlier lines of this and later steps are void.
    """

    step: Annotated[fsio.Count, Metric(dtype="<i8")]
    """Number of steps done, including this one."""
    epoch: fsio.Count
    """Number of passes over the data that were finished before the step."""
    loss: Annotated[_Number, Metric("loss", panel="loss", is_logarithmic=True, dtype="<f8")]
    """Mean loss of the step's samples. None, in this and other fields: NaN or infinite."""
    grad_norm: Annotated[
        _Number, Metric("gradient norm", panel="grad_norm", is_logarithmic=True, dtype="<f8")
    ]
    """Norm of all gradients, before clipping."""
    learning_rate: Annotated[fsio.Finite, Metric("learning rate", panel="learning_rate")]
    """Learning rate of the step's update."""
    step_seconds: Annotated[fsio.Finite, Metric("step", "s", panel="seconds", dtype="<f8")]
    """Time since the end of the last step, including data loading and checkpoints in between."""
    data_seconds: Annotated[fsio.Finite, Metric("wait for data", "s", panel="seconds")]
    """Time that the step waited for its batch of data."""
    time: Annotated[fsio.Timestamp, Metric(dtype="<f8")]
    """End of the step, in seconds since 1970."""
    tflops_per_second: NotRequired[
        Annotated[fsio.Finite, Metric("computed", "TFLOP/s", panel="flops", is_sparse=True)]
    ]
    """Computing rate of all ranks together, without recomputation: 3 times the operations of the
    forward passes, or 2 times if nearly all weights are frozen, per second."""
    mfu: NotRequired[Annotated[fsio.Finite, Metric("MFU", panel="flops", is_extra=True)]]
    """Model FLOPs utilisation: `tflops_per_second` as a fraction of all GPUs' peak by their data
    sheets. Missing for GPUs whose peak is unknown."""
    launch: NotRequired[str]
    """The launch that wrote the line, as the `token` in its lease."""
    batch: NotRequired[Annotated[fsio.Count, Metric(dtype="<i8")]]
    """Number of the batch in the run's data; greater than the step after skipped batches."""
    num_samples: NotRequired[Annotated[fsio.Count, Metric()]]
    """Number of clips in the step's batch, over all ranks."""
    bucket: NotRequired[
        Annotated[Shape, Metric(parts={"num_frames": "", "height": "", "width": ""})]
    ]
    """Frames, height and width of the batch's clips, which all have one shape."""
    tokens_per_second: NotRequired[Annotated[fsio.Finite, Metric()]]
    """Tokens of the `num_samples` clips, over all ranks, divided by `step_seconds`; tokens of a
    clip as `longtake plan` counts them: in one attention, with text and references."""
    loss_by_sigma: NotRequired[
        Annotated[
            list[_Number],
            Field(min_length=4, max_length=4),
            Metric(
                panel="loss",
                is_extra=True,
                is_sparse=True,
                parts={
                    "loss_sigma_1": "loss, sigma 0 to ¼",
                    "loss_sigma_2": "loss, sigma ¼ to ½",
                    "loss_sigma_3": "loss, sigma ½ to ¾",
                    "loss_sigma_4": "loss, sigma ¾ to 1",
                },
            ),
        ]
    ]
    """Mean loss at sigmas in [0, 1/4), [1/4, 1/2), [1/2, 3/4) and [3/4, 1]; None: no sample."""
    weight_norm: NotRequired[
        Annotated[_Number, Metric("weight norm", panel="weight_norm", dtype="<f8")]
    ]
    """Norm of the trained weights before the step's update."""
    update_ratio: NotRequired[
        Annotated[_Number, Metric("update / weights", panel="weight_norm", is_extra=True)]
    ]
    """Norm of the last step's update divided by the norm of the weights."""
    peak_memory_bytes: NotRequired[
        Annotated[fsio.Count, Metric("peak memory", "B", panel="memory", is_sparse=True)]
    ]
    """Peak of the bytes allocated by rank 0 on its GPU since the last line with this field."""
    nonfinite_share: NotRequired[fsio.Finite]
    """Fraction of gradient elements that are NaN or infinite."""
    group_grad_norms: NotRequired[dict[str, _Number]]
    """Gradient norm of each group of parameters, by the group's name."""
    group_weight_norms: NotRequired[dict[str, _Number]]
    """Weight norm of each group of parameters, by the group's name."""
    group_update_ratios: NotRequired[dict[str, _Number]]
    """Update ratio (see `update_ratio`) of each group of parameters, by the group's name."""
    store_bytes: NotRequired[fsio.Count]
    """Bytes that rank 0's decode workers fetched from object stores since the last step."""
    store_seconds: NotRequired[fsio.Finite]
    """Total duration of rank 0's store requests since the last step; workers overlap in time."""
    store_retries: NotRequired[fsio.Count]
    """Number of rank 0's store requests since the last step that were repeated."""
    verdict: NotRequired[Literal["skip", "roll_back", "stop"]]
    """The guard's verdict on the step; missing: "ok". With a verdict no update was applied."""


# get_type_hints keeps NotRequired as the outermost type; readers need the inner one.
METRIC_TYPES: Final[Mapping[str, Any]] = {
    name: get_args(hint)[0] if get_origin(hint) is NotRequired else hint
    for name, hint in get_type_hints(Metrics, include_extras=True).items()
}
"""Type of each metric in `Metrics`, without NotRequired."""


METRIC_COLUMNS: Final[Mapping[str, Mapping[str, Metric]]] = {
    name: {part: replace(metric, label=label) for part, label in metric.parts.items()}
    or {name: metric}
    for name, kind in METRIC_TYPES.items()
    for metric in getattr(kind, "__metadata__", ())
    if isinstance(metric, Metric)
}
"""Columns of each field of `Metrics` that has a `Metric`; a list has one column per item."""


METRICS: Final[Mapping[str, Metric]] = {
    name: metric for columns in METRIC_COLUMNS.values() for name, metric in columns.items()
}
