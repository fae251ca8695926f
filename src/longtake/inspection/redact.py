"""Removes secrets, home folders and the names of users and hosts from text.

The same name gets the same replacement in all texts of a `Redactor`, so that records still refer to
each other. It removes too much rather than too little.
"""

import json
import os
import pwd
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

_MIN_SECRET_LENGTH = 8  # a shorter value is only removed where it was found, not everywhere
_SECRET_WORD = re.compile(
    r"(?:^|[_.-])(?:token|secret|passw(?:or)?d|pass|passphrase|pwd|credentials?|auth|authorization"
    r"|api[_-]?key|apikey|(?:shared[_-]?)?access[_-]?key(?:[_-]?id)?|private[_-]?key|account[_-]?key"
    r"|signature|cookie|longtake[_-]board|webhook|machine)(?:$|[_.-])"
)
"""Words in names of settings whose values are secret or identify a machine: token, password ..."""
_OTHER_KEY = re.compile(r"(?:^|[_.-])key$")  # such as --wandb-key, or key of an fsspec store
_MIN_OTHER_KEY_LENGTH = 16
_IS_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")  # a parameter, such as blocks.0.to_q.weight
_KEY = re.compile(
    # A letter after a backslash is an escape, such as the n of \n.
    r"(?:(?<![\w.\\-])|(?<=\\[nrt]))(?:--(?P<option>[A-Za-z][\w.-]*+)\\*[\"']?(?:,\s*|=|[ \t]+)"
    r"|-{0,2}(?P<key>[A-Za-z][\w.-]*+)\\*[\"']?\s*[:=]\s*)"
)
_VALUE = re.compile(
    r"(?:(?P<quote>\\*[\"'])(?:[Bb]earer |[Bb]asic )?(?P<quoted>.{0,4096}?)(?<!\\)(?P=quote)"
    r"|\\*[\"']?(?:[Bb]earer |[Bb]asic )?(?P<bare>[^\s\"'\\,;&)}\]]+))"
)
_HOOK = re.compile(r"\bhook\\*[\"']?\s*[:=]\s*(?P<quote>\\*[\"'])(?P<command>.+?)(?<!\\)(?P=quote)")
_URL = re.compile(r"\bhttps?://[^\s\"'\\<>]++")
_NOT_SECRET = re.compile(r"true|false|null|none|[-+]?[\d.]{1,6}|<\w+-\d+>", re.IGNORECASE)
_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*-----.*?(?:-----END [A-Z ]*-----|$)", re.DOTALL)
_TOKENS = (
    r"\b(?:hf|ghp|gho|ghu|ghs|ghr|r8|npm|rpa|tgp_v1|wandb_v1|github_pat|glpat|pypi)[_-][\w-]{16,}",
    r"\b(?:sk|pk|rk|dop_v1|xox[abeoprs]|xapp)[_-][\w-]{16,}",
    r"\b(?:AKIA|ASIA|AROA)[0-9A-Z]{16}\b",
    r"\bAIza[\w-]{35}",
    r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?",  # a JSON web token
    r"\b[0-9a-fA-F]{40}\b",  # a W&B key; also a git commit
    r"(?<=[Bb]earer )[\w.~+/=-]{8,}",
    r"(?<=[Bb]asic )[\w+/=]{16,}",
    r"(?<=-u )[^\s:\"']+:[^\s\"']+",  # curl's user and password
    r"(?<=\bpassword )[^\s\"']{6,}",  # as .netrc writes it
    r"(?<=api\.telegram\.org/bot)[\w:-]+",
)
_TOKEN = re.compile("|".join(f"(?:{each})" for each in _TOKENS))
_URL_LOGIN = re.compile(r"(?<=://)[^\s\"'<>]+@")  # to the last @, as a secret may contain a slash
_URL_QUERY = re.compile(r"(?P<url>://[^\s?#\"'<>\\]++)\?[^\s\"'<>\\]+")
_WEBHOOK = re.compile(
    r"(?<=://)(?=[^\s\"'\\]*hook)(?P<host>[\w.-]+(?::\d+)?)/[^\s\"'\\]+", re.IGNORECASE
)
_HIDDEN = re.compile(r"\bSecret(?:Str|Bytes)\(b?\\*[\"'](?P<value>[^\"'\\]+)")  # pydantic's
_COOKIES = re.compile(r"(?<=cookie:)[ \t]*[^\s\"'\\][^\r\n\"'\\]*", re.IGNORECASE)
_GIT_REMOTE = re.compile(
    r"\b(?:ssh|git)(?:\+\w+)?://[^\s\"'\\]+|(?<![\w.+-])(?:git@[\w.-]+:|[\w.+-]+@[\w.-]+:(?=\S+\.git\b))"
    r"[^\s\"'\\]+"
)
_HOME = re.compile(r"(?<![\w.])/(?:home|Users)/(?P<user>[^/\s\"'\\:<>]+)")
_ADDRESS = re.compile(r"(?<![\w.+-])[\w.+-]++@[A-Za-z][\w-]*(?:\.[\w-]+)*")
_IPV4 = re.compile(r"(?<![\w.])(?!127\.0\.0\.1\b|0\.0\.0\.0\b)\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_IPV6 = re.compile(
    r"(?<![\w:])(?:(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}"
    r"|(?:[0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F:]{1,39})(?![\w:])"
)
_HARDWARE = re.compile(
    r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5,19}[0-9a-fA-F]{2}(?![\w:])|"
    r"\b(?:GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
)
_HOST_KEYS = re.compile(
    r"\"(?:host|hostname|nodename|by)\"\s*:\s*\"([^\"\\/\s]{2,255})\""
    r"|\b(?:HOSTNAME|SLURMD_NODENAME|MASTER_ADDR)=([\w.-]{2,255})"
)
_KEY_NAMES = re.compile(
    r"\"(\w+)\"\s*:|^[ \t]*(?:\[+(?:[\w.]*\.)?)?(\w++)[ \t]*(?:=|\]+[ \t]*$)", re.MULTILINE
)
_IS_NO_NAME = frozenset({"localhost", "root", "none", "unknown"})


class Redactor:
    """Removes secrets and names from texts: first `learn` all of them, then `redact` each.

    Args:
        environment: the variables of this process, whose secrets are removed wherever they occur.
        hosts: names of hosts to remove.
        users: names of users to remove.
        keep: values that are not secret, whatever their key is, such as tokens of launches.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        hosts: Iterable[str] = (),
        users: Iterable[str] = (),
        keep: Iterable[str] = (),
    ) -> None:
        self.removed: Counter[str] = Counter()  # number of different values, by kind
        self._names: dict[str, dict[str, str]] = {}
        self._secrets: set[str] = set()
        self._homes = {str(Path.home()), environment.get("HOME", "")} - {"", "/"}
        self._hosts, self._users, self._keep = set(hosts), set(users), set(keep)
        self._key_names: set[str] = set()
        self._hosts |= {os.uname().nodename}
        self._users |= {environment[name] for name in ("USER", "LOGNAME") if environment.get(name)}
        for name, value in environment.items():
            if _is_secret(name, value):
                self._secrets.add(value)

    def add_owner(self, uid: int) -> None:
        """Also remove the login name and the home folder of the user with this uid from texts."""
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            return
        self._users.add(entry.pw_name)
        self._homes |= {entry.pw_dir} - {"", "/"}

    def learn(self, text: str) -> None:
        """Collect the secrets and names in one text; call this for all texts before `redact`."""
        self._secrets |= {value for _, _, value in self._keyed_secrets(text)}
        for found in _HOOK.finditer(text):  # its addresses may be secret, such as a webhook's
            self._secrets |= {found["command"], *_URL.findall(found["command"])}
        self._secrets |= {found["value"] for found in _HIDDEN.finditer(text)}
        for found in _HOST_KEYS.finditer(text):
            self._hosts.add(found[1] or found[2])
        self._users |= {found["user"] for found in _HOME.finditer(text)}
        self._key_names |= {found[1] or found[2] for found in _KEY_NAMES.finditer(text)}

    def redact(self, text: str) -> str:
        """Return the text with secrets, home folders, addresses and names replaced."""
        # The order matters: secrets first, then what may be inside of them. A secret in which a
        # host was replaced would no longer match its pattern.
        text = _KEY_BLOCK.sub(lambda found: self._name("secret", found[0]), text)
        known = {each for each in self._secrets if len(each) >= _MIN_SECRET_LENGTH}
        text = self._replace("secret", known - self._key_names, text, "{}")
        # Last one first, so that the positions of the others stay valid.
        for start, end, value in reversed(list(self._keyed_secrets(text))):
            text = text[:start] + self._name("secret", value) + text[end:]
        for pattern in (_COOKIES, _TOKEN):
            text = pattern.sub(lambda found: self._name("secret", found[0]), text)
        text = _GIT_REMOTE.sub(lambda found: self._name("address", found[0]), text)
        text = _URL_LOGIN.sub(lambda found: self._name("secret", found[0]) + "@", text)
        text = _URL_QUERY.sub(
            lambda found: f"{found['url']}?{self._name('secret', found[0])}", text
        )
        text = _WEBHOOK.sub(lambda found: f"{found['host']}/{self._name('secret', found[0])}", text)
        text = self._replace("home", self._homes, text, r"{}(?![\w-])")
        text = _HOME.sub(lambda found: self._name("home", found[0]), text)
        text = _ADDRESS.sub(lambda found: self._name("address", found[0]), text)
        text = self._replace("host", self._hosts, text, r"(?<!\w){}(?:\.[A-Za-z][\w-]*)*(?!\w)")
        for pattern in (_IPV4, _IPV6, _HARDWARE):
            text = pattern.sub(lambda found: self._name("address", found[0]), text)
        return self._replace("user", self._users, text, r"(?<![A-Za-z0-9]){}(?![A-Za-z0-9])")

    def _keyed_secrets(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield start, end and text of each value in a text whose key names a secret."""
        for key in _KEY.finditer(text):
            found = _VALUE.match(text, key.end())
            if found is None:
                continue
            group = "bare" if found["quoted"] is None else "quoted"
            value = found[group]
            if value not in self._keep and _is_secret(key["option"] or key["key"], value):
                yield *found.span(group), value

    def _replace(self, kind: str, values: Iterable[str], text: str, pattern: str) -> str:
        # The longest first, as a value may contain another.
        for value in sorted(values, key=lambda each: (-len(each), each)):
            if value in _IS_NO_NAME:
                continue
            # A value that is also the name of a key is replaced only as a part of a path.
            place = r"(?<=/){}(?=[/\s\"']|$)" if value in self._key_names else pattern
            # A text has the value as it is, escaped in a JSON string, or quoted in a URL.
            for form in {value, json.dumps(value)[1:-1], quote(value), quote(value, safe="")}:
                wanted = re.compile(place.format(re.escape(form)))
                if form in text and wanted.search(text):
                    text = wanted.sub(self._name(kind, value), text)
        return text

    def _name(self, kind: str, value: str) -> str:
        names = self._names.setdefault(kind, {})
        if value not in names:
            names[value] = f"<{kind}-{len(names) + 1}>"
            self.removed[kind] += 1
        return names[value]


def _is_secret(key: str, value: str) -> bool:
    if not value or _NOT_SECRET.fullmatch(value):
        return False
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()
    if _OTHER_KEY.search(parts) and len(value) >= _MIN_OTHER_KEY_LENGTH:
        return _IS_PATH.fullmatch(value) is None
    return _SECRET_WORD.search(parts) is not None
