// SPDX-License-Identifier: MIT
/*
 * The CUDA kernels against their C twins, on fresh random input and poisoned
 * outputs, compared by bytes; then how fast they are. The driver comes by
 * dlopen(), the kernels from a fatbin: argv[1], or where the build put it; for
 * attention, by the backend and the fatbin in it: it also compares the kernels'
 * bits among themselves.
 *
 *	gpu_check [--seed N] [--no-timing] [--small] [FATBIN]
 *
 * --small: attention alone, of small sizes: for compute-sanitizer.
 * Exit status 77, saying why, where there is no GPU or no fatbin.
 */
#include <dlfcn.h>
#include <libgen.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "codec/codec.h"
#include "gpu/gpu.h"
#include "gpu/kernels.h"
#include "lib/gpu_attend.h"

/* ---- the driver ---- */

typedef int cu_result;
typedef uint64_t cu_ptr;
typedef struct cu_object *cu_handle;

#define CU_CALLS(X) \
	X(cuInit, "cuInit", (unsigned int)) \
	X(cuDriverGetVersion, "cuDriverGetVersion", (int *)) \
	X(cuDeviceGet, "cuDeviceGet", (int *, int)) \
	X(cuDeviceGetName, "cuDeviceGetName", (char *, int, int)) \
	X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, int)) \
	X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (cu_handle *, int)) \
	X(cuCtxSetCurrent, "cuCtxSetCurrent", (cu_handle)) \
	X(cuCtxSynchronize, "cuCtxSynchronize", (void)) \
	X(cuModuleLoadData, "cuModuleLoadData", (cu_handle *, const void *)) \
	X(cuModuleGetFunction, "cuModuleGetFunction", (cu_handle *, cu_handle, const char *)) \
	X(cuLaunchKernel, "cuLaunchKernel", (cu_handle, unsigned int, unsigned int, unsigned int, unsigned int, \
					     unsigned int, unsigned int, unsigned int, cu_handle, void **, void **)) \
	X(cuMemAlloc, "cuMemAlloc_v2", (cu_ptr *, size_t)) \
	X(cuMemFree, "cuMemFree_v2", (cu_ptr)) \
	X(cuMemHostAlloc, "cuMemHostAlloc", (void **, size_t, unsigned int)) \
	X(cuMemFreeHost, "cuMemFreeHost", (void *)) \
	X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (cu_ptr, const void *, size_t)) \
	X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void *, cu_ptr, size_t)) \
	X(cuMemsetD8, "cuMemsetD8_v2", (cu_ptr, unsigned char, size_t)) \
	X(cuEventCreate, "cuEventCreate", (cu_handle *, unsigned int)) \
	X(cuEventRecord, "cuEventRecord", (cu_handle, cu_handle)) \
	X(cuEventSynchronize, "cuEventSynchronize", (cu_handle)) \
	X(cuEventElapsedTime, "cuEventElapsedTime", (float *, cu_handle, cu_handle)) \
	X(cuGetErrorString, "cuGetErrorString", (cu_result, const char **))

#define X(name, symbol, args) static cu_result(*name) args;
CU_CALLS(X)
#undef X

static void die(int status, const char *fmt, ...) __attribute__((noreturn, format(printf, 2, 3)));

static void die(int status, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	putchar('\n');
	exit(status);
}

static void check(cu_result r, const char *what)
{
	const char *text = NULL;

	if (!r)
		return;
	cuGetErrorString(r, &text);
	die(1, "%s: error %d: %s", what, r, text ? text : "?");
}

#define CU(call) check(call, #call)

enum { DIGEST, COPY, APPEND, KERNELS };

static cu_handle function[KERNELS];
static kvt_twin twin[KERNELS];
static int processors;

static void *read_file(const char *path)
{
	FILE *f = fopen(path, "rb");
	char *data = NULL;
	long n;

	if (!f)
		return NULL;
	if (!fseek(f, 0, SEEK_END) && (n = ftell(f)) > 0 && (data = malloc(n + 1))) {
		rewind(f);
		n = fread(data, 1, n, f);
		data[n] = 0;
	}
	fclose(f);
	return data;
}

static void *find_fatbin(const char *path)
{
	static const char *const places[] = { "kvtier.fatbin", "../../kernels/kvtier.fatbin" };
	char exe[4096] = "", *dir, name[4200];
	void *data;

	if (path)
		return read_file(path);
	if (readlink("/proc/self/exe", exe, sizeof(exe) - 1) < 0)
		return NULL;
	dir = dirname(exe);
	for (size_t i = 0; i < 2; i++) {
		snprintf(name, sizeof(name), "%s/%s", dir, places[i]);
		data = read_file(name);
		if (data)
			return data;
	}
	return NULL;
}

static void start(const char *path)
{
	static const char *const names[KERNELS] = { "digest", "copy", "append" };
	void *lib = dlopen("libcuda.so.1", RTLD_NOW), *fatbin;
	char symbol[64], device_name[128];
	int version, device, major, minor;
	cu_handle context, module;

	if (!lib)
		die(77, "skipped: no NVIDIA driver (%s)", dlerror());
#define X(name, symbol, args) \
	*(void **)&name = dlsym(lib, symbol); \
	if (!name) \
		die(1, "libcuda.so.1 has no " symbol);
	CU_CALLS(X)
#undef X
	if (cuInit(0) || cuDeviceGet(&device, 0))
		die(77, "skipped: the NVIDIA driver finds no GPU");
	fatbin = find_fatbin(path);
	if (!fatbin)
		die(77, "skipped: no kernels (%s): make kernels builds them", path ? path : "kvtier.fatbin");
	CU(cuDriverGetVersion(&version));
	CU(cuDeviceGetName(device_name, sizeof(device_name), device));
	CU(cuDeviceGetAttribute(&processors, 16, device));
	CU(cuDeviceGetAttribute(&major, 75, device));
	CU(cuDeviceGetAttribute(&minor, 76, device));
	printf("%s, sm_%d%d, %d multiprocessors, driver for CUDA %d.%d\n", device_name, major, minor, processors,
	       version / 1000, version % 1000 / 10);
	CU(cuDevicePrimaryCtxRetain(&context, device));
	CU(cuCtxSetCurrent(context));
	CU(cuModuleLoadData(&module, fatbin));
	for (int k = 0; k < KERNELS; k++) {
		snprintf(symbol, sizeof(symbol), "block_%s", names[k]);
		CU(cuModuleGetFunction(&function[k], module, symbol));
		for (const struct kvt_twin_entry *t = kvt_twins; t->module; t++)
			if (!strcmp(t->module, "block") && !strcmp(t->function, names[k]))
				twin[k] = t->run;
	}
	free(fatbin);
}

static void launch(int kernel, uint32_t grid, uint32_t block, void *args)
{
	void *list[] = { args };

	CU(cuLaunchKernel(function[kernel], grid, 1, 1, block, 1, 1, 0, NULL, list, NULL));
}

static void run_twin(int kernel, void *args)
{
	void *const list[] = { args };
	const struct kvt_dim3 one = { 1, 1, 1 };

	if (twin[kernel](one, one, list))
		die(1, "twin: %s", kvt_last_error());
}

/* ---- data, twice: for the twin and for the kernel ---- */

static uint64_t rng;

static uint64_t rnd(void)
{
	rng ^= rng << 13;
	rng ^= rng >> 7;
	rng ^= rng << 17;
	return rng * 0x2545F4914F6CDD1Dull;
}

struct twice {
	uint8_t *host;
	cu_ptr device;
	void *pinned; /* the device's copy is pinned host memory */
	size_t bytes;
};

static struct twice twice(size_t bytes, bool pinned)
{
	struct twice t = { .host = malloc(bytes), .bytes = bytes };

	if (!t.host)
		die(1, "no memory");
	if (pinned) {
		CU(cuMemHostAlloc(&t.pinned, bytes, 1));
		t.device = (uintptr_t)t.pinned;
	} else {
		CU(cuMemAlloc(&t.device, bytes));
	}
	return t;
}

static void give_up(struct twice *t)
{
	free(t->host);
	if (t->pinned)
		CU(cuMemFreeHost(t->pinned));
	else
		CU(cuMemFree(t->device));
}

static void to_device(const struct twice *t)
{
	if (t->pinned)
		memcpy(t->pinned, t->host, t->bytes);
	else
		CU(cuMemcpyHtoD(t->device, t->host, t->bytes));
}

static void fill(const struct twice *t)
{
	for (size_t i = 0; i < t->bytes; i++)
		t->host[i] = rnd() >> 32;
	to_device(t);
}

static void poison(const struct twice *t)
{
	memset(t->host, 0xa5, t->bytes);
	to_device(t);
}

static bool same(const struct twice *t, const char *what)
{
	uint8_t *got = malloc(t->bytes);
	size_t i;

	CU(cuCtxSynchronize());
	if (t->pinned)
		memcpy(got, t->pinned, t->bytes);
	else
		CU(cuMemcpyDtoH(got, t->device, t->bytes));
	for (i = 0; i < t->bytes && got[i] == t->host[i]; i++)
		;
	if (i < t->bytes)
		printf("FAIL %s: byte %zu of %zu is %02x, not %02x\n", what, i, t->bytes, got[i], t->host[i]);
	i = i == t->bytes;
	free(got);
	return i;
}

/* An array of addresses in @in, one for each side; offsets @at. */
static void addresses(const struct twice *t, const struct twice *in, const uint64_t *at, uint32_t n)
{
	uint64_t *dev = malloc(n * 8);

	for (uint32_t i = 0; i < n; i++) {
		((uint64_t *)t->host)[i] = (uintptr_t)in->host + at[i];
		dev[i] = in->device + at[i];
	}
	CU(cuMemcpyHtoD(t->device, dev, n * 8));
	free(dev);
}

static int failures;

static void expect(bool ok)
{
	failures += !ok;
}

/* ---- checks ---- */

#define N 37

static void check_digest(uint32_t row_bytes, uint32_t misaligned, bool pinned)
{
	struct twice data = twice(80ull * row_bytes + 64, pinned), at = twice(N * 8, false), rows = twice(N * 4, false),
		     first = twice(N * 4, false), out = twice(N * 8 + 64, false);
	struct kvt_digest_args a = { .n = N, .row_bytes = row_bytes }, b;
	uint64_t offset[N];
	char what[100];

	fill(&data);
	for (uint32_t i = 0; i < N; i++) {
		((uint32_t *)rows.host)[i] = rnd() % 71;
		((uint32_t *)first.host)[i] = rnd();
		offset[i] = (uint64_t)row_bytes * (rnd() % 10) + misaligned;
	}
	to_device(&rows);
	to_device(&first);
	addresses(&at, &data, offset, N);
	for (int with_first = 0; with_first < 2; with_first++) {
		static const uint32_t shapes[][2] = { { 1, 32 }, { 5, 96 }, { 64, 256 }, { 132, 1024 } };
		const uint32_t *shape = shapes[rnd() % 4];

		poison(&out);
		b = a;
		a.blocks = (uintptr_t)at.host, b.blocks = at.device;
		a.rows = (uintptr_t)rows.host, b.rows = rows.device;
		a.first = with_first ? (uintptr_t)first.host : 0, b.first = with_first ? first.device : 0;
		a.out = (uintptr_t)out.host, b.out = out.device;
		run_twin(DIGEST, &a);
		launch(DIGEST, shape[0], shape[1], &b);
		snprintf(what, sizeof(what), "digest, rows of %u bytes, %u off, %s, %u x %u threads", row_bytes,
			 misaligned, pinned ? "pinned" : "device", shape[0], shape[1]);
		expect(same(&out, what));
	}
	give_up(&data), give_up(&at), give_up(&rows), give_up(&first), give_up(&out);
}

static void check_copy(uint32_t bytes, uint32_t dst_off, uint32_t src_off, bool src_pinned, bool dst_pinned,
		       bool with_sizes)
{
	size_t pitch = bytes + 64;
	struct twice src = twice(N * pitch, src_pinned), dst = twice(N * pitch, dst_pinned), d = twice(N * 8, false),
		     s = twice(N * 8, false), sizes = twice(N * 4, false);
	struct kvt_copy_args a = { .n = N, .bytes = bytes }, b;
	uint64_t d_at[N], s_at[N];
	char what[120];

	fill(&src);
	poison(&dst);
	for (uint32_t i = 0; i < N; i++) {
		d_at[i] = (i * 11 % N) * pitch + dst_off;
		s_at[i] = i * pitch + src_off;
		((uint32_t *)sizes.host)[i] = rnd() % (bytes + 1);
	}
	to_device(&sizes);
	addresses(&d, &dst, d_at, N);
	addresses(&s, &src, s_at, N);
	b = a;
	a.dst = (uintptr_t)d.host, b.dst = d.device;
	a.src = (uintptr_t)s.host, b.src = s.device;
	a.sizes = with_sizes ? (uintptr_t)sizes.host : 0, b.sizes = with_sizes ? sizes.device : 0;
	run_twin(COPY, &a);
	launch(COPY, 1 + rnd() % 20, 32 * (1 + rnd() % 32), &b);
	snprintf(what, sizeof(what), "copy of %u bytes, +%u to +%u, %s to %s%s", bytes, src_off, dst_off,
		 src_pinned ? "pinned" : "device", dst_pinned ? "pinned" : "device", with_sizes ? ", sizes" : "");
	expect(same(&dst, what));
	give_up(&src), give_up(&dst), give_up(&d), give_up(&s), give_up(&sizes);
}

/* Rows that hold all 16-bit patterns, or floats at which rounding turns and random ones. */
static void fill_rows(const struct twice *t, uint32_t type, uint32_t n, uint32_t elements, uint64_t stride)
{
	uint32_t size = kvt_codec_bytes(type, 1), k = 0;

	memset(t->host, 0, t->bytes);
	for (uint32_t i = 0; i < n; i++)
		for (uint32_t e = 0; e < elements; e++, k++) {
			uint8_t *p = t->host + i * stride + e * size;
			uint32_t x = rnd();

			if (k % 4 == 1) /* near a tie of f16 or bf16, of any exponent */
				x = (x & 0xff800000) | ((((x & 0x7ff) << 12) + (x >> 11 & 3) - 1) & 0x7fffff);
			else if (k % 4 == 2) /* infinities, NaNs */
				x = 0x7f800000 | (x & 0x80000000) | (1u << x % 24 & 0x7fffff);
			if (size == 2)
				x = k;
			memcpy(p, &x, size);
		}
	to_device(t);
}

static void check_append(uint32_t src_type, uint32_t dst_type, uint32_t elements, uint32_t pad, bool pinned)
{
	uint64_t stride = kvt_codec_bytes(src_type, elements) + pad, row = kvt_codec_bytes(dst_type, elements);
	uint32_t n = 65536 / elements + 1, block_rows = 7, n_blocks = n / block_rows + 1;
	struct twice src = twice(n * stride, pinned), dst = twice(n_blocks * block_rows * row, false),
		     at = twice(n * 8, false), rows = twice(n * 4, false);
	struct kvt_append_args a = { .src_stride = stride, .n = n, .elements = elements, .src_type = src_type,
				     .dst_type = dst_type }, b;
	uint64_t *offset = malloc(n * 8);
	char what[120];

	fill_rows(&src, src_type, n, elements, stride);
	poison(&dst);
	for (uint32_t i = 0; i < n; i++) {
		uint32_t place = n - 1 - i;

		offset[i] = place / block_rows * block_rows * row;
		((uint32_t *)rows.host)[i] = place % block_rows;
	}
	to_device(&rows);
	addresses(&at, &dst, offset, n);
	b = a;
	a.src = (uintptr_t)src.host, b.src = src.device;
	a.blocks = (uintptr_t)at.host, b.blocks = at.device;
	a.rows = (uintptr_t)rows.host, b.rows = rows.device;
	run_twin(APPEND, &a);
	launch(APPEND, 1 + rnd() % 64, 32 * (1 + rnd() % 32), &b);
	snprintf(what, sizeof(what), "append of %u x %u %s (+%u, %s) as %s", n, elements, kvt_codec_name(src_type), pad,
		 pinned ? "pinned" : "device", kvt_codec_name(dst_type));
	expect(same(&dst, what));
	give_up(&src), give_up(&dst), give_up(&at), give_up(&rows);
	free(offset);
}

static void check_all(void)
{
	static const uint32_t copies[] = { 1, 15, 16, 4095, 4096, 5000, 65536, 70001 };
	static const uint32_t offsets[] = { 0, 1, 2, 4, 8, 16 };
	int cases = 0;

	for (uint32_t n = 1; n <= 300; n++, cases++)
		check_digest(n, offsets[rnd() % 6], rnd() % 4 == 0);
	for (uint32_t n = 256; n <= 4096; n += 64, cases++)
		check_digest(n, 0, n % 256 == 0);
	for (int i = 0; i < 200; i++, cases++)
		check_digest(1 + rnd() % 9000, offsets[rnd() % 6], false);
	for (size_t k = 0; k < sizeof(copies) / sizeof(copies[0]); k++)
		for (int where = 0; where < 3; where++)
			for (int i = 0; i < 6; i++, cases++)
				check_copy(copies[k], i ? offsets[rnd() % 6] : 0, i ? offsets[rnd() % 6] : 0,
					   where == 1, where == 2, i % 2);
	for (uint32_t st = 0; st <= KVT_BF16; st++)
		for (uint32_t dt = 0; dt <= KVT_BF16; dt++)
			for (int i = 0; i < 4; i++, cases++)
				check_append(st, dt, i == 1 ? 37 : 128 << i, i == 2 ? 4 : 0, i == 3);
	printf("%d cases, %d failures\n", cases, failures);
}

/* ---- timings ---- */

static float ms_of(int kernel, uint32_t grid, uint32_t block, void *args)
{
	static cu_handle from, to;
	float ms, times[9];

	if (!from) {
		CU(cuEventCreate(&from, 0));
		CU(cuEventCreate(&to, 0));
	}
	launch(kernel, grid, block, args);
	for (int i = 0; i < 9; i++) {
		int k;

		CU(cuEventRecord(from, NULL));
		launch(kernel, grid, block, args);
		CU(cuEventRecord(to, NULL));
		CU(cuEventSynchronize(to));
		CU(cuEventElapsedTime(&ms, from, to));
		for (k = i; k > 0 && times[k - 1] > ms; k--)
			times[k] = times[k - 1];
		times[k] = ms;
	}
	return times[4]; /* the median */
}

static cu_ptr upload(const void *p, size_t bytes)
{
	cu_ptr d;

	CU(cuMemAlloc(&d, bytes));
	CU(cuMemcpyHtoD(d, p, bytes));
	return d;
}

/* Addresses of @n places of @bytes from @base, in a random order. */
static cu_ptr shuffled(uint64_t base, uint64_t bytes, uint32_t n)
{
	uint64_t *at = malloc(n * 8), t;
	cu_ptr d;

	for (uint32_t i = 0; i < n; i++) {
		uint32_t k = rnd() % (i + 1);

		t = base + i * bytes;
		at[i] = at[k];
		at[k] = t;
	}
	d = upload(at, n * 8ull);
	free(at);
	return d;
}

static void time_digest(void)
{
	static const uint32_t sizes[] = { 64, 128, 200, 240, 256, 512, 1024, 2048, 4096 };
	const uint64_t total = 1ull << 30, block = 64 << 10;
	const uint32_t n = total / block;
	uint32_t *rows = malloc(n * 4);
	cu_ptr data, at, d_rows, out;

	CU(cuMemAlloc(&data, total));
	CU(cuMemAlloc(&out, n * 8));
	CU(cuMemsetD8(data, 0x3c, total));
	at = shuffled(data, block, n);
	for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
		uint32_t grids[] = { 16, (uint32_t)processors, 8 * (uint32_t)processors };
		struct kvt_digest_args a = { .blocks = at, .out = out, .n = n, .row_bytes = sizes[k] };

		for (uint32_t i = 0; i < n; i++)
			rows[i] = block / sizes[k];
		a.rows = d_rows = upload(rows, n * 4);
		printf("digest, 64 KiB blocks, rows of %4u:", sizes[k]);
		for (int g = 0; g < 3; g++)
			printf("  %4u x 256: %7.1f GB/s", grids[g],
			       (double)n * rows[0] * sizes[k] / ms_of(DIGEST, grids[g], 256, &a) / 1e6);
		printf("\n");
		CU(cuMemFree(d_rows));
	}
	CU(cuMemFree(data));
	CU(cuMemFree(at));
	CU(cuMemFree(out));
	free(rows);
}

static void time_copy(void)
{
	static const char *const names[] = { "host to GPU", "GPU to host", "GPU to GPU" };
	const uint64_t total = 256ull << 20;
	cu_ptr gpu, gpu2;
	void *host;

	CU(cuMemAlloc(&gpu, total));
	CU(cuMemAlloc(&gpu2, total));
	CU(cuMemHostAlloc(&host, total, 1));
	memset(host, 1, total);
	CU(cuMemsetD8(gpu, 1, total));
	for (int where = 0; where < 3; where++)
		for (uint32_t bytes = 4096; bytes <= 2 << 20; bytes *= bytes == 16384 || bytes == 32768 ? 2 : 4) {
			uint32_t n = total / bytes, grids[] = { 8, 16, where == 2 ? 8 * (uint32_t)processors : 32 };
			uint64_t from = where == 0 ? (uintptr_t)host : gpu, to = where == 1 ? (uintptr_t)host : gpu2;
			struct kvt_copy_args a = { .dst = shuffled(to, bytes, n), .src = shuffled(from, bytes, n),
						   .n = n, .bytes = bytes };

			printf("copy, %s, items of %4u KiB:", names[where], bytes >> 10);
			for (int g = 0; g < 3; g++)
				printf("  %4u x 512: %7.1f GB/s", grids[g],
				       (double)total / ms_of(COPY, grids[g], 512, &a) / 1e6);
			printf("%s\n", where == 2 ? " (bytes copied; twice that is read and written)" : "");
			CU(cuMemFree(a.dst));
			CU(cuMemFree(a.src));
		}
	CU(cuMemFree(gpu));
	CU(cuMemFree(gpu2));
	CU(cuMemFreeHost(host));
}

/* Tokens of 8 heads x 128, bf16 to f16, into blocks of 32 rows. */
static void time_append(void)
{
	static const uint32_t tokens[] = { 1, 32, 512, 65536 };

	for (size_t k = 0; k < sizeof(tokens) / sizeof(tokens[0]); k++) {
		uint32_t n = tokens[k], *rows = malloc(n * 4), most = 32 * (uint32_t)processors;
		uint32_t grid = n < most ? n : most; /* a row a warp, four warps a block */
		struct kvt_append_args a = { .src_stride = 2048, .n = n, .elements = 1024, .src_type = KVT_BF16,
					     .dst_type = KVT_F16 };
		uint64_t *at = malloc(n * 8);
		cu_ptr src, dst;
		float ms;

		CU(cuMemAlloc(&src, n * 2048ull));
		CU(cuMemAlloc(&dst, (n + 31ull) * 2048));
		CU(cuMemsetD8(src, 0x3c, n * 2048ull));
		for (uint32_t i = 0; i < n; i++) {
			rows[i] = i % 32;
			at[i] = dst + i / 32 * 65536ull;
		}
		a.src = src;
		a.blocks = upload(at, n * 8);
		a.rows = upload(rows, n * 4);
		ms = ms_of(APPEND, (grid + 3) / 4, 128, &a);
		printf("append, %5u tokens of 8 x 128 bf16 as f16: %8.2f us, %7.1f GB/s read and written\n", n, ms * 1e3,
		       n * 4096.0 / ms / 1e6);
		CU(cuMemFree(a.blocks));
		CU(cuMemFree(a.rows));
		CU(cuMemFree(src));
		CU(cuMemFree(dst));
		free(rows);
		free(at);
	}
}

int main(int argc, char **argv)
{
	const char *path = NULL;
	bool timing = true, small = false;
	struct kvt_gpu *gpu;

	if (getrandom(&rng, sizeof(rng), 0) < 0)
		rng = getpid();
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--seed") && i + 1 < argc)
			rng = strtoull(argv[++i], NULL, 0);
		else if (!strcmp(argv[i], "--no-timing"))
			timing = false;
		else if (!strcmp(argv[i], "--small"))
			small = true;
		else
			path = argv[i];
	}
	rng |= 1;
	start(path);
	printf("seed %#llx\n", (unsigned long long)rng);
	if (!small)
		check_all();
	if (kvt_gpu_cuda_open(0, &gpu))
		die(1, "attention: %s", kvt_last_error());
	failures += gpu_attend_check(gpu, rng, !small);
	if (gpu->sm == 90)
		failures += gpu_attend_check_fast(gpu, rng, !small);
	if (!small)
		failures += gpu_attend_check_mutations(gpu, rng);
	if (timing && !small && !failures) {
		time_digest();
		time_copy();
		time_append();
		gpu_attend_time(gpu, NULL);
	}
	gpu->ops->close(gpu);
	return failures != 0;
}
