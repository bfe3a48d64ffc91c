// SPDX-License-Identifier: MIT
/* The thread's last error message, and the one log callback of the process. */
#include "base/err.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MESSAGE_BYTES 512

static _Thread_local char message[MESSAGE_BYTES];

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static kvt_log_fn log_fn;
static void *log_user;

const char *kvt_last_error(void)
{
	return message;
}

int kvt_fail(int err, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(message, sizeof(message), fmt, ap);
	va_end(ap);
	return err;
}

int kvt_fail_more(int err, const char *fmt, ...)
{
	char before[MESSAGE_BYTES];
	va_list ap;
	size_t n;

	memcpy(before, message, sizeof(before));
	va_start(ap, fmt);
	vsnprintf(message, sizeof(message), fmt, ap);
	va_end(ap);
	/* cut where it is too long, which snprintf() would do with a warning */
	n = strlen(message);
	strncat(message, ": ", sizeof(message) - 1 - n);
	n = strlen(message);
	strncat(message, before, sizeof(message) - 1 - n);
	return err;
}

void kvt_set_log(kvt_log_fn fn, void *user)
{
	pthread_mutex_lock(&log_lock);
	log_fn = fn;
	log_user = user;
	pthread_mutex_unlock(&log_lock);
}

void kvt_log(enum kvt_log_level level, const char *fmt, ...)
{
	char line[MESSAGE_BYTES];
	kvt_log_fn fn;
	void *user;
	va_list ap;

	pthread_mutex_lock(&log_lock);
	fn = log_fn;
	user = log_user;
	pthread_mutex_unlock(&log_lock);
	if (!fn)
		return;
	va_start(ap, fmt);
	vsnprintf(line, sizeof(line), fmt, ap);
	va_end(ap);
	fn(user, level, line);
}
