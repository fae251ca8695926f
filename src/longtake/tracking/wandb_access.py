"""Whether W&B can be used here: installed, with a key, and reachable."""

import importlib.util
import netrc
import os
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from longtake.config import TrackingSection
from longtake.errors import RecipeError

_CLOUD = "https://api.wandb.ai"
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_SECONDS = 5.0


def refuse_missing_wandb(section: TrackingSection) -> None:
    """Refuse a recipe that wants W&B where it is not installed.

    Raises:
        RecipeError: it is not.
    """
    if section.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise RecipeError(
            f'tracking.wandb = "{section.wandb}", and W&B is not installed. Install it with '
            "`pip install longtake[wandb]`, or leave it with --set tracking.wandb=off."
        )


def missing_key(section: TrackingSection) -> str | None:
    """What to say where a recipe wants W&B online and there is no key for it; None: there is."""
    if section.wandb != "online" or has_key():
        return None
    return (
        f'tracking.wandb = "online", and there is no key for {base_url()} (neither WANDB_API_KEY '
        "nor a line of netrc; `wandb login` writes one), so nothing is sent yet"
    )


def base_url() -> str:
    """Where W&B is, as its own library finds it unless its settings files say otherwise."""
    return os.environ.get("WANDB_BASE_URL", _CLOUD).rstrip("/")


def has_key() -> bool:
    """Whether there is a key for it."""
    if any(os.environ.get(name) for name in _KEYS):
        return True
    home = Path.home()
    places = [os.environ.get("NETRC"), home / ".netrc", home / "_netrc"]
    for place in filter(None, places):
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(place)).authenticators(urlsplit(base_url()).hostname or ""):
                return True
    return False


def demand_answer(url: str) -> None:
    """Return if a server answers, whatever it says.

    W&B's own library would wait for minutes. Proxies of the environment are used.

    Raises:
        ConnectionError: none does, in 5 s.
    """
    try:
        urllib.request.urlopen(url, timeout=_SECONDS).close()  # noqa: S310 - the user's own server
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"{url} cannot be reached: {reason}") from error
