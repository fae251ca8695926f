"""The numbers of metrics.jsonl: one description of each, which writer, readers and plots ask."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, NotRequired, get_args, get_origin, get_type_hints

from pydantic import Field
from typing_extensions import TypedDict

from longtake import fsio


@dataclass(frozen=True)
class Metric:
    """How a number of metrics.jsonl is kept by readers and drawn; see `METRICS`."""

    label: str = ""
    """In plots; empty: it is not drawn."""
    unit: str = ""
    panel: str = ""
    """The plot that draws it: a key of `board.plots.TITLES`."""
    is_extra: bool = False
    """Drawn only if somebody asks for it."""
    is_logarithmic: bool = False
    """Whether its axis is logarithmic at first."""
    is_sparse: bool = False
    """Whether many steps or runs do not have it: its line spans them, its plot is left out."""
    dtype: str = "<f4"
    """Of a column of these numbers."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Labels of a list's items by the names of their columns."""


@fsio.with_other_fields
class Metrics(TypedDict):
    """One line of metrics.jsonl; a field with a `Metric` is kept in columns by `inspection.rows`.

    A step that is run again (after a resume or a rollback) has a later line; what stands before it
    of this step and of later ones was abandoned.
    """

    step: Annotated[fsio.Count, Metric(dtype="<i8")]
    """Steps that are done with it."""
    epoch: fsio.Count
    """Passes over the data that were finished before it."""
    loss: Annotated[
        fsio.Finite | None, Metric("loss", panel="loss", is_logarithmic=True, dtype="<f8")
    ]
    """Mean over the samples. None, here and elsewhere: it was NaN or infinite."""
    grad_norm: Annotated[
        fsio.Finite | None,
        Metric("gradient norm", panel="grad_norm", is_logarithmic=True, dtype="<f8"),
    ]
    """Before it is clipped."""
    learning_rate: Annotated[fsio.Finite, Metric("learning rate", panel="learning_rate")]
    """Of the step's update."""
    step_seconds: Annotated[fsio.Finite, Metric("step", "s", panel="seconds", dtype="<f8")]
    """Since the step before, with the wait for data and what was saved between them."""
    data_seconds: Annotated[fsio.Finite, Metric("wait for data", "s", panel="seconds")]
    """The wait for the batch."""
    time: Annotated[fsio.Timestamp, Metric(dtype="<f8")]
    """Seconds since 1970 at the end of the step."""
    tflops_per_second: NotRequired[
        Annotated[fsio.Finite, Metric("computed", "TFLOP/s", panel="flops", is_sparse=True)]
    ]
    """All ranks together, without recomputed activations: 3 times the operations of the forward
    passes, 2 times where nearly all weights are frozen."""
    mfu: NotRequired[Annotated[fsio.Finite, Metric("MFU", panel="flops", is_extra=True)]]
    """Model FLOPs utilisation: `tflops_per_second` as a share of what all GPUs could do by their
    data sheets, where those are known."""
    launch: NotRequired[str]
    """The `token` in the lease of the process that wrote the line."""
    batch: NotRequired[Annotated[fsio.Count, Metric(dtype="<i8")]]
    """Number of the batch in the run's data; not the step's where batches were skipped."""
    num_samples: NotRequired[Annotated[fsio.Count, Metric()]]
    """Clips that the step was trained on, of all ranks."""
    loss_by_sigma: NotRequired[
        Annotated[
            list[fsio.Finite | None],
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
    """Loss at sigmas in [0, 1/4), [1/4, 1/2), [1/2, 3/4) and [3/4, 1]; None: no sample there."""
    weight_norm: NotRequired[
        Annotated[fsio.Finite | None, Metric("weight norm", panel="weight_norm", dtype="<f8")]
    ]
    """Norm of the trained weights that the step began with."""
    update_ratio: NotRequired[
        Annotated[
            fsio.Finite | None, Metric("update / weights", panel="weight_norm", is_extra=True)
        ]
    ]
    """Norm of the update before this step over that of the weights."""
    peak_memory_bytes: NotRequired[
        Annotated[fsio.Count, Metric("peak memory", "B", panel="memory", is_sparse=True)]
    ]
    """Most bytes of rank 0's tensors on its GPU since the last line that has this field."""
    nonfinite_share: NotRequired[fsio.Finite]
    """Fraction of gradient elements that are NaN or infinite."""
    group_grad_norms: NotRequired[dict[str, fsio.Finite | None]]
    """Gradient norm of each group of parameters."""
    group_weight_norms: NotRequired[dict[str, fsio.Finite | None]]
    """Weight norm of each group of parameters."""
    group_update_ratios: NotRequired[dict[str, fsio.Finite | None]]
    """Update ratio of each group of parameters."""
    store_bytes: NotRequired[fsio.Count]
    """Bytes that rank 0's decoding workers fetched from object stores since the step before."""
    store_seconds: NotRequired[fsio.Finite]
    """Sum over all requests, which several workers make at a time."""
    store_retries: NotRequired[fsio.Count]
    """Requests that were repeated."""
    verdict: NotRequired[Literal["skip", "roll_back", "stop"]]
    """The guard's verdict where it was not "ok": the step's update was not made."""


METRIC_TYPES: Final[Mapping[str, Any]] = {
    name: get_args(hint)[0] if get_origin(hint) is NotRequired else hint
    for name, hint in get_type_hints(Metrics, include_extras=True).items()
}
"""The types of the fields of `Metrics`."""


METRIC_COLUMNS: Final[Mapping[str, Mapping[str, Metric]]] = {
    name: {part: replace(metric, label=label) for part, label in metric.parts.items()}
    or {name: metric}
    for name, kind in METRIC_TYPES.items()
    for metric in getattr(kind, "__metadata__", ())
    if isinstance(metric, Metric)
}
"""The numbers of each field that readers keep as columns; an item of a list has its own."""


METRICS: Final[Mapping[str, Metric]] = {
    name: metric for columns in METRIC_COLUMNS.values() for name, metric in columns.items()
}
