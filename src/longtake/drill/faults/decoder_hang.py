"""A decoder freezes in the middle of a clip."""

from longtake.drill.decoder_fault import judge
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.place import SAMPLE_TIMEOUT_SECONDS
from longtake.drill.result import Result
from longtake.drill.workers import stop_while_decoding

_NAME = "decoder-hang"


def drill(ground: Ground) -> Result:
    """Stop a decoding process for good while it has a clip open."""
    place = ground.fresh(_NAME)
    with place.launch() as launch:
        launch.wait_for_rows(1)
        stopped = stop_while_decoding(launch, place.clips)
        found = launch.find("decoder_stalled", pid=stopped.pid)
        launch.finish()
    verdict = judge(_NAME, "decoder_stalled", place, stopped, found, ground.undisturbed)
    where = found.event["where"] if found else ""
    return verdict.result(
        f"Process {stopped.pid} was stopped while it decoded {stopped.clip.name}, was past its "
        f"deadline of {SAMPLE_TIMEOUT_SECONDS:g} s, was dumped{where and f' in {where}'}, killed "
        "and replaced; every step is the undisturbed run's to the bit."
    )


FAULT = Fault(
    _NAME,
    does="Stops a decoding process (SIGSTOP) while it decodes a clip.",
    must="It is dumped, killed and replaced at its deadline; every step stays the same to the bit.",
    drill=drill,
)
