/* SPDX-License-Identifier: MIT */
/*
 * kvtier: a KV cache in tiers.
 *
 * A cache object owns planes (arrays of fixed-size encoded rows, one layer's K
 * or V) cut into blocks, and decides in which tier each block lives: GPU,
 * pinned RAM, RAM or disk. An engine appends rows to sequences, attends over
 * them, and never sees where the bytes were.
 *
 * Rules that hold for every call:
 *  - Functions return 0 (or a count) or a negative errno. kvt_last_error() then
 *    holds one line for the calling thread: what was asked, how much, the
 *    limit, and which knob changes it. A call that fails changes nothing, but
 *    for writes of several blocks: those before the one that failed are written.
 *  - Parameter structs begin with their size: set it with KVT_INIT(). Fields
 *    that a caller's older header lacks read as zero, and zero is the default.
 *    A larger struct from a newer header is accepted while its tail is zero
 *    (-E2BIG otherwise).
 *  - Sizes are bytes unless the name says otherwise.
 *  - Destroy and free functions cannot fail and accept NULL.
 *  - Nothing prints. Log lines go to the callback of kvt_set_log().
 *  - fork(): a child must not use a parent's cache; its memory is not inherited.
 *
 * Threads: different caches are independent. On one cache, calls on different
 * sequences may run concurrently; calls on one sequence, or writes to one raw
 * plane, are the caller's to order. kvt_attend*() calls on one cache take turns.
 *
 * Exactness: an attention output row is a function of its query row, the
 * encoded rows it may see in position order, mask, scale, bias and codec. It
 * does not depend on tiers, budgets, block size, threads, instruction set,
 * how the prompt was cut into calls, or whether an earlier request computed it.
 */
#ifndef KVTIER_H
#define KVTIER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVT_VERSION_MAJOR 0
#define KVT_VERSION_MINOR 1
#define KVT_VERSION_PATCH 0

/* "MAJOR.MINOR.PATCH" of the library that is running. */
const char *kvt_version(void);

/* The calling thread's last error message; "" before the first. Valid until its next failing call. */
const char *kvt_last_error(void);

enum kvt_log_level { KVT_LOG_ERROR, KVT_LOG_WARN, KVT_LOG_INFO, KVT_LOG_DEBUG };

/* One line, no newline. May be called from any thread, also the library's own. */
typedef void (*kvt_log_fn)(void *user, enum kvt_log_level level, const char *line);

/* Set the process's log callback; NULL (the default) drops lines. */
void kvt_set_log(kvt_log_fn fn, void *user);

/* A parameter struct, zeroed but for its size: struct kvt_attn a = KVT_INIT(a); */
#define KVT_INIT(object) { .size = sizeof(object) }

/* ---- cache -------------------------------------------------------------- */

struct kvt_cache;
struct kvt_seq;

enum kvt_tier { KVT_TIER_GPU, KVT_TIER_PINNED, KVT_TIER_RAM, KVT_TIER_DISK, KVT_TIERS };

/* "gpu", "pinned", "ram", "disk"; NULL for another number. */
const char *kvt_tier_name(enum kvt_tier tier);

/*
 * How a row's elements are stored. q8_0 and q4_0 are ggml's: groups of 32
 * elements with one f16 scale, 34 and 18 bytes; head_dim is a multiple of 32.
 */
enum kvt_codec { KVT_F32, KVT_F16, KVT_BF16, KVT_Q8_0, KVT_Q4_0, KVT_CODECS };

/* "f32", "f16", "bf16", "q8_0", "q4_0"; NULL for another number. */
const char *kvt_codec_name(enum kvt_codec codec);

enum kvt_host_kind { KVT_HOST_AUTO, KVT_HOST_USER, KVT_HOST_MODULE };
enum kvt_io_kind { KVT_IO_AUTO, KVT_IO_URING, KVT_IO_THREADS };
enum kvt_backend_kind { KVT_BACKEND_AUTO, KVT_BACKEND_CPU, KVT_BACKEND_CUDA };

/* Which blocks leave a tier. No result depends on it. */
enum kvt_policy_kind {
	KVT_POLICY_AUTO,   /* learns what is used again and when; on cyclic reads as SCAN */
	KVT_POLICY_LRU,
	KVT_POLICY_S3FIFO,
	KVT_POLICY_COST,   /* as AUTO, but the oldest of what is alike always goes first */
	KVT_POLICY_SCAN,   /* for reads that are all cyclic: what does not fit streams, the rest stays */
	KVT_POLICIES
};

/*
 * A plane: @heads x @head_dim elements a row, encoded by @codec.
 * Its block holds floor(block_bytes / row bytes) rows.
 */
struct kvt_plane_params {
	uint32_t size;
	uint32_t codec;	   /* enum kvt_codec */
	uint32_t heads;	   /* KV heads, 1 to 1024 */
	uint32_t head_dim; /* elements, 1 to 8192; attention takes 8 to 576 */
	uint32_t layer;	   /* the caller's layer index, for its own orientation and for placement policies */
	uint32_t reserved;
	uint64_t rows; /* 0: rows belong to sequences; else a raw plane of so many rows, at most 2^40 */
};

#define KVT_CACHE_HUGEPAGES	   (1u << 0) /* reserved huge pages; default, and where there are none: transparent ones */
#define KVT_CACHE_NO_WRITE_VERIFY (1u << 1) /* trust the disk's word: do not read back what was written */
#define KVT_CACHE_NUMA_STRICT	   (1u << 2) /* @numa_node or an error; default: degrade with a warning */
#define KVT_CACHE_PUBLISH	   (1u << 3) /* a socket from which other processes read the stats: kvtier stat */

/*
 * Budgets are hard and are checked before anything is allocated. Block
 * metadata, tables, scratch, staging and thread stacks count against
 * @ram_bytes. A tier with a budget of 0 is absent; pinned or ram must exist.
 * One block of @disk_bytes always stays free: content is rewritten beside the
 * old one.
 */
struct kvt_cache_params {
	uint32_t size;
	uint32_t flags; /* KVT_CACHE_* */
	uint64_t gpu_bytes, pinned_bytes, ram_bytes, disk_bytes;
	uint64_t block_bytes; /* a multiple of 4 KiB, 4 KiB to 2 MiB; 0: 64 KiB */
	const char *disk_dir; /* where the slot file lives; NULL: $TMPDIR, else /var/tmp */
	const char *name;     /* for stats and messages, at most 63 printable ASCII bytes; NULL: "kvtier" */
	const struct kvt_plane_params *planes;
	uint32_t n_planes;	 /* 1 to 65535 */
	uint32_t threads;	 /* compute threads, 1 to 1024; 0: one for each core this process may use */
	uint32_t max_seqs;	 /* sequences alive at once; 0: 16 */
	uint32_t max_tokens;	 /* rows a sequence may hold; 0: 131072 */
	uint32_t max_query_rows; /* query tokens that one pass over the KV serves; larger calls take more passes. 0: 512 */
	uint32_t max_query_heads; /* the most query heads of any attention call; 0: the most KV heads of a plane x 8 */
	uint32_t host;		 /* enum kvt_host_kind */
	uint32_t io;		 /* enum kvt_io_kind */
	uint32_t backend;	 /* enum kvt_backend_kind: what the gpu tier lives on */
	uint32_t gpu_device;	 /* device index */
	int32_t numa_node;	 /* node + 1 for host frames; 0: wherever */
	uint32_t policy;	 /* enum kvt_policy_kind */
	uint64_t writeback_bytes_per_s; /* cap of background write-back; 0: none. An eviction that waits is not held back */
	uint64_t prefix_bytes;	 /* of @ram_bytes, for the prefix tree: kvt_prefix_bytes(), at most 2^48; 0: no tree */
	uint32_t prefix_tokens;	 /* tokens of a chunk: a multiple of every sequence plane's block rows; 0: the least one */
	uint32_t snapshots;	 /* recurrent-state snapshots that the tree may hold; 0: none */
	uint32_t session_snapshots; /* the most of them for one session; 0: no such limit */
	uint32_t reserved2;
	uint64_t snapshot_bytes; /* the largest state */
	const char *store_dir;	 /* the disk tier lives in this directory and outlives the process; needs @prefix_bytes */
	const void *store_model; /* [KVT_FINGERPRINT] of the model whose rows these are; with @store_dir */
	uint64_t store_rotation; /* names what is done to rows before they are encoded (rotation, rope); 0: nothing */
	const char *warm_name; /* the ram tier outlives this process, under this name; NULL: it does not. kvt_seq_recover() */
	uint64_t warm_id;      /* of what makes the rows (model, adapters): rows of another are refused */
	uint64_t gpu_scratch_bytes; /* the part of @gpu_bytes that a batch's tables and attention's scratch may take */
};

#define KVT_FINGERPRINT 32 /* bytes that stand for a model's weights: a digest of them */

/*
 * Create a cache; everything it will ever need is allocated here.
 * -EINVAL: a parameter out of range (named); -ENOMEM: a budget below what the
 * geometry needs (the message says how much would do), or above physical
 * memory; -ENOENT, -EROFS, -ENOSPC, -EACCES: @disk_dir; -ENODEV: no such
 * backend. @params and what it points to are not kept.
 * With @store_dir, also: -EBUSY: another process, or another cache of this one, has it open;
 * -EMEDIUMTYPE: it was written with another geometry, codec, rotation, model or format (named);
 * -EUCLEAN: its superblock is damaged.
 */
int kvt_cache_create(const struct kvt_cache_params *params, struct kvt_cache **cache);

/* Ends all I/O and frees the cache, its sequences and its disk space. No other call may be running. */
void kvt_cache_destroy(struct kvt_cache *cache);

/*
 * The smallest @ram_bytes with which kvt_cache_create() and attention over
 * @params' planes work, given the other budgets. Returns bytes, or a negative errno.
 */
int64_t kvt_cache_min_ram(const struct kvt_cache_params *params);

/* Rows in a block of @plane, or -EINVAL. */
int64_t kvt_plane_block_rows(const struct kvt_cache *cache, uint32_t plane);

/* Bytes of an encoded row of @plane, or -EINVAL. */
int64_t kvt_plane_row_bytes(const struct kvt_cache *cache, uint32_t plane);

/*
 * Write back all dirty blocks and wait; with @store_dir, also write down what is where.
 * -ENOSPC: there is no room on disk, or no disk tier; -EIO; -EBUSY: some are borrowed.
 */
int kvt_cache_flush(struct kvt_cache *cache);

/*
 * Run fn(arg, i) for i in [0, n) on the cache's compute threads and wait; the
 * caller is one of them. For an engine's own work. Calls take turns. fn may
 * call anything of the library; what it starts itself runs on its own thread.
 */
void kvt_cache_parallel(struct kvt_cache *cache, uint32_t n, void (*fn)(void *arg, uint32_t i), void *arg);

/* ---- sequences ---------------------------------------------------------- */

/* An empty sequence. -ENOSPC: @max_seqs are alive. */
int kvt_seq_create(struct kvt_cache *cache, struct kvt_seq **seq);

/*
 * With @warm_name: of the sequences that a process before this one left in the
 * ram tier, the one that begins with the most of @tokens [n], cut to those; it
 * is a sequence as any other then. Its rows have been verified; of what was in
 * another tier, or being written, nothing is left. Rows of raw planes are not
 * kept, and of a block that sequences share, one has it. -ENOENT: none begins
 * so. Sequences that nobody recovers make room for new ones.
 */
int kvt_seq_recover(struct kvt_cache *cache, const uint32_t *tokens, uint32_t n, struct kvt_seq **seq);

/*
 * A sequence that begins with the first @tokens of @seq (at most its length).
 * Blocks are shared; the first write to a shared block copies it.
 */
int kvt_seq_fork(struct kvt_seq *seq, uint32_t tokens, struct kvt_seq **fork);

/* Any other call on it is -EINVAL then, until its place is a new sequence's. */
void kvt_seq_free(struct kvt_seq *seq);

/* Tokens in the sequence. */
uint32_t kvt_seq_len(const struct kvt_seq *seq);

/*
 * Make the sequence @n tokens longer. @tokens [n] are their ids (NULL: zeros).
 * The new rows of every sequence plane read as zeros until they are written.
 * -ENOSPC: @max_tokens, or every tier is full.
 */
int kvt_seq_append(struct kvt_seq *seq, const uint32_t *tokens, uint32_t n);

/* Cut to the first @tokens. -EINVAL if the sequence is shorter. */
int kvt_seq_truncate(struct kvt_seq *seq, uint32_t tokens);

/* The ids of tokens [first, first + n). -ERANGE outside the sequence. */
int kvt_seq_tokens(const struct kvt_seq *seq, uint32_t first, uint32_t n, uint32_t *tokens);

/* Elements handed in or out, one of enum kvt_codec, or rows as they are stored. */
#define KVT_ENCODED 0xffffu

/*
 * Rows in the caller's memory. Row i begins at data + i * stride; its heads x
 * head_dim elements of @type are contiguous.
 */
struct kvt_rows {
	void *data;
	uint64_t stride; /* bytes; 0: rows are contiguous */
	uint32_t type;	 /* enum kvt_codec, or KVT_ENCODED */
	uint32_t reserved;
};

/*
 * Write rows [first, first + n) of @plane, encoding them. -ERANGE outside the
 * sequence; -ENOSPC (every tier is full), -ENOMEM (too many blocks are in use),
 * -EIO: a block could not be written; the rows of earlier blocks are, that
 * block's and later ones' are as they were.
 */
int kvt_seq_write(struct kvt_seq *seq, uint32_t plane, uint32_t first, uint32_t n, const struct kvt_rows *src);

/* Read rows [first, first + n) of @plane, decoded to dst->type or as stored. Verified like any read. */
int kvt_seq_read(struct kvt_seq *seq, uint32_t plane, uint32_t first, uint32_t n, const struct kvt_rows *dst);

/*
 * Move every block of the sequence to @tier, or as many as fit there. Returns
 * blocks now in @tier. An engine parks a paused request with KVT_TIER_DISK.
 */
int64_t kvt_seq_move(struct kvt_seq *seq, enum kvt_tier tier);

/* ---- raw planes: rows by index, no tokens (plane params' rows != 0) ------ */

/*
 * Write @n rows to the row indices @rows [n], in order (a later one wins).
 * -ERANGE; -EINVAL: not a raw plane; else as kvt_seq_write().
 */
int kvt_plane_write(struct kvt_cache *cache, uint32_t plane, const uint64_t *rows, uint32_t n,
		    const struct kvt_rows *src);

/* Read rows [first, first + n); rows never written are zeros. */
int kvt_plane_read(struct kvt_cache *cache, uint32_t plane, uint64_t first, uint32_t n, const struct kvt_rows *dst);

/* Rows [first, first + n) become zeros; whole blocks are given back. Costs nothing for rows never written. */
int kvt_plane_clear(struct kvt_cache *cache, uint32_t plane, uint64_t first, uint64_t n);

/* ---- borrow: hold a block's bytes where they are ------------------------- */

struct kvt_borrow {
	const void *data;     /* encoded rows, row_bytes apart; stays until returned */
	uint32_t rows;	      /* rows that have been written to the block */
	uint32_t row_bytes;
	uint32_t tier;	      /* where @data is */
	uint32_t block;	      /* the library's */
	uint32_t place_rev;   /* changes with every move */
	uint64_t content_rev; /* changes with every write */
};

/*
 * Borrow block @index of @plane (rows from index * block_rows) for reading by the CPU. Loads it if need be.
 * -ENOMEM: it finds no frame, for too many blocks are borrowed; -ENOSPC: what is in them can go nowhere.
 */
int kvt_seq_borrow(struct kvt_seq *seq, uint32_t plane, uint32_t index, struct kvt_borrow *borrow);
int kvt_plane_borrow(struct kvt_cache *cache, uint32_t plane, uint64_t index, struct kvt_borrow *borrow);
void kvt_borrow_return(struct kvt_cache *cache, const struct kvt_borrow *borrow);

/* ---- attention ----------------------------------------------------------- */

#define KVT_ATTN_CAUSAL (1u << 0) /* query position p sees positions <= p (sequences only) */

/*
 * By which arithmetic. Between families a row's bits differ, and its error; within one they depend on nothing but what
 * the row may see, as said below.
 */
enum kvt_attn_family {
	KVT_ATTN_EXACT,
	/*
	 * Many query rows at once on sm_90, by kvt_batch_attend(): K and V with heads of 64 or 128 elements, a positive
	 * scale, no softcap, no alibi. Few rows take as long as many, for one row's positions are not divided.
	 * What it cannot do is -EOPNOTSUPP.
	 */
	KVT_ATTN_FAST,
};

/*
 * out = sum_j softmax_j(cap(scale * q.k_j) + bias_j) v_j over the rows j that
 * the query may see. Query head h reads KV head h / (n_heads / kv_heads).
 * A row that sees nothing is zeros. A visible score of +inf or NaN makes the
 * whole output row NaN (0x7fc00000). A score of -inf has weight 0.
 * Rows that a query may not see do not touch its output, whatever they hold.
 */
struct kvt_attn {
	uint32_t size;
	uint32_t flags; /* KVT_ATTN_* */
	uint32_t k_plane, v_plane; /* the same number of KV heads; head_dim 8 to 576, may differ */
	uint32_t n_heads;	   /* query heads, a multiple of the KV heads */
	uint32_t window;	   /* sees only positions > p - window; 0: all (sequences only) */
	float scale;		   /* 0: 1 / sqrt(K's head_dim) */
	float softcap;		   /* cap(s) = softcap * tanh(s / softcap); 0: none */
	const float *alibi;	   /* [n_heads] slopes, NULL: none. Sequences: bias = slope * (j - p); masks: slope * mask */
	const float *sinks;	   /* [n_heads] logits that take weight and give nothing; NULL: none */
	uint64_t q_stride;	   /* floats from a token's queries to the next one's; 0: n_heads x K head_dim */
	uint64_t out_stride;	   /* likewise of its output; 0: n_heads x V head_dim */
	uint32_t v_dim;		   /* V is the first so many elements of its plane's one head (MLA); 0: all of each head */
	uint32_t family;	   /* enum kvt_attn_family */
};

/* Query rows of one sequence: positions [first, first + n), which need not be its last. */
struct kvt_attn_item {
	struct kvt_seq *seq;
	uint32_t first, n;
	const float *q; /* [n][n_heads][K head_dim], tokens attn->q_stride apart */
	float *out;	/* [n][n_heads][V head_dim], tokens attn->out_stride apart */
};

/* Attend for a batch of sequences. Items do not affect each other. On an error no output is defined. */
int kvt_attend(struct kvt_cache *cache, const struct kvt_attn *attn, const struct kvt_attn_item *items,
	       uint32_t n_items);

/* Query rows over rows [0, n_rows) of raw planes, seen through an explicit mask. */
struct kvt_attn_mask {
	uint32_t size;
	uint32_t n;	   /* query rows */
	uint64_t n_rows;   /* KV rows, at most the planes' */
	const void *mask;  /* [n][mask_stride] added to the scores; -inf: not seen. NULL: all seen */
	uint64_t mask_stride; /* elements, at least n_rows */
	uint32_t mask_type;   /* KVT_F32 or KVT_F16 */
	uint32_t reserved;
	const float *q; /* [n][n_heads][K head_dim] */
	float *out;	/* [n][n_heads][V head_dim] */
};

/* As kvt_attend() over raw planes. KVT_ATTN_CAUSAL and a window are -EINVAL: the mask says what is seen. */
int kvt_attend_mask(struct kvt_cache *cache, const struct kvt_attn *attn, const struct kvt_attn_mask *mask);

/* ---- prefix cache: what a request has computed, kept for the next ---------- */

/*
 * A tree over token ids. A node is a chunk: prefix_tokens tokens, and the blocks
 * that hold their rows in every sequence plane, in whatever tier they are. Trees
 * of different roots share nothing: not even how long a lookup takes says
 * whether another tenant has asked the same.
 *
 * Any call from any thread. No I/O is done with the tree locked.
 */
struct kvt_prefix_root {
	uint32_t size;
	uint32_t reserved;
	uint8_t model[KVT_FINGERPRINT];
	const void *adapter; /* what identifies it; NULL: none */
	const void *salt;    /* of a tenant: only requests with the same one share; NULL: none */
	uint32_t adapter_bytes, salt_bytes; /* at most 64 each. None and an empty one are the same */
};

/* What is cached of a prompt. Its chunks stay until it is released. */
struct kvt_prefix_match {
	uint32_t tokens;   /* of the prompt's first; any number, not only whole chunks */
	uint32_t chunks;   /* that hold them: the depth in the tree */
	uint32_t snapshot; /* the deepest recurrent snapshot at or above is of so many tokens; 0: there is none */
	uint32_t node;	   /* the library's */
};

/*
 * Find the longest cached prefix of tokens [n] and pin it. An engine that needs
 * logits asks for all tokens but the last, which it computes again.
 * Returns 0, also with nothing found; then, too, release it. -EINVAL: no tree, or a bad @root.
 * A match of 0 chunks holds nothing: one that failed, one that was released, a zeroed one.
 */
int kvt_prefix_match(struct kvt_cache *cache, const struct kvt_prefix_root *root, const uint32_t *tokens, uint32_t n,
		     struct kvt_prefix_match *match);
void kvt_prefix_release(struct kvt_cache *cache, struct kvt_prefix_match *match);

/*
 * Make the empty sequence @seq begin with the matched tokens (at most @tokens of
 * them), sharing their blocks; who writes to one copies it first. What an
 * earlier process left on disk is read and verified here: where it is not what was
 * written, the sequence ends before it. Returns the sequence's tokens.
 */
int64_t kvt_prefix_attach(struct kvt_cache *cache, const struct kvt_prefix_match *match, uint32_t tokens,
			  struct kvt_seq *seq);

/*
 * Keep the first @tokens of @seq, whose rows must have been written in every plane,
 * for others. @ns: what computing one of them took, for the counter of saved
 * time and for who must go first; 0: unknown. Returns the tokens that are now cached: fewer
 * where there is no room (counted), for that is not the request's fault.
 */
int64_t kvt_prefix_insert(struct kvt_cache *cache, const struct kvt_prefix_root *root, struct kvt_seq *seq,
			  uint32_t tokens, uint32_t ns);

/*
 * Make room of @chunks chunks in @tier, those that no match pins and that are
 * needed least. From a memory tier they go to disk where that has room, else they
 * are dropped; from KVT_TIER_DISK they are dropped. Returns how many went, at most @chunks.
 */
int64_t kvt_prefix_evict(struct kvt_cache *cache, enum kvt_tier tier, uint32_t chunks);

/* Tokens of a chunk, or -EINVAL: no tree. */
int64_t kvt_prefix_tokens(const struct kvt_cache *cache);

/* The prefix_bytes with which the tree of a cache of @params holds @chunks chunks, at most 2^31 - 1; or a negative errno. */
int64_t kvt_prefix_bytes(const struct kvt_cache_params *params, uint32_t chunks);

/*
 * Keep the recurrent state (SSM, linear attention) behind the first @n of @tokens,
 * which must be cached. It goes with its chunk, or when its session has
 * session_snapshots newer ones, or when all are taken and it was not used for longest.
 * -ENOENT: the tokens are not cached; -EINVAL: more than snapshot_bytes; -ENOSPC: no room.
 */
int kvt_snapshot_put(struct kvt_cache *cache, const struct kvt_prefix_root *root, const uint32_t *tokens, uint32_t n,
		     uint64_t session, const void *state, uint64_t bytes);

/* The state behind match->snapshot tokens. Returns its size; more than @bytes: nothing was copied. */
int64_t kvt_snapshot_get(struct kvt_cache *cache, const struct kvt_prefix_match *match, void *state, uint64_t bytes);

struct kvt_prefix_stats {
	uint32_t size;
	uint32_t roots;
	uint64_t chunks, chunks_free, chunks_evictable, chunks_pinned; /* the last three add up to the first */
	uint64_t tokens;	   /* that are cached */
	uint64_t lookups, lookups_hit;
	uint64_t tokens_asked, tokens_hit;
	uint64_t depth;		   /* chunks of the longest match */
	uint64_t hit_bytes[KVT_TIERS]; /* of blocks attached, by where they were */
	uint64_t saved_ns;	   /* what the tokens attached had taken to compute */
	uint64_t inserted, demoted, dropped; /* chunks */
	uint64_t refused;	   /* chunks that found no room */
	uint64_t snapshots, snapshots_used;
	uint64_t saved;		   /* chunks written down in @store_dir */
	uint64_t recovered;	   /* chunks found there at the start */
	uint64_t untrue;	   /* chunks whose bytes on disk were not what was written */
	uint64_t log_bytes;
};

int kvt_prefix_stats(struct kvt_cache *cache, struct kvt_prefix_stats *stats);

/* ---- a GPU at work ------------------------------------------------------- */

/*
 * A batch: sequences whose rows kernels append and attend to where they are, in
 * GPU memory and in pinned memory that the GPU reads in place, without the host
 * waiting for it. A step:
 *
 *	kvt_batch_step(batch, counts, tokens);		makes room; everything else only launches
 *	for each layer: kvt_batch_write_kv(), kvt_batch_attend()
 *
 * What is launched after a step may be captured in a graph and replayed after
 * later steps, until kvt_batch_epoch() changes. Every sequence plane is written
 * once in each step; a step's rows of a plane that is not are zeros, as after
 * kvt_seq_append(), and cost no other row. So an aborted step is taken back by
 * kvt_batch_detach() and kvt_seq_truncate(), written in part or not. What is
 * written twice in a step is lost, with the blocks it is in.
 *
 * While sequences are attached, other calls on them are -EBUSY (kvt_seq_free()
 * detaches the batch first), and their blocks stay.
 *
 * Exactness: an output row is a function as kvt_attend()'s, by the GPU's
 * arithmetic: it does not depend on where blocks are, on the batch's other
 * sequences, or on how a prompt was cut into steps.
 *
 * A batch is used by one thread at a time, and not beside other calls on its
 * sequences. -ENODEV from any of these: the GPU is gone; detach, and go on on the CPU.
 */
struct kvt_batch;

struct kvt_batch_params {
	uint32_t size;
	uint32_t flags;	     /* 0 */
	uint32_t max_seqs;   /* attached at once; 0: 1 */
	uint32_t max_tokens; /* of all sequences in a step; 0: max_query_rows */
	/*
	 * The part of gpu_scratch_bytes that blocks in pinned memory pass through, copied ahead of attention to their
	 * plane: two blocks or more; best what one layer has there, and a tenth more. Attention is then no part of a
	 * capture, and its results are right if kvt_batch_wait() says so. 0: they are read where they are.
	 */
	uint64_t ring_bytes;
};

/* -ENODEV: no gpu tier; -ENOMEM: gpu_scratch_bytes, which one batch at a time has, is too small, or in use. */
int kvt_batch_create(struct kvt_cache *cache, const struct kvt_batch_params *params, struct kvt_batch **batch);
void kvt_batch_destroy(struct kvt_batch *batch); /* before its cache */

/*
 * Attach @n sequences. Their blocks are brought to the gpu and pinned tiers.
 * -ENOMEM, -ENOSPC: they do not fit there; -EBUSY: attached already. On an error none is attached.
 */
int kvt_batch_attach(struct kvt_batch *batch, struct kvt_seq *const *seqs, uint32_t n);

/* Wait for what was launched, and make them sequences as others again. */
void kvt_batch_detach(struct kvt_batch *batch);

/*
 * Make each sequence counts[i] tokens longer (0 is one), @tokens their ids one
 * sequence after the other, or NULL. -EINVAL: more than max_tokens; -ENOSPC,
 * -ENOMEM: no room in the gpu and pinned tiers. On an error no sequence is longer.
 */
int kvt_batch_step(struct kvt_batch *batch, const uint32_t *counts, const uint32_t *tokens);

/* The step's rows of a sequence plane, from memory that the GPU reads (src->data): encoded, digested, placed. */
int kvt_batch_write(struct kvt_batch *batch, uint32_t plane, const struct kvt_rows *src);

/* The same of two planes in one launch. */
int kvt_batch_write_kv(struct kvt_batch *batch, uint32_t k_plane, const struct kvt_rows *k, uint32_t v_plane,
		       const struct kvt_rows *v);

/* The step's query rows, one sequence's after the other's, where the GPU reads and writes them: q, out. */
struct kvt_batch_attn {
	uint32_t size;
	uint32_t q_type, out_type; /* KVT_F32, KVT_F16 or KVT_BF16 */
	uint32_t reserved;
	uint64_t q;	     /* address; token i's heads begin at q + i * q_stride */
	uint64_t out;
	uint64_t q_stride;   /* bytes; 0: tokens are contiguous */
	uint64_t out_stride;
};

/* As kvt_attend() for the step's tokens. attn->alibi and attn->sinks are addresses that the GPU reads. */
int kvt_batch_attend(struct kvt_batch *batch, const struct kvt_attn *attn, const struct kvt_batch_attn *io);

/* Another number: sizes have changed, and what was captured is to be captured again. */
uint32_t kvt_batch_epoch(const struct kvt_batch *batch);

/* Wait for what was launched; its errors show here. */
int kvt_batch_wait(struct kvt_batch *batch);

/* ---- stats --------------------------------------------------------------- */

struct kvt_tier_stats {
	uint64_t budget, used, peak; /* bytes set aside, full or not; with overhead where it counts against the tier */
	uint64_t overhead;	     /* bytes of metadata, scratch, staging and stacks */
	uint64_t frames, frames_free;
	uint64_t blocks; /* blocks readable in this tier */
};

struct kvt_stats {
	uint32_t size;
	uint32_t sequences;
	uint64_t block_bytes;
	uint64_t blocks;	   /* alive */
	uint64_t blocks_dirty;	   /* with no verified copy on disk */
	struct kvt_tier_stats tier[KVT_TIERS];
	uint64_t rows_written;
	uint64_t hits, misses;	   /* blocks borrowed that were / were not resident */
	uint64_t disk_reads, disk_read_bytes, disk_writes, disk_write_bytes;
	uint64_t moves, move_bytes; /* between memory tiers */
	uint64_t evictions, cow_copies;
	uint64_t digest_errors;	   /* bytes that did not match; never served */
	uint64_t io_errors;	   /* reads and writes that failed */
	uint64_t full;		   /* calls and writes that found every place taken */
	uint64_t blocks_lost;	   /* content no tier can give any more */
	uint64_t reclaimed;	   /* blocks whose memory the kernel took; they are read from disk again */
	uint64_t warm_blocks;	   /* blocks found in a warm pool, and verified */
	uint64_t gpu_lost;	   /* 1: the GPU is gone since (a fault, a suspend); the gpu tier is empty and stays so */
	uint64_t gpu_dropped;	   /* blocks that were there then; those with a copy on disk go on from it */
	uint64_t demotions;	   /* blocks that made room by going down to the next memory tier */
	uint64_t disk_read_ns;	   /* time in which reads from disk were under way */
	uint64_t streamed_bytes;   /* of blocks that were copied to the GPU ahead of attention, through a batch's ring */
	uint64_t in_place_bytes;   /* of those that a batch's attention read in pinned memory; a captured launch counts once */
	uint64_t prefetched;	   /* reads of blocks that were expected to be borrowed soon: */
	uint64_t prefetch_used;	   /* the block was, once the read had begun; */
	uint64_t prefetch_wasted;  /* or was not, and has left memory */
};

/* Fill @stats (its size set). Exact when the cache is at rest. */
int kvt_cache_stats(struct kvt_cache *cache, struct kvt_stats *stats);

/*
 * The same as JSON (one object; keys as in struct kvt_stats, plus names and
 * the I/O path in use). Returns the length without the NUL; at most @bytes are
 * written, always NUL-terminated. As snprintf, so call with 0 to learn the size.
 */
int64_t kvt_cache_stats_json(struct kvt_cache *cache, char *buf, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
