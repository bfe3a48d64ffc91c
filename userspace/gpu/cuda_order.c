// SPDX-License-Identifier: MIT
/*
 * Streams, graphs and events on CUDA. What the driver would let pass, or would
 * invalidate a capture for, is refused here first, as the other backends do.
 */
#include "gpu/cuda.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#include "base/err.h"

/* Make an object of @bytes, which begins with the driver's handle, and give it a handle of the table's. */
static int create(struct cuda *c, struct kvt_table *table, size_t bytes, const char *what,
		  kvt_cu_result (*make)(kvt_cu_handle *cu, unsigned int flags), unsigned int flags,
		  kvt_cu_result (*unmake)(kvt_cu_handle cu), uint32_t *handle)
{
	kvt_cu_handle *object = calloc(1, bytes);
	bool pushed;
	int err;

	if (!object)
		return kvt_fail(-ENOMEM, "no memory for %s", what);
	err = kvt_cuda_enter(c, &pushed);
	if (err)
		goto err_free;
	err = kvt_cuda_check(c, make(object, flags), "creating %s", what);
	if (!err) {
		pthread_mutex_lock(&c->lock);
		err = kvt_table_add(table, object, handle);
		pthread_mutex_unlock(&c->lock);
		if (err)
			unmake(*object);
	}
	kvt_cuda_leave(c, pushed);
	if (!err)
		return 0;
err_free:
	free(object);
	return err;
}

int kvt_cuda_stream_create(struct kvt_gpu *gpu, kvt_stream *handle)
{
	struct cuda *c = cuda_of(gpu);

	_Static_assert(!offsetof(struct stream, cu), "create() fills it in");
	return create(c, &c->streams, sizeof(struct stream), "a stream", c->cu->StreamCreate, KVT_CU_STREAM_NON_BLOCKING,
		      c->cu->StreamDestroy, handle);
}

void kvt_cuda_stream_destroy(struct kvt_gpu *gpu, kvt_stream handle)
{
	struct cuda *c = cuda_of(gpu);
	kvt_cu_handle graph = NULL;
	struct stream *s;
	bool pushed;

	pthread_mutex_lock(&c->lock);
	s = kvt_table_remove(&c->streams, handle);
	pthread_mutex_unlock(&c->lock);
	if (s && !kvt_cuda_enter(c, &pushed)) {
		if (s->capturing && !c->cu->StreamEndCapture(s->cu, &graph) && graph)
			c->cu->GraphDestroy(graph);
		kvt_cuda_check(c, c->cu->StreamDestroy(s->cu), "destroying a stream");
		kvt_cuda_leave(c, pushed);
	}
	free(s);
}

int kvt_cuda_stream_sync(struct kvt_gpu *gpu, kvt_stream handle)
{
	struct cuda *c = cuda_of(gpu);
	kvt_cu_handle stream;
	bool pushed;
	int err = kvt_cuda_begin_uncaptured(c, handle, "nothing on it runs", &stream, &pushed);

	if (err)
		return err;
	err = kvt_cuda_check(c, c->cu->StreamSynchronize(stream), "work on stream %u", handle);
	kvt_cuda_leave(c, pushed);
	return err;
}

int kvt_cuda_bind_thread(struct kvt_gpu *gpu)
{
	struct cuda *c = cuda_of(gpu);

	if (atomic_load(&c->lost))
		return kvt_cuda_is_lost(c);
	return kvt_cuda_check(c, c->cu->CtxSetCurrent(c->context), "binding a thread");
}

/* ---- graphs ---- */

int kvt_cuda_capture_begin(struct kvt_gpu *gpu, kvt_stream handle)
{
	struct cuda *c = cuda_of(gpu);
	struct stream *s;
	bool pushed;
	int err = kvt_cuda_enter(c, &pushed);

	if (err)
		return err;
	pthread_mutex_lock(&c->lock);
	s = kvt_cuda_stream_of(c, handle);
	if (!s)
		err = -EINVAL;
	else if (!handle)
		err = kvt_fail(-EINVAL, "the default stream cannot capture: create one");
	else if (s->capturing)
		err = kvt_fail(-EINVAL, "stream %u is capturing already", handle);
	else /* relaxed: other threads go on allocating and copying meanwhile */
		err = kvt_cuda_check(c, c->cu->StreamBeginCapture(s->cu, KVT_CU_CAPTURE_RELAXED), "beginning a capture");
	if (!err)
		s->capturing = true;
	pthread_mutex_unlock(&c->lock);
	kvt_cuda_leave(c, pushed);
	return err;
}

/* With the lock held: the events of a capture become its graph's, or (@graph 0) of nothing. */
static void hand_over_events(struct cuda *c, kvt_stream capture, kvt_graph graph)
{
	for (uint32_t i = 1; i < c->events.n; i++) {
		struct event *e = c->events.objects[i];

		if (e && e->capture == capture) {
			e->capture = 0;
			e->graph = graph;
		}
	}
}

int kvt_cuda_capture_end(struct kvt_gpu *gpu, kvt_stream handle, kvt_graph *graph)
{
	struct cuda *c = cuda_of(gpu);
	kvt_cu_handle recorded = NULL, exec = NULL;
	struct stream *s;
	bool pushed;
	int err = kvt_cuda_enter(c, &pushed);

	if (err)
		return err;
	pthread_mutex_lock(&c->lock);
	s = kvt_cuda_stream_of(c, handle);
	if (!s)
		err = -EINVAL;
	else if (!s->capturing)
		err = kvt_fail(-EINVAL, "stream %u is not capturing", handle);
	if (!err) {
		s->capturing = false;
		err = kvt_cuda_check(c, c->cu->StreamEndCapture(s->cu, &recorded), "ending a capture");
		if (!err)
			err = kvt_cuda_check(c, c->cu->GraphInstantiate(&exec, recorded, 0), "instantiating a graph");
		if (!err)
			err = kvt_table_add(&c->graphs, exec, graph);
		hand_over_events(c, handle, err ? 0 : *graph);
	}
	pthread_mutex_unlock(&c->lock);
	if (recorded)
		c->cu->GraphDestroy(recorded);
	if (err && exec)
		c->cu->GraphExecDestroy(exec);
	kvt_cuda_leave(c, pushed);
	return err;
}

int kvt_cuda_graph_launch(struct kvt_gpu *gpu, kvt_graph graph, kvt_stream handle)
{
	struct cuda *c = cuda_of(gpu);
	kvt_cu_handle exec, stream = NULL;
	struct stream *s = NULL;
	bool pushed;
	int err;

	pthread_mutex_lock(&c->lock);
	exec = kvt_table_get(&c->graphs, graph);
	if (!exec)
		kvt_fail(-EINVAL, "no graph has handle %u", graph);
	else
		s = kvt_cuda_stream_of(c, handle);
	if (s)
		stream = s->cu;
	for (uint32_t i = 1; s && i < c->events.n; i++) {
		struct event *e = c->events.objects[i];

		if (e && e->graph == graph) {
			e->graph = 0;
			e->recorded = true;
		}
	}
	pthread_mutex_unlock(&c->lock);
	if (!s)
		return -EINVAL;
	err = kvt_cuda_enter(c, &pushed);
	if (err)
		return err;
	err = kvt_cuda_check(c, c->cu->GraphLaunch(exec, stream), "launching graph %u", graph);
	kvt_cuda_leave(c, pushed);
	return err;
}

void kvt_cuda_graph_destroy(struct kvt_gpu *gpu, kvt_graph graph)
{
	struct cuda *c = cuda_of(gpu);
	kvt_cu_handle exec;
	bool pushed;

	pthread_mutex_lock(&c->lock);
	exec = kvt_table_remove(&c->graphs, graph);
	pthread_mutex_unlock(&c->lock);
	if (exec && !kvt_cuda_enter(c, &pushed)) {
		kvt_cuda_check(c, c->cu->GraphExecDestroy(exec), "destroying a graph");
		kvt_cuda_leave(c, pushed);
	}
}

/* ---- events ---- */

/* With the lock held. */
static struct event *event_of(struct cuda *c, kvt_event handle)
{
	struct event *e = kvt_table_get(&c->events, handle);

	if (!e)
		kvt_fail(-EINVAL, "no event has handle %u", handle);
	return e;
}

int kvt_cuda_event_create(struct kvt_gpu *gpu, kvt_event *handle)
{
	struct cuda *c = cuda_of(gpu);

	_Static_assert(!offsetof(struct event, cu), "create() fills it in");
	return create(c, &c->events, sizeof(struct event), "an event", c->cu->EventCreate, 0, c->cu->EventDestroy, handle);
}

void kvt_cuda_event_destroy(struct kvt_gpu *gpu, kvt_event handle)
{
	struct cuda *c = cuda_of(gpu);
	struct event *e;
	bool pushed;

	pthread_mutex_lock(&c->lock);
	e = kvt_table_remove(&c->events, handle);
	pthread_mutex_unlock(&c->lock);
	if (e && !kvt_cuda_enter(c, &pushed)) {
		kvt_cuda_check(c, c->cu->EventDestroy(e->cu), "destroying an event");
		kvt_cuda_leave(c, pushed);
	}
	free(e);
}

int kvt_cuda_event_record(struct kvt_gpu *gpu, kvt_event handle, kvt_stream on)
{
	struct cuda *c = cuda_of(gpu);
	struct stream *s;
	struct event *e;
	bool pushed;
	int err = kvt_cuda_enter(c, &pushed);

	if (err)
		return err;
	pthread_mutex_lock(&c->lock);
	e = event_of(c, handle);
	s = e ? kvt_cuda_stream_of(c, on) : NULL;
	/* external: the graph records the event itself each time it runs */
	err = s ? kvt_cuda_check(c, c->cu->EventRecord(e->cu, s->cu, s->capturing ? KVT_CU_EVENT_EXTERNAL : 0), "recording an event") :
		  -EINVAL;
	if (!err) {
		e->capture = s->capturing ? on : 0;
		e->graph = 0;
		e->recorded |= !s->capturing;
	}
	pthread_mutex_unlock(&c->lock);
	kvt_cuda_leave(c, pushed);
	return err;
}

int kvt_cuda_event_wait(struct kvt_gpu *gpu, kvt_stream on, kvt_event handle)
{
	struct cuda *c = cuda_of(gpu);
	struct stream *s;
	struct event *e;
	bool pushed;
	int err = kvt_cuda_enter(c, &pushed);

	if (err)
		return err;
	pthread_mutex_lock(&c->lock);
	e = event_of(c, handle);
	s = e ? kvt_cuda_stream_of(c, on) : NULL;
	if (!s)
		err = -EINVAL;
	else if (e->graph || (e->capture && e->capture != on))
		err = kvt_fail(-EINVAL, "event %u was recorded in a capture: only that capture can wait for it", handle);
	else if (!e->capture) /* else the capturing stream waits for itself */
		err = kvt_cuda_check(c, c->cu->StreamWaitEvent(s->cu, e->cu, s->capturing ? KVT_CU_EVENT_EXTERNAL : 0),
			    "waiting for an event");
	pthread_mutex_unlock(&c->lock);
	kvt_cuda_leave(c, pushed);
	return err;
}

/* The driver's handle of an event that a host may ask about, with the context made current: kvt_cuda_leave() then. */
static int begin_event(struct cuda *c, kvt_event handle, bool recorded, kvt_cu_handle *event, bool *pushed)
{
	struct event *e;
	int err = 0;

	pthread_mutex_lock(&c->lock);
	e = event_of(c, handle);
	if (!e)
		err = -EINVAL;
	else if (e->capture || e->graph)
		err = kvt_fail(-EINVAL, "event %u was recorded in a capture", handle);
	else if (recorded && !e->recorded)
		err = kvt_fail(-EAGAIN, "event %u was never recorded", handle);
	else
		*event = e->cu;
	pthread_mutex_unlock(&c->lock);
	return err ? err : kvt_cuda_enter(c, pushed);
}

int kvt_cuda_event_query(struct kvt_gpu *gpu, kvt_event handle)
{
	struct cuda *c = cuda_of(gpu);
	kvt_cu_handle event;
	kvt_cu_result result;
	bool pushed;
	int err = begin_event(c, handle, false, &event, &pushed);

	if (err)
		return err;
	result = c->cu->EventQuery(event);
	err = result == KVT_CU_NOT_READY ? 0 : kvt_cuda_check(c, result, "event %u", handle);
	kvt_cuda_leave(c, pushed);
	return err ? err : !result;
}

int kvt_cuda_event_sync(struct kvt_gpu *gpu, kvt_event handle)
{
	struct cuda *c = cuda_of(gpu);
	kvt_cu_handle event;
	bool pushed;
	int err = begin_event(c, handle, false, &event, &pushed);

	if (err)
		return err;
	err = kvt_cuda_check(c, c->cu->EventSynchronize(event), "event %u", handle);
	kvt_cuda_leave(c, pushed);
	return err;
}

int kvt_cuda_event_elapsed(struct kvt_gpu *gpu, kvt_event from, kvt_event to, float *ms)
{
	struct cuda *c = cuda_of(gpu);
	kvt_cu_handle a, b;
	bool pushed;
	int err = begin_event(c, from, true, &a, &pushed);

	if (err)
		return err;
	kvt_cuda_leave(c, pushed);
	err = begin_event(c, to, true, &b, &pushed);
	if (err)
		return err;
	err = kvt_cuda_check(c, c->cu->EventElapsedTime(ms, a, b), "events %u and %u have not both been reached", from, to);
	kvt_cuda_leave(c, pushed);
	return err;
}
