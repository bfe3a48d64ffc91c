// SPDX-License-Identifier: MIT
/* Which attention kernels to launch, and how; gpu/attend.h. */
#include "gpu/attend.h"

#include <errno.h>
#include <math.h>

#include "base/err.h"
#include "kvtier.h"

#define TILE KVT_ATTEND_TILE
#define DECODE_ROWS 16	/* query rows of a decode block */
#define PREFILL_ROWS 64 /* of a prefill block */
#define HOPPER_ROWS 128
#define HOPPER_SLOTS 4	 /* kernels/attend_hopper.cu */
#define FAST_SLOTS 3	 /* kernels/attend_fast.cu */
#define FAST_BLOCKS 2	 /* likewise */
#define PAD 16		   /* bytes behind each row in shared memory: banks */
#define STAGES_MAX 8  /* kernels/attend.cuh */
#define RESERVED 1024 /* bytes that the driver keeps of each block's shared memory */
/* At most, of a kernel, beside rows of Q, K and V. */
#define DECODE_OTHER(n_seqs) (4416 + 4 * (n_seqs))
#define WIDE_OTHER(n_seqs) (4096 + 4 * (n_seqs))
#define SMALL_OTHER(n_seqs) (21120 + 4 * (n_seqs))
#define PREFILL_OTHER 7296
#define HOPPER_OTHER 8192
#define WIDE_HEADS 4	 /* KV heads of a block */
#define WIDE_ROWS 32	 /* of a stage */
#define WIDE_LEAST 2	 /* stages: a tile of V */
#define WIDE_BYTES 100000 /* of stages; more are slower */
#define SMALL_TILES 8	 /* of a split */
#define FUSED_SPLITS 64	 /* that one block merges */
#define MERGE_COLUMNS 32

static uint32_t div_up(uint64_t n, uint64_t by)
{
	return (uint32_t)((n + by - 1) / by);
}

static int check(const struct kvt_attend_limits *l, const struct kvt_attend_args *a)
{
	if (a->family > KVT_ATTN_FAST)
		return kvt_fail(-EINVAL, "attend: no family %u", a->family);
	if (!a->n_seqs || a->n_seqs > KVT_ATTEND_SEQS)
		return kvt_fail(-EINVAL, "attend: %u sequences; 1 to %u in one launch", a->n_seqs, KVT_ATTEND_SEQS);
	if (a->codec != KVT_F16 && a->codec != KVT_BF16)
		return kvt_fail(-EINVAL, "attend: no GPU kernel reads codec %u; f16 and bf16 are read", a->codec);
	if (a->q_type > KVT_BF16 || a->out_type > KVT_BF16 || a->mask_type > KVT_F16)
		return kvt_fail(-EINVAL, "attend: queries of type %u, outputs of %u, a mask of %u", a->q_type,
				a->out_type, a->mask_type);
	if (!a->k_dim || a->k_dim % 8 || a->k_dim > KVT_ATTEND_K_MAX || !a->v_dim || a->v_dim % 8 ||
	    a->v_dim > KVT_ATTEND_V_MAX)
		return kvt_fail(-EINVAL, "attend: heads of %u and %u elements; the GPU takes multiples of 8 up to %u and %u",
				a->k_dim, a->v_dim, KVT_ATTEND_K_MAX, KVT_ATTEND_V_MAX);
	if (!a->kv_heads || !a->heads || a->heads % a->kv_heads)
		return kvt_fail(-EINVAL, "attend: %u heads over %u KV heads", a->heads, a->kv_heads);
	if (!a->k_block_rows || a->k_block_rows % 16 || !a->v_block_rows || a->v_block_rows % 16)
		return kvt_fail(-EINVAL, "attend: blocks of %u and %u rows; the GPU takes multiples of 16",
				a->k_block_rows, a->v_block_rows);
	if (a->k_row_bytes % 16 || a->v_row_bytes % 16)
		return kvt_fail(-EINVAL, "attend: rows of %u and %u bytes; the GPU takes multiples of 16", a->k_row_bytes,
				a->v_row_bytes);
	if (!(fabsf(a->scale) < INFINITY) || a->scale == 0)
		return kvt_fail(-EINVAL, "attend: a scale of %g", (double)a->scale);
	if (a->heads > 65535)
		return kvt_fail(-EINVAL, "attend: %u heads; at most 65535", a->heads);
	if (l->rows >= 1ull << 31 || (uint64_t)l->tokens * a->heads >= 1ull << 31)
		return kvt_fail(-EINVAL, "attend: %llu rows, %u tokens: 2^31 of rows, and of tokens x heads, are too many",
				(unsigned long long)l->rows, l->tokens);
	return 0;
}

int kvt_attend_slab(struct kvt_gpu *gpu, kvt_dptr slab, uint64_t bytes, struct kvt_attend_args *a)
{
	const uint32_t rows = KVT_ATTEND_BOX_ROWS(a->k_block_rows, a->v_block_rows);
	int err;

	a->slab_bytes = 0;
	if (a->family != KVT_ATTN_FAST || a->k_row_bytes != a->v_row_bytes || bytes < 128 || bytes / 128 > INT32_MAX)
		return 0;
	err = gpu->ops->tensor_map(gpu, slab, bytes, a->k_row_bytes, rows, a->map);
	if (err)
		return err == -EOPNOTSUPP ? 0 : err;
	a->slab = slab;
	a->slab_bytes = bytes;
	return 0;
}

uint64_t kvt_attend_part_bytes(const struct kvt_attend_args *a)
{
	return (uint64_t)a->part_rows * (a->v_dim + 2) * sizeof(float);
}

/* A row's bytes in shared memory: whole steps of 16 elements. */
static uint32_t row_bytes(uint32_t dim)
{
	return 2 * div_up(dim, 16) * 16 + PAD;
}

/* The same where they are whole lines of 128 bytes. */
static uint32_t lines(uint32_t dim)
{
	return div_up(2 * dim, 128) * 128;
}

/* Of a K and a V tile. */
static uint32_t stage_bytes(const struct kvt_attend_args *a, uint32_t v_dim)
{
	return TILE * (row_bytes(a->k_dim) + row_bytes(v_dim));
}

/* Shared memory of a block, with as many stages, up to @most, as fit when @blocks share a multiprocessor. 0: not one. */
static uint32_t shared_bytes(const struct kvt_attend_device *d, uint32_t fixed, uint32_t stage, uint32_t blocks, uint32_t most,
			     uint32_t *stages)
{
	uint32_t bytes = (d->shared_max + RESERVED) / blocks - RESERVED;

	*stages = bytes > fixed ? (bytes - fixed) / stage : 0;
	if (*stages > most)
		*stages = most;
	return *stages ? fixed + *stages * stage : 0;
}

/* Two blocks on a multiprocessor where each has @least stages; else one. */
static uint32_t fit(const struct kvt_attend_device *d, uint32_t fixed, uint32_t stage, uint32_t least, uint32_t *blocks)
{
	uint32_t stages, bytes = shared_bytes(d, fixed, stage, 2, STAGES_MAX, &stages);

	*blocks = 2;
	if (stages >= least)
		return bytes;
	*blocks = 1;
	return shared_bytes(d, fixed, stage, 1, STAGES_MAX, &stages);
}

/* Query rows of a sequence by KV head, at most. */
static uint32_t group_rows(const struct kvt_attend_limits *l, const struct kvt_attend_args *a)
{
	return l->seq_tokens * (a->heads / a->kv_heads);
}

/* (sequence, split, block of rows, KV head). */
static uint64_t units(const struct kvt_attend_limits *l, const struct kvt_attend_args *a)
{
	return (l->rows / KVT_ATTEND_SPLIT + a->n_seqs) * div_up(group_rows(l, a), DECODE_ROWS) * a->kv_heads;
}

/* Scratch, and what the parts of splits are merged by. */
static void divide(const struct kvt_attend_device *d, const struct kvt_attend_limits *l, struct kvt_attend_args *a,
		   struct kvt_attend_recipe *r)
{
	uint32_t rows = group_rows(l, a), slices = div_up(a->v_dim, MERGE_COLUMNS);

	a->part_rows = rows < DECODE_ROWS ? (rows + 1) / 2 * 2 : DECODE_ROWS;
	a->fused = 0;
	*r = (struct kvt_attend_recipe){ .n = 2 };
	r->scratch_bytes = 4 * KVT_ATTEND_COUNTERS + units(l, a) * kvt_attend_part_bytes(a);
	r->step[1] = (struct kvt_attend_step){
		.function = "merge", .block = { 256, 1, 1 },
		/* whole rows where there are enough for all multiprocessors */
		.grid = { (uint64_t)l->tokens * a->heads >= 4ull * d->processors ? 1 : slices, a->heads,
			  l->tokens < 65535 ? l->tokens : 65535 },
	};
}

static int too_large(const struct kvt_attend_device *d, const struct kvt_attend_args *a)
{
	return kvt_fail(-EINVAL, "attend: heads of %u and %u elements need more than the %u bytes of shared memory", a->k_dim,
			a->v_dim, d->shared_max);
}

static int decode(const struct kvt_attend_device *d, const struct kvt_attend_limits *l, struct kvt_attend_args *a,
		  struct kvt_attend_recipe *r)
{
	static const char *const names[2][4] = {
		{ "decode_f16_64", "decode_f16_128", "decode_f16_256", "decode_f16_512" },
		{ "decode_bf16_64", "decode_bf16_128", "decode_bf16_256", "decode_bf16_512" },
	};
	uint64_t n = units(l, a), grid;
	uint32_t blocks, shared;

	divide(d, l, a, r);
	/* one block with all loads in flight where there is little to do */
	shared = fit(d, DECODE_ROWS * row_bytes(a->k_dim) + DECODE_OTHER(a->n_seqs), TILE * (lines(a->k_dim) + lines(a->v_dim)),
		     n > d->processors ? 3 : UINT32_MAX, &blocks);
	if (!shared && d->sm)
		return too_large(d, a);
	grid = (uint64_t)d->processors * blocks;
	r->step[0] = (struct kvt_attend_step){
		.function = names[a->codec == KVT_BF16][(a->v_dim > 64) + (a->v_dim > 128) + (a->v_dim > 256)],
		.grid = { (uint32_t)(n < grid ? n : grid ? grid : 1), 1, 1 },
		.block = { 256, 1, 1 }, .shared_bytes = shared,
	};
	return 0;
}

/* What kernels of two sizes of heads take: nothing is added to scores. */
static bool plain(const struct kvt_attend_args *a)
{
	return a->softcap == 0 && !a->slopes && !a->mask && a->scale > 0 && a->k_dim == a->v_dim &&
	       (a->k_dim == 64 || a->k_dim == 128);
}

/* What attend_wide takes. */
static bool wide_takes(const struct kvt_attend_args *a)
{
	return plain(a) && a->kv_heads % WIDE_HEADS == 0;
}

static int wide(const struct kvt_attend_device *d, const struct kvt_attend_limits *l, struct kvt_attend_args *a,
		struct kvt_attend_recipe *r)
{
	static const char *const names[2][2] = {
		{ "wide_f16_64", "wide_f16_128" },
		{ "wide_bf16_64", "wide_bf16_128" },
	};
	uint32_t stage = WIDE_ROWS * WIDE_HEADS * a->k_dim * 2, stages, shared;
	uint64_t n = units(l, a) / WIDE_HEADS;

	if (!wide_takes(a))
		return kvt_fail(-EINVAL, "attend: decoding of %u KV heads at once takes heads of 64 or 128 elements and plain scores; %u and %u, %u KV heads",
				WIDE_HEADS, a->k_dim, a->v_dim, a->kv_heads);
	divide(d, l, a, r);
	shared = shared_bytes(d, WIDE_OTHER(a->n_seqs), stage, 1, WIDE_BYTES / stage, &stages);
	if (stages < WIDE_LEAST && d->sm)
		return too_large(d, a);
	r->step[0] = (struct kvt_attend_step){
		.function = names[a->codec == KVT_BF16][a->k_dim == 128],
		.grid = { (uint32_t)(n < d->processors ? n : d->processors ? d->processors : 1), 1, 1 },
		.block = { WIDE_HEADS * 32 + 128, 1, 1 }, .shared_bytes = shared,
	};
	return 0;
}

static int small(const struct kvt_attend_device *d, const struct kvt_attend_limits *l, struct kvt_attend_args *a,
		 struct kvt_attend_recipe *r)
{
	uint32_t k_row = lines(a->k_dim), v_row = lines(a->v_dim), tiles, shared;
	uint64_t n = units(l, a);

	if (a->k_dim > 128 || a->v_dim > 128)
		return kvt_fail(-EINVAL, "attend: decoding of little takes heads of up to 128 elements; %u and %u", a->k_dim, a->v_dim);
	divide(d, l, a, r);
	shared = shared_bytes(d, SMALL_OTHER(a->n_seqs) + DECODE_ROWS * row_bytes(a->k_dim),
			      TILE * (k_row > v_row ? k_row : v_row), 1, 2 * SMALL_TILES, &tiles);
	if (tiles < SMALL_TILES && d->sm)
		return too_large(d, a);
	r->step[0] = (struct kvt_attend_step){
		.function = a->codec == KVT_BF16 ? "small_bf16" : "small_f16", .block = { 256, 1, 1 }, .shared_bytes = shared,
		.grid = { (uint32_t)(n < INT32_MAX ? n : INT32_MAX), 1, 1 },
	};
	/* one block merges what a KV head's blocks leave: quick where it is little */
	if (n < KVT_ATTEND_COUNTERS && l->rows / KVT_ATTEND_SPLIT <= FUSED_SPLITS) {
		a->fused = 1;
		r->n = 1;
	}
	return 0;
}

/* What is quickest, by how much there is to do for each multiprocessor. */
static enum kvt_attend_path decode_path(const struct kvt_attend_device *d, const struct kvt_attend_limits *l,
					struct kvt_attend_args *a)
{
	uint64_t n = units(l, a) - (uint64_t)a->n_seqs * div_up(group_rows(l, a), DECODE_ROWS) * a->kv_heads;
	struct kvt_attend_recipe r;

	if (d->sm >= 80 && n <= d->processors && a->k_dim <= 128 && a->v_dim <= 128 && !small(d, l, a, &r))
		return KVT_ATTEND_SMALL;
	if (d->sm >= 80 && wide_takes(a) && n / WIDE_HEADS + 8 >= d->processors && !wide(d, l, a, &r))
		return KVT_ATTEND_WIDE;
	return KVT_ATTEND_DECODE;
}

static int prefill(const struct kvt_attend_device *d, const struct kvt_attend_limits *l, struct kvt_attend_args *a,
		   struct kvt_attend_recipe *r)
{
	static const char *const names[2][2] = {
		{ "prefill_f16_64", "prefill_f16_128" },
		{ "prefill_bf16_64", "prefill_bf16_128" },
	};
	uint32_t group = a->heads / a->kv_heads, slice = a->v_dim > 64 ? 128 : 64, blocks;
	uint32_t shared = fit(d, PREFILL_ROWS * row_bytes(a->k_dim) + PREFILL_OTHER, stage_bytes(a, slice), 2, &blocks);
	uint64_t units = ((uint64_t)l->tokens * group / PREFILL_ROWS + a->n_seqs) * a->kv_heads * div_up(a->v_dim, slice);

	if (!shared && d->sm)
		return kvt_fail(-EINVAL, "attend: heads of %u and %u elements need more than the %u bytes of shared memory",
				a->k_dim, a->v_dim, d->shared_max);
	*r = (struct kvt_attend_recipe){ .n = 1 };
	r->step[0] = (struct kvt_attend_step){
		.function = names[a->codec == KVT_BF16][a->v_dim > 64],
		.grid = { (uint32_t)(units < INT32_MAX ? units : INT32_MAX), 1, 1 },
		.block = { 128, 1, 1 }, .shared_bytes = shared,
	};
	return 0;
}

static bool hopper_takes(const struct kvt_attend_device *d, const struct kvt_attend_args *a)
{
	return d->sm == 90 && plain(a);
}

/* Clusters of @blocks thread blocks, of HOPPER_ROWS rows each in turn. */
static uint32_t grid_of(const struct kvt_attend_device *d, const struct kvt_attend_limits *l, const struct kvt_attend_args *a,
			uint32_t blocks)
{
	uint64_t units = ((uint64_t)l->tokens * (a->heads / a->kv_heads) / (blocks * HOPPER_ROWS) + a->n_seqs) * a->kv_heads;
	uint32_t most = d->processors / blocks;

	return blocks * (uint32_t)(units < most ? units : most ? most : 1);
}

static int hopper(const struct kvt_attend_device *d, const struct kvt_attend_limits *l, struct kvt_attend_args *a,
		  struct kvt_attend_recipe *r)
{
	static const char *const names[2][2] = {
		{ "hopper_f16_64", "hopper_f16_128" },
		{ "hopper_bf16_64", "hopper_bf16_128" },
	};

	if (!hopper_takes(d, a))
		return kvt_fail(-EINVAL, "attend: sm_90's own kernels take heads of 64 or 128 elements and plain scores; %u and %u on sm_%u",
				a->k_dim, a->v_dim, d->sm);
	*r = (struct kvt_attend_recipe){ .n = 1 };
	r->step[0] = (struct kvt_attend_step){
		.function = names[a->codec == KVT_BF16][a->k_dim == 128],
		.grid = { grid_of(d, l, a, 1), 1, 1 }, .block = { 384, 1, 1 },
		.shared_bytes = (HOPPER_ROWS + 2 * HOPPER_SLOTS * TILE) * a->k_dim * 2 + HOPPER_OTHER,
	};
	return 0;
}

static int fast(const struct kvt_attend_device *d, const struct kvt_attend_limits *l, struct kvt_attend_args *a,
		struct kvt_attend_recipe *r)
{
	static const char *const names[2][2] = {
		{ "fast_f16_64", "fast_f16_128" },
		{ "fast_bf16_64", "fast_bf16_128" },
	};

	if (!plain(a) || (d->sm && d->sm != 90))
		return kvt_fail(-EOPNOTSUPP, "attend: family fast is of sm_90, for heads of 64 or 128 elements, K's and V's alike, a positive scale, no soft-cap, slopes or mask; here sm_%u, %u and %u elements: take family exact",
				d->sm, a->k_dim, a->v_dim);
	*r = (struct kvt_attend_recipe){ .n = 1 };
	r->step[0] = (struct kvt_attend_step){
		.function = names[a->codec == KVT_BF16][a->k_dim == 128],
		.grid = { grid_of(d, l, a, FAST_BLOCKS), 1, 1 }, .block = { 384, 1, 1 },
		.shared_bytes = 2 * FAST_SLOTS * KVT_ATTEND_FAST_TILE * a->k_dim * 2 + HOPPER_OTHER,
	};
	return 0;
}

int kvt_attend_recipe_path(const struct kvt_attend_device *d, const struct kvt_attend_limits *l,
			   enum kvt_attend_path path, struct kvt_attend_args *a, struct kvt_attend_recipe *r)
{
	int err = check(l, a);

	if (err)
		return err;
	if (a->family == KVT_ATTN_FAST)
		return fast(d, l, a, r);
	if (path == KVT_ATTEND_AUTO && (uint64_t)group_rows(l, a) <= PREFILL_ROWS)
		path = decode_path(d, l, a);
	if (path == KVT_ATTEND_DECODE)
		return decode(d, l, a, r);
	if (path == KVT_ATTEND_WIDE)
		return wide(d, l, a, r);
	if (path == KVT_ATTEND_SMALL)
		return small(d, l, a, r);
	return path == KVT_ATTEND_HOPPER || (path == KVT_ATTEND_AUTO && hopper_takes(d, a)) ? hopper(d, l, a, r) :
											      prefill(d, l, a, r);
}

int kvt_attend_recipe(const struct kvt_attend_device *d, const struct kvt_attend_limits *l, struct kvt_attend_args *a,
		      struct kvt_attend_recipe *r)
{
	return kvt_attend_recipe_path(d, l, KVT_ATTEND_AUTO, a, r);
}
