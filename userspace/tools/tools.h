/* SPDX-License-Identifier: MIT */
/* The commands of the kvtier program. Exit codes: 0 done, 1 failed, 2 wrong usage. */
#ifndef KVT_TOOLS_TOOLS_H
#define KVT_TOOLS_TOOLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

int cmd_run(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int bench_gpu(int argc, char **argv);  /* kvtier bench gpu */
int bench_load(int argc, char **argv); /* kvtier bench load */
int cmd_inspect(int argc, char **argv);
int cmd_sample(int argc, char **argv);
int cmd_pools(int argc, char **argv);
int cmd_stat(int argc, char **argv);
int cmd_store(int argc, char **argv);
int cmd_replay(int argc, char **argv);

/* "4096", "64K", "1.5G": bytes, K = 1024. -EINVAL (a message in kvt_last_error()) for anything else. */
int tool_size(const char *text, uint64_t *bytes);

/* A whole number in [min, max]; -EINVAL with a message naming @option. */
int tool_number(const char *option, const char *text, uint64_t min, uint64_t max, uint64_t *value);

/* A number in decimal, or "-inf"; -EINVAL with a message naming @option. */
int tool_real(const char *option, const char *text, double *value);

/*
 * A message of the library names its parameters; whoever runs a command knows
 * options. A command that has some sets the table, ended by a NULL, before it
 * does anything else; messages are then printed with the one for the other.
 */
struct tool_word {
	const char *library, *option;
};
extern const struct tool_word *tool_words;
const char *tool_message(const char *line, char *buf, size_t bytes); /* returns @buf */

/* Print "kvtier COMMAND: message" and return the exit code. */
int tool_usage_error(const char *command, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/*
 * The same where getopt_long() returned @found, ':' or '?'. Its letters begin
 * with ':' and opterr is 0, so that it prints nothing itself.
 */
struct option;
int tool_option_error(const char *command, int found, char **argv, const struct option *options);

int tool_failed(const char *command);	/* prints kvt_last_error() */

/*
 * A stream that remembers its first failure: errno of a write that a buffer
 * put off is gone by the time that somebody asks. @s must outlive it, and
 * fclose() leaves @fd open. tool_stream_flush(): 0, or -errno of the first
 * write that failed. The other two: stdout as such a stream.
 */
struct tool_stream {
	int fd, failure;
};
FILE *tool_stream_open(struct tool_stream *s, int fd); /* NULL: no memory */
int tool_stream_flush(const struct tool_stream *s, FILE *f);
void tool_output_begin(void);
int tool_output_end(void);

/*
 * Progress on stderr: a bar on a terminal; elsewhere a line every ten seconds
 * where it is asked for, or the environment says CI=true. @what: "prefill", ...
 */
enum tool_progress_mode { TOOL_PROGRESS_AUTO, TOOL_PROGRESS_ALWAYS, TOOL_PROGRESS_NEVER };

struct tool_progress {
	const char *what, *unit;
	uint64_t total;
	double start, last;
	enum { TOOL_PROGRESS_OFF, TOOL_PROGRESS_BAR, TOOL_PROGRESS_LINES } form;
	bool printed;
	/* for the caller to set: what was done before it began; each unit takes longer than the one before */
	uint64_t from;
	bool grows;
	uint64_t last_done, half_done; /* samples, at each of which twice as much was done, and how long it had taken */
	double last_s, half_s;
};
void tool_progress_start(struct tool_progress *p, enum tool_progress_mode mode, const char *what, const char *unit,
			 uint64_t total);
void tool_progress_update(struct tool_progress *p, uint64_t done);
void tool_progress_end(struct tool_progress *p);

#endif
