/* A stand-in for NVIDIA's libnvidia-ml.so.1 that answers from a text file.
 *
 * The real nvidia-ml-py loads it on the testbed's nodes, so what hpcenv reads there goes through the real
 * calls. nvmlInit and nvmlDeviceGetUtilizationRates read the file anew: a change of the file changes the answers of the
 * next process, and what a process that watches the GPUs sees next.
 *
 * File: $STUB_NVML, else /etc/stub-nvml.conf. Lines `key = value`; `#` begins a comment. `[gpu]` begins the
 * next GPU; what comes before the first one is the driver's. GPU i is the i-th `[gpu]`.
 *
 * A value `!N` makes the call return NVML's error N (nvml.h, nvmlReturn_t: 3 not supported, 4 no permission,
 * 9 driver not loaded, 15 GPU is lost, 18 library version differs from the driver's, 999 unknown).
 * A value `!hang` never returns, `!crash` ends the process by SIGABRT. A key that is not in the file is
 * "not supported". The key of a call is written beside it below; a new call is one line of a table.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { MAX_GPUS = 64, MAX_ROWS = 64 };

typedef struct { char key[48], value[160]; } Row;
typedef struct { Row rows[MAX_ROWS]; int count; } Table;
typedef Table *Device;

static Table driver, gpus[MAX_GPUS], parts[MAX_GPUS];
static Device whole_of[MAX_GPUS]; /* part -> its GPU */
static unsigned gpu_count, part_count;
static int initialized;

static char *trimmed(char *text)
{
    char *end = text + strlen(text);
    while (end > text && strchr(" \t\r\n", end[-1]))
        *--end = 0;
    return text + strspn(text, " \t");
}

static void read_file(void)
{
    const char *path = getenv("STUB_NVML");
    FILE *file = fopen(path ? path : "/etc/stub-nvml.conf", "r");
    char line[256];
    Table *table = &driver;
    driver.count = 0;
    gpu_count = part_count = 0;
    if (!file)
        return;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "#")] = 0;
        char *text = trimmed(line), *equals = strchr(text, '=');
        if (!strcmp(text, "[gpu]") && gpu_count < MAX_GPUS) {
            table = &gpus[gpu_count++];
            table->count = 0;
        } else if (!strcmp(text, "[part]") && gpu_count && part_count < MAX_GPUS) { /* of the GPU above (MIG) */
            whole_of[part_count] = &gpus[gpu_count - 1];
            table = &parts[part_count++];
            table->count = 0;
        } else if (equals && table->count < MAX_ROWS) {
            Row *row = &table->rows[table->count++];
            *equals = 0;
            snprintf(row->key, sizeof row->key, "%s", trimmed(text));
            snprintf(row->value, sizeof row->value, "%s", trimmed(equals + 1));
        }
    }
    fclose(file);
}

/* The value of a key, or the error that the file asks for. */
static int look_up(Table *table, const char *key, const char **value)
{
    if (!initialized)
        return UNINITIALIZED;
    if (!table)
        return INVALID_ARGUMENT;
    for (int i = 0; i < table->count; i++) {
        if (strcmp(table->rows[i].key, key))
            continue;
        *value = table->rows[i].value;
        if (!strcmp(*value, "!hang"))
            for (;;)
                pause();
        if (!strcmp(*value, "!crash"))
            abort();
        return **value == '!' ? atoi(*value + 1) : OK;
    }
    return NOT_SUPPORTED;
}

static int text_of(Table *table, const char *key, char *out, unsigned length)
{
    const char *value;
    int status = look_up(table, key, &value);
    if (status != OK)
        return status;
    if (strlen(value) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return OK;
}

/* Up to `count` whole numbers, decimal or 0x...; the last one that is there also counts for those behind it. */
static int numbers_of(Table *table, const char *key, unsigned long long *out, int count)
{
    const char *value;
    int status = look_up(table, key, &value);
    char *end;
    if (status != OK)
        return status;
    for (int i = 0; i < count; i++) {
        out[i] = strtoull(value, &end, 0);
        if (*(end += strspn(end, ", .:")))
            value = end;
    }
    return OK;
}

/* -- calls without a GPU ---------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned flags)
{
    const char *value;
    (void)flags;
    read_file();
    initialized = 1;
    int status = look_up(&driver, "init", &value);
    initialized = status == OK || status == NOT_SUPPORTED;
    return initialized ? OK : status;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int status)
{
    static const struct { int status; const char *text; } texts[] = {
        {0, "Success"}, {1, "Uninitialized"}, {2, "Invalid Argument"}, {3, "Not Supported"},
        {4, "Insufficient Permissions"}, {6, "Not Found"}, {7, "Insufficient Size"}, {9, "Driver Not Loaded"},
        {10, "Timeout"}, {15, "GPU is lost"}, {16, "GPU requires reset"},
        {18, "Driver/library version mismatch"}, {999, "Unknown Error"},
    };
    for (unsigned i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].status == status)
            return texts[i].text;
    return "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *out, unsigned length) { return text_of(&driver, "driver", out, length); }
int nvmlSystemGetNVMLVersion(char *out, unsigned length) { return text_of(&driver, "nvml", out, length); }

int nvmlSystemGetCudaDriverVersion(int *out)
{
    unsigned long long version;
    int was = initialized;
    if (!was) { /* NVML answers this one without nvmlInit, too */
        read_file();
        initialized = 1;
    }
    int status = numbers_of(&driver, "cuda", &version, 1);
    initialized = was;
    *out = (int)version;
    return status;
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

int nvmlDeviceGetCount_v2(unsigned *out)
{
    const char *value;
    int status = look_up(&driver, "count", &value);
    *out = gpu_count;
    return status == NOT_SUPPORTED ? OK : status; /* `count = !N` only makes an error */
}

static int handle_of(unsigned index, Device *out)
{
    const char *value;
    if (index >= gpu_count)
        return INVALID_ARGUMENT;
    int status = look_up(&gpus[index], "handle", &value);
    *out = &gpus[index];
    return status == NOT_SUPPORTED ? OK : status;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) { return handle_of(index, out); }

static int handle_by(const char *key, const char *wanted, Device *out)
{
    char text[160];
    for (unsigned i = 0; i < gpu_count; i++)
        if (text_of(&gpus[i], key, text, sizeof text) == OK && !strcasecmp(text, wanted))
            return handle_of(i, out);
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device *out) { return handle_by("uuid", uuid, out); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, Device *out) { return handle_by("bus", id, out); }

/* -- parts of a GPU with `mig = 1 1`; `handle = !4` is a part of another job, `instance` its number ---------------- */

int nvmlDeviceGetMaxMigDeviceCount(Device gpu, unsigned *out) { return gpu ? (*out = 7, OK) : INVALID_ARGUMENT; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device gpu, unsigned index, Device *out)
{
    const char *value;
    for (unsigned i = 0; i < part_count; i++)
        if (whole_of[i] == gpu && !index--) {
            int status = look_up(&parts[i], "handle", &value);
            *out = &parts[i];
            return status == NOT_SUPPORTED ? OK : status;
        }
    return NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device part, Device *out)
{
    for (unsigned i = 0; i < part_count; i++)
        if (&parts[i] == part)
            return *out = whole_of[i], OK;
    return INVALID_ARGUMENT;
}

/* -- one text or one number of a GPU ------------------------------------------------------------ */

#define TEXT(call, key) \
    int call(Device gpu, char *out, unsigned length) { return text_of(gpu, key, out, length); }
#define NUMBER(call, type, key) \
    int call(Device gpu, type *out) \
    { \
        unsigned long long found = 0; \
        int status = numbers_of(gpu, key, &found, 1); \
        *out = (type)found; \
        return status; \
    }
/* Two numbers: current and pending, or current and maximum; one number counts for both. */
#define PAIR(call, key) \
    int call(Device gpu, unsigned *first, unsigned *second) \
    { \
        unsigned long long found[2] = {0, 0}; \
        int status = numbers_of(gpu, key, found, 2); \
        *first = (unsigned)found[0], *second = (unsigned)found[1]; \
        return status; \
    }
/* One number of several, by an argument: `clock = 1980 1980 2619 1545` in the order of nvmlClockType_t. */
#define INDEXED(call, type, key, most) \
    int call(Device gpu, unsigned index, type *out) \
    { \
        unsigned long long found[most] = {0}; \
        int status = index < (most) ? numbers_of(gpu, key, found, most) : INVALID_ARGUMENT; \
        *out = (type)found[index < (most) ? index : 0]; \
        return status; \
    }

TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")

NUMBER(nvmlDeviceGetMinorNumber, unsigned, "minor")
NUMBER(nvmlDeviceGetNumGpuCores, unsigned, "cores")
NUMBER(nvmlDeviceGetBrand, unsigned, "brand")
NUMBER(nvmlDeviceGetArchitecture, unsigned, "architecture")
NUMBER(nvmlDeviceGetComputeMode, unsigned, "compute-mode")
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, "persistence")
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power-limit")
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, "power-limit")
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "power-limit-default")
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle")
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "throttle")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie-generation")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie-generation-max")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie-width")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie-width-max")
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie-replays")
NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, "energy")
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, "retired-pending")
NUMBER(nvmlDeviceGetNumaNodeId, unsigned, "numa-node")
NUMBER(nvmlDeviceIsMigDeviceHandle, unsigned, "is-mig-device")
NUMBER(nvmlDeviceGetGpuInstanceId, unsigned, "instance")

PAIR(nvmlDeviceGetMigMode, "mig")
PAIR(nvmlDeviceGetEccMode, "ecc")
PAIR(nvmlDeviceGetCudaComputeCapability, "compute-capability")

INDEXED(nvmlDeviceGetClockInfo, unsigned, "clock", 4)
INDEXED(nvmlDeviceGetMaxClockInfo, unsigned, "clock-max", 4)
INDEXED(nvmlDeviceGetApplicationsClock, unsigned, "clock-application", 4)
INDEXED(nvmlDeviceGetTemperature, unsigned, "temperature", 1)
INDEXED(nvmlDeviceGetNvLinkState, unsigned, "nvlink", 18)

/* -- structures (nvml.h, CUDA 13.0) --------------------------------------------------------------- */

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };
int nvmlDeviceGetPciInfo_v3(Device gpu, struct pci *out)
{
    char text[160];
    int status = text_of(gpu, "bus", text, sizeof text);
    memset(out, 0, sizeof *out);
    if (status != OK)
        return status;
    if (sscanf(text, "%x:%x:%x", &out->domain, &out->bus, &out->device) != 3)
        return 999;
    snprintf(out->text, sizeof out->text, "%.31s", text);
    snprintf(out->legacy, sizeof out->legacy, "%04x:%02x:%02x.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    return OK;
}

struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(Device gpu, struct utilization *out)
{
    unsigned long long found[2] = {0, 0};
    read_file();
    int status = numbers_of(gpu, "utilization", found, 2);
    out->gpu = (unsigned)found[0], out->memory = (unsigned)found[1];
    return status;
}

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(Device gpu, struct memory_v2 *out) /* `memory-mib = 81559 0`: total and used */
{
    unsigned long long mib[2] = {0, 0}, used;
    const char *value = "";
    int status = numbers_of(gpu, "memory-mib", mib, 2);
    if (status == OK)
        look_up(gpu, "memory-mib", &value);
    used = strpbrk(value, " ,") ? mib[1] : 0;
    out->total = mib[0] << 20, out->used = used << 20, out->reserved = 0;
    out->free = out->total - out->used;
    return status;
}
int nvmlDeviceGetMemoryInfo(Device gpu, struct memory *out)
{
    struct memory_v2 found;
    int status = nvmlDeviceGetMemoryInfo_v2(gpu, &found);
    out->total = found.total, out->free = found.free, out->used = found.used;
    return status;
}

/* `ecc-corrected` and `ecc-uncorrected`: volatile, then aggregate. */
int nvmlDeviceGetTotalEccErrors(Device gpu, unsigned kind, unsigned counter, unsigned long long *out)
{
    unsigned long long found[2] = {0, 0};
    int status = numbers_of(gpu, kind ? "ecc-uncorrected" : "ecc-corrected", found, 2);
    *out = found[counter & 1];
    return status;
}

/* `remapped-rows = corrected uncorrected pending failure` */
int nvmlDeviceGetRemappedRows(Device gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    unsigned long long found[4] = {0};
    int status = numbers_of(gpu, "remapped-rows", found, 4);
    *corrected = (unsigned)found[0], *uncorrected = (unsigned)found[1];
    *pending = (unsigned)found[2], *failed = (unsigned)found[3];
    return status;
}

/* `process = PID MIB`: one process that uses the GPU; without the key none does. `process-file = PATH`: the process whose
 * number is in that file, as long as it runs. */
struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(Device gpu, unsigned *count, struct process *out)
{
    unsigned long long found[2] = {0, 0};
    unsigned room = *count;
    int status = numbers_of(gpu, "process", found, 2);
    const char *path;
    if (status == NOT_SUPPORTED && look_up(gpu, "process-file", &path) == OK) {
        FILE *file = fopen(path, "r");
        char folder[32];
        if (file && fscanf(file, "%llu", &found[0]) == 1) {
            snprintf(folder, sizeof folder, "/proc/%llu", found[0]);
            status = access(folder, F_OK) ? NOT_SUPPORTED : OK;
        }
        if (file)
            fclose(file);
    }
    *count = status == OK;
    if (status != OK)
        return status == NOT_SUPPORTED ? OK : status;
    if (!out || !room)
        return INSUFFICIENT_SIZE;
    *out = (struct process){(unsigned)found[0], found[1] << 20, ~0u, ~0u};
    return OK;
}

/* GPM: `gpm-N = VALUE` is metric N; without `gpm = 1` the GPU does not support it. */
struct gpm_support { unsigned version, supported; };
int nvmlGpmQueryDeviceSupport(Device gpu, struct gpm_support *out)
{
    unsigned long long found = 0;
    out->supported = numbers_of(gpu, "gpm", &found, 1) == OK && found;
    return OK;
}
struct gpm_sample { Device gpu; };
int nvmlGpmSampleAlloc(struct gpm_sample **out) { return (*out = calloc(1, sizeof **out)) ? OK : INSUFFICIENT_SIZE; }
int nvmlGpmSampleFree(struct gpm_sample *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(Device gpu, struct gpm_sample *sample)
{
    Device whole;
    sample->gpu = gpu;
    return nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu, &whole) == OK ? NOT_SUPPORTED : OK;
}
int nvmlGpmMigSampleGet(Device gpu, unsigned instance, struct gpm_sample *sample)
{
    unsigned found = 0;
    for (unsigned i = 0; i < part_count; i++)
        if (whole_of[i] == gpu && nvmlDeviceGetGpuInstanceId(&parts[i], &found) == OK && found == instance)
            return sample->gpu = &parts[i], OK;
    return NOT_FOUND;
}
struct gpm_metric { unsigned id; int status; double value; const char *names[3]; };
struct gpm_metrics { unsigned version, count; struct gpm_sample *before, *after; struct gpm_metric metrics[]; };
int nvmlGpmMetricsGet(struct gpm_metrics *asked)
{
    for (unsigned i = 0; i < asked->count; i++) {
        unsigned long long found = 0;
        char key[16];
        snprintf(key, sizeof key, "gpm-%u", asked->metrics[i].id);
        asked->metrics[i].status = numbers_of(asked->after->gpu, key, &found, 1);
        asked->metrics[i].value = (double)found;
    }
    return OK;
}

/* `field-N = VALUE`, for example field-230 (recovery action): an unsigned number. */
struct field { unsigned id, scope; long long time, latency; unsigned type, status; union { double d; unsigned u; unsigned long long w; } value; };
int nvmlDeviceGetFieldValues(Device gpu, int count, struct field *out)
{
    for (int i = 0; i < count; i++) {
        char key[32];
        unsigned long long found = 0;
        snprintf(key, sizeof key, "field-%u", out[i].id);
        out[i].status = (unsigned)numbers_of(gpu, key, &found, 1);
        out[i].type = 1; /* NVML_VALUE_TYPE_UNSIGNED_INT */
        out[i].value.w = 0;
        out[i].value.u = (unsigned)found;
    }
    return OK;
}

/* `fabric = STATE STATUS CLIQUE HEALTHMASK` */
struct fabric { unsigned version; unsigned char cluster[16]; unsigned status, clique, state, health; };
int nvmlDeviceGetGpuFabricInfoV(Device gpu, struct fabric *out)
{
    unsigned long long found[4] = {0};
    int status = numbers_of(gpu, "fabric", found, 4);
    out->state = (unsigned)found[0], out->status = (unsigned)found[1];
    out->clique = (unsigned)found[2], out->health = (unsigned)found[3];
    return status;
}

/* `peer-ancestor` and `peer-status` of the first GPU: the same to every other one. */
int nvmlDeviceGetTopologyCommonAncestor(Device gpu, Device other, unsigned *out)
{
    unsigned long long found = 0;
    int status = other ? numbers_of(gpu, "peer-ancestor", &found, 1) : INVALID_ARGUMENT;
    *out = (unsigned)found;
    return status;
}
int nvmlDeviceGetP2PStatus(Device gpu, Device other, unsigned kind, unsigned *out)
{
    unsigned long long found = 0;
    int status = other && kind < 8 ? numbers_of(gpu, "peer-status", &found, 1) : INVALID_ARGUMENT;
    *out = (unsigned)found;
    return status;
}
