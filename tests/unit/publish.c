// SPDX-License-Identifier: MIT
/*
 * Counters for other processes: who connects gets them, as often as wanted and
 * while the cache works; who does not read holds up nobody; memory for it is in
 * the budget; the name is gone with the cache and with a process that is killed.
 */
#include <check.h>
#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/publish.h"

static int64_t least;

static struct kvt_cache *make(uint32_t flags, const char *name)
{
	struct kvt_plane_params plane = KVT_INIT(plane);
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_cache *c = NULL;

	plane.codec = KVT_F16;
	plane.heads = 1;
	plane.head_dim = 64;
	plane.rows = 256;
	p.planes = &plane;
	p.n_planes = 1;
	p.threads = 1;
	p.block_bytes = 4096;
	p.max_seqs = p.max_tokens = 1;
	p.max_query_rows = 8;
	p.name = name;
	p.flags = flags;
	least = kvt_cache_min_ram(&p);
	ck_assert_msg(least > 0, "%s", kvt_last_error());
	p.ram_bytes = (uint64_t)least + (1 << 20);
	ck_assert_msg(!kvt_cache_create(&p, &c), "%s", kvt_last_error());
	return c;
}

static int dial(pid_t pid, unsigned int number)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int n = snprintf(at.sun_path + 1, sizeof(at.sun_path) - 1, KVT_PUBLISH_NAME, pid, number);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

	ck_assert_int_ge(fd, 0);
	if (!connect(fd, (struct sockaddr *)&at, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)))
		return fd;
	n = -errno;
	close(fd);
	return n;
}

static json_int_t rows_written(unsigned int number, const char *name)
{
	static char text[KVT_PUBLISH_MAX];
	int fd = dial(getpid(), number);
	ssize_t n;
	json_t *o;
	json_int_t rows;

	ck_assert_int_ge(fd, 0);
	n = recv(fd, text, sizeof(text), 0);
	close(fd);
	o = json_loadb(text, n > 0 ? (size_t)n : 0, 0, NULL);
	ck_assert_msg(o != NULL, "%zd bytes", n);
	ck_assert_str_eq(json_string_value(json_object_get(o, "name")), name);
	rows = json_integer_value(json_object_get(o, "rows_written"));
	json_decref(o);
	return rows;
}

START_TEST(two_caches)
{
	struct kvt_cache *silent = make(0, "silent"), *a, *b;
	int64_t without = least;
	float row[64] = { 1 };
	struct kvt_rows rows = { .data = row, .type = KVT_F32 };
	uint64_t index = 0;

	ck_assert_int_eq(dial(getpid(), 0), -ECONNREFUSED);
	a = make(KVT_CACHE_PUBLISH, "a");
	ck_assert_int_ge(least, without + KVT_PUBLISH_STACK);
	b = make(KVT_CACHE_PUBLISH, "b");
	for (int i = 0; i < 50; i++) {
		int idle = dial(getpid(), 0); /* never read from, and closed at once */

		ck_assert_int_eq(kvt_plane_write(a, 0, &index, 1, &rows), 0);
		ck_assert_int_eq(rows_written(0, "a"), i + 1);
		ck_assert_int_eq(rows_written(1, "b"), 0);
		close(idle);
	}
	kvt_cache_destroy(a);
	ck_assert_int_eq(dial(getpid(), 0), -ECONNREFUSED);
	ck_assert_int_eq(rows_written(1, "b"), 0);
	kvt_cache_destroy(b);
	ck_assert_int_eq(dial(getpid(), 1), -ECONNREFUSED);
	kvt_cache_destroy(silent);
}
END_TEST

START_TEST(killed)
{
	int ready[2], status;
	pid_t child;
	char c;

	ck_assert_int_eq(pipe(ready), 0);
	child = fork();
	ck_assert_int_ge(child, 0);
	if (!child) {
		make(KVT_CACHE_PUBLISH, "child");
		(void)!write(ready[1], "x", 1);
		for (;;)
			pause();
	}
	ck_assert_int_eq(read(ready[0], &c, 1), 1);
	ck_assert_int_ge(dial(child, 0), 0);
	kill(child, SIGKILL);
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert_int_eq(dial(child, 0), -ECONNREFUSED);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("publish");
	TCase *tc = tcase_create("publish");
	SRunner *r;
	int failed;

	tcase_add_test(tc, two_caches);
	tcase_add_test(tc, killed);
	suite_add_tcase(s, tc);
	r = srunner_create(s);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? 1 : 0;
}
