"""A host's clock that can be set, though all hosts share this machine's.

    clock = HostClock(folder)
    cluster.start("node1", command, env=clock.environment)
    clock.step(-2.5)                      # at once, for all processes that were started so

A preloaded library adds a number of nanoseconds, which lies in a file that they all map, to what
the C library says of the date. Dates of files remain this machine's.
"""

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long long *added, none;

__attribute__((constructor)) static void map_added(void) {
    const char *path = getenv("HOST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(0, sizeof *added, PROT_READ, MAP_SHARED, file, 0);
    added = mapped == MAP_FAILED ? &none : mapped;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, found);
    if (failed || !added || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
        return failed;
    long long date = found->tv_sec * 1000000000LL + found->tv_nsec + *added;
    found->tv_sec = date / 1000000000LL;
    found->tv_nsec = date % 1000000000LL;
    return 0;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec date;
    int failed = clock_gettime(CLOCK_REALTIME, &date);
    found->tv_sec = date.tv_sec;
    found->tv_usec = date.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *found) {
    struct timespec date;
    clock_gettime(CLOCK_REALTIME, &date);
    if (found) *found = date.tv_sec;
    return date.tv_sec;
}
"""


def why_not() -> str | None:
    """Why a clock cannot be set here; None if it can."""
    return None if shutil.which("cc") else "a host's clock needs a C compiler (cc)"


class HostClock:
    """The clock of all processes that are started with its environment."""

    def __init__(self, folder: Path) -> None:
        library, number = folder / "host_clock.so", folder / "host_clock"
        build = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
        subprocess.run(build, input=_SOURCE, text=True, check=True)
        number.write_bytes(bytes(8))
        with number.open("r+b") as file:
            self._added = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "HOST_CLOCK": str(number)}

    def step(self, seconds: float) -> None:
        before = struct.unpack("q", self._added)[0]
        self._added[:] = struct.pack("q", before + round(seconds * 1e9))
