/* SPDX-License-Identifier: MIT */
/* Errors carry words: a negative errno, and the thread's last message (kvt_last_error()). */
#ifndef KVT_BASE_ERR_H
#define KVT_BASE_ERR_H

#include "kvtier.h"

/*
 * Record a message for the calling thread and return @err (a negative errno).
 * The message says what was asked, how much, the limit, and which knob changes it.
 */
int kvt_fail(int err, const char *fmt, ...) __attribute__((format(printf, 2, 3), cold));

/* As kvt_fail(), with ": " and the previous message behind it: for adding what the caller was doing. */
int kvt_fail_more(int err, const char *fmt, ...) __attribute__((format(printf, 2, 3), cold));

/* Hand a line (without a newline) to the log callback; dropped where none is set. */
void kvt_log(enum kvt_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3), cold));

#endif
