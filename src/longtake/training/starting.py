"""What a process does before its first step, in words; torch-free."""

from longtake import heartbeat

_PHASES: dict[str, str] = {
    "start": "importing PyTorch",
    "rendezvous": "waiting for the other ranks",
    "open": "opening catalog and run directory",
    "plan": "planning memory",
    "build": "building the model",
    "load": "loading the checkpoint",
    "cache": "filling the cache",
    "data": "waiting for the first batch",
}


def starting_phase() -> str | None:
    """What this process does before its first step; None from then on."""
    return _PHASES.get(heartbeat.current_phase() or "start")
