/* SPDX-License-Identifier: MIT */
/* The commands of the kvtier program. Exit codes: 0 done, 1 failed, 2 wrong usage. */
#ifndef KVT_TOOLS_TOOLS_H
#define KVT_TOOLS_TOOLS_H

#include <stdbool.h>
#include <stdint.h>

int cmd_run(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_sample(int argc, char **argv);

/* "4096", "64K", "1.5G": bytes, K = 1024. -EINVAL (a message in kvt_last_error()) for anything else. */
int tool_size(const char *text, uint64_t *bytes);

/* A whole number in [min, max]; -EINVAL with a message naming @option. */
int tool_number(const char *option, const char *text, uint64_t min, uint64_t max, uint64_t *value);

/* Print "kvtier COMMAND: message" and return the exit code. */
int tool_usage_error(const char *command, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int tool_failed(const char *command);	/* prints kvt_last_error() */

/* A progress bar on stderr: silent where that is not a terminal. @what: "prefill", ... */
struct tool_progress {
	const char *what, *unit;
	uint64_t total;
	double start, last;
	bool on;
};
void tool_progress_start(struct tool_progress *p, const char *what, const char *unit, uint64_t total);
void tool_progress_update(struct tool_progress *p, uint64_t done);
void tool_progress_end(struct tool_progress *p);

#endif
