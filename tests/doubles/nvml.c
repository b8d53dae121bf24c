/*
 * A double of libnvidia-ml.so.1: answers with the values of a file, "KEY VALUE" a line, which a test may replace at any
 * time. The file is $NVML_DOUBLE_FILE, or nvml.values beside the library. What the file lacks is not supported.
 *
 * init CODE: of nvmlInit and, when it changes, of every call. hang NAME, gpuN.hang NAME: this call does not return while
 * the line is there. gpuN.lost CODE: of every call about this GPU. gpuN.error.NAME CODE: of one call.
 */
#define _GNU_SOURCE
#include "nvml.h"

#include <dlfcn.h>
#include <libgen.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 16
#define MAX_MIGS 8
#define SLOTS 65536
#define NONE (~0u)

struct nvmlDevice_st { int gpu, mig; char prefix[24]; };
struct nvmlEventSet_st { u64 mask[MAX_GPUS]; unsigned int seen; int changes; };
struct nvmlGpmSample_st { int gpu, instance; u64 number; };

static struct nvmlDevice_st gpus[MAX_GPUS], migs[MAX_GPUS][MAX_MIGS];
static struct { const char *key, *value; } slots[SLOTS];
static char *content;
static struct stat known;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static u64 gpm_samples;
static int references;

static unsigned int place(const char *key)
{
	unsigned int hash = 2166136261u;

	for (const char *at = key; *at; at++)
		hash = (hash ^ (unsigned char)*at) * 16777619u;
	hash %= SLOTS;
	while (slots[hash].key && strcmp(slots[hash].key, key))
		hash = (hash + 1) % SLOTS;
	return hash;
}

static const char *file_name(void)
{
	static char path[4096];
	Dl_info found;

	if (getenv("NVML_DOUBLE_FILE"))
		return getenv("NVML_DOUBLE_FILE");
	if (!path[0] && dladdr((void *)file_name, &found)) {
		snprintf(path, sizeof(path), "%s", found.dli_fname);
		char *slash = strrchr(path, '/');
		snprintf(slash ? slash + 1 : path, 32, "nvml.values");
	}
	return path;
}

/* Reads the file again when it was replaced, once a call: looking costs more than most calls. Called with the lock. */
static void load(void)
{
	struct stat now;
	FILE *file;
	char *rest;

	if (stat(file_name(), &now))
		return;
	if (content && now.st_ino == known.st_ino && now.st_size == known.st_size &&
	    now.st_mtim.tv_sec == known.st_mtim.tv_sec && now.st_mtim.tv_nsec == known.st_mtim.tv_nsec)
		return;
	if (!(file = fopen(file_name(), "r")))
		return;
	free(content);
	content = calloc(1, now.st_size + 1);
	if (fread(content, 1, now.st_size, file) != (size_t)now.st_size)
		content[0] = 0;
	fclose(file);
	known = now;
	memset(slots, 0, sizeof(slots));
	for (char *line = strtok_r(content, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
		char *value = strchr(line, ' ');
		if (!value)
			continue;
		*value++ = 0;
		unsigned int at = place(line);
		slots[at].key = line;
		slots[at].value = value;
	}
}

/* Copies the value of prefix + name into text; returns whether there is one. */
static int text_of(const char *prefix, const char *name, char *text, size_t size)
{
	char key[160];
	const char *value;

	snprintf(key, sizeof(key), "%s%s", prefix, name);
	pthread_mutex_lock(&lock);
	value = slots[place(key)].value;
	if (value)
		snprintf(text, size, "%s", value);
	pthread_mutex_unlock(&lock);
	return value != NULL;
}

static int number_of(const char *prefix, const char *name, u64 *number)
{
	char text[64];

	if (!text_of(prefix, name, text, sizeof(text)))
		return 0;
	*number = strtoull(text, NULL, 0);
	return 1;
}

static u64 number_or(const char *prefix, const char *name, u64 otherwise)
{
	number_of(prefix, name, &otherwise);
	return otherwise;
}

static void wait_ms(int ms)
{
	struct timespec time = { ms / 1000, ms % 1000 * 1000000L };
	nanosleep(&time, NULL);
}

static u64 now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000ull + now.tv_nsec / 1000000;
}

/* Each call asks this first, and a call that hangs asks again and again. */
static int hangs(const char *prefix, const char *call)
{
	char text[128];

	if (!*prefix) {
		pthread_mutex_lock(&lock);
		load();
		pthread_mutex_unlock(&lock);
	}
	return text_of(prefix, "hang", text, sizeof(text)) && (!strcmp(text, call) || !strcmp(text, "*"));
}

static const char *gpu_prefix(nvmlDevice_t device)
{
	return gpus[device->gpu].prefix;
}

/* What every call does first: hangs or fails as the file says. device may be NULL. */
static nvmlReturn_t enter(nvmlDevice_t device, const char *call)
{
	char name[128];
	u64 code;

	while (hangs("", call) || (device && hangs(gpu_prefix(device), call)))
		wait_ms(5);
	if (!references)
		return NVML_ERROR_UNINITIALIZED;
	if ((code = number_or("", "init", 0)))
		return code;
	snprintf(name, sizeof(name), "error.%s", call);
	if ((code = number_or("", name, 0)))
		return code;
	if (!device)
		return NVML_SUCCESS;
	if ((code = number_or(gpu_prefix(device), "lost", 0)) || (code = number_or(device->prefix, name, 0)))
		return code;
	return NVML_SUCCESS;
}

#define ENTER(device)                                                                                                  \
	do {                                                                                                           \
		nvmlReturn_t entered = enter(device, __func__);                                                        \
		if (entered)                                                                                           \
			return entered;                                                                                \
	} while (0)

static nvmlReturn_t give_text(nvmlDevice_t device, const char *name, char *text, unsigned int length)
{
	return text_of(device ? device->prefix : "", name, text, length) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t give(nvmlDevice_t device, const char *name, unsigned int *out)
{
	u64 number;

	if (!number_of(device->prefix, name, &number))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = number;
	return NVML_SUCCESS;
}

static nvmlReturn_t give_long(nvmlDevice_t device, const char *name, u64 *out)
{
	return number_of(device->prefix, name, out) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* A call that gives one number of a device. */
#define NUMBER(call, name)                                                                                             \
	EXPORT nvmlReturn_t call(nvmlDevice_t device, unsigned int *out)                                               \
	{                                                                                                              \
		ENTER(device);                                                                                         \
		return give(device, name, out);                                                                        \
	}
#define LONG_NUMBER(call, name)                                                                                        \
	EXPORT nvmlReturn_t call(nvmlDevice_t device, u64 *out)                                                        \
	{                                                                                                              \
		ENTER(device);                                                                                         \
		return give_long(device, name, out);                                                                   \
	}
/* A call that gives one number for an argument. */
#define INDEXED(call, format)                                                                                          \
	EXPORT nvmlReturn_t call(nvmlDevice_t device, unsigned int index, unsigned int *out)                           \
	{                                                                                                              \
		char name[64];                                                                                         \
		ENTER(device);                                                                                         \
		snprintf(name, sizeof(name), format, index);                                                           \
		return give(device, name, out);                                                                        \
	}
#define TEXT(call, name)                                                                                               \
	EXPORT nvmlReturn_t call(nvmlDevice_t device, char *text, unsigned int length)                                 \
	{                                                                                                              \
		ENTER(device);                                                                                         \
		return give_text(device, name, text, length);                                                          \
	}
#define SYSTEM_TEXT(call, name)                                                                                        \
	EXPORT nvmlReturn_t call(char *text, unsigned int length)                                                      \
	{                                                                                                              \
		ENTER(NULL);                                                                                           \
		return give_text(NULL, name, text, length);                                                            \
	}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	u64 code;

	(void)flags;
	while (hangs("", __func__))
		wait_ms(5);
	if ((code = number_or("", "init", 0)))
		return code;
	for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
		gpus[gpu] = (struct nvmlDevice_st){ gpu, -1, "" };
		snprintf(gpus[gpu].prefix, sizeof(gpus[gpu].prefix), "gpu%d.", gpu);
		for (int mig = 0; mig < MAX_MIGS; mig++) {
			migs[gpu][mig] = (struct nvmlDevice_st){ gpu, mig, "" };
			snprintf(migs[gpu][mig].prefix, sizeof(migs[gpu][mig].prefix), "gpu%d.mig%d.", gpu, mig);
		}
	}
	references++;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
	if (!references)
		return NVML_ERROR_UNINITIALIZED;
	references--;
	return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
	static char text[32];

	snprintf(text, sizeof(text), "error %d of the double", result);
	return text;
}

SYSTEM_TEXT(nvmlSystemGetDriverVersion, "driver_version")
SYSTEM_TEXT(nvmlSystemGetNVMLVersion, "nvml_version")

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	ENTER(NULL);
	*version = number_or("", "cuda_version", 0);
	return *version ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	ENTER(NULL);
	*count = number_or("", "count", 0);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	ENTER(NULL);
	if (index >= number_or("", "count", 0) || index >= MAX_GPUS)
		return NVML_ERROR_INVALID_ARGUMENT;
	*device = &gpus[index];
	return enter(*device, __func__);
}

TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetSerial, "serial")
NUMBER(nvmlDeviceGetMinorNumber, "minor")
NUMBER(nvmlDeviceGetArchitecture, "architecture")
NUMBER(nvmlDeviceGetPowerUsage, "power_mw")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
NUMBER(nvmlDeviceGetPerformanceState, "pstate")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.generation_max")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie.width_max")
NUMBER(nvmlDeviceGetPcieReplayCounter, "pcie.replays")
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pending")
NUMBER(nvmlDeviceGetMaxMigDeviceCount, "mig.max")
NUMBER(nvmlDeviceGetGpuInstanceId, "gpu_instance")
NUMBER(nvmlDeviceGetComputeInstanceId, "compute_instance")
NUMBER(nvmlDeviceGetNumaNodeId, "numa_node_of_memory")
LONG_NUMBER(nvmlDeviceGetCurrentClocksEventReasons, "clock_event_reasons")
LONG_NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, "clock_event_reasons")
LONG_NUMBER(nvmlDeviceGetTotalEnergyConsumption, "energy_mj")
LONG_NUMBER(nvmlDeviceGetSupportedEventTypes, "event_types")
INDEXED(nvmlDeviceGetClockInfo, "clock_mhz.%u")
INDEXED(nvmlDeviceGetMaxClockInfo, "clock_max_mhz.%u")
INDEXED(nvmlDeviceGetTemperature, "temperature.%u")
INDEXED(nvmlDeviceGetPcieThroughput, "pcie.throughput_kb.%u")
INDEXED(nvmlDeviceGetNvLinkState, "nvlink%u.state")
INDEXED(nvmlDeviceGetNvLinkVersion, "nvlink%u.version")
INDEXED(nvmlDeviceGetNvLinkRemoteDeviceType, "nvlink%u.remote_type")

static nvmlReturn_t fabric(nvmlDevice_t device, unsigned char *cluster, unsigned int *clique, unsigned char *state)
{
	u64 number;

	/* The UUID of the double repeats one byte. */
	if (!number_of(device->prefix, "fabric.clique", &number))
		return NVML_ERROR_NOT_SUPPORTED;
	*clique = number;
	*state = number_or(device->prefix, "fabric.state", 3);
	memset(cluster, number_or(device->prefix, "fabric.cluster", 0), 16);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info)
{
	ENTER(device);
	info->status = NVML_SUCCESS;
	return fabric(device, info->clusterUuid, &info->cliqueId, &info->state);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info)
{
	ENTER(device);
	/* Drivers before 545 do not have it. */
	if (number_or(device->prefix, "fabric.old", 0))
		return NVML_ERROR_FUNCTION_NOT_FOUND;
	if (info->version != NVML_FABRIC_V2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	info->status = NVML_SUCCESS;
	return fabric(device, info->clusterUuid, &info->cliqueId, &info->state);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
	char name[64];
	u64 number;

	ENTER(device);
	snprintf(name, sizeof(name), "temperature.%u", temperature->sensorType);
	if (!number_of(device->prefix, name, &number))
		return NVML_ERROR_NOT_SUPPORTED;
	temperature->temperature = number;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	ENTER(device);
	memset(pci, 0, sizeof(*pci));
	if (give_text(device, "bus_id", pci->busId, sizeof(pci->busId)))
		return NVML_ERROR_NOT_SUPPORTED;
	sscanf(pci->busId, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
	snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
		 pci->device & 0xff);
	pci->pciDeviceId = 0x233010de;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	char text[16];

	ENTER(device);
	if (give_text(device, "compute_capability", text, sizeof(text)))
		return NVML_ERROR_NOT_SUPPORTED;
	return sscanf(text, "%d.%d", major, minor) == 2 ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	ENTER(device);
	if (give_long(device, "memory.total", &memory->total))
		return NVML_ERROR_NOT_SUPPORTED;
	/* As the real one: without the second version, what is reserved counts as used. */
	memory->used = number_or(device->prefix, "memory.used", 0) + number_or(device->prefix, "memory.reserved", 0);
	memory->free = number_or(device->prefix, "memory.free", 0);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	ENTER(device);
	if (memory->version != NVML_MEMORY_V2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (give_long(device, "memory.total", &memory->total))
		return NVML_ERROR_NOT_SUPPORTED;
	memory->used = number_or(device->prefix, "memory.used", 0);
	memory->free = number_or(device->prefix, "memory.free", 0);
	memory->reserved = number_or(device->prefix, "memory.reserved", 0);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
	ENTER(device);
	nvmlReturn_t found = give(device, "util.gpu", &rates->gpu);
	return found ? found : give(device, "util.memory", &rates->memory);
}

static nvmlReturn_t coder(nvmlDevice_t device, const char *name, unsigned int *percent, unsigned int *period_us)
{
	*period_us = 1000000;
	return give(device, name, percent);
}

EXPORT nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned int *percent, unsigned int *period_us)
{
	ENTER(device);
	return coder(device, "util.encoder", percent, period_us);
}

EXPORT nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned int *percent, unsigned int *period_us)
{
	ENTER(device);
	return coder(device, "util.decoder", percent, period_us);
}

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	ENTER(device);
	nvmlReturn_t found = give(device, "ecc.mode", current);
	*pending = *current;
	return found;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int type, unsigned int counter, u64 *count)
{
	char name[64];

	ENTER(device);
	snprintf(name, sizeof(name), "ecc.%u.%u", type, counter);
	return give_long(device, name, count);
}

/* VALUE may begin with a letter that says its type: u, l, L, d, s or i; without one it is L, unsigned long long. */
static void set_field(nvmlFieldValue_t *field, const char *text)
{
	static const char kinds[] = "duLlsi";
	static const int types[] = { 0, 1, 3, 2, 4, 5 };
	const char *kind = strchr(kinds, text[0]);

	field->nvmlReturn = NVML_SUCCESS;
	field->valueType = kind && *kind ? types[kind - kinds] : 3;
	text += kind && *kind;
	field->value.ullVal = 0;
	switch (field->valueType) {
	case 0: field->value.dVal = strtod(text, NULL); break;
	case 1: field->value.uiVal = strtoul(text, NULL, 0); break;
	case 5: field->value.siVal = strtol(text, NULL, 0); break;
	case 4: field->value.sllVal = strtoll(text, NULL, 0); break;
	default: field->value.ullVal = strtoull(text, NULL, 0);
	}
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields)
{
	ENTER(device);
	for (int at = 0; at < count; at++) {
		char name[64], text[64];

		if (fields[at].scopeId && fields[at].scopeId != NONE)
			snprintf(name, sizeof(name), "field.%u.%u", fields[at].fieldId, fields[at].scopeId);
		else
			snprintf(name, sizeof(name), fields[at].scopeId ? "field.%u.all" : "field.%u", fields[at].fieldId);
		fields[at].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
		if (text_of(device->prefix, name, text, sizeof(text)))
			set_field(&fields[at], text);
	}
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
					      unsigned int *pending, unsigned int *failed)
{
	ENTER(device);
	*uncorrected = number_or(device->prefix, "remapped.uncorrected", 0);
	*pending = number_or(device->prefix, "remapped.pending", 0);
	*failed = number_or(device->prefix, "remapped.failed", 0);
	return give(device, "remapped.corrected", corrected);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned int cause, unsigned int *count, u64 *pages)
{
	char name[64];
	unsigned int room = *count;
	u64 have;

	ENTER(device);
	snprintf(name, sizeof(name), "retired.%u", cause);
	if (!number_of(device->prefix, name, &have))
		return NVML_ERROR_NOT_SUPPORTED;
	*count = have;
	if (!pages || room < have)
		return have ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
	for (u64 at = 0; at < have; at++)
		pages[at] = 0x1000 * (at + 1);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	ENTER(device);
	nvmlReturn_t found = give(device, "mig.mode", current);
	*pending = *current;
	return found;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
	char text[96];

	ENTER(device);
	if (index >= MAX_MIGS || !text_of(migs[device->gpu][index].prefix, "uuid", text, sizeof(text)))
		return NVML_ERROR_NOT_FOUND;
	*mig = &migs[device->gpu][index];
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	ENTER(device);
	memset(attributes, 0, sizeof(*attributes));
	attributes->memorySizeMB = number_or(device->prefix, "memory.total", 0) >> 20;
	return give(device, "sm_count", &attributes->multiprocessorCount);
}

static nvmlReturn_t processes(nvmlDevice_t device, const char *kind, unsigned int *count, nvmlProcessInfo_t *infos)
{
	char name[64], text[128];
	unsigned int room = *count;
	u64 have;

	snprintf(name, sizeof(name), "%s.count", kind);
	if (!number_of(device->prefix, name, &have))
		return NVML_ERROR_NOT_SUPPORTED;
	*count = have;
	if (!have)
		return NVML_SUCCESS;
	if (!infos || room < have)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned int at = 0; at < have; at++) {
		infos[at] = (nvmlProcessInfo_t){ 0, ~0ull, NONE, NONE };
		snprintf(name, sizeof(name), "%s.%u", kind, at);
		if (text_of(device->prefix, name, text, sizeof(text)))
			sscanf(text, "%u,%llu,%u,%u", &infos[at].pid, &infos[at].usedGpuMemory, &infos[at].gpuInstanceId,
			       &infos[at].computeInstanceId);
	}
	return NVML_SUCCESS;
}

#define PROCESSES(call, kind)                                                                                          \
	EXPORT nvmlReturn_t call(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)                   \
	{                                                                                                              \
		ENTER(device);                                                                                         \
		return processes(device, kind, count, infos);                                                          \
	}

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
						    unsigned int *count, u64 since_us)
{
	char name[64], text[128];
	unsigned int found = 0;
	u64 have;

	ENTER(device);
	if (!number_of(device->prefix, "samples.count", &have))
		return NVML_ERROR_NOT_SUPPORTED;
	if (!have)
		return NVML_ERROR_NOT_FOUND;
	if (!samples || *count < have) {
		*count = have;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	for (unsigned int at = 0; at < have; at++) {
		nvmlProcessUtilizationSample_t sample = { 0 };

		snprintf(name, sizeof(name), "samples.%u", at);
		if (text_of(device->prefix, name, text, sizeof(text)))
			sscanf(text, "%u,%llu,%u,%u,%u,%u", &sample.pid, &sample.timeStamp, &sample.smUtil,
			       &sample.memUtil, &sample.encUtil, &sample.decUtil);
		if (sample.timeStamp > since_us)
			samples[found++] = sample;
	}
	*count = found;
	return found ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *nodes,
						unsigned int scope)
{
	u64 number;

	ENTER(device);
	(void)scope;
	if (!number_of(device->prefix, "numa_node", &number))
		return NVML_ERROR_NOT_SUPPORTED;
	memset(nodes, 0, size * sizeof(*nodes));
	if (number < 64ull * size)
		nodes[number / 64] = 1ul << number % 64;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int size, unsigned long *cpus)
{
	u64 first, last;

	ENTER(device);
	if (!number_of(device->prefix, "cpus.first", &first) || !number_of(device->prefix, "cpus.last", &last))
		return NVML_ERROR_NOT_SUPPORTED;
	memset(cpus, 0, size * sizeof(*cpus));
	for (u64 cpu = first; cpu <= last && cpu < 64ull * size; cpu++)
		cpus[cpu / 64] |= 1ul << cpu % 64;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, unsigned int *level)
{
	char name[64];
	u64 number;

	ENTER(one);
	snprintf(name, sizeof(name), "topology.%d.%d", one->gpu < other->gpu ? one->gpu : other->gpu,
		 one->gpu < other->gpu ? other->gpu : one->gpu);
	if (!number_of("", name, &number))
		return NVML_ERROR_NOT_SUPPORTED;
	*level = number;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t other, unsigned int index, unsigned int *status)
{
	char name[64];
	u64 number;

	ENTER(one);
	snprintf(name, sizeof(name), "p2p.%d.%d.%u", one->gpu, other->gpu, index);
	if (!number_of("", name, &number) && !number_of("", "p2p", &number))
		return NVML_ERROR_NOT_SUPPORTED;
	*status = number;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
	char name[64];

	ENTER(device);
	memset(pci, 0, sizeof(*pci));
	snprintf(name, sizeof(name), "nvlink%u.remote", link);
	return give_text(device, name, pci->busId, sizeof(pci->busId));
}

EXPORT nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
	ENTER(device);
	if (support->version != 1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	support->isSupportedDevice = number_or(gpu_prefix(device), "gpm", 0);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
	ENTER(NULL);
	*sample = calloc(1, sizeof(**sample));
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
	free(sample);
	return NVML_SUCCESS;
}

static nvmlReturn_t take_sample(nvmlDevice_t device, int instance, nvmlGpmSample_t sample)
{
	if (!number_or(gpu_prefix(device), "gpm", 0))
		return NVML_ERROR_NOT_SUPPORTED;
	*sample = (struct nvmlGpmSample_st){ device->gpu, instance, ++gpm_samples };
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
	ENTER(device);
	return take_sample(device, -1, sample);
}

EXPORT nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int instance, nvmlGpmSample_t sample)
{
	ENTER(device);
	return take_sample(device, instance, sample);
}

EXPORT nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
	nvmlGpmSample_t one = get->sample1, other = get->sample2;

	ENTER(NULL);
	if (get->version != 1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (one->gpu != other->gpu || one->instance != other->instance || !one->number || one->number >= other->number)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned int at = 0; at < get->numMetrics; at++) {
		char name[64], text[64];

		if (one->instance < 0)
			snprintf(name, sizeof(name), "gpm.%u", get->metrics[at].metricId);
		else
			snprintf(name, sizeof(name), "instance%d.gpm.%u", one->instance, get->metrics[at].metricId);
		get->metrics[at].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
		if (text_of(gpus[one->gpu].prefix, name, text, sizeof(text))) {
			get->metrics[at].nvmlReturn = NVML_SUCCESS;
			get->metrics[at].value = strtod(text, NULL);
		}
	}
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	ENTER(NULL);
	*set = calloc(1, sizeof(**set));
	(*set)->seen = number_or("", "events.count", 0);
	/* As the real one it sleeps until something happens. */
	(*set)->changes = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
	char *folder = strdup(file_name());
	inotify_add_watch((*set)->changes, dirname(folder), IN_MOVED_TO);
	free(folder);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	close(set->changes);
	free(set);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, u64 types, nvmlEventSet_t set)
{
	ENTER(device);
	if (types & ~number_or(device->prefix, "event_types", 0))
		return NVML_ERROR_NOT_SUPPORTED;
	set->mask[device->gpu] |= types;
	return NVML_SUCCESS;
}

/* events.N GPU,TYPE,DATA,GPU_INSTANCE,COMPUTE_INSTANCE: the Nth event, from 0; events.count says how many there are. */
static int next_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
	while (set->seen < number_or("", "events.count", 0)) {
		char name[64], text[128];
		unsigned int gpu = 0;

		*data = (nvmlEventData_t){ NULL, 0, 0, NONE, NONE };
		snprintf(name, sizeof(name), "events.%u", set->seen++);
		if (!text_of("", name, text, sizeof(text)))
			continue;
		sscanf(text, "%u,%llu,%llu,%u,%u", &gpu, &data->eventType, &data->eventData, &data->gpuInstanceId,
		       &data->computeInstanceId);
		data->device = &gpus[gpu % MAX_GPUS];
		if (set->mask[gpu % MAX_GPUS] & data->eventType)
			return 1;
	}
	return 0;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
	for (u64 begin = now_ms();;) {
		ENTER(NULL);
		if (next_event(set, data))
			return NVML_SUCCESS;
		u64 now = now_ms();
		if (now >= begin + timeout_ms)
			return NVML_ERROR_TIMEOUT;
		struct pollfd changes = { set->changes, POLLIN, 0 };
		char ignored[4096];
		if (poll(&changes, 1, begin + timeout_ms - now) > 0)
			while (read(set->changes, ignored, sizeof(ignored)) > 0)
				;
	}
}
