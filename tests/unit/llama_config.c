// SPDX-License-Identifier: MIT
/* What the llama.cpp plug-in is told: variables, a file, and each thing that may be wrong with them. */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engines/ggml/plugin.h"

static struct kg_config c;

/* Up to three variables; the environment's others do not matter. */
static int read3(const char *a, const char *b, const char *d)
{
	char *env[] = { (char *)"HOME=/", (char *)a, (char *)b, (char *)d, NULL };

	return kg_config_read(&c, env);
}

START_TEST(nothing_set)
{
	ck_assert_int_eq(read3("PATH=/bin", "KVTIERX=1", NULL), 0);
}
END_TEST

START_TEST(sizes_and_words)
{
	char *env[] = { (char *)"KVTIER_RAM_BYTES=3G", (char *)"KVTIER_DISK_BYTES=2t", (char *)"KVTIER_BLOCK_BYTES=65536",
			(char *)"KVTIER_THREADS=3", (char *)"KVTIER_NUMA_NODE=0", (char *)"KVTIER_IO=threads",
			(char *)"KVTIER_HUGEPAGES=1", (char *)"KVTIER_NO_WRITE_VERIFY=1", (char *)"KVTIER_LOG=debug",
			(char *)"KVTIER_DISK_DIR=/tmp/x", (char *)"KVTIER_DEVICE=always", (char *)"KVTIER_CACHES=2", NULL };

	ck_assert_int_eq(kg_config_read(&c, env), 1);
	ck_assert_uint_eq(c.cache.ram_bytes, 3ull << 30);
	ck_assert_uint_eq(c.cache.disk_bytes, 2ull << 40);
	ck_assert_uint_eq(c.cache.block_bytes, 65536);
	ck_assert_uint_eq(c.cache.threads, 3);
	ck_assert_int_eq(c.cache.numa_node, 1);
	ck_assert_uint_eq(c.cache.io, KVT_IO_THREADS);
	ck_assert_uint_eq(c.cache.flags, KVT_CACHE_HUGEPAGES | KVT_CACHE_NO_WRITE_VERIFY);
	ck_assert_int_eq(c.log, KVT_LOG_DEBUG);
	ck_assert_str_eq(c.disk_dir, "/tmp/x");
	ck_assert(c.chosen && !c.all_planes);
	ck_assert_uint_eq(c.caches, 2);
}
END_TEST

static const struct {
	const char *variable, *says;
} bad[] = {
	{ "KVTIER_RAM=1G", "KVTIER_RAM is not known" },
	{ "KVTIER_ram_bytes_=1", "is not known" },
	{ "KVTIER_RAM_BYTES=", "KVTIER_RAM_BYTES is \"\"" },
	{ "KVTIER_RAM_BYTES=-1", "KVTIER_RAM_BYTES is \"-1\"" },
	{ "KVTIER_RAM_BYTES=1GB", "KVTIER_RAM_BYTES is \"1GB\"" },
	{ "KVTIER_RAM_BYTES=1.5G", "expected" },
	{ "KVTIER_RAM_BYTES=99999999999999999999", "expected" },
	{ "KVTIER_RAM_BYTES=9999999999999T", "expected" },
	{ "KVTIER_THREADS=0", "from 1 to 1024" },
	{ "KVTIER_THREADS=2x", "from 1 to 1024" },
	{ "KVTIER_IO=direct", "auto uring threads" },
	{ "KVTIER_IO=au", "auto uring threads" },
	{ "KVTIER_HUGEPAGES=yes", "0 or 1" },
	{ "KVTIER_DISK_BYTES=1G", "KVTIER_RAM_BYTES is not set" },
	{ "KVTIER_CONFIG=/no/such", "/no/such" },
};

START_TEST(refused)
{
	ck_assert_int_lt(read3(bad[_i].variable, NULL, NULL), 0);
	ck_assert_msg(strstr(kvt_last_error(), bad[_i].says) != NULL, "%s: %s", bad[_i].variable, kvt_last_error());
}
END_TEST

START_TEST(gpu_refused)
{
	ck_assert_int_eq(read3("KVTIER_RAM_BYTES=1G", "KVTIER_GPU_BYTES=1G", NULL), -EINVAL);
}
END_TEST

static char path[4096], variable[4200];

static void write_file(const char *text)
{
	FILE *f;

	snprintf(path, sizeof(path), "%s/kvtier.conf", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
	snprintf(variable, sizeof(variable), "KVTIER_CONFIG=%s", path);
	f = fopen(path, "w");
	ck_assert(f && fputs(text, f) >= 0 && !fclose(f));
}

START_TEST(file)
{
	write_file("# comment\n\n  ram_bytes = 2G \nthreads=2\ndisk_dir=/a b\n");
	ck_assert_int_eq(read3(variable, "KVTIER_THREADS=4", NULL), 1);
	unlink(path);
	ck_assert_uint_eq(c.cache.ram_bytes, 2ull << 30);
	ck_assert_uint_eq(c.cache.threads, 4); /* the environment has the last word */
	ck_assert_str_eq(c.disk_dir, "/a b");
}
END_TEST

static const struct {
	const char *text, *says;
} bad_files[] = {
	{ "ram_bytes=1G\nram=1\n", ":2: ram is not known" },
	{ "ram_bytes 1G\n", ":1: \"ram_bytes 1G\" is not key=value" },
	{ "RAM_BYTES=1G\n", ":1: RAM_BYTES is not known" },
	{ "ram_bytes=x\n", ":1: ram_bytes is \"x\"" },
};

START_TEST(bad_file)
{
	int ret;

	write_file(bad_files[_i].text);
	ret = read3(variable, NULL, NULL);
	unlink(path);
	ck_assert_int_eq(ret, -EINVAL);
	ck_assert_msg(strstr(kvt_last_error(), bad_files[_i].says) != NULL, "%s", kvt_last_error());
}
END_TEST

START_TEST(long_line)
{
	static char text[3000];
	int ret;

	memset(text, 'x', sizeof(text) - 2);
	text[sizeof(text) - 2] = '\n';
	write_file(text);
	ret = read3(variable, NULL, NULL);
	unlink(path);
	ck_assert_int_eq(ret, -EINVAL);
	ck_assert(strstr(kvt_last_error(), "longer than"));
}
END_TEST

int main(void)
{
	Suite *s = suite_create("llama_config");
	TCase *t = tcase_create("llama_config");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_add_test(t, nothing_set);
	tcase_add_test(t, sizes_and_words);
	tcase_add_loop_test(t, refused, 0, sizeof(bad) / sizeof(bad[0]));
	tcase_add_test(t, gpu_refused);
	tcase_add_test(t, file);
	tcase_add_loop_test(t, bad_file, 0, sizeof(bad_files) / sizeof(bad_files[0]));
	tcase_add_test(t, long_line);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
