// SPDX-License-Identifier: MIT
/*
 * A RAM tier that is clean, and somebody who wants the memory: hog user|module TIER-MIB HOG-MIB
 *
 * Fills the tier, writes it back, lets another process touch its memory, and reads every row again. Says who got what:
 * with the module the kernel takes clean frames; without, somebody is killed.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvtier.h"

enum { DIM = 1024 };

static int failed(const char *what)
{
	fprintf(stderr, "hog: %s: %s\n", what, kvt_last_error());
	return 1;
}

static void row_of(uint32_t i, uint32_t *row)
{
	for (uint32_t j = 0; j < DIM; j++)
		row[j] = (i * 2654435761u) ^ (j * 40503u);
}

/* Bytes of memory, touched and kept until the parent says so; its exit status, or -signal. */
static int hog(uint64_t bytes)
{
	int status;
	pid_t pid = fork();

	if (!pid) {
		uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		for (uint64_t i = 0; p != MAP_FAILED && i < bytes; i += 4096)
			p[i] = 1;
		_exit(p == MAP_FAILED);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return 1;
	return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
	struct kvt_plane_params plane = { .size = sizeof(plane), .codec = KVT_F32, .heads = 1, .head_dim = DIM };
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_stats st = KVT_INIT(st);
	static uint32_t row[DIM], want[DIM];
	struct kvt_rows rows = { .data = row, .type = KVT_ENCODED };
	struct kvt_cache *cache;
	struct kvt_seq *seq;
	uint32_t n;
	int got;

	if (argc != 4)
		return 2;
	n = (uint32_t)atoi(argv[2]) * 256; /* rows of 4 KiB */
	p.planes = &plane;
	p.n_planes = 1;
	p.threads = 1;
	p.max_seqs = 1;
	p.max_tokens = n;
	p.max_query_rows = 1;
	p.max_query_heads = 1;
	p.disk_dir = "/mnt";
	p.disk_bytes = ((uint64_t)n + 4096) * 4096;
	p.host = strcmp(argv[1], "module") ? KVT_HOST_USER : KVT_HOST_MODULE;
	p.ram_bytes = (uint64_t)kvt_cache_min_ram(&p) + (uint64_t)n * 4096 * 102 / 100;
	if (kvt_cache_create(&p, &cache) || kvt_seq_create(cache, &seq) || kvt_seq_append(seq, NULL, n))
		return failed("cache");
	for (uint32_t i = 0; i < n; i++) {
		row_of(i, row);
		if (kvt_seq_write(seq, 0, i, 1, &rows))
			return failed("write");
	}
	if (kvt_cache_flush(cache))
		return failed("flush");
	printf("  %s: %s MiB in memory and on disk; now somebody wants %s MiB\n", argv[1], argv[2], argv[3]);
	fflush(stdout);
	got = hog((uint64_t)atoi(argv[3]) << 20);
	printf("  %s: the hog %s\n", argv[1], !got ? "got its memory" : got == -SIGKILL ? "was killed" : "failed");
	for (uint32_t i = 0; i < n; i++) {
		row_of(i, want);
		if (kvt_seq_read(seq, 0, i, 1, &rows))
			return failed("read");
		if (memcmp(row, want, sizeof(row))) {
			fprintf(stderr, "hog: row %u is wrong\n", i);
			return 1;
		}
	}
	kvt_cache_stats(cache, &st);
	printf("  %s: every row right; %llu blocks were taken, %llu MiB were read from disk\n", argv[1],
	       (unsigned long long)st.reclaimed, (unsigned long long)(st.disk_read_bytes >> 20));
	kvt_cache_destroy(cache);
	return got || !st.reclaimed;
}
