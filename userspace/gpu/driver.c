// SPDX-License-Identifier: MIT
/* The driver API by dlopen(), and what its errors mean here; gpu/driver.h. */
#include "gpu/driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/err.h"

static struct kvt_cu driver;
static int load_error;
static char load_message[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load(void)
{
	static const struct {
		const char *symbol;
		size_t at;
		bool later;
	} calls[] = {
#define X(name, symbol, args) { symbol, offsetof(struct kvt_cu, name), false },
#define LATER(name, symbol, args) { symbol, offsetof(struct kvt_cu, name), true },
		KVT_CU_CALLS(X)
		KVT_CU_LATER_CALLS(LATER)
#undef LATER
#undef X
	};
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	kvt_cu_result result;

	load_error = -ENODEV;
	if (!lib) {
		snprintf(load_message, sizeof(load_message), "no NVIDIA driver: %s", dlerror());
		return;
	}
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		void *call = dlsym(lib, calls[i].symbol);

		if (!call && !calls[i].later) {
			snprintf(load_message, sizeof(load_message),
				 "the NVIDIA driver is too old: libcuda.so.1 has no %s(), which came with driver 470",
				 calls[i].symbol);
			return;
		}
		*(void **)((char *)&driver + calls[i].at) = call;
	}
	result = driver.Init(0);
	if (!result)
		result = driver.DriverGetVersion(&driver.version);
	if (!result)
		result = driver.DeviceGetCount(&driver.devices);
	if (result || !driver.devices) {
		snprintf(load_message, sizeof(load_message), "the NVIDIA driver finds no usable GPU (%s): see nvidia-smi",
			 result ? kvt_cu_error_name(&driver, result) : "none");
		return;
	}
	load_error = 0;
}

int kvt_cu_load(const struct kvt_cu **cu)
{
	pthread_once(&once, load);
	if (load_error)
		return kvt_fail(load_error, "%s", load_message);
	*cu = &driver;
	return 0;
}

int kvt_cu_errno(kvt_cu_result result)
{
	switch (result) {
	case 0:
		return 0;
	case 1: /* invalid value */
	case 400: /* invalid handle */
	case 713: /* host memory not registered */
		return -EINVAL;
	case 2: /* out of memory */
	case 701: /* launch out of resources */
		return -ENOMEM;
	case 209: /* no binary for GPU */
	case 218: /* invalid PTX */
	case 222: /* unsupported PTX version */
		return -ENOEXEC;
	case KVT_CU_NOT_FOUND:
		return -ENOENT;
	case KVT_CU_NOT_READY:
		return -EAGAIN;
	case 712: /* host memory already registered */
		return -EEXIST;
	case 800: /* not permitted */
		return -EPERM;
	case 801: /* not supported */
		return -EOPNOTSUPP;
	case 3: /* not initialised: what a fork()ed child gets */
	case 4: /* deinitialised: the process is ending */
	case 46: /* device unavailable */
	case 100: /* no device */
	case 101: /* invalid device */
	case 201: /* invalid context */
	case 214: /* uncorrectable ECC error */
	case 220: /* uncorrectable NVLink error */
	case 999: /* unknown: what a suspend leaves behind */
		return -ENODEV;
	default:
		/* what a kernel or the hardware did wrong: the context answers every later call with the same */
		if (result == 700 || result == 702 || result == 709 || result == 710 || (result >= 714 && result <= 721))
			return -ENODEV;
		return result >= 900 && result < 910 ? -EINVAL : -EIO; /* 900 to 909: capture rules */
	}
}

const char *kvt_cu_error_name(const struct kvt_cu *cu, kvt_cu_result result)
{
	const char *name = NULL;

	return cu->GetErrorName(result, &name) || !name ? "an error without a name" : name;
}
