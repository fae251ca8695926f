/* A driver of two GPUs, as far as longtake asks it, for machines that have none.
 *
 * GPU 0 is hot: 412 W, slowed down by heat, with one XID (79). GPU 1 draws 655 W and has no ECC.
 */
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, TIMEOUT = 10 };
typedef struct { int number; } Gpu;
typedef struct { char old_bus_id[16]; unsigned domain, bus, device, pci_id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { Gpu *gpu; unsigned long long type, data; unsigned instance, compute; } Event;

static Gpu gpus[2] = {{0}, {1}};
static int has_told;

int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) { *gpu = &gpus[index]; return SUCCESS; }
int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *pci) {
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", gpu->number ? 0x5E : 0x3B);
  return SUCCESS;
}
int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *mw) { *mw = gpu->number ? 655000 : 412000; return SUCCESS; }
int nvmlDeviceGetEnforcedPowerLimit(Gpu *gpu, unsigned *mw) { (void)gpu; *mw = 700000; return SUCCESS; }
int nvmlDeviceGetTemperature(Gpu *gpu, unsigned sensor, unsigned *celsius) {
  (void)sensor; *celsius = gpu->number ? 62 : 91; return SUCCESS;
}
int nvmlDeviceGetClockInfo(Gpu *gpu, unsigned kind, unsigned *mhz) {
  *mhz = kind == 2 ? 2619 : gpu->number ? 1980 : 1155; return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, unsigned long long *bits) {
  *bits = gpu->number ? 0x4 : 0x44; return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *found) {
  (void)gpu; found->gpu = 97; found->memory = 40; return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *found) {
  (void)gpu; found->total = 80ULL << 30; found->used = 60ULL << 30; found->free = 20ULL << 30; return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(Gpu *gpu, unsigned kind, unsigned counter, unsigned long long *count) {
  (void)counter; *count = kind ? 2 : 11; return gpu->number ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetRemappedRows(Gpu *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  (void)gpu; *corrected = 1; *uncorrected = 2; *pending = 0; *failed = 0; return SUCCESS;
}
int nvmlDeviceGetNvLinkErrorCounter(Gpu *gpu, unsigned link, unsigned counter, unsigned long long *count) {
  *count = 10 * link + counter; return gpu->number || link > 1 ? NOT_SUPPORTED : SUCCESS;
}
int nvmlEventSetCreate(void **set) { *set = &has_told; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(Gpu *gpu, unsigned long long kinds, void *set) { (void)gpu; (void)kinds; (void)set; return SUCCESS; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned ms) {
  (void)set; (void)ms;
  if (has_told) return TIMEOUT;
  has_told = 1;
  memset(event, 0, sizeof *event);
  event->gpu = &gpus[0]; event->type = 8; event->data = 79;
  return SUCCESS;
}
const char *nvmlErrorString(int code) { (void)code; return "an error"; }
