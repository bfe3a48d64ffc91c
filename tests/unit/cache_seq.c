// SPDX-License-Identifier: MIT
/* Sequences: forks share until one writes, cuts do not show through, raw planes take rows in any order. */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"

#define ROW 16 /* elements */

static struct kvt_cache *make(uint64_t raw_rows, uint32_t head_dim)
{
	struct kvt_plane_params plane = KVT_INIT(plane);
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_cache *cache;

	plane.heads = 1;
	plane.head_dim = head_dim;
	plane.rows = raw_rows;
	p.planes = &plane;
	p.n_planes = 1;
	p.block_bytes = 4096;
	p.ram_bytes = 8 << 20;
	p.max_tokens = 1000;
	p.max_seqs = 4;
	p.threads = 1;
	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	return cache;
}

static void write_rows(struct kvt_seq *seq, uint32_t first, uint32_t n, float value)
{
	float *rows = malloc(n * ROW * sizeof(float));
	struct kvt_rows src = { .data = rows, .type = KVT_F32 };

	for (uint32_t i = 0; i < n * ROW; i++)
		rows[i] = value + (float)(first + i / ROW);
	ck_assert_msg(!kvt_seq_write(seq, 0, first, n, &src), "%s", kvt_last_error());
	free(rows);
}

/* Row @t holds value + t, or zeros with @value 0. */
static void expect(struct kvt_seq *seq, uint32_t first, uint32_t n, float value)
{
	float row[ROW];
	struct kvt_rows dst = { .data = row, .type = KVT_F32 };

	for (uint32_t t = first; t < first + n; t++) {
		ck_assert(!kvt_seq_read(seq, 0, t, 1, &dst));
		for (int i = 0; i < ROW; i++)
			if (row[i] != (value ? value + (float)t : 0))
				ck_abort_msg("row %u is %g", t, (double)row[i]);
	}
}

START_TEST(rows_are_zero_until_written)
{
	struct kvt_cache *cache = make(0, ROW);
	struct kvt_seq *seq;

	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, 300));
	expect(seq, 0, 300, 0);
	write_rows(seq, 100, 10, 5); /* a gap in front of it */
	expect(seq, 0, 100, 0);
	expect(seq, 100, 10, 5);
	expect(seq, 110, 190, 0);
	kvt_cache_destroy(cache);
}
END_TEST

START_TEST(what_was_cut_does_not_show_through)
{
	struct kvt_cache *cache = make(0, ROW);
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_seq *seq;

	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, 200));
	write_rows(seq, 0, 200, 7);
	ck_assert(!kvt_seq_truncate(seq, 70)); /* 64 rows a block */
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.blocks, 2);
	ck_assert(!kvt_seq_append(seq, NULL, 130));
	expect(seq, 0, 70, 7);
	expect(seq, 70, 130, 0);
	write_rows(seq, 150, 1, 9);
	expect(seq, 70, 80, 0);
	ck_assert(!kvt_seq_truncate(seq, 0));
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.blocks, 0);
	kvt_cache_destroy(cache);
}
END_TEST

START_TEST(forks_share_until_one_writes)
{
	struct kvt_cache *cache = make(0, ROW);
	struct kvt_seq *a, *b, *c;
	struct kvt_stats st = KVT_INIT(st);
	uint32_t ids[5] = { 11, 22, 33, UINT32_MAX, 0 }, back[5];

	ck_assert(!kvt_seq_create(cache, &a) && !kvt_seq_append(a, ids, 5) && !kvt_seq_append(a, NULL, 195));
	write_rows(a, 0, 200, 3);
	ck_assert(!kvt_seq_fork(a, 100, &b));
	ck_assert(!kvt_seq_fork(b, 100, &c));
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.blocks, 4);
	ck_assert_uint_eq(st.sequences, 3);
	ck_assert(!kvt_seq_tokens(c, 0, 5, back));
	ck_assert(!memcmp(ids, back, sizeof(ids)));
	ck_assert_int_eq(kvt_seq_tokens(c, 99, 2, back), -ERANGE);

	/* b goes on from 100: a's rows behind 100 must not show, and a must not change */
	ck_assert(!kvt_seq_append(b, NULL, 50));
	expect(b, 0, 100, 3);
	expect(b, 100, 50, 0);
	write_rows(b, 100, 20, 1000);
	expect(a, 0, 200, 3);
	expect(b, 100, 20, 1000);
	expect(c, 0, 100, 3);
	/* a row in the middle of what all share */
	write_rows(c, 10, 1, 500);
	expect(a, 0, 200, 3);
	expect(b, 0, 100, 3);
	expect(c, 10, 1, 500);
	expect(c, 11, 89, 3);
	/* whole blocks replaced in one call */
	write_rows(a, 0, 128, 40);
	expect(b, 0, 100, 3);
	expect(c, 11, 89, 3);
	kvt_seq_free(a);
	expect(b, 0, 100, 3);
	kvt_seq_free(b);
	expect(c, 11, 89, 3);
	kvt_seq_free(c);
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.blocks, 0);
	ck_assert_uint_gt(st.cow_copies, 1);
	kvt_cache_destroy(cache);
}
END_TEST

START_TEST(raw_rows_in_any_order)
{
	struct kvt_cache *cache = make(500, ROW);
	float rows[4 * ROW], back[500 * ROW];
	struct kvt_rows src = { .data = rows, .type = KVT_F32 }, dst = { .data = back, .type = KVT_F32 };
	const uint64_t at[] = { 499, 3, 4, 200 }, twice[] = { 7, 7 }, outside[] = { 8, 500 };
	struct kvt_stats st = KVT_INIT(st);

	for (int i = 0; i < 4 * ROW; i++)
		rows[i] = (float)(1 + i / ROW);
	ck_assert(!kvt_plane_read(cache, 0, 0, 500, &dst));
	for (int i = 0; i < 500 * ROW; i++)
		ck_assert(back[i] == 0);
	ck_assert(!kvt_plane_write(cache, 0, at, 4, &src));
	ck_assert(!kvt_plane_read(cache, 0, 0, 500, &dst));
	ck_assert(back[499 * ROW] == 1 && back[3 * ROW] == 2 && back[4 * ROW] == 3 && back[200 * ROW + 15] == 4);
	ck_assert(back[0] == 0 && back[5 * ROW] == 0 && back[498 * ROW] == 0);
	ck_assert(!kvt_plane_write(cache, 0, twice, 2, &src)); /* the later one wins */
	ck_assert(!kvt_plane_read(cache, 0, 7, 1, &dst));
	ck_assert(back[0] == 2);
	/* a bad index anywhere: nothing is written */
	ck_assert_int_eq(kvt_plane_write(cache, 0, outside, 2, &src), -ERANGE);
	ck_assert(!kvt_plane_read(cache, 0, 8, 1, &dst));
	ck_assert(back[0] == 0);

	ck_assert(!kvt_plane_clear(cache, 0, 4, 300));
	ck_assert(!kvt_plane_read(cache, 0, 0, 500, &dst));
	ck_assert(back[3 * ROW] == 2 && back[4 * ROW] == 0 && back[7 * ROW] == 0 && back[200 * ROW] == 0 &&
		  back[499 * ROW] == 1);
	ck_assert_int_eq(kvt_plane_clear(cache, 0, 400, 101), -ERANGE);
	ck_assert_int_eq(kvt_plane_clear(cache, 0, UINT64_MAX, 2), -ERANGE);
	ck_assert(!kvt_plane_clear(cache, 0, 0, 500));
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.blocks, 0);
	kvt_cache_destroy(cache);
}
END_TEST

/* With a disk tier of 256 blocks, and as little memory as there may be. */
static struct kvt_cache *make_least(void)
{
	struct kvt_plane_params plane = KVT_INIT(plane);
	struct kvt_cache_params p = KVT_INIT(p);
	struct kvt_cache *cache;

	plane.heads = 1;
	plane.head_dim = ROW;
	p.planes = &plane;
	p.n_planes = 1;
	p.block_bytes = 4096;
	p.max_tokens = 64 * 100;
	p.max_seqs = 1;
	p.threads = 1;
	p.disk_bytes = 1 << 20;
	p.ram_bytes = (uint64_t)kvt_cache_min_ram(&p);
	ck_assert_msg(!kvt_cache_create(&p, &cache), "%s", kvt_last_error());
	return cache;
}

/* A borrowed block stays where it is while everything around it is evicted. */
START_TEST(a_borrowed_block_stays)
{
	struct kvt_cache *cache = make_least();
	struct kvt_borrow held, other;
	struct kvt_seq *seq;
	uint8_t copy[4096];

	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, 64 * 100));
	for (uint32_t t = 0; t < 64 * 100; t += 64)
		write_rows(seq, t, 64, 1);
	ck_assert(!kvt_seq_borrow(seq, 0, 50, &held));
	ck_assert_uint_eq(held.rows, 64);
	memcpy(copy, held.data, sizeof(copy));
	for (uint32_t i = 0; i < 100; i++) {
		ck_assert_msg(!kvt_seq_borrow(seq, 0, i, &other), "%s", kvt_last_error());
		ck_assert((i == 50) == (other.data == held.data));
		kvt_borrow_return(cache, &other);
	}
	ck_assert(!memcmp(copy, held.data, sizeof(copy)));
	kvt_borrow_return(cache, &held);
	ck_assert_int_eq(kvt_seq_borrow(seq, 0, 100, &other), -ERANGE);
	kvt_cache_destroy(cache);
}
END_TEST

/* Blocks that were written and then borrowed are no bar to writing, until the frames are borrowed that it takes. */
START_TEST(borrowed_blocks_are_written_back)
{
	struct kvt_stats st = KVT_INIT(st);
	struct kvt_cache *cache = make_least();
	struct kvt_borrow held[256];
	const uint8_t *data;
	struct kvt_seq *seq;
	uint32_t frames, n;

	ck_assert(!kvt_cache_stats(cache, &st));
	frames = (uint32_t)st.tier[KVT_TIER_RAM].frames;
	ck_assert_uint_le(frames, 64);
	ck_assert(!kvt_seq_create(cache, &seq) && !kvt_seq_append(seq, NULL, 64 * frames));
	for (n = 0; n + 1 < frames; n++) {
		write_rows(seq, n * 64, 64, 1);
		ck_assert_msg(!kvt_seq_borrow(seq, 0, n, &held[n]), "%s", kvt_last_error());
	}
	write_rows(seq, n * 64, 64, 1);
	ck_assert_msg(!kvt_seq_borrow(seq, 0, n, &held[n]), "%s", kvt_last_error());
	data = held[0].data;
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.tier[KVT_TIER_RAM].frames_free, 0);
	ck_assert_uint_lt(st.blocks_dirty, frames);
	for (n = 0; n < frames; n++)
		kvt_borrow_return(cache, &held[n]);
	write_rows(seq, 0, 64, 5); /* what is written back may be changed again */
	ck_assert(!kvt_seq_borrow(seq, 0, 0, &held[0]));
	ck_assert_ptr_eq(held[0].data, data);
	kvt_borrow_return(cache, &held[0]);
	ck_assert_int_ge(kvt_seq_move(seq, KVT_TIER_DISK), frames);
	expect(seq, 0, 64, 5);
	expect(seq, 64, 64 * (frames - 1), 1);
	ck_assert(!kvt_cache_stats(cache, &st));
	ck_assert_uint_eq(st.digest_errors + st.blocks_lost, 0);
	kvt_cache_destroy(cache);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("cache_seq");
	TCase *t = tcase_create("sequences");
	SRunner *r = srunner_create(s);
	int failed;

	tcase_set_timeout(t, 60);
	tcase_add_test(t, rows_are_zero_until_written);
	tcase_add_test(t, what_was_cut_does_not_show_through);
	tcase_add_test(t, forks_share_until_one_writes);
	tcase_add_test(t, raw_rows_in_any_order);
	tcase_add_test(t, a_borrowed_block_stays);
	tcase_add_test(t, borrowed_blocks_are_written_back);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
