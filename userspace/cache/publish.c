// SPDX-License-Identifier: MIT
/* One thread that waits for whoever wants a cache's counters. */
#include "cache/publish.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/err.h"

struct kvt_publish {
	struct kvt_cache *cache;
	int socket;
	atomic_bool stop;
	pthread_t thread;
	char text[KVT_PUBLISH_MAX];
};

uint64_t kvt_publish_bytes(void)
{
	return sizeof(struct kvt_publish) + KVT_PUBLISH_STACK;
}

static bool may_see(int peer)
{
	struct ucred who;
	socklen_t n = sizeof(who);

	return !getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &who, &n) && (!who.uid || who.uid == geteuid());
}

static void *publish_main(void *arg)
{
	struct kvt_publish *p = arg;

	while (!atomic_load(&p->stop)) {
		int peer = accept4(p->socket, NULL, NULL, SOCK_CLOEXEC);
		int64_t n;

		if (peer < 0) {
			if (errno != EINVAL) /* that is a shutdown; no more descriptors may pass */
				usleep(100000);
			continue;
		}
		n = may_see(peer) ? kvt_cache_stats_json(p->cache, p->text, sizeof(p->text)) : -EPERM;
		if (n > 0 && n < (int64_t)sizeof(p->text)) /* who does not read it gets nothing, and holds up nobody */
			(void)!send(peer, p->text, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL);
		close(peer);
	}
	return NULL;
}

/* A name that is free: caches of a process count up. */
static int bind_name(int fd)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int err = EADDRINUSE;

	for (unsigned int i = 0; err == EADDRINUSE && i < 1024; i++) {
		int n = snprintf(at.sun_path + 1, sizeof(at.sun_path) - 1, KVT_PUBLISH_NAME, getpid(), i);

		err = bind(fd, (struct sockaddr *)&at, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)) ?
			      errno : 0;
	}
	return -err;
}

static int start(struct kvt_publish *p)
{
	sigset_t all, old;
	pthread_attr_t attr;
	int err;

	p->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (p->socket < 0)
		return -errno;
	err = -bind_name(p->socket);
	if (!err && listen(p->socket, 8))
		err = errno;
	if (!err) { /* its stack is no place for the program's signal handlers */
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &old);
		pthread_attr_init(&attr);
		pthread_attr_setstacksize(&attr, KVT_PUBLISH_STACK);
		err = pthread_create(&p->thread, &attr, publish_main, p);
		pthread_attr_destroy(&attr);
		pthread_sigmask(SIG_SETMASK, &old, NULL);
	}
	if (err)
		close(p->socket);
	return -err;
}

int kvt_publish_start(struct kvt_cache *cache, struct kvt_publish **publish)
{
	struct kvt_publish *p = calloc(1, sizeof(*p));
	int ret;

	if (!p)
		return kvt_fail(-ENOMEM, "no memory for a socket's buffer");
	p->cache = cache;
	ret = start(p);
	if (ret) {
		free(p);
		return kvt_fail(ret, "a socket for other processes to read counters from: %s",
				strerror(-ret));
	}
	*publish = p;
	return 0;
}

void kvt_publish_stop(struct kvt_publish *p)
{
	if (!p)
		return;
	atomic_store(&p->stop, true);
	shutdown(p->socket, SHUT_RDWR);
	pthread_join(p->thread, NULL);
	close(p->socket);
	free(p);
}
