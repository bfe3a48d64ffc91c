/* SPDX-License-Identifier: GPL-2.0-only */
/* Tracepoints: what happens to frames and transfers (events/kvtier in tracefs). */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM kvtier

#if !defined(KVT_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define KVT_TRACE_H

#include <linux/tracepoint.h>

DECLARE_EVENT_CLASS(kvtier_pool,
	TP_PROTO(u64 pool, u32 n_frames, u32 frame_bytes),
	TP_ARGS(pool, n_frames, frame_bytes),
	TP_STRUCT__entry(
		__field(u64, pool)
		__field(u32, n_frames)
		__field(u32, frame_bytes)
	),
	TP_fast_assign(
		__entry->pool = pool;
		__entry->n_frames = n_frames;
		__entry->frame_bytes = frame_bytes;
	),
	TP_printk("pool=%llu frames=%u frame_bytes=%u", __entry->pool, __entry->n_frames, __entry->frame_bytes)
);

DEFINE_EVENT(kvtier_pool, kvtier_pool_create,
	TP_PROTO(u64 pool, u32 n_frames, u32 frame_bytes), TP_ARGS(pool, n_frames, frame_bytes));
DEFINE_EVENT(kvtier_pool, kvtier_pool_destroy,
	TP_PROTO(u64 pool, u32 n_frames, u32 frame_bytes), TP_ARGS(pool, n_frames, frame_bytes));

DECLARE_EVENT_CLASS(kvtier_frame,
	TP_PROTO(u64 pool, u32 frame),
	TP_ARGS(pool, frame),
	TP_STRUCT__entry(
		__field(u64, pool)
		__field(u32, frame)
	),
	TP_fast_assign(
		__entry->pool = pool;
		__entry->frame = frame;
	),
	TP_printk("pool=%llu frame=%u", __entry->pool, __entry->frame)
);

DEFINE_EVENT(kvtier_frame, kvtier_populate, TP_PROTO(u64 pool, u32 frame), TP_ARGS(pool, frame));
DEFINE_EVENT(kvtier_frame, kvtier_take, TP_PROTO(u64 pool, u32 frame), TP_ARGS(pool, frame));

TRACE_EVENT(kvtier_xfer_start,
	TP_PROTO(u64 pool, u32 frame, bool write, u64 offset, u32 bytes),
	TP_ARGS(pool, frame, write, offset, bytes),
	TP_STRUCT__entry(
		__field(u64, pool)
		__field(u64, offset)
		__field(u32, frame)
		__field(u32, bytes)
		__field(bool, write)
	),
	TP_fast_assign(
		__entry->pool = pool;
		__entry->offset = offset;
		__entry->frame = frame;
		__entry->bytes = bytes;
		__entry->write = write;
	),
	TP_printk("pool=%llu frame=%u %s offset=%llu bytes=%u", __entry->pool, __entry->frame,
		  __entry->write ? "write" : "read", __entry->offset, __entry->bytes)
);

TRACE_EVENT(kvtier_xfer_done,
	TP_PROTO(u64 pool, u32 frame, bool write, s32 result),
	TP_ARGS(pool, frame, write, result),
	TP_STRUCT__entry(
		__field(u64, pool)
		__field(u32, frame)
		__field(s32, result)
		__field(bool, write)
	),
	TP_fast_assign(
		__entry->pool = pool;
		__entry->frame = frame;
		__entry->result = result;
		__entry->write = write;
	),
	TP_printk("pool=%llu frame=%u %s result=%d", __entry->pool, __entry->frame,
		  __entry->write ? "write" : "read", __entry->result)
);

#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>
