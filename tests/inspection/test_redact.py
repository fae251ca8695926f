"""What is removed from texts that others will read, and what stays."""

import re

import pytest

from longtake.inspection.redact import Redactor

_PLANTED = "kJ8sd-f7Gh2.kLq"
_WANDB_KEY = "0123456789abcdef0123456789abcdef01234567"


def _redacted(*texts: str, **known: object) -> list[str]:
    redactor = Redactor(**{"environment": {}, **known})  # type: ignore[arg-type]
    for text in texts:
        redactor.learn(text)
    return [redactor.redact(text) for text in texts]


@pytest.mark.parametrize(
    "text",
    [
        f'api_key = "{_PLANTED}"',
        f'{{"access_token": "{_PLANTED}"}}',
        f'{{"apiToken": "{_PLANTED}"}}',
        f'{{"error": "login failed: password=\\"{_PLANTED}\\""}}',
        f'{{"error": "line\\ntoken={_PLANTED}\\nline"}}',
        f"error: token={_PLANTED}",
        f"export WANDB_API_KEY={_PLANTED}",
        f"python x.py --api-key {_PLANTED} --steps 3",
        f'["python", "--hub-token", "{_PLANTED}"]',
        f"Authorization: Bearer {_PLANTED}",
        f'{{"headers": {{"Authorization": "Basic {_PLANTED}"}}}}',
        f"machine api.wandb.ai login user password {_PLANTED}",
        f"s3://bucket/x.mp4?X-Amz-Signature={_PLANTED}",
        f"https://alice:{_PLANTED}@example.com/x.git",
        f"https://hooks.slack.com/services/T0/B0/{_PLANTED}",
        f'hook = "curl -d @- https://example.com/{_PLANTED}"',
        f"curl -u alice:{_PLANTED} https://example.com",
        f"hf_{_PLANTED.replace('.', '')}abcd",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{_PLANTED}\n-----END OPENSSH PRIVATE KEY-----",
        f"wandb: using {_WANDB_KEY}",
        "key AKIAIOSFODNN7EXAMPLE of",
        f"s3://AKIA:with/slash+{_PLANTED}@bucket/clips",
        f"AccountName=films;AccountKey={_PLANTED}==;EndpointSuffix=core",
        f"account_key='{_PLANTED}'",
        f"SharedAccessKey={_PLANTED}",
        f"python x.py --wandb-key {_PLANTED}q",
        f"python x.py --key {_PLANTED}q",
        f"{{'key': '{_PLANTED}q', 'client_kwargs': {{}}}}",
        f"posting to https://discord.com/api/webhooks/1234/{_PLANTED}",
        f"posting to https://films.webhook.office.com/webhookb2/{_PLANTED}",
        f"posting to http://chat.example.org:8065/hooks/{_PLANTED}",
        f"posting to https://api.telegram.org/bot12:{_PLANTED.replace('.', '_')}/sendMessage",
        f"password=SecretStr('{_PLANTED}')",
        f"Key(value=SecretStr('{_PLANTED}'))",
        f"Cookie: theme=dark; longtake_board_8420={_PLANTED}",
        f"set-cookie: a=1; session={_PLANTED}; Path=/",
        f"longtake_board_8420={_PLANTED}",
    ],
)
def test_secrets_are_removed(text: str) -> None:
    [shown] = _redacted(text)
    assert _PLANTED not in shown
    assert not re.search(r"kJ8sd|kLq|0123456789abcdef|AKIAI", shown)
    assert re.search(r"<secret-\d>", shown)


@pytest.mark.parametrize(
    "remote",
    ["git@example.com:team/film.git", "ssh://git@example.com/film.git", "me@host:film.git"],
)
def test_the_repository_of_a_git_remote_is_removed(remote: str) -> None:
    assert _redacted(f"origin {remote} (fetch)") == ["origin <address-1> (fetch)"]


def test_a_secret_is_removed_wherever_it_occurs_and_has_one_name() -> None:
    value = 'a "quoted" é/secret'
    texts = [f"password = '{value}'", 'said "a \\"quoted\\" \\u00e9/secret" twice', "in the shell"]
    environment = {"MY_TOKEN": "in-the-shell-environment"}
    texts.append("x in-the-shell-environment x")
    assert _redacted(*texts, environment=environment) == [
        "password = '<secret-1>'",
        'said "<secret-1>" twice',
        "in the shell",
        "x <secret-2> x",
    ]


def test_homes_users_hosts_and_addresses_are_removed_alike_everywhere() -> None:
    texts = [
        '{"host": "gpu01", "recipe": "/home/alice/runs/a.toml", "to": "bob@example.org"}',
        "gpu01.cluster.example: /home/alice/runs by alice, 10.1.2.3 fe80::1 aa:bb:cc:dd:ee:f0",
        "/mnt/alice/clips and /Users/carol/x, gpu011, malice",
    ]
    assert _redacted(*texts) == [
        '{"host": "<host-1>", "recipe": "<home-1>/runs/a.toml", "to": "<address-1>"}',
        "<host-1>: <home-1>/runs by <user-1>, <address-2> <address-3> <address-4>",
        "/mnt/<user-1>/clips and <home-2>/x, gpu011, malice",
    ]


def test_a_name_that_is_a_key_too_is_only_removed_from_paths() -> None:
    text = '[data]\ncatalog = "/mnt/data/x.parquet"\nout = "/home/data/y"'
    assert _redacted(text) == ['[data]\ncatalog = "/mnt/<user-1>/x.parquet"\nout = "<home-1>/y"']


@pytest.mark.parametrize(
    "text",
    [
        'max_tokens = 512\ntokenizer = "tokenizer"\n',
        "missing key: transformer_blocks.0.attn.to_q.weight",
        '{"token": "stall_abcdefgh_00000007_0"}',
        '{"time": "2026-05-01T12:00:00+00:00", "step": 12, "loss": 0.25, "versions": "2.13.0+cpu"}',
        "File /opt/torch/nn/linear.py, line 12, in forward: c10d::Backend at 127.0.0.1:29500",
        "RuntimeError: expected 3 tokens, passed 4; see https://pytorch.org/docs/stable",
    ],
)
def test_what_explains_a_run_stays(text: str) -> None:
    assert _redacted(text, keep=["stall_abcdefgh_00000007_0"]) == [text]
