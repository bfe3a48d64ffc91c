// SPDX-License-Identifier: MIT
/*
 * kvtier doctor: what this machine offers to a KV cache, and for each thing
 * missing the one command that mends it. Every check fills one finding; the
 * text and the JSON are two ways to print the same list.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <liburing.h>
#include <numa.h>
#include <numaif.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include "attention/kernel.h"
#include "gpu/gpu.h"
#include "host/host.h"
#include "host/module.h"
#include "tools/tools.h"

#define MEMLOCK_ENOUGH (1ull << 30)
#define DIRS_MAX 64
#define CUDA_DEVICES 16
#define FINDINGS_MAX (16 + DIRS_MAX + CUDA_DEVICES)
#define GPU_PROBE_S 20

/* absent: the machine does not have it, and no command gives it. */
enum status { OK, MISSING, ABSENT };

static const char *const status_names[] = { "ok", "missing", "absent" };

struct finding {
	const char *name;
	enum status status;
	char detail[400];
	char mend[300];
	json_t *facts;
};

struct report {
	const char *root; /* before /proc, /sys, /dev and /boot */
	struct utsname system;
	struct finding list[FINDINGS_MAX];
	unsigned int n;
};

/* JSON wants UTF-8, and a directory's name may be anything. */
static void keep_ascii(char *text)
{
	for (; *text; text++)
		if (*text < ' ' || *text > '~')
			*text = '?';
}

static struct finding *__attribute__((format(printf, 4, 5)))
add(struct report *r, const char *name, enum status status, const char *fmt, ...)
{
	struct finding *f = &r->list[r->n++];
	va_list ap;

	f->name = name;
	f->status = status;
	f->facts = json_object();
	va_start(ap, fmt);
	vsnprintf(f->detail, sizeof(f->detail), fmt, ap);
	va_end(ap);
	keep_ascii(f->detail);
	return f;
}

static void __attribute__((format(printf, 2, 3))) mend(struct finding *f, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(f->mend, sizeof(f->mend), fmt, ap);
	va_end(ap);
	keep_ascii(f->mend);
}

static void fact(struct finding *f, const char *key, json_t *value)
{
	json_object_set_new(f->facts, key, value);
}

/* ---- reading /proc and /sys ---- */

static FILE *open_below(const struct report *r, const char *path)
{
	char full[512];

	snprintf(full, sizeof(full), "%s%s", r->root, path);
	return fopen(full, "re");
}

static bool exists_below(const struct report *r, const char *path)
{
	char full[512];

	snprintf(full, sizeof(full), "%s%s", r->root, path);
	return access(full, F_OK) == 0;
}

/* The first line of a file, or "". */
static const char *first_line(const struct report *r, const char *path, char *buf, size_t bytes)
{
	FILE *f = open_below(r, path);

	buf[0] = 0;
	if (!f)
		return buf;
	if (fgets(buf, bytes, f))
		buf[strcspn(buf, "\n")] = 0;
	fclose(f);
	return buf;
}

static uint64_t number_in(const struct report *r, const char *path, uint64_t otherwise)
{
	char line[64];
	char *end;
	uint64_t n;

	first_line(r, path, line, sizeof(line));
	n = strtoull(line, &end, 10);
	return end == line ? otherwise : n;
}

/* What follows "KEY" and spaces, colons and tabs in a line of @path; "" where no line begins so. */
static const char *value_of(const struct report *r, const char *path, const char *key, char *buf, size_t bytes)
{
	FILE *f = open_below(r, path);
	size_t n = strlen(key), skip;
	char line[512];

	buf[0] = 0;
	while (f && !buf[0] && fgets(line, sizeof(line), f)) {
		skip = strspn(line + n * !strncmp(line, key, n), " \t:=");
		if (strncmp(line, key, n) || !skip)
			continue;
		snprintf(buf, bytes, "%.*s", (int)strcspn(line + n + skip, "\n"), line + n + skip);
	}
	if (f)
		fclose(f);
	return buf;
}

static const char *bytes_text(uint64_t bytes, char *buf, size_t size)
{
	if (bytes >= 1ull << 30)
		snprintf(buf, size, "%.1f GiB", bytes / 1073741824.0);
	else if (bytes >= 1 << 20)
		snprintf(buf, size, "%.1f MiB", bytes / 1048576.0);
	else
		snprintf(buf, size, "%" PRIu64 " KiB", bytes >> 10);
	return buf;
}

static bool on_ubuntu(const struct report *r)
{
	char id[32];

	return !strcmp(value_of(r, "/etc/os-release", "ID", id, sizeof(id)), "ubuntu");
}

/* ---- checks ---- */

static void check_cpu(struct report *r)
{
	static const char *const isas[] = { "portable", "avx2", "avx512", "neon" };
	char model[128], usable[64] = "";
	json_t *list = json_array();
	struct finding *f;
	cpu_set_t cpus;
	size_t at = 0;
	int cores = sched_getaffinity(0, sizeof(cpus), &cpus) ? 1 : CPU_COUNT(&cpus);

	for (size_t i = 0; i < sizeof(isas) / sizeof(isas[0]); i++) {
		if (!kvt_attn_kernels(isas[i]))
			continue;
		at += snprintf(usable + at, sizeof(usable) - at, "%s%s", at ? ", " : "", isas[i]);
		json_array_append_new(list, json_string(isas[i]));
	}
	value_of(r, "/proc/cpuinfo", "model name", model, sizeof(model));
	f = add(r, "cpu", OK, "%s%s%d core%s usable; kernels: %s of %s", model, model[0] ? ", " : "", cores,
		cores == 1 ? "" : "s", kvt_attn_kernels(NULL)->isa, usable);
	fact(f, "model", json_string(model));
	fact(f, "cores", json_integer(cores));
	fact(f, "isa", json_string(kvt_attn_kernels(NULL)->isa));
	fact(f, "isas", list);
}

static void check_memory(struct report *r)
{
	char text[64], a[24], b[24], c[24];
	uint64_t total, available, limit;
	struct finding *f;

	total = strtoull(value_of(r, "/proc/meminfo", "MemTotal", text, sizeof(text)), NULL, 10) << 10;
	available = strtoull(value_of(r, "/proc/meminfo", "MemAvailable", text, sizeof(text)), NULL, 10) << 10;
	limit = number_in(r, "/sys/fs/cgroup/memory.max", number_in(r, "/sys/fs/cgroup/memory/memory.limit_in_bytes", 0));
	f = add(r, "memory", OK, "%s, %s available%s%s", bytes_text(total, a, sizeof(a)),
		bytes_text(available, b, sizeof(b)), limit && limit < total ? "; this container's limit is " : "",
		limit && limit < total ? bytes_text(limit, c, sizeof(c)) : "");
	fact(f, "total_bytes", json_integer(total));
	fact(f, "available_bytes", json_integer(available));
	fact(f, "limit_bytes", limit && limit < total ? json_integer(limit) : json_null());
}

static void check_module(struct report *r)
{
	char version[64], path[160];
	struct finding *f;
	int err;

	first_line(r, "/sys/module/kvtier/version", version, sizeof(version));
	snprintf(path, sizeof(path), "/lib/modules/%.64s/updates/dkms", r->system.release);
	if (!exists_below(r, "/dev/kvtier")) {
		bool installed = false;
		static const char *const names[] = { "kvtier.ko", "kvtier.ko.xz", "kvtier.ko.zst", "kvtier.ko.gz" };
		char full[256];

		for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
			snprintf(full, sizeof(full), "%s/%s", path, names[i]);
			installed |= exists_below(r, full);
		}
		f = add(r, "module", MISSING, "no /dev/kvtier: %s; host tiers live in user space",
			installed ? "kvtier.ko is installed but not loaded" : "kvtier.ko is not installed");
		mend(f, installed ? "sudo modprobe kvtier" : "sudo make install-dkms");
	} else if (!r->root[0] && (err = kvt_module_suits()) < 0) {
		f = add(r, "module", MISSING, "%s; host tiers live in user space", kvt_last_error());
		mend(f, err == -EACCES ? "sudo usermod -aG kvtier \"$USER\"   # then log in again" :
			err == -EPERM  ? "ulimit -l unlimited   # or LimitMEMLOCK=infinity" :
					 "sudo rm /dev/kvtier; sudo modprobe -r kvtier; sudo modprobe kvtier");
	} else {
		f = add(r, "module", OK, "/dev/kvtier%s%s", version[0] ? ", version " : "", version);
	}
	fact(f, "version", version[0] ? json_string(version) : json_null());
}

struct cuda_device {
	uint64_t bytes;
	char name[100];
	char unusable[300]; /* why the gpu tier cannot live there; "" if it can */
};

/* What a child of ours found out about libcuda: a broken driver may crash or hang it, and not us. */
struct cuda_probe {
	int stage; /* 0: no library; 1: cuInit failed; 2: no device; 3: usable */
	int error, version, devices;
	char why[200];
	struct cuda_device device[CUDA_DEVICES]; /* the first of them */
};

/* Whether this build's kernels run there: the library is asked as a cache would ask it. */
static void try_backend(uint32_t device, struct cuda_device *d)
{
	struct kvt_gpu *gpu;

	if (kvt_gpu_cuda_open(device, &gpu))
		snprintf(d->unusable, sizeof(d->unusable), "%s", kvt_last_error());
	else
		gpu->ops->close(gpu);
}

static void probe_cuda(struct cuda_probe *p)
{
	int (*init)(unsigned int), (*version)(int *), (*count)(int *), (*get)(int *, int), (*name)(char *, int, int);
	int (*total)(size_t *, int);
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	size_t bytes;
	int device;

	if (!lib) {
		snprintf(p->why, sizeof(p->why), "%s", dlerror());
		return;
	}
	p->stage = 1;
	init = dlsym(lib, "cuInit");
	version = dlsym(lib, "cuDriverGetVersion");
	count = dlsym(lib, "cuDeviceGetCount");
	get = dlsym(lib, "cuDeviceGet");
	name = dlsym(lib, "cuDeviceGetName");
	total = dlsym(lib, "cuDeviceTotalMem_v2");
	if (!init || !version || !count || !get || !name || !total) {
		p->error = -1;
		snprintf(p->why, sizeof(p->why), "libcuda.so.1 lacks functions of the driver API");
		return;
	}
	version(&p->version);
	p->error = init(0);
	if (p->error) {
		snprintf(p->why, sizeof(p->why), "cuInit() gives error %d", p->error);
		return;
	}
	p->stage = 2;
	if (count(&p->devices) || p->devices < 1)
		return;
	p->stage = 3;
	for (int i = 0; i < p->devices && i < CUDA_DEVICES; i++) {
		struct cuda_device *d = &p->device[i];

		if (get(&device, i) || name(d->name, sizeof(d->name), device) || total(&bytes, device)) {
			snprintf(d->unusable, sizeof(d->unusable), "the driver does not say what it is");
			continue;
		}
		d->bytes = bytes;
		try_backend((uint32_t)i, d);
	}
}

/* 0, or what happened to the child. */
static int probe_cuda_apart(struct cuda_probe *p)
{
	int ends[2], status = 0;
	size_t got = 0;
	ssize_t n;
	pid_t child;

	memset(p, 0, sizeof(*p));
	if (pipe2(ends, O_CLOEXEC))
		return -errno;
	child = fork();
	if (child == 0) {
		struct rlimit no_core = { 0, 0 };
		int quiet = open("/dev/null", O_WRONLY | O_CLOEXEC);

		setrlimit(RLIMIT_CORE, &no_core);
		dup2(quiet, STDOUT_FILENO);
		dup2(quiet, STDERR_FILENO);
		alarm(GPU_PROBE_S);
		probe_cuda(p);
		_exit(write(ends[1], p, sizeof(*p)) != sizeof(*p));
	}
	close(ends[1]);
	if (child < 0) {
		close(ends[0]);
		return -errno;
	}
	while ((n = read(ends[0], (char *)p + got, sizeof(*p) - got)) > 0 || (n < 0 && errno == EINTR))
		got += n > 0 ? (size_t)n : 0;
	close(ends[0]);
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	if (got == sizeof(*p))
		return 0;
	return WIFSIGNALED(status) ? WTERMSIG(status) : -EIO;
}

/* NVIDIA display or 3-D controllers on the PCI bus. */
static int count_nvidia(const struct report *r)
{
	char path[600], text[32];
	struct dirent *e;
	int n = 0;
	DIR *d;

	snprintf(path, sizeof(path), "%s/sys/bus/pci/devices", r->root);
	d = opendir(path);
	while (d && (e = readdir(d))) {
		snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/vendor", e->d_name);
		if (strcmp(first_line(r, path, text, sizeof(text)), "0x10de"))
			continue;
		snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/class", e->d_name);
		n += !strncmp(first_line(r, path, text, sizeof(text)), "0x03", 4);
	}
	if (d)
		closedir(d);
	return n;
}

static void gpu_facts(struct finding *f, const struct cuda_probe *p, const struct cuda_device *d)
{
	fact(f, "devices", json_integer(d ? p->devices : 0));
	fact(f, "device", d ? json_integer(d - p->device) : json_null());
	fact(f, "name", d ? json_string(d->name) : json_null());
	fact(f, "bytes", json_integer(d ? (json_int_t)d->bytes : 0));
	fact(f, "kernels", json_string(kvt_gpu_kernel_archs()));
	fact(f, "driver_api", p->version ? json_integer(p->version) : json_null());
}

static void add_gpu(struct report *r, const struct cuda_probe *p, int i)
{
	const struct cuda_device *d = &p->device[i];
	char a[24], number[32] = "";
	struct finding *f;

	if (p->devices > 1)
		snprintf(number, sizeof(number), "%d of %d: ", i, p->devices);
	f = add(r, "gpu", *d->unusable ? MISSING : OK, "%s%s, %s; driver API %d.%d; %s%s", number, d->name,
		bytes_text(d->bytes, a, sizeof(a)), p->version / 1000, p->version % 1000 / 10,
		*d->unusable ? "not used: " : "kernels for ", *d->unusable ? d->unusable : kvt_gpu_kernel_archs());
	if (*d->unusable)
		mend(f, *kvt_gpu_kernel_archs() ? "nvidia-smi" : "make kernels && make");
	gpu_facts(f, p, d);
}

static void check_gpu(struct report *r)
{
	int on_bus = count_nvidia(r), broken;
	struct cuda_probe p;
	struct finding *f;

	broken = probe_cuda_apart(&p);
	if (!broken && p.stage == 3) {
		for (int i = 0; i < p.devices && i < CUDA_DEVICES; i++)
			add_gpu(r, &p, i);
		return;
	}
	if (!broken && p.stage == 0 && !on_bus) {
		f = add(r, "gpu", ABSENT, "no NVIDIA GPU on the PCI bus and no libcuda.so.1; attention runs on the CPU");
	} else if (!broken && p.stage == 2) {
		f = add(r, "gpu", ABSENT, "the CUDA driver finds no device; attention runs on the CPU");
	} else {
		if (broken)
			f = add(r, "gpu", MISSING, "asking libcuda.so.1 ended by %s",
				broken > 0 ? strsignal(broken) : strerror(-broken));
		else
			f = add(r, "gpu", MISSING, "%d NVIDIA GPU%s on the PCI bus: %s", on_bus, on_bus == 1 ? "" : "s", p.why);
		mend(f, on_ubuntu(r) ? "sudo ubuntu-drivers install" : "sudo apt-get install nvidia-driver");
	}
	gpu_facts(f, &p, NULL);
}

static json_t *limit_json(rlim_t limit)
{
	return limit == RLIM_INFINITY ? json_null() : json_integer(limit);
}

static void check_memlock(struct report *r)
{
	char text[64], a[24];
	struct rlimit limit;
	struct finding *f;
	bool exempt;

	getrlimit(RLIMIT_MEMLOCK, &limit);
	exempt = strtoull(value_of(r, "/proc/self/status", "CapEff", text, sizeof(text)), NULL, 16) >> 14 & 1;
	if (exempt)
		f = add(r, "memlock", OK, "no limit: this process has CAP_IPC_LOCK");
	else if (limit.rlim_cur == RLIM_INFINITY)
		f = add(r, "memlock", OK, "no limit");
	else if (limit.rlim_cur >= MEMLOCK_ENOUGH)
		f = add(r, "memlock", OK, "RLIMIT_MEMLOCK is %s: the most of a pinned tier that is locked",
			bytes_text(limit.rlim_cur, a, sizeof(a)));
	else
		f = add(r, "memlock", MISSING, "RLIMIT_MEMLOCK is %s: a larger pinned tier is not locked",
			bytes_text(limit.rlim_cur, a, sizeof(a)));
	if (f->status == MISSING && limit.rlim_max == RLIM_INFINITY)
		mend(f, "ulimit -l unlimited");
	else if (f->status == MISSING && limit.rlim_max > limit.rlim_cur && limit.rlim_max >= MEMLOCK_ENOUGH)
		mend(f, "ulimit -l %" PRIu64, (uint64_t)limit.rlim_max >> 10);
	else if (f->status == MISSING)
		mend(f, "echo \"$USER - memlock unlimited\" | sudo tee /etc/security/limits.d/kvtier.conf   # then log in again");
	fact(f, "soft_bytes", limit_json(limit.rlim_cur));
	fact(f, "hard_bytes", limit_json(limit.rlim_max));
	fact(f, "exempt", json_boolean(exempt));
}

static void check_hugepages(struct report *r)
{
	uint64_t total, free_pages;
	struct finding *f;
	char text[128];

	total = number_in(r, "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", 0);
	free_pages = number_in(r, "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 0);
	if (!exists_below(r, "/sys/kernel/mm/hugepages/hugepages-2048kB")) {
		f = add(r, "hugetlb", ABSENT, "this kernel has no 2 MiB huge pages to reserve");
	} else if (free_pages) {
		f = add(r, "hugetlb", OK, "%" PRIu64 " of %" PRIu64 " reserved 2 MiB pages free", free_pages, total);
	} else {
		f = add(r, "hugetlb", MISSING, "%s", total ? "all reserved 2 MiB pages are in use" : "no 2 MiB page is reserved");
		mend(f, "sudo sysctl vm.nr_hugepages=%" PRIu64, total + 512);
	}
	fact(f, "total", json_integer(total));
	fact(f, "free", json_integer(free_pages));

	first_line(r, "/sys/kernel/mm/transparent_hugepage/enabled", text, sizeof(text));
	if (!text[0]) {
		f = add(r, "thp", ABSENT, "this kernel has no transparent huge pages");
	} else if (strstr(text, "[never]")) {
		f = add(r, "thp", MISSING, "transparent huge pages are off");
		mend(f, "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled");
	} else {
		f = add(r, "thp", OK, "transparent huge pages: %s", strstr(text, "[always]") ? "always" : "madvise");
	}
	fact(f, "enabled", text[0] ? json_string(text) : json_null());
}

static void check_numa(struct report *r)
{
	unsigned long mask = 1;
	struct finding *f;
	int nodes, error = 0;
	void *page;

	if (numa_available() < 0) {
		f = add(r, "numa", ABSENT, "this kernel has no NUMA: memory is one node");
		fact(f, "nodes", json_integer(1));
		return;
	}
	nodes = numa_num_configured_nodes();
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (page != MAP_FAILED) {
		if (mbind(page, 4096, MPOL_BIND, &mask, 8 * sizeof(mask), 0))
			error = errno;
		munmap(page, 4096);
	}
	if (error == EPERM || error == ENOSYS) {
		f = add(r, "numa", MISSING, "%d node%s, but mbind() is refused: %s", nodes, nodes == 1 ? "" : "s",
			strerror(error));
		mend(f, "docker run --cap-add SYS_NICE ...   # where this is a container");
	} else {
		f = add(r, "numa", OK, "%d node%s, memory can be bound", nodes, nodes == 1 ? "" : "s");
	}
	fact(f, "nodes", json_integer(nodes));
}

static void check_uring(struct report *r)
{
	uint64_t disabled = number_in(r, "/proc/sys/kernel/io_uring_disabled", 0);
	struct io_uring ring;
	struct finding *f;
	int ret = io_uring_queue_init(2, &ring, 0);

	if (!ret) {
		io_uring_queue_exit(&ring);
		f = add(r, "io_uring", OK, "usable");
	} else if (ret == -ENOMEM) {
		f = add(r, "io_uring", MISSING, "refused: no locked memory left for its rings");
		mend(f, "ulimit -l unlimited");
	} else if (ret == -ENOSYS) {
		f = add(r, "io_uring", MISSING, "not in this kernel, or hidden by a seccomp filter; a thread pool does the I/O");
		mend(f, "docker run --security-opt seccomp=unconfined ...   # where this is a container");
	} else if (disabled) {
		f = add(r, "io_uring", MISSING, "%s: kernel.io_uring_disabled is %" PRIu64 "; a thread pool does the I/O",
			strerror(-ret), disabled);
		mend(f, "sudo sysctl kernel.io_uring_disabled=0");
	} else {
		f = add(r, "io_uring", MISSING, "%s, most likely by a container's seccomp filter; a thread pool does the I/O",
			strerror(-ret));
		mend(f, "docker run --security-opt seccomp=unconfined ...");
	}
	fact(f, "error", ret ? json_integer(-ret) : json_null());
}

static void check_dir(struct report *r, const char *dir, bool asked)
{
	struct kvt_file_info info = { .fs = "", .reason = "" }, other;
	struct finding *f;

	if (kvt_file_probe(dir, &info)) {
		f = add(r, "disk", MISSING, "%s: %s", dir, kvt_last_error());
		if (access(dir, F_OK))
			mend(f, "mkdir -p '%s'", dir);
		else if (access(dir, W_OK) && errno == EACCES)
			mend(f, "sudo chown \"$USER\" '%s'", dir);
		else
			mend(f, "kvtier run --disk-dir DIR ...   # another directory; kvtier doctor --dir DIR checks it");
	} else if (info.direct) {
		f = add(r, "disk", OK, "%s: %s, O_DIRECT at %u bytes (memory %u)", dir, info.fs, info.offset_align,
			info.mem_align);
	} else {
		f = add(r, "disk", MISSING, "%s: no O_DIRECT, I/O goes through the page cache: %s", dir, info.reason);
		if (!kvt_file_probe("/var/tmp", &other) && other.direct)
			mend(f, asked ? "kvtier run --disk-dir /var/tmp ..." : "export TMPDIR=/var/tmp");
		else
			mend(f, "kvtier run --disk-dir DIR ...   # DIR on ext4, xfs or btrfs; kvtier doctor --dir DIR checks it");
	}
	fact(f, "dir", json_string(dir) ?: json_null());
	fact(f, "fs", json_string(info.fs));
	fact(f, "direct", json_boolean(info.direct));
	fact(f, "reason", json_string(info.reason));
	fact(f, "mem_align", json_integer(info.mem_align));
	fact(f, "offset_align", json_integer(info.offset_align));
}

/* "y", "n", or "" where nothing readable tells. */
static const char *p2pdma_config(const struct report *r, char *buf, size_t bytes)
{
	char path[128], line[256];
	bool any = false;
	FILE *f;

	snprintf(path, sizeof(path), "/boot/config-%.64s", r->system.release);
	if (exists_below(r, path)) {
		value_of(r, path, "CONFIG_PCI_P2PDMA", buf, bytes);
		return buf[0] ? buf : strcpy(buf, "n");
	}
	buf[0] = 0;
	f = open_below(r, "/proc/kallsyms");
	while (f && fgets(line, sizeof(line), f)) {
		any = true;
		if (strstr(line, " pci_p2pdma_distance_many")) {
			fclose(f);
			return strcpy(buf, "y");
		}
	}
	if (f)
		fclose(f);
	return any ? strcpy(buf, "n") : buf;
}

static void check_p2p(struct report *r)
{
	struct finding *f;
	char config[16];

	p2pdma_config(r, config, sizeof(config));
	if (!config[0]) {
		f = add(r, "p2p", ABSENT, "unknown: neither /boot/config-%s nor /proc/kallsyms tells of PCI_P2PDMA",
			r->system.release);
	} else if (config[0] == 'n') {
		f = add(r, "p2p", MISSING, "this kernel is built without CONFIG_PCI_P2PDMA; disk and GPU exchange through RAM");
		mend(f, "sudo apt-get install %s   # a distribution's kernel has it",
		     on_ubuntu(r) ? "linux-image-generic" : "linux-image-$(dpkg --print-architecture)");
	} else {
		f = add(r, "p2p", ABSENT, "the kernel has PCI_P2PDMA; this version of kvtier does not use it");
	}
	fact(f, "config_pci_p2pdma", config[0] ? json_string(config) : json_null());
}

/* ---- printing ---- */

static void print_text(const struct report *r)
{
	unsigned int missing = 0;

	printf("kvtier %s on %s %s %s\n\n", kvt_version(), r->system.sysname, r->system.release, r->system.machine);
	for (unsigned int i = 0; i < r->n; i++) {
		const struct finding *f = &r->list[i];

		missing += f->status == MISSING;
		printf("  %-8s %-9s %s\n", status_names[f->status], f->name, f->detail);
		if (f->mend[0])
			printf("  %-8s %-9s   $ %s\n", "", "", f->mend);
	}
	printf("\nEverything works without what is missing, only slower or smaller (%u missing).\n", missing);
}

static int print_json(const struct report *r)
{
	json_t *top, *checks = json_array();
	int ret;

	for (unsigned int i = 0; i < r->n; i++) {
		const struct finding *f = &r->list[i];

		json_array_append_new(checks, json_pack("{s:s, s:s, s:s, s:s?, s:O}", "name", f->name, "status",
							status_names[f->status], "detail", f->detail, "mend",
							f->mend[0] ? f->mend : NULL, "facts", f->facts));
	}
	top = json_pack("{s:s, s:s, s:s, s:s, s:o}", "version", kvt_version(), "system", r->system.sysname, "release",
			r->system.release, "machine", r->system.machine, "checks", checks);
	ret = top ? json_dumpf(top, stdout, JSON_INDENT(2)) : -1;
	putchar('\n');
	json_decref(top);
	return ret;
}

int cmd_doctor(int argc, char **argv)
{
	const char *dirs[DIRS_MAX], *tmp = getenv("TMPDIR");
	static struct report r = { .root = "" };
	unsigned int n_dirs = 0;
	bool json = false, asked;
	int ret = 0;

	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--json")) {
			json = true;
		} else if (strcmp(argv[i], "--dir") && strcmp(argv[i], "--root")) {
			return tool_usage_error("doctor", "\"%s\" is not an option", argv[i]);
		} else if (i + 1 == argc || !*argv[i + 1]) {
			return tool_usage_error("doctor", "%s needs a directory", argv[i]);
		} else if (!strcmp(argv[i], "--root")) {
			r.root = argv[++i];
		} else if (n_dirs == DIRS_MAX) {
			return tool_usage_error("doctor", "--dir is given more than %d times", DIRS_MAX);
		} else {
			dirs[n_dirs++] = argv[++i];
		}
	}
	asked = n_dirs;
	if (!asked)
		dirs[n_dirs++] = tmp && tmp[0] ? tmp : "/var/tmp";
	uname(&r.system);

	check_cpu(&r);
	check_memory(&r);
	check_memlock(&r);
	check_hugepages(&r);
	check_numa(&r);
	check_uring(&r);
	for (unsigned int i = 0; i < n_dirs; i++)
		check_dir(&r, dirs[i], asked);
	check_module(&r);
	check_gpu(&r);
	check_p2p(&r);

	if (json)
		ret = print_json(&r);
	else
		print_text(&r);
	for (unsigned int i = 0; i < r.n; i++)
		json_decref(r.list[i].facts);
	return ret ? 1 : 0;
}
