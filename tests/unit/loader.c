// SPDX-License-Identifier: MIT
/*
 * The loader: every way to read gives the same bytes, for tensors of awkward
 * sizes at awkward offsets, in any order and any selection, in files and
 * shards; a file that changes is an error and never a signal; budgets hold.
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/budget.h"
#include "gpu/mock.h"
#include "kvtier.h"
#include "lib/weightfile.h"
#include "runtime/loader.h"

#define REDZONE 64

/* sizes round the block, the gap and the piece; 0 is a tensor without bytes */
static const uint32_t sizes[] = { 1, 4095, 4096, 4097, 0, 3, 300001, 7, 1 << 20, 262144 + 5, 131072, 2, 1500000, 13, 8192 };
#define N_TENSORS ((int)(sizeof(sizes) / sizeof(*sizes)))

/* Reads of threads, which a test can cut short: to a third, in whole blocks where a disk reads. */
static bool short_reads;

ssize_t pread(int fd, void *buf, size_t n, off_t at)
{
	size_t unit = fcntl(fd, F_GETFL) & O_DIRECT ? 4096 : 1;

	if (short_reads && n > 3 * unit)
		n = n / 3 / unit * unit;
	return syscall(SYS_pread64, fd, buf, n, at);
}

static const char *write_model(const char *name, const char *prefix, uint32_t seed)
{
	struct bytes b = { 0 }, h = { 0 }, d = { 0 };
	uint64_t at = 0;
	char entry[200];

	put_text(&h, "{");
	for (int i = 0; i < N_TENSORS; i++) {
		sprintf(entry, "%s\"%s%d\":{\"dtype\":\"U8\",\"shape\":[%u],\"data_offsets\":[%llu,%llu]}", i ? "," : "", prefix, i,
			sizes[i], (unsigned long long)at, (unsigned long long)at + sizes[i]);
		put_text(&h, entry);
		at += sizes[i];
	}
	put(&h, "}", 2);
	put_pattern(&d, at, seed);
	put_safetensors(&b, (char *)h.p, d.p, d.n);
	free(h.p);
	free(d.p);
	return write_bytes(name, &b);
}

static struct kvt_weights *open_ok(const char *path)
{
	struct kvt_weights *w;

	ck_assert_msg(kvt_weights_open(path, &w) == 0, "%s", kvt_last_error());
	return w;
}

/* Which tensors a test asks for. */
static bool all(uint32_t i)
{
	(void)i;
	return true;
}

static bool odd(uint32_t i)
{
	return i & 1;
}

static bool small(uint32_t i)
{
	return sizes[i % N_TENSORS] < 10000;
}

static bool big(uint32_t i)
{
	return sizes[i % N_TENSORS] >= 262144;
}

static bool none(uint32_t i)
{
	(void)i;
	return false;
}

static bool (*const picks[])(uint32_t) = { all, odd, small, big, none };

/* Load each picked tensor into memory of its own between redzones, last first, and compare with a plain read. */
static void load_and_compare(const struct kvt_weights *w, bool (*pick)(uint32_t), const struct kvt_load_params *params,
			     struct kvt_budget *budget, struct kvt_load_report *report)
{
	struct kvt_load_item *items = calloc(w->n_tensors, sizeof(*items));
	uint64_t total = 0;
	uint32_t n = 0;

	for (uint32_t i = w->n_tensors; i-- > 0;) {
		const struct kvt_tensor *t = &w->tensors[i];
		uint8_t *p;

		if (!pick(i))
			continue;
		p = malloc(t->bytes + 2 * REDZONE);
		memset(p, 0xa5, t->bytes + 2 * REDZONE);
		items[n++] = (struct kvt_load_item){ .tensor = t, .host = p + REDZONE };
		total += t->bytes;
	}
	ck_assert_msg(kvt_load_charged(w, items, n, params, budget, report) == 0, "%s", kvt_last_error());
	ck_assert_uint_eq(report->bytes, total);
	for (uint32_t k = 0; k < n; k++) {
		const struct kvt_tensor *t = items[k].tensor;
		uint8_t *want = malloc(t->bytes + 1), *p = items[k].host;

		ck_assert_int_eq(kvt_tensor_read(w, t, 0, t->bytes, want), 0);
		ck_assert_msg(!memcmp(p, want, t->bytes), "%s differs", t->name);
		for (int i = 1; i <= REDZONE; i++)
			ck_assert(p[-i] == 0xa5 && p[t->bytes + i - 1] == 0xa5);
		free(want);
		free(p - REDZONE);
	}
	free(items);
}

START_TEST(every_way)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 1));

	for (uint32_t mode = 0; mode < KVT_LOAD_MODES; mode++)
		for (uint32_t io = KVT_IO_URING; io <= KVT_IO_THREADS; io++)
			for (uint32_t depth = 1; depth <= 5; depth += 4)
				for (uint64_t piece = depth == 1 ? 4096 * 32 : 4096; piece <= 4 << 20; piece *= 32)
					for (size_t k = 0; k < sizeof(picks) / sizeof(*picks); k++) {
						struct kvt_load_params p = { .size = sizeof(p), .mode = mode, .io = io,
									     .depth = depth, .piece_bytes = piece };
						struct kvt_load_report r = KVT_INIT(r);

						load_and_compare(w, picks[k], &p, NULL, &r);
						if (mode != KVT_LOAD_MMAP)
							ck_assert_str_eq(r.io, io == KVT_IO_URING ? "io_uring" : "threads");
						if (mode == KVT_LOAD_BUFFERED && picks[k] == all)
							ck_assert_uint_eq(r.shards[KVT_LOAD_BUFFERED], 1);
						if (mode == KVT_LOAD_MMAP && picks[k] == all)
							ck_assert_uint_eq(r.shards[KVT_LOAD_MMAP], 1);
					}
	kvt_weights_close(w);
}
END_TEST

/* Memory that lies as the file does is read without staging; the odd one out is moved to where it can be used. */
START_TEST(image)
{
	struct bytes b = { 0 }, d = { 0 };
	struct kvt_weights *w;
	uint8_t *want;

	put_pattern(&d, 3 + 4000000 + 40, 7);
	put_safetensors(&b, "{\"odd\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
			    "\"w\":{\"dtype\":\"F32\",\"shape\":[1000000],\"data_offsets\":[3,4000003]},"
			    "\"v\":{\"dtype\":\"I8\",\"shape\":[40],\"data_offsets\":[4000003,4000043]}}", d.p, d.n);
	w = open_ok(write_bytes("image.safetensors", &b));
	want = d.p;
	for (uint32_t mode = 0; mode < KVT_LOAD_MODES; mode++) {
		struct kvt_budget budget = { .limit = 64 << 20 };
		struct kvt_load_params p = { .size = sizeof(p), .mode = mode };
		struct kvt_load_image image;
		struct kvt_load_report r = KVT_INIT(r);

		ck_assert_msg(kvt_load_image(w, &p, &budget, &image, &r) == 0, "%s", kvt_last_error());
		for (uint32_t i = 0; i < w->n_tensors; i++) {
			const struct kvt_load_item *item = &image.items[i];

			ck_assert_ptr_eq(item->tensor, &w->tensors[i]);
			ck_assert_mem_eq(item->host, want + (w->tensors[i].offset - w->tensors[0].offset),
					 w->tensors[i].bytes);
			if (w->tensors[i].dtype == KVT_DT_F32)
				ck_assert_uint_eq((uintptr_t)item->host % 4, 0);
			ck_assert((uint8_t *)item->host + item->tensor->bytes <= image.base + image.bytes);
		}
		ck_assert_uint_eq(atomic_load(&budget.used), image.bytes);
		ck_assert_uint_eq(atomic_load(&budget.peak), image.bytes + r.staging_bytes);
		kvt_load_image_free(&image);
		ck_assert_uint_eq(atomic_load(&budget.used), 0);
		/* one byte less than the block: nothing is allocated */
		budget.limit = 4000000;
		ck_assert_int_eq(kvt_load_image(w, &p, &budget, &image, &r), -ENOMEM);
		ck_assert_ptr_nonnull(strstr(kvt_last_error(), "RAM budget"));
		ck_assert_uint_eq(atomic_load(&budget.used), 0);
		kvt_load_image_free(&image);
	}
	free(d.p);
	kvt_weights_close(w);
}
END_TEST

START_TEST(shards)
{
	static const char *const names[] = { "a.safetensors", "b.safetensors", "c.safetensors" };
	struct bytes x = { 0 };
	struct kvt_weights *w;
	char entry[100];

	put_text(&x, "{\"weight_map\":{");
	for (int s = 0; s < 3; s++) {
		write_model(names[s], s == 0 ? "a" : s == 1 ? "b" : "c", s + 1);
		for (int i = 0; i < N_TENSORS; i++) {
			sprintf(entry, "%s\"%c%d\":\"%s\"", s || i ? "," : "", 'a' + s, i, names[s]);
			put_text(&x, entry);
		}
	}
	put_text(&x, "}}");
	w = open_ok(write_bytes("model.safetensors.index.json", &x));
	ck_assert_uint_eq(w->n_shards, 3);
	for (uint32_t mode = 0; mode < KVT_LOAD_MODES; mode++)
		for (size_t k = 0; k < sizeof(picks) / sizeof(*picks); k++) {
			struct kvt_load_params p = { .size = sizeof(p), .mode = mode, .piece_bytes = 256 << 10 };
			struct kvt_load_report r = KVT_INIT(r);

			load_and_compare(w, picks[k], &p, NULL, &r);
			ck_assert_uint_eq(r.shards[1] + r.shards[2] + r.shards[3], picks[k] == none ? 0 : 3);
		}
	kvt_weights_close(w);
}
END_TEST

/* Pages that are under way elsewhere are not dropped by the first call. False: some file systems drop none. */
static bool drop_cached(int fd, const uint8_t *map, uint64_t bytes)
{
	unsigned char *resident = malloc(bytes / 4096 + 1);
	int dropped = 0; /* twice: a page that is being read cannot be, nor is it seen */

	ck_assert_ptr_nonnull(resident);
	for (int i = 0; i < 100 && dropped < 2; i++) {
		bool none = true;

		ck_assert_int_eq(fdatasync(fd), 0);
		ck_assert_int_eq(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
		ck_assert_int_eq(mincore((void *)(uintptr_t)map, bytes, resident), 0);
		for (uint64_t page = 0; page < (bytes + 4095) / 4096; page++)
			none &= !(resident[page] & 1);
		dropped = none ? dropped + 1 : 0;
		usleep(10000);
	}
	free(resident);
	return dropped == 2;
}

/* What lies in the page cache comes from there, what does not is read directly; small tensors far apart too. */
START_TEST(rule)
{
	const char *path = write_model("model.safetensors", "t", 16);
	struct kvt_weights *w = open_ok(path);
	struct kvt_load_params p = KVT_INIT(p);
	struct kvt_load_report r = KVT_INIT(r);
	int fd = open(path, O_RDONLY);
	uint8_t *map = mmap(NULL, w->shards[0].bytes, PROT_READ, MAP_SHARED, fd, 0);

	load_and_compare(w, all, &p, NULL, &r); /* it has just been written */
	ck_assert_uint_eq(r.shards[KVT_LOAD_BUFFERED], 1);
	for (size_t k = 0; k < 4; k++) {
		int tries = 20; /* a disk may have a page there before the call that asks for it has returned */

		do {
			if (!drop_cached(fd, map, w->shards[0].bytes)) {
				printf("SKIP: rule: %s keeps its pages cached\n", path);
				k = 4;
				break;
			}
			load_and_compare(w, picks[k], &p, NULL, &r);
		} while (r.shards[KVT_LOAD_BUFFERED] && --tries);
		if (k == 4)
			break;
		ck_assert_uint_eq(r.shards[KVT_LOAD_BUFFERED], 0);
		ck_assert_uint_eq(r.shards[KVT_LOAD_DIRECT] + r.shards[KVT_LOAD_MMAP], 1);
	}
	munmap(map, w->shards[0].bytes);
	close(fd);
	kvt_weights_close(w);
}
END_TEST

START_TEST(read_short)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 17));

	for (uint32_t mode = 0; mode < KVT_LOAD_MODES; mode++)
		for (uint64_t piece = 64 << 10; piece <= 4 << 20; piece *= 8) {
			struct kvt_load_params p = { .size = sizeof(p), .mode = mode, .io = KVT_IO_THREADS,
						     .piece_bytes = piece };
			struct kvt_load_report r = KVT_INIT(r);

			short_reads = true;
			load_and_compare(w, all, &p, NULL, &r);
			short_reads = false;
		}
	kvt_weights_close(w);
}
END_TEST

static double thread_seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

/* From the page cache others copy, so that they can do it side by side: the caller's own time is a small part of a copy's. */
START_TEST(cached_by_others)
{
	struct bytes b = { 0 }, d = { 0 };
	const uint64_t bytes = 64 << 20;
	struct kvt_weights *w;
	uint8_t *to = malloc(bytes);
	double mine = 1e9, copy = 1e9, t;

	put_pattern(&d, bytes, 18);
	put_safetensors(&b, "{\"w\":{\"dtype\":\"U8\",\"shape\":[67108864],\"data_offsets\":[0,67108864]}}", d.p, d.n);
	w = open_ok(write_bytes("big.safetensors", &b));
	for (uint32_t io = KVT_IO_URING; io <= KVT_IO_THREADS; io++) {
		for (int i = 0; i < 3; i++) { /* the better of three: somebody else may need the page cache */
			struct kvt_load_params p = { .size = sizeof(p), .mode = KVT_LOAD_BUFFERED, .io = io };
			struct kvt_load_item item = { .tensor = &w->tensors[0], .host = to };

			t = thread_seconds();
			ck_assert_int_eq(kvt_tensor_read(w, &w->tensors[0], 0, bytes, to), 0);
			copy = fmin(copy, thread_seconds() - t);
			memset(to, 0, bytes);
			t = thread_seconds();
			ck_assert_msg(kvt_load(w, &item, 1, &p, NULL) == 0, "%s", kvt_last_error());
			mine = fmin(mine, thread_seconds() - t);
			ck_assert_mem_eq(to, d.p, bytes);
		}
		ck_assert_msg(mine < copy / 2, "io %u: %g s of the caller, a copy takes %g s", io, mine, copy);
	}
	free(d.p);
	free(to);
	kvt_weights_close(w);
}
END_TEST

static char last_line[512];

static enum kvt_log_level last_level;

static void keep_line(void *user, enum kvt_log_level level, const char *line)
{
	(void)user;
	last_level = level;
	snprintf(last_line, sizeof(last_line), "%s", line);
}

/* Make a system call fail with @err for the rest of this process, where its argument @arg has a bit of @mask. */
static void deny(int nr, int err, int arg, uint32_t mask)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args) + 8 * arg),
		BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, mask, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | err),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = { sizeof(filter) / sizeof(*filter), filter };

	ck_assert_int_eq(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	ck_assert_int_eq(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog), 0);
}

START_TEST(no_direct_at_open)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 2));
	struct kvt_load_params p = { .size = sizeof(p), .mode = KVT_LOAD_DIRECT };
	struct kvt_load_report r = KVT_INIT(r);

	kvt_set_log(keep_line, NULL);
	deny(SYS_openat, EINVAL, 2, O_DIRECT);
	load_and_compare(w, all, &p, NULL, &r);
	ck_assert_uint_eq(r.shards[KVT_LOAD_MMAP], 1);
	ck_assert_uint_eq(r.shards[KVT_LOAD_DIRECT], 0);
	ck_assert_msg(strstr(last_line, "has no O_DIRECT") && strstr(last_line, "mmap"), "%s", last_line);
	ck_assert_int_eq(last_level, KVT_LOG_WARN); /* what a command shows unasked */
	kvt_weights_close(w);
}
END_TEST

/* Refused only when it is used, as some file systems do: the descriptor's own flag is what the filter cannot see, so
 * every pread of 4 KiB or more fails. */
START_TEST(no_direct_at_read)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 3));
	struct kvt_load_params p = { .size = sizeof(p), .io = KVT_IO_THREADS, .mode = KVT_LOAD_DIRECT, .piece_bytes = 1 << 20 };
	uint8_t *a = malloc(w->bytes), *b = malloc(w->bytes);
	struct kvt_load_item *items = calloc(w->n_tensors, sizeof(*items));
	struct kvt_load_report r = KVT_INIT(r);
	uint64_t at = 0;

	for (uint32_t i = 0; i < w->n_tensors; i++) {
		ck_assert_int_eq(kvt_tensor_read(w, &w->tensors[i], 0, w->tensors[i].bytes, a + at), 0);
		items[i] = (struct kvt_load_item){ .tensor = &w->tensors[i], .host = b + at };
		at += w->tensors[i].bytes;
	}
	kvt_set_log(keep_line, NULL);
	deny(SYS_pread64, EINVAL, 2, 0xfffff000);
	ck_assert_msg(kvt_load(w, items, w->n_tensors, &p, &r) == 0, "%s", kvt_last_error());
	ck_assert_mem_eq(a, b, at);
	ck_assert_uint_eq(r.shards[KVT_LOAD_MMAP], 1);
	ck_assert_uint_eq(r.shards[KVT_LOAD_DIRECT], 0);
	ck_assert_ptr_nonnull(strstr(last_line, "has no O_DIRECT"));
	free(items);
	free(a);
	free(b);
	kvt_weights_close(w);
}
END_TEST

START_TEST(no_io_uring)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 4));
	struct kvt_load_params p = { .size = sizeof(p), .mode = KVT_LOAD_DIRECT };
	struct kvt_load_report r = KVT_INIT(r);

	kvt_set_log(keep_line, NULL);
	deny(SYS_io_uring_setup, EPERM, 0, ~0u);
	load_and_compare(w, all, &p, NULL, &r);
	ck_assert_str_eq(r.io, "threads");
	ck_assert_ptr_nonnull(strstr(last_line, "io_uring"));
	p.io = KVT_IO_URING;
	ck_assert_int_eq(kvt_load(w, NULL, 0, &p, &r), -EPERM);
	kvt_weights_close(w);
}
END_TEST

START_TEST(no_process_vm_readv)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 5));
	struct kvt_load_params p = { .size = sizeof(p), .mode = KVT_LOAD_MMAP };
	struct kvt_load_report r = KVT_INIT(r);

	deny(SYS_process_vm_readv, EPERM, 0, ~0u);
	load_and_compare(w, all, &p, NULL, &r);
	kvt_weights_close(w);
}
END_TEST

struct change {
	const char *path;
	off_t size; /* -1: write a byte in the middle */
	bool done;
};

/* Change the file once the first piece has arrived. */
static int change_file(void *user, uint64_t done, uint64_t total)
{
	struct change *c = user;
	int fd;

	(void)total;
	if (c->done || !done)
		return 0;
	c->done = true;
	if (c->size >= 0) {
		ck_assert_int_eq(truncate(c->path, c->size), 0);
		return 0;
	}
	fd = open(c->path, O_WRONLY);
	ck_assert_int_eq(pwrite(fd, "x", 1, 5000), 1);
	close(fd);
	return 0;
}

/* Shrinking under a mapping is where a careless reader dies of SIGBUS: this test would end by it. */
START_TEST(changes_while_loading)
{
	for (uint32_t mode = KVT_LOAD_DIRECT; mode < KVT_LOAD_MODES; mode++)
		for (uint32_t io = KVT_IO_URING; io <= KVT_IO_THREADS; io++)
			for (int how = 0; how < 4; how++) {
				static const off_t to[] = { 0, 4096 + 5, 50 << 20, -1 };
				struct change c = { .path = write_model("model.safetensors", "t", 6), .size = to[how] };
				struct kvt_load_params p = { .size = sizeof(p), .mode = mode, .io = io, .depth = 2,
							     .piece_bytes = 64 << 10, .progress = change_file, .user = &c };
				struct kvt_weights *w = open_ok(c.path);
				struct kvt_load_item *items = calloc(w->n_tensors, sizeof(*items));
				uint8_t *mem = malloc(kvt_load_layout(w, NULL, NULL) + 4096);

				kvt_load_layout(w, mem, items);
				usleep(10000); /* a tick of the file system's clock */
				ck_assert_int_eq(kvt_load(w, items, w->n_tensors, &p, NULL), -ESTALE);
				ck_assert_msg(strstr(kvt_last_error(), "model.safetensors") != NULL, "%s", kvt_last_error());
				ck_assert(c.done);
				free(mem);
				free(items);
				kvt_weights_close(w);
			}
}
END_TEST

START_TEST(replaced_before_loading)
{
	const char *path = write_model("model.safetensors", "t", 8);
	struct kvt_weights *w = open_ok(path);
	struct kvt_load_params p = { .size = sizeof(p), .mode = KVT_LOAD_DIRECT };
	char byte[1];
	struct kvt_load_item item = { .tensor = &w->tensors[0], .host = byte };

	write_model("other.safetensors", "t", 9);
	ck_assert_int_eq(rename(scratch("other.safetensors"), path), 0);
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -ESTALE);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "replaced"));
	kvt_weights_close(w);
}
END_TEST

static int count(void *user, uint64_t done, uint64_t total)
{
	uint64_t *seen = user;

	ck_assert_uint_ge(done, seen[0]);
	ck_assert_uint_le(done, total);
	seen[0] = done;
	return done > seen[1];
}

START_TEST(progress_and_cancel)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 10));
	uint64_t seen[2] = { 0, UINT64_MAX };
	struct kvt_load_params p = { .size = sizeof(p), .progress = count, .user = seen, .piece_bytes = 256 << 10 };
	struct kvt_load_report r = KVT_INIT(r);
	struct kvt_load_item item = { .tensor = kvt_weights_find(w, "t12") };

	load_and_compare(w, all, &p, NULL, &r);
	ck_assert_uint_eq(seen[0], w->bytes);
	seen[0] = 0;
	seen[1] = 500000;
	item.host = malloc(item.tensor->bytes);
	for (p.mode = 0; p.mode < KVT_LOAD_MODES; p.mode++) {
		seen[0] = 0;
		ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -ECANCELED);
		ck_assert_uint_lt(seen[0], 1000000);
	}
	free(item.host);
	kvt_weights_close(w);
}
END_TEST

START_TEST(budget)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 11));
	struct kvt_load_report r = KVT_INIT(r);
	uint64_t limit = 64 << 20;

	/* smaller and fewer reads, down to one of 256 KiB and its stack */
	for (; limit >= (256 + 64) << 10; limit = limit * 2 / 3) {
		struct kvt_budget b = { .limit = limit };
		struct kvt_load_params p = KVT_INIT(p);

		load_and_compare(w, all, &p, &b, &r);
		ck_assert_uint_le(atomic_load(&b.peak), limit);
		ck_assert_uint_eq(atomic_load(&b.peak), r.staging_bytes);
		ck_assert_uint_eq(atomic_load(&b.used), 0);
	}
	{
		struct kvt_budget b = { .limit = 200 << 10 };

		ck_assert_int_eq(kvt_load_charged(w, NULL, 0, NULL, &b, &r), -ENOMEM);
		ck_assert_ptr_nonnull(strstr(kvt_last_error(), "budget"));
		ck_assert_uint_eq(atomic_load(&b.peak), 0);
	}
	ck_assert_int_eq(kvt_load_fits(1 << 20, NULL), 0);
	ck_assert_int_eq(kvt_load_fits(1ull << 50, NULL), -ENOMEM);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "1125899906842624 bytes"));
	kvt_weights_close(w);
}
END_TEST

START_TEST(wrong_calls)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 12)), *other = open_ok(w->path);
	struct kvt_load_item item = { .tensor = &w->tensors[0] };
	struct kvt_load_params p = KVT_INIT(p);
	char byte;

	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL); /* no destination */
	item.device = 4096;
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL); /* no GPU */
	item.host = &byte;
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL); /* two */
	item.device = 0;
	ck_assert_int_eq(kvt_load(w, NULL, 1, &p, NULL), -EINVAL);
	item.tensor = NULL;
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "item 0 is NULL"));
	item.tensor = &other->tensors[0];
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "of other weights"));
	item.tensor = (const struct kvt_tensor *)((const char *)&w->tensors[0] + 1);
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL);
	item.tensor = &w->tensors[w->n_tensors];
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL);
	item.tensor = &w->tensors[0];
	p.piece_bytes = 5000;
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL);
	p.piece_bytes = 0;
	p.depth = 65;
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL);
	p.depth = 0;
	p.mode = KVT_LOAD_MODES;
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL);
	p.mode = KVT_LOAD_AUTO;
	p.size = 0;
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, NULL), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "KVT_INIT"));
	p.size = sizeof(p);
	byte = 42;
	ck_assert_int_eq(kvt_load(w, &item, 1, &p, &(struct kvt_load_report){ 0 }), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "load report: size is 0"));
	ck_assert_int_eq(byte, 42);
	kvt_weights_close(other);
	kvt_weights_close(w);
}
END_TEST

/* ---- to a GPU ---- */

static void to_device(const struct kvt_weights *w, struct kvt_gpu *gpu, struct kvt_load_item *items)
{
	for (uint32_t i = 0; i < w->n_tensors; i++) {
		kvt_dptr p;

		/* all but one on the GPU */
		if (i == 3) {
			items[i] = (struct kvt_load_item){ .tensor = &w->tensors[i], .host = malloc(w->tensors[i].bytes) };
			continue;
		}
		ck_assert_int_eq(gpu->ops->alloc(gpu, w->tensors[i].bytes + 1, &p), 0);
		items[i] = (struct kvt_load_item){ .tensor = &w->tensors[i], .device = p };
	}
}

static void compare_device(const struct kvt_weights *w, struct kvt_gpu *gpu, const struct kvt_load_item *items)
{
	for (uint32_t i = 0; i < w->n_tensors; i++) {
		const struct kvt_tensor *t = &w->tensors[i];
		uint8_t *a = malloc(t->bytes + 1), *b = malloc(t->bytes + 1);

		ck_assert_int_eq(kvt_tensor_read(w, t, 0, t->bytes, a), 0);
		if (items[i].host)
			memcpy(b, items[i].host, t->bytes);
		else if (t->bytes)
			ck_assert_int_eq(gpu->ops->copy_d2h(gpu, b, items[i].device, t->bytes), 0);
		ck_assert_msg(!memcmp(a, b, t->bytes), "%s differs", t->name);
		free(a);
		free(b);
	}
}

static void free_device(const struct kvt_weights *w, struct kvt_gpu *gpu, struct kvt_load_item *items)
{
	for (uint32_t i = 0; i < w->n_tensors; i++) {
		free(items[i].host);
		gpu->ops->free(gpu, items[i].device);
	}
}

/* Copies that run as late as they may: a staging buffer that is reused before its event shows as wrong bytes. */
START_TEST(gpu_late_copies)
{
	static const uint64_t delays[] = { 0, 3, UINT64_MAX };
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 13));
	struct kvt_load_item items[N_TENSORS];
	struct kvt_gpu *gpu;

	for (uint32_t mode = 0; mode < KVT_LOAD_MODES; mode++)
		for (size_t d = 0; d < 3; d++)
			for (uint64_t piece = 4096; piece <= 4 << 20; piece *= 32) {
				struct kvt_load_params p = { .size = sizeof(p), .mode = mode, .piece_bytes = piece,
							     .depth = 3 };
				struct kvt_load_report r = KVT_INIT(r);
				uint64_t alive;

				ck_assert_int_eq(kvt_mock_open(0, &gpu), 0);
				kvt_mock_delay(gpu, delays[d]);
				to_device(w, gpu, items);
				alive = kvt_mock_alive(gpu);
				p.gpu = gpu;
				ck_assert_msg(kvt_load(w, items, w->n_tensors, &p, &r) == 0, "%s", kvt_last_error());
				ck_assert(r.pinned);
				ck_assert_uint_eq(r.bytes, w->bytes);
				compare_device(w, gpu, items);
				ck_assert_uint_eq(kvt_mock_alive(gpu), alive);
				free_device(w, gpu, items);
				ck_assert_str_eq(kvt_mock_fault(gpu), "");
				gpu->ops->close(gpu);
			}
	kvt_weights_close(w);
}
END_TEST

/* The cpu backend's memory is the host's: what can go straight into it does, and a wrong address is still told. */
START_TEST(gpu_of_host_memory)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 19));
	struct kvt_load_item items[N_TENSORS];
	struct kvt_gpu *gpu;

	ck_assert_int_eq(kvt_gpu_cpu_open(0, &gpu), 0);
	for (uint32_t mode = 0; mode < KVT_LOAD_MODES; mode++)
		for (uint32_t io = KVT_IO_URING; io <= KVT_IO_THREADS; io++) {
			struct kvt_load_params p = { .size = sizeof(p), .mode = mode, .io = io, .gpu = gpu };
			struct kvt_load_report r = KVT_INIT(r);

			to_device(w, gpu, items);
			ck_assert_msg(kvt_load(w, items, w->n_tensors, &p, &r) == 0, "%s", kvt_last_error());
			ck_assert_uint_eq(r.bytes, w->bytes);
			compare_device(w, gpu, items);
			/* one byte too far at either end */
			for (int i = 0; i < 2; i++) {
				kvt_dptr good = items[12].device;
				uint64_t room = items[12].tensor->bytes + 1;

				items[12].device = i ? good + room - items[12].tensor->bytes + 1 : good - 1;
				ck_assert_int_eq(kvt_load(w, items, w->n_tensors, &p, NULL), -EINVAL);
				items[12].device = good;
			}
			free_device(w, gpu, items);
		}
	gpu->ops->close(gpu);
	kvt_weights_close(w);
}
END_TEST

/* Every call of the backend fails once: an error, nothing left, nothing freed under a copy. */
START_TEST(gpu_fails_anywhere)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 14));
	struct kvt_load_params p = { .size = sizeof(p), .piece_bytes = 1 << 20, .depth = 2 };
	struct kvt_load_item items[N_TENSORS];
	struct kvt_gpu *gpu;
	bool more = true;
	uint64_t alive;
	int err;

	for (uint64_t n = 1; more; n++) {
		ck_assert_int_eq(kvt_mock_open(0, &gpu), 0);
		kvt_mock_delay(gpu, UINT64_MAX);
		to_device(w, gpu, items);
		alive = kvt_mock_alive(gpu);
		p.gpu = gpu;
		kvt_mock_fail_at(gpu, n, -EIO);
		err = kvt_load(w, items, w->n_tensors, &p, NULL);
		more = kvt_mock_failed(gpu);
		kvt_mock_fail_at(gpu, 0, 0);
		ck_assert(!err || err == -EIO);
		/* only pinned staging and the check for it can be done without */
		if (!err)
			compare_device(w, gpu, items);
		ck_assert_msg(!err == (n <= 1 || !more), "call %d: %d", (int)n, err);
		ck_assert_uint_eq(kvt_mock_alive(gpu), alive);
		free_device(w, gpu, items);
		ck_assert_str_eq(kvt_mock_fault(gpu), "");
		gpu->ops->close(gpu);
	}
	kvt_weights_close(w);
}
END_TEST

START_TEST(gpu_staging_not_pinned)
{
	struct kvt_weights *w = open_ok(write_model("model.safetensors", "t", 15));
	struct kvt_load_params p = KVT_INIT(p);
	struct kvt_load_item items[N_TENSORS];
	struct kvt_load_report r = KVT_INIT(r);
	struct kvt_gpu *gpu;

	kvt_set_log(keep_line, NULL);
	ck_assert_int_eq(kvt_mock_open(0, &gpu), 0);
	p.gpu = gpu;
	to_device(w, gpu, items);
	kvt_mock_refuse(gpu, KVT_MOCK_host_alloc, -ENOMEM);
	ck_assert_int_eq(kvt_load(w, items, w->n_tensors, &p, &r), 0);
	ck_assert(r.pinned); /* registered instead */
	kvt_mock_refuse(gpu, KVT_MOCK_host_register, -ENOMEM);
	ck_assert_int_eq(kvt_load(w, items, w->n_tensors, &p, &r), 0);
	ck_assert(!r.pinned);
	ck_assert_ptr_nonnull(strstr(last_line, "not pinned"));
	compare_device(w, gpu, items);
	free_device(w, gpu, items);
	ck_assert_int_eq(kvt_load_fits(1 << 20, gpu), 0);
	ck_assert_int_eq(kvt_load_fits(1 << 30, gpu), -ENOMEM);
	gpu->ops->close(gpu);
	kvt_weights_close(w);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("loader");
	TCase *same = tcase_create("same bytes"), *faults = tcase_create("faults"), *gpu = tcase_create("gpu");
	SRunner *r = srunner_create(s);
	int failed;

	scratch_dir();
	tcase_set_timeout(same, 240);
	tcase_set_timeout(faults, 120);
	tcase_set_timeout(gpu, 120);
	tcase_add_test(same, every_way);
	tcase_add_test(same, image);
	tcase_add_test(same, shards);
	tcase_add_test(same, rule);
	tcase_add_test(same, read_short);
	tcase_add_test(same, cached_by_others);
	tcase_add_test(faults, no_direct_at_open);
	tcase_add_test(faults, no_direct_at_read);
	tcase_add_test(faults, no_io_uring);
	tcase_add_test(faults, no_process_vm_readv);
	tcase_add_test(faults, changes_while_loading);
	tcase_add_test(faults, replaced_before_loading);
	tcase_add_test(faults, progress_and_cancel);
	tcase_add_test(faults, budget);
	tcase_add_test(faults, wrong_calls);
	tcase_add_test(gpu, gpu_late_copies);
	tcase_add_test(gpu, gpu_of_host_memory);
	tcase_add_test(gpu, gpu_fails_anywhere);
	tcase_add_test(gpu, gpu_staging_not_pinned);
	suite_add_tcase(s, same);
	suite_add_tcase(s, faults);
	suite_add_tcase(s, gpu);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
