"""A curriculum from an object store, trained on two hosts while store, clock and rank fail."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image
from tests.cluster import host_clock, hosts
from tests.cluster.host_clock import HostClock
from tests.cluster.hosts import Cluster
from tests.cluster.launchers import Launchers
from tests.data import store

from longtake.data.index import index
from longtake.demo import shapes
from longtake.faults import nodes
from longtake.faults.expect import Evidence
from longtake.faults.sandbox import TrainingSite

pytestmark = [pytest.mark.drill, pytest.mark.slow]

_BUCKET = "films"
_NUM_VIDEOS, _NUM_IMAGES = 48, 96
_USUAL_STEPS = 8  # before the store is lost: a stall is found by comparing with them
_GONE_SECONDS = 20.0
_STEP_SECONDS = -2.5  # of the clock
_SAVE_EVERY = 10  # steps
_RECIPE = (
    f"""\
out = "run"
checkpoint.every = {_SAVE_EVERY}
"""
    """\
text.kind = "transformers"
text.max_tokens = 8
text.config = { d_model = 16, d_kv = 8, d_ff = 16, num_layers = 1, num_heads = 2 }
optimizer = { learning_rate = 3e-3, warmup_steps = 3 }
training = { steps = 40, global_batch_size = 4, device = "cpu", precision = "fp32" }
ema.decay = 0.9
tracking.tensorboard = false

[model]
family = "wan"
config = { num_layers = 2, num_attention_heads = 4, attention_head_dim = 12, ffn_dim = 32 }

[codec]
kind = "autoencoder"
config.base_dim = 4
config.z_dim = 4
config.dim_mult = [1, 1]
config.num_res_blocks = 1
config.temperal_downsample = [true]

[data]
catalog = "../catalog.parquet"
buckets = [                              # of 192 and 64 tokens
    { num_frames = 5, height = 32, width = 32 },
    { num_frames = 1, height = 32, width = 32 },
]
tokens_per_batch = 384
workers = 1
frame_cache_gib = 0                      # so that every epoch fetches every clip
store.timeout_seconds = 2

[[data.stages]]
name = "small"
steps = 20
buckets = [
    { num_frames = 5, height = 16, width = 16 },
    { num_frames = 1, height = 16, width = 16 },
]

[[data.stages]]
name = "large"
learning_rate = 1e-3
warmup_steps = 4
ema_decay = 0.95
"""
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts that share this machine's disk."""
    if reason := hosts.why_not() or host_clock.why_not():
        pytest.skip(reason)
    with hosts.hosts(2, tmp_path_factory.mktemp("hosts")) as cluster:
        yield cluster


@contextmanager
def _films(cluster: Cluster, folder: Path) -> Iterator[store.Proxy]:
    """A store with captioned videos and images, their catalog, and the way of the hosts to it."""
    clips, captions = folder / "clips", folder / "clips" / "captions.jsonl"
    shapes.write_clips(clips, _NUM_VIDEOS, seed=0)
    with captions.open("a") as file:
        for number in range(_NUM_IMAGES):
            colour = (number, 255 - number, 2 * number)
            Image.new("RGB", (32, 32), colour).save(clips / f"{number}.png")
            file.write(json.dumps({"video": f"{number}.png", "caption": f"colour {number}"}) + "\n")
    with store.s3_server() as address:
        store.put_folder(address, _BUCKET, clips)
        with pytest.MonkeyPatch.context() as patch:
            store.use(patch, address)
            out = folder / "catalog.parquet"
            index([Path(f"s3://{_BUCKET}")], captions=captions, out=out, workers=0)
        with store.Proxy(int(address.rpartition(":")[2]), cluster.listen()) as proxy:
            yield proxy


def _site(folder: Path, name: str) -> TrainingSite:
    site = TrainingSite(folder / name)
    site.folder.mkdir()
    site.write_recipe(_RECIPE)
    return site


def _said(site: TrainingSite, *verb: str) -> str:
    command = [sys.executable, "-m", "longtake", *verb, "run"]
    done = subprocess.run(command, cwd=site.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_a_run_that_loses_store_clock_and_rank_is_bitwise_the_undisturbed(
    cluster: Cluster, tmp_path: Path
) -> None:
    """And says of each on which node it was, when and why."""
    first, second = cluster.names
    undisturbed, site = _site(tmp_path, "undisturbed"), _site(tmp_path, "run-with-faults")
    with _films(cluster, tmp_path) as proxy:
        clock = HostClock(tmp_path)
        names = {**store.KEYS, "AWS_ENDPOINT_URL": proxy.address, "AWS_DEFAULT_REGION": "us-east-1"}
        env = {first: names, second: {**names, **clock.environment}}
        with Launchers(undisturbed.folder, cluster, "2", env=env) as launchers:
            launchers.finish()
        with Launchers(site.folder, cluster, "2", env=env) as launchers:
            launchers.wait_for_rows(_USUAL_STEPS)
            proxy.become("gone")
            gone_at = time.monotonic()
            stalled = launchers.wait_for_node_event("stalled")
            clock.step(_STEP_SECONDS)
            stepped = launchers.wait_for_node_event("clock_stepped")
            time.sleep(max(0.0, gone_at + _GONE_SECONDS - time.monotonic()))
            proxy.become("open")
            cleared = launchers.wait_for_node_event("stall_cleared")
            # Two steps after a save, so that steps are lost; the next save is eight steps away.
            launchers.wait_until(
                lambda: launchers.num_rows() % _SAVE_EVERY == 2, "two steps after a save"
            )
            cluster.must(second, "pkill", "-KILL", "-f", "longtake train")
            recovery = nodes.wait_for_recovery(launchers, site, time.monotonic())
            launchers.finish()
            output = launchers.output
    evidence = Evidence()
    evidence.expect_event(stalled, gone_at, "no event says that the training stalled", 20.0)
    evidence.expect(stepped is not None, "no event says that the clock was set")
    evidence.expect(cleared is not None, "no event says that the stall ended")
    evidence.expect_recovered(recovery)
    evidence.expect_equal(site.run, undisturbed.run)
    evidence.expect_world_sizes(site.run, 2, 2)
    set_back = f"{second}: the clock was set back by {-_STEP_SECONDS:.3f}"
    evidence.expect_output(output, f"Rank 1 of 2 on {second}", set_back)
    assert evidence.complaints == []
    _expect_told(site, second, set_back)


def _expect_told(site: TrainingSite, host: str, set_back: str) -> None:
    """Each trouble once, with node, time and cause."""
    date, clip = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", rf"s3://{_BUCKET}/\w+\.\w+"
    shown, worker = _said(site, "show"), r"node\d: decode worker \d+ of rank \d"
    for sentence in (
        rf"{date} step \d+: stalled for \d+ s: The store s3://{_BUCKET} has given nothing for "
        rf"\d+ s: \w+\. {worker} has been waiting for it for \d+ s, for clip {clip}",
        rf"{date} step \d+: clock stepped {_STEP_SECONDS:g} s: {set_back}",
        rf"{date} step \d+: rank failed on {host}: rank 1 \(phase \w+\): killed by SIGKILL",
    ):
        assert len(re.findall(sentence, shown)) == 1, (sentence, shown)
    assert shown.count("stalled for") == shown.count("rank failed") == 1
    health, audited = _said(site, "health"), _said(site, "data", "audit")
    assert re.search(rf"{date} {set_back}\d* s, [\w ]+ ago", health)
    assert re.search(
        r"Steps? \d+.* trained again by the launch that began at "
        rf"{date}, because at [\d:]+ UTC a rank failed on {host}: rank 1",
        audited,
    )
    assert "every clip was trained exactly as often as it should have been." in audited
