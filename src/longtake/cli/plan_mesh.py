"""What `longtake plan` tells of a mesh: what is sent over which link, and whether that hides."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from longtake.formatting import escape, format_short_duration

if TYPE_CHECKING:
    from longtake.training.mesh_forecast import MeshForecast

_GIB = 2**30
_GB = 1e9
_LITTLE = 0.05
_WORDS = {
    "weights": "twice in each micro-batch",
    "gradients to shards": "in the last one",
    "gradients": "in the last one, between copies",
    "tokens": "in each attention",
}
_LINKS = {"node": "a node's links", "network": "the network"}


def mesh_facts(mesh: "MeshForecast | None") -> dict[str, Any] | None:
    """The same as JSON; None where one process is alone."""
    if mesh is None:
        return None
    return {
        "link_gb_per_second": {"node": mesh.links.node / _GB, "network": mesh.links.network / _GB},
        "ranks_of_a_copy": mesh.num_shards,
        "copies": mesh.num_copies,
        "sent_bytes": mesh.num_bytes,
        "sent": [
            {
                "what": row.what,
                "ranks": row.ranks,
                "over": row.over,
                "bytes": row.num_bytes,
                "seconds": _rounded(row.seconds),
                "exposed_seconds": _rounded(row.exposed_seconds),
            }
            for row in mesh.sent
        ],
        "compute_seconds": _rounded(mesh.compute_seconds),
        "step_seconds": _rounded(mesh.step_seconds),
        "exposed_share": round(mesh.exposed_share, 4),
        "idle_share": round(mesh.idle_share, 4),
        "advice": [
            {
                "set": list(each.changes),
                "step_seconds": _rounded(each.step_seconds),
                "step_peak_gib": round(each.step_peak_bytes / _GIB, 6),
                "fits": each.fits,
            }
            for each in mesh.advice
        ],
    }


def of_mesh(mesh: Mapping[str, Any], processes: int, per_node: int) -> Iterator[RenderableType]:
    """The table, the verdict and what would help."""
    yield _opening(mesh, processes, per_node)
    yield _table(mesh["sent"])
    yield _verdict(mesh)
    for each in mesh["advice"]:
        settings = escape(" ".join(f"--set {change}" for change in each["set"]))
        verdict = "" if each["fits"] is not False else ", [red]does not fit[/red]"
        yield f"  {settings}: {format_short_duration(each['step_seconds'])} a step{verdict}"
    if mesh["idle_share"]:
        yield (
            f"[yellow]note[/yellow] The batch does not divide: {mesh['idle_share']:.1%} of all "
            "places stay empty, and their ranks compute for nothing."
        )


def _opening(mesh: Mapping[str, Any], processes: int, per_node: int) -> str:
    nodes, link = -(-processes // per_node), mesh["link_gb_per_second"]
    text = f"{processes} processes on {nodes} node{'s' * (nodes > 1)}: "
    copies, ranks = mesh["copies"], mesh["ranks_of_a_copy"]
    many = f"{copies} copies of the model" if copies > 1 else "one copy of the model"
    held = (
        f"{many}, each held by {ranks} together" if copies > 1 else f"{many}, held by all together"
    )
    text += held if ranks > 1 else many
    text += f". Each card sends {link['node']:g} GB/s within its node"
    return text + (f" and {link['network']:g} GB/s beyond." if nodes > 1 else ".")


def _table(sent: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("each rank sends", "among", "over", "GB a step", "takes", "exposed", ""):
        is_text = column in ("each rank sends", "over", "")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column != "")
    for row in sent:
        table.add_row(
            row["what"],
            str(row["ranks"]),
            _LINKS[row["over"]],
            f"{row['bytes'] / _GB:.3g}",
            format_short_duration(row["seconds"]),
            format_short_duration(row["exposed_seconds"]),
            _WORDS[row["what"]],
        )
    return table


def _verdict(mesh: Mapping[str, Any]) -> str:
    step, compute, share = mesh["step_seconds"], mesh["compute_seconds"], mesh["exposed_share"]
    text = (
        f"A step takes {format_short_duration(step)}, of which "
        f"{format_short_duration(compute)} is compute: {format_short_duration(step - compute)} "
        f"({share:.1%}) waits for other ranks."
    )
    if share < _LITTLE:
        return f"{text} The rest of what is sent hides behind compute."
    if not mesh["advice"]:
        return f"{text} [yellow]That is much[/yellow]: faster links, or more work for each rank."
    return f"{text} [yellow]That is much.[/yellow] What would help, each by itself:"


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.5g}")
