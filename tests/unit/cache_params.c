// SPDX-License-Identifier: MIT
/* Each parameter wrong alone, otherwise valid: the exact errno, and a message that names what and how much. */
#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"

static struct kvt_plane_params planes[2];

static struct kvt_cache_params good(void)
{
	struct kvt_cache_params p = KVT_INIT(p);

	for (int i = 0; i < 2; i++)
		planes[i] = (struct kvt_plane_params){
			.size = sizeof(planes[i]), .codec = KVT_F16, .heads = 2, .head_dim = 64
		};
	p.planes = planes;
	p.n_planes = 2;
	p.ram_bytes = 16 << 20;
	p.max_seqs = 2;
	p.max_tokens = 1000;
	p.threads = 1;
	return p;
}

static void refused(const struct kvt_cache_params *p, int err, const char *word)
{
	struct kvt_cache *cache = NULL;
	int ret = kvt_cache_create(p, &cache);

	ck_assert_msg(ret == err, "%d (%s) instead of %d", ret, ret ? kvt_last_error() : "done", err);
	ck_assert_msg(strstr(kvt_last_error(), word), "'%s' does not name %s", kvt_last_error(), word);
	ck_assert_ptr_null(cache);
}

START_TEST(good_is_good)
{
	struct kvt_cache_params p = good();
	struct kvt_cache *cache;

	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	ck_assert_int_eq(kvt_plane_block_rows(cache, 0), 65536 / 256);
	ck_assert_int_eq(kvt_plane_row_bytes(cache, 1), 256);
	ck_assert_int_eq(kvt_plane_row_bytes(cache, 2), -EINVAL);
	kvt_cache_destroy(cache);
	kvt_cache_destroy(NULL);
	kvt_seq_free(NULL);
}
END_TEST

#define BAD(field, value, err, word)                    \
	do {                                            \
		struct kvt_cache_params bad = good();   \
		bad.field = value;                      \
		refused(&bad, err, word);               \
	} while (0)

START_TEST(each_bad_parameter_alone)
{
	static const char long_name[] = "0123456789012345678901234567890123456789012345678901234567890123";

	BAD(size, 0, -EINVAL, "size");
	BAD(size, 8, -EINVAL, "size");
	BAD(flags, 1u << 31, -EINVAL, "flags");
	BAD(reserved2, 1, -EINVAL, "reserved");
	BAD(policy, KVT_POLICIES, -EINVAL, "policy 5 is unknown");
	BAD(block_bytes, 1, -EINVAL, "block_bytes");
	BAD(block_bytes, 4097, -EINVAL, "block_bytes");
	BAD(block_bytes, 4ull << 20, -EINVAL, "block_bytes");
	BAD(planes, NULL, -EINVAL, "planes");
	BAD(n_planes, 0, -EINVAL, "planes");
	BAD(n_planes, 65536, -EINVAL, "planes");
	BAD(threads, 1000000, -EINVAL, "threads");
	BAD(name, long_name, -EINVAL, "name");
	BAD(name, "\xff", -EINVAL, "name");
	BAD(numa_node, -1, -EINVAL, "numa_node");
	BAD(host, 99, -EINVAL, "host");
	BAD(io, 99, -EINVAL, "io");
	BAD(backend, 99, -EINVAL, "backend");
	BAD(max_tokens, 1u << 31, -EINVAL, "max_tokens");
	BAD(ram_bytes, 0, -ENOMEM, "ram_bytes");
	BAD(ram_bytes, 4096, -ENOMEM, "ram_bytes");
	BAD(ram_bytes, 1ull << 60, -ENOMEM, "this machine");
	BAD(pinned_bytes, 1ull << 60, -ENOMEM, "pinned_bytes");
	BAD(pinned_bytes, 100, -ENOMEM, "pinned_bytes");
	BAD(disk_bytes, 100, -ENOMEM, "disk_bytes");
	BAD(gpu_bytes, 100, -ENOMEM, "gpu_bytes");
	BAD(disk_bytes, 1ull << 62, -EINVAL, "disk_bytes");
}
END_TEST

static struct kvt_cache_params with_tree(void)
{
	struct kvt_cache_params p = good();

	p.prefix_bytes = 4 << 20;
	p.snapshots = 2;
	p.snapshot_bytes = 4096;
	return p;
}

/* Sizes near 2^64, which wrap where one is added to another: refused, and no less memory is asked for. */
START_TEST(sizes_do_not_wrap)
{
	static const uint64_t huge[] = { UINT64_MAX, UINT64_MAX - 1, UINT64_MAX - 65535, UINT64_MAX - 1000000, 1ull << 63 };
	struct kvt_cache_params p = with_tree();
	struct kvt_cache *cache;

	p.max_seqs = 1u << 20; /* a warm pool's table of tokens: 2^32 blocks */
	p.max_tokens = 1u << 26;
	p.warm_name = "kvtier-test-sizes";
	ck_assert_int_eq(kvt_cache_min_ram(&p), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "max_seqs"));
	p = with_tree();
	for (size_t i = 0; i < sizeof(huge) / sizeof(huge[0]); i++) {
		p.snapshot_bytes = huge[i];
		refused(&p, -EINVAL, "snapshot_bytes");
		ck_assert_int_eq(kvt_cache_min_ram(&p), -EINVAL);
		ck_assert_int_eq(kvt_prefix_bytes(&p, 8), -EINVAL);
		p = with_tree();
		p.prefix_bytes = huge[i];
		refused(&p, -EINVAL, "prefix_bytes");
		ck_assert_int_eq(kvt_cache_min_ram(&p), -EINVAL);
		p = with_tree();
		p.gpu_bytes = p.gpu_scratch_bytes = huge[i];
		ck_assert_int_lt(kvt_cache_create(&p, &cache), 0);
		p = with_tree();
	}
	p.disk_bytes = 100ull << 40;
	refused(&p, -EINVAL, "disk_bytes");
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "are the most with blocks of "));
	p = with_tree();
	p.prefix_bytes = (uint64_t)kvt_prefix_bytes(&p, 1); /* a chunk */
	ck_assert_int_gt(kvt_cache_min_ram(&p), (int64_t)p.prefix_bytes);
	p.prefix_bytes--; /* not even that: no memory would do */
	refused(&p, -ENOMEM, "a tree of one chunk takes");
	ck_assert_int_eq(kvt_cache_min_ram(&p), -ENOMEM);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "a tree of one chunk takes"));
	p.prefix_bytes = 1ull << 48; /* more than this machine has, and told so */
	refused(&p, -ENOMEM, "ram_bytes");
	ck_assert_int_gt(kvt_cache_min_ram(&p), 1ll << 48);
	ck_assert_int_gt(kvt_prefix_bytes(&p, INT32_MAX), 1ll << 31);
	ck_assert_int_eq(kvt_prefix_bytes(&p, (uint32_t)INT32_MAX + 1), -EINVAL);
	ck_assert_int_eq(kvt_prefix_bytes(&p, UINT32_MAX), -EINVAL);
	p = with_tree();
	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	kvt_cache_destroy(cache);
}
END_TEST

START_TEST(each_bad_plane_alone)
{
	struct kvt_cache_params p = good();
	struct kvt_cache *cache;

#define BAD_PLANE(field, value, word)              \
	do {                                       \
		p = good();                        \
		planes[1].field = value;           \
		refused(&p, -EINVAL, word);        \
	} while (0)
	BAD_PLANE(codec, 77, "codec");
	BAD_PLANE(heads, 0, "heads");
	BAD_PLANE(heads, 1025, "heads");
	BAD_PLANE(head_dim, 0, "head_dim");
	BAD_PLANE(head_dim, 8193, "head_dim");
	BAD_PLANE(reserved, 1, "reserved");
	BAD_PLANE(rows, UINT64_MAX, "rows");
	BAD_PLANE(size, 4, "size");
	/* a row larger than a block names the knob */
	p = good();
	planes[1].head_dim = 8192;
	planes[1].heads = 16;
	refused(&p, -EINVAL, "block_bytes");
	/* rows that do not divide a block are fine */
	p = good();
	planes[1].head_dim = 80;
	planes[1].heads = 5;
	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	ck_assert_int_eq(kvt_plane_block_rows(cache, 1), 65536 / 800);
	kvt_cache_destroy(cache);
}
END_TEST

START_TEST(disk_directories)
{
	struct kvt_cache_params p = good();

	p.disk_bytes = 1 << 20;
	p.disk_dir = "/nowhere/at/all";
	refused(&p, -ENOENT, "/nowhere/at/all");
	p.disk_dir = "/etc/passwd";
	refused(&p, -ENOTDIR, "/etc/passwd");
}
END_TEST

/* A newer header's larger struct is fine while its tail is zero. */
START_TEST(struct_sizes)
{
	struct {
		struct kvt_cache_params p;
		uint64_t tail;
	} newer = { .p = good() };
	struct kvt_cache *cache;

	newer.p.size = sizeof(newer);
	ck_assert_msg(!kvt_cache_create(&newer.p, &cache), "%s", kvt_last_error());
	kvt_cache_destroy(cache);
	newer.tail = 1;
	refused(&newer.p, -E2BIG, "older than the header");
}
END_TEST

START_TEST(least_ram_is_enough_and_less_is_not)
{
	static const uint64_t blocks[] = { 4096, 12288, 65536, 1 << 20, 2 << 20 };

	for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++) {
		struct kvt_cache_params p = good();
		struct kvt_cache *cache;

		p.block_bytes = blocks[i];
		p.disk_bytes = 64 << 20;
		p.ram_bytes = (uint64_t)kvt_cache_min_ram(&p);
		ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
		kvt_cache_destroy(cache);
		p.ram_bytes--;
		refused(&p, -ENOMEM, "ram_bytes");
	}
}
END_TEST

START_TEST(bad_calls_change_nothing)
{
	struct kvt_cache_params p = good();
	struct kvt_attn_item item = { 0 };
	struct kvt_attn a = KVT_INIT(a);
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_seq *one, *two, *three;
	struct kvt_borrow borrow;
	struct kvt_cache *cache;
	struct kvt_rows rows = { 0 };
	float data[2 * 64] = { 1 };
	uint64_t row = 0;

	ck_assert(!kvt_cache_create(&p, &cache));
	ck_assert(!kvt_seq_create(cache, &one));
	ck_assert(!kvt_seq_create(cache, &two));
	ck_assert_int_eq(kvt_seq_create(cache, &three), -ENOSPC);
	ck_assert_int_eq(kvt_seq_append(one, NULL, 1001), -ENOSPC);
	ck_assert_int_eq(kvt_seq_append(one, NULL, 1000), 0);
	ck_assert_int_eq(kvt_seq_append(one, NULL, 1), -ENOSPC);
	ck_assert_uint_eq(kvt_seq_len(one), 1000);
	ck_assert_int_eq(kvt_seq_truncate(two, 1), -EINVAL);
	ck_assert_int_eq(kvt_seq_fork(two, 1, &three), -ERANGE);
	ck_assert_int_eq(kvt_seq_write(one, 0, 0, 1, NULL), -EINVAL);
	ck_assert_int_eq(kvt_seq_write(one, 0, 0, 1, &rows), -EINVAL);
	rows.data = data;
	ck_assert_int_eq(kvt_seq_write(one, 0, 1000, 1, &rows), -ERANGE);
	ck_assert_int_eq(kvt_seq_write(one, 0, 999, 2, &rows), -ERANGE);
	ck_assert_int_eq(kvt_seq_write(one, 0, 5, UINT32_MAX, &rows), -ERANGE);
	ck_assert_int_eq(kvt_seq_write(one, 2, 0, 1, &rows), -EINVAL);
	rows.type = 55;
	ck_assert_int_eq(kvt_seq_write(one, 0, 0, 1, &rows), -EINVAL);
	rows.type = KVT_F32;
	rows.stride = 511;
	ck_assert_int_eq(kvt_seq_write(one, 0, 0, 1, &rows), -EINVAL);
	rows.stride = 0;
	rows.reserved = 1;
	ck_assert_int_eq(kvt_seq_write(one, 0, 0, 1, &rows), -EINVAL);
	ck_assert_int_eq(kvt_seq_read(one, 0, 0, 1, &rows), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "reserved"));
	rows.reserved = 0;
	ck_assert_int_eq(kvt_plane_write(cache, 0, &row, 1, &rows), -EINVAL); /* not a raw plane */
	ck_assert_int_eq(kvt_seq_borrow(one, 0, 4, &borrow), -ERANGE);
	ck_assert_int_eq((int)kvt_seq_move(one, (enum kvt_tier)9), -EINVAL);

	a.n_heads = 4;
	a.v_plane = 1;
	item = (struct kvt_attn_item){ .seq = one, .first = 0, .n = 1, .q = data, .out = data };
	a.v_plane = 2;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EINVAL);
	a.v_plane = 1;
	a.n_heads = 3;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EINVAL);
	a.n_heads = 32;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EINVAL);
	a.n_heads = 4;
	a.flags = 2;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EINVAL);
	a.flags = 0;
	a.softcap = -1;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EINVAL);
	a.softcap = 0;
	a.family = KVT_ATTN_FAST;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EOPNOTSUPP);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "family fast"));
	a.family = 2;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EINVAL);
	a.family = KVT_ATTN_EXACT;
	item.n = 1001;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -ERANGE);
	/* distances that wrap, and places that are none */
	item.n = 2;
	a.out_stride = (1ull << 62) - 256;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EINVAL);
	a.out_stride = 0;
	a.q_stride = UINT64_MAX;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EINVAL);
	a.q_stride = 0;
	rows.stride = UINT64_MAX - 511;
	ck_assert_int_eq(kvt_seq_write(one, 0, 0, 2, &rows), -EINVAL);
	ck_assert_int_eq(kvt_seq_read(one, 0, 0, 2, &rows), -EINVAL);
	ck_assert_int_eq(kvt_attend(cache, &a, NULL, 1), -EINVAL);
	ck_assert_int_eq(kvt_seq_create(cache, NULL), -EINVAL);
	ck_assert_int_eq(kvt_seq_fork(one, 1, NULL), -EINVAL);
	ck_assert_int_eq(kvt_seq_tokens(one, 0, 1, NULL), -EINVAL);
	ck_assert_int_eq(kvt_seq_borrow(one, 0, 0, NULL), -EINVAL);
	ck_assert_int_eq(kvt_cache_stats_json(cache, NULL, 10), -EINVAL);
	item.seq = NULL;
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EINVAL);

	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.blocks, 0);
	ck_assert_uint_eq(st.rows_written, 0);
	ck_assert_uint_eq(st.sequences, 2);
	kvt_cache_destroy(cache);
}
END_TEST

/* A freed sequence is none; freeing it twice is nothing. */
START_TEST(freed_sequences_are_refused)
{
	struct kvt_cache_params p = good();
	struct kvt_stats st = KVT_INIT(st);
	float data[2 * 64] = { 1 }, out[4 * 64];
	struct kvt_rows rows = { .data = data };
	struct kvt_attn a = KVT_INIT(a);
	struct kvt_attn_item item;
	struct kvt_seq *seq, *fork;
	struct kvt_borrow borrow;
	struct kvt_cache *cache;
	uint32_t token = 0;

	ck_assert_int_eq(kvt_cache_create(&p, NULL), -EINVAL);
	ck_assert(!kvt_cache_create(&p, &cache));
	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, 4));
	kvt_seq_free(seq);
	kvt_seq_free(seq);
	kvt_seq_free(seq);
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.sequences, 0);
	ck_assert_int_eq(kvt_seq_append(seq, NULL, 1), -EINVAL);
	ck_assert_int_eq(kvt_seq_truncate(seq, 0), -EINVAL);
	ck_assert_int_eq(kvt_seq_fork(seq, 0, &fork), -EINVAL);
	ck_assert_int_eq(kvt_seq_tokens(seq, 0, 0, &token), -EINVAL);
	ck_assert_int_eq(kvt_seq_write(seq, 0, 0, 0, &rows), -EINVAL);
	ck_assert_int_eq(kvt_seq_read(seq, 0, 0, 0, &rows), -EINVAL);
	ck_assert_int_eq(kvt_seq_move(seq, KVT_TIER_RAM), -EINVAL);
	ck_assert_int_eq(kvt_seq_borrow(seq, 0, 0, &borrow), -EINVAL);
	a.k_plane = 0;
	a.v_plane = 1;
	a.n_heads = 4;
	item = (struct kvt_attn_item){ .seq = seq, .q = out, .out = out };
	ck_assert_int_eq(kvt_attend(cache, &a, &item, 1), -EINVAL);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "freed"));
	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, 1));
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.sequences, 1);
	kvt_cache_destroy(cache);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("cache_params");
	TCase *t = tcase_create("refusals");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 60);
	tcase_add_test(t, good_is_good);
	tcase_add_test(t, each_bad_parameter_alone);
	tcase_add_test(t, sizes_do_not_wrap);
	tcase_add_test(t, each_bad_plane_alone);
	tcase_add_test(t, disk_directories);
	tcase_add_test(t, struct_sizes);
	tcase_add_test(t, least_ram_is_enough_and_less_is_not);
	tcase_add_test(t, bad_calls_change_nothing);
	tcase_add_test(t, freed_sequences_are_refused);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
