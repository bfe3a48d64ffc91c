// SPDX-License-Identifier: MIT
/* The attention kernels' twins: right, and the same bits by every path; where there is no GPU, these are the kernels. */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/attend.h"
#include "gpu/mock.h"
#include "gpu/op.h"
#include "kvtier.h"
#include "lib/gpu_attend.h"

static struct kvt_gpu *g;

static void setup(void)
{
	ck_assert_int_eq(kvt_gpu_cpu_open(0, &g), 0);
}

static void teardown(void)
{
	g->ops->close(g);
}

START_TEST(twins_are_exact)
{
	ck_assert_int_eq(gpu_attend_check(g, 0x5eed, false), 0);
}
END_TEST

START_TEST(family_fast_is_exact)
{
	ck_assert_int_eq(gpu_attend_check_fast(g, 0x5eed, false), 0);
}
END_TEST

START_TEST(what_changes_the_order_of_rows_changes_bits)
{
	ck_assert_int_eq(gpu_attend_check_mutations(g, 0x5eed), 0);
}
END_TEST

static const struct kvt_attend_device h200 = { .sm = 90, .processors = 132, .shared_max = 232448 };

static struct kvt_attend_args good(void)
{
	return (struct kvt_attend_args){ .n_seqs = 1, .heads = 32, .kv_heads = 8, .k_dim = 128, .v_dim = 128, .codec = KVT_F16,
					 .k_block_rows = 32, .v_block_rows = 32, .k_row_bytes = 2048, .v_row_bytes = 2048,
					 .scale = 1 };
}

START_TEST(recipes_fit_the_device)
{
	static const uint32_t dims[] = { 8, 16, 64, 72, 80, 96, 112, 128, 192, 256, 512 };
	static const struct kvt_attend_device devices[] = { { 80, 108, 166912 }, { 86, 84, 101376 }, { 90, 132, 232448 },
							    { 120, 170, 101376 } };

	for (size_t d = 0; d < sizeof(devices) / sizeof(*devices); d++)
		for (size_t i = 0; i < sizeof(dims) / sizeof(*dims); i++)
			for (uint32_t tokens = 1; tokens <= 4096; tokens *= 64) {
				struct kvt_attend_limits limits = { .tokens = tokens, .seq_tokens = tokens, .rows = 131072 };
				struct kvt_attend_args a = good();
				struct kvt_attend_recipe r;
				int err;

				a.k_dim = a.v_dim = dims[i];
				err = kvt_attend_recipe(&devices[d], &limits, &a, &r);
				if (dims[i] == 512 && devices[d].shared_max < 166912) {
					ck_assert_int_eq(err, -EINVAL); /* said, not launched */
					continue;
				}
				ck_assert_msg(!err, "%s", kvt_last_error());
				for (uint32_t s = 0; s < r.n; s++)
					ck_assert_uint_le(r.step[s].shared_bytes, devices[d].shared_max);
				ck_assert_uint_eq(r.n, tokens == 1 && !a.fused ? 2 : 1);
				ck_assert_uint_eq(r.scratch_bytes != 0, tokens == 1);
			}
}
END_TEST

/* What merges begins while what leaves the parts ends, which has waited for what is before both. */
START_TEST(decoding_begins_early)
{
	static const enum kvt_attend_path paths[] = { KVT_ATTEND_DECODE, KVT_ATTEND_WIDE, KVT_ATTEND_SMALL };
	struct kvt_attend_limits limits = { .tokens = 1, .seq_tokens = 1, .rows = 131072 };

	for (size_t i = 0; i < sizeof(paths) / sizeof(*paths); i++) {
		struct kvt_attend_args a = good();
		struct kvt_attend_recipe r;

		ck_assert_int_eq(kvt_attend_recipe_path(&h200, &limits, paths[i], &a, &r), 0);
		ck_assert_uint_eq(r.n, 2);
		for (uint32_t s = 0; s < r.n; s++) {
			kvt_kernel k;

			ck_assert_int_eq(kvt_twin_find("attend", r.step[s].function, &k), 0);
			ck_assert_msg(kvt_twins[k].waits, "%s", r.step[s].function);
		}
	}
}
END_TEST

START_TEST(bad_arguments_are_named)
{
	struct kvt_attend_limits limits = { .tokens = 1, .seq_tokens = 1, .rows = 4096 };
	struct kvt_attend_recipe r;
	struct kvt_attend_args a = good();

	ck_assert_int_eq(kvt_attend_recipe(&h200, &limits, &a, &r), 0);
#define BAD(change) \
	do { \
		a = good(); \
		change; \
		ck_assert_int_eq(kvt_attend_recipe(&h200, &limits, &a, &r), -EINVAL); \
	} while (0)
	BAD(a.n_seqs = 0);
	BAD(a.n_seqs = KVT_ATTEND_SEQS + 1);
	BAD(a.codec = KVT_F32);
	BAD(a.q_type = KVT_CODECS);
	BAD(a.out_type = KVT_CODECS);
	BAD(a.mask_type = KVT_BF16);
	BAD(a.k_dim = 76);
	BAD(a.v_dim = 4);
	BAD(a.k_dim = KVT_ATTEND_K_MAX + 16);
	BAD(a.v_dim = KVT_ATTEND_V_MAX + 16);
	BAD(a.kv_heads = 0);
	BAD(a.heads = 12);
	BAD(a.k_block_rows = 24);
	BAD(a.v_block_rows = 0);
	BAD(a.v_row_bytes = 2056);
	BAD(a.scale = 0);
	limits.rows = 1ull << 31;
	BAD((void)0);
}
END_TEST

/* The copy engine is asked for where family fast can use it; without it bits are the same, so to have none is no error. */
START_TEST(a_slab_is_mapped_for_family_fast)
{
	struct kvt_attend_args a = good();
	struct kvt_mock_record r;
	struct kvt_gpu *gpu;
	kvt_dptr slab;

	ck_assert_int_eq(kvt_mock_open(0, &gpu), 0);
	ck_assert_int_eq(gpu->ops->alloc(gpu, 1 << 20, &slab), 0);
	kvt_mock_reset(gpu);
#define MAPPED(times, bytes_then, change) \
	do { \
		a = good(); \
		a.family = KVT_ATTN_FAST; \
		a.slab_bytes = 77; \
		change; \
		kvt_mock_reset(gpu); \
		ck_assert_int_eq(kvt_attend_slab(gpu, slab, 1 << 20, &a), 0); \
		ck_assert_uint_eq(kvt_mock_count(gpu, KVT_MOCK_tensor_map), times); \
		ck_assert_uint_eq(a.slab_bytes, bytes_then); \
	} while (0)
#define BOX(rows) (kvt_mock_log(gpu, 0, &r) && r.height == (rows))
	MAPPED(1, 1 << 20, (void)0);
	ck_assert_uint_eq(a.slab, slab);
	ck_assert(BOX(32) && r.src == slab && r.bytes == 1 << 20 && r.src_pitch == 2048);
	MAPPED(1, 1 << 20, a.v_block_rows = 48);
	ck_assert(BOX(16));
	MAPPED(1, 1 << 20, (a.k_block_rows = 512, a.v_block_rows = 1024));
	ck_assert(BOX(64));
	MAPPED(0, 0, a.family = KVT_ATTN_EXACT);
	MAPPED(0, 0, a.v_row_bytes = 4096);
	kvt_mock_refuse(gpu, KVT_MOCK_tensor_map, -EOPNOTSUPP);
	MAPPED(1, 0, (void)0);
	kvt_mock_refuse(gpu, KVT_MOCK_tensor_map, -EIO);
	ck_assert_int_eq(kvt_attend_slab(gpu, slab, 1 << 20, &a), -EIO);
	kvt_mock_refuse(gpu, KVT_MOCK_tensor_map, 0);
	kvt_mock_reset(gpu);
	ck_assert_int_eq(kvt_attend_slab(gpu, 0, 0, &a), 0); /* no gpu tier */
	ck_assert_uint_eq(kvt_mock_count(gpu, KVT_MOCK_tensor_map) + a.slab_bytes, 0);
	gpu->ops->free(gpu, slab);
	ck_assert_str_eq(kvt_mock_fault(gpu), "");
	gpu->ops->close(gpu);
}
END_TEST

START_TEST(family_fast_is_refused_with_the_reason)
{
	static const struct kvt_attend_device others[] = { { 80, 108, 166912 }, { 100, 148, 232448 }, { 120, 170, 101376 } };
	struct kvt_attend_limits limits = { .tokens = 512, .seq_tokens = 512, .rows = 32768 };
	struct kvt_attend_recipe r;
	struct kvt_attend_args a = good();

	a.family = KVT_ATTN_FAST;
	ck_assert_int_eq(kvt_attend_recipe(&h200, &limits, &a, &r), 0);
	ck_assert_str_eq(r.step[0].function, "fast_f16_128");
	ck_assert_uint_le(r.step[0].shared_bytes, h200.shared_max);
	ck_assert_uint_eq(r.step[0].grid.x, 132); /* clusters of two */
	limits.tokens = limits.seq_tokens = 1;
	ck_assert_int_eq(kvt_attend_recipe(&h200, &limits, &a, &r), 0);
	ck_assert_uint_eq(r.step[0].grid.x, 16);
	limits.tokens = limits.seq_tokens = 512;
	for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++) {
		ck_assert_int_eq(kvt_attend_recipe(&others[i], &limits, &a, &r), -EOPNOTSUPP);
		ck_assert_ptr_nonnull(strstr(kvt_last_error(), "sm_90"));
	}
#define REFUSED(error, change) \
	do { \
		a = good(); \
		a.family = KVT_ATTN_FAST; \
		change; \
		ck_assert_int_eq(kvt_attend_recipe(&h200, &limits, &a, &r), error); \
	} while (0)
	REFUSED(-EOPNOTSUPP, a.k_dim = a.v_dim = 96);
	REFUSED(-EOPNOTSUPP, a.v_dim = 64);
	REFUSED(-EOPNOTSUPP, a.softcap = 30);
	REFUSED(-EOPNOTSUPP, a.slopes = 256);
	REFUSED(-EOPNOTSUPP, a.mask = 256);
	REFUSED(-EOPNOTSUPP, a.scale = -1);
	REFUSED(-EINVAL, a.family = KVT_ATTN_FAST + 1);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("gpu_attend");
	TCase *t = tcase_create("gpu_attend");
	SRunner *r;
	int failed;

	tcase_add_checked_fixture(t, setup, teardown);
	tcase_set_timeout(t, 120);
	tcase_add_test(t, twins_are_exact);
	tcase_add_test(t, family_fast_is_exact);
	tcase_add_test(t, family_fast_is_refused_with_the_reason);
	tcase_add_test(t, a_slab_is_mapped_for_family_fast);
	tcase_add_test(t, what_changes_the_order_of_rows_changes_bits);
	tcase_add_test(t, recipes_fit_the_device);
	tcase_add_test(t, decoding_begins_early);
	tcase_add_test(t, bad_arguments_are_named);
	suite_add_tcase(s, t);
	r = srunner_create(s);
	srunner_run_all(r, CK_ENV);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
