// SPDX-License-Identifier: MIT
/* Progress: one line on stderr, redrawn ten times a second; where that is no terminal, a line every ten seconds, or nothing. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tools/measure.h"
#include "tools/tools.h"

#define BAR 30
#define REDRAW_S 0.1
#define LINE_S 10

/* @n with a unit (of 1000), short: 950, 12.3K, 410K. */
static const char *short_number(char *buf, size_t bytes, double n)
{
	static const char units[] = " KMGT";
	int u = 0;

	for (; n >= 9999.5 && u < 4; u++)
		n /= 1000;
	snprintf(buf, bytes, u && n < 99.95 ? "%.1f%.*s" : "%.0f%.*s", n, u ? 1 : 0, &units[u]);
	return buf;
}

/*
 * Seconds for what is left. Where each unit takes longer than the one before, as the tokens of a prompt do, which look at all
 * before them, unit i took a + 2 x b x i; a sample at about half of what is done says how much of either.
 */
static double seconds_left(const struct tool_progress *p, double done, double elapsed)
{
	double each = elapsed / (done - p->from), b = 0;

	if (p->grows && p->half_done > p->from) {
		b = (each - p->half_s / (p->half_done - p->from)) / (done - p->half_done);
		b = b < 0 ? 0 : b * (done + p->from) > each ? each / (done + p->from) : b;
	}
	return (p->total - done) * (each + b * (p->total - p->from));
}

static void draw(const struct tool_progress *p, uint64_t done, double t)
{
	double part = p->total ? (double)done / p->total : 1, elapsed = t - p->start, rate;
	char bar[BAR + 1], a[16], b[16], c[16];
	int fill, i;

	if (part > 1)
		part = 1;
	rate = elapsed > 0 && done > p->from ? (done - p->from) / elapsed : 0;
	fill = part * BAR;
	for (i = 0; i < BAR; i++)
		bar[i] = i < fill ? '=' : i == fill ? '>' : ' ';
	bar[BAR] = 0;
	if (p->form == TOOL_PROGRESS_BAR)
		fprintf(stderr, "\r%s [%s]", p->what, bar);
	else
		fprintf(stderr, "%s", p->what);
	fprintf(stderr, " %3.0f %%  %s/%s %s  %s/s", part * 100, short_number(a, sizeof(a), done),
		short_number(b, sizeof(b), p->total), p->unit, short_number(c, sizeof(c), rate));
	if (rate > 0 && done < p->total)
		fprintf(stderr, "  %.0f s left", seconds_left(p, done, elapsed));
	fputs(p->form == TOOL_PROGRESS_BAR ? "\033[K" : "\n", stderr);
	fflush(stderr);
}

void tool_progress_start(struct tool_progress *p, enum tool_progress_mode mode, const char *what, const char *unit,
			 uint64_t total)
{
	const char *ci = getenv("CI");

	*p = (struct tool_progress){ .what = what, .unit = unit, .total = total };
	p->start = p->last = now();
	if (mode == TOOL_PROGRESS_NEVER)
		p->form = TOOL_PROGRESS_OFF;
	else if (isatty(STDERR_FILENO))
		p->form = TOOL_PROGRESS_BAR;
	else if (mode == TOOL_PROGRESS_ALWAYS || (ci && !strcmp(ci, "true")))
		p->form = TOOL_PROGRESS_LINES;
	if (p->form == TOOL_PROGRESS_BAR)
		draw(p, 0, p->start);
}

void tool_progress_update(struct tool_progress *p, uint64_t done)
{
	double t;

	if (p->form == TOOL_PROGRESS_OFF)
		return;
	t = now();
	if (done > p->from && (p->last_done <= p->from || done - p->from >= 2 * (p->last_done - p->from))) {
		p->half_done = p->last_done;
		p->half_s = p->last_s;
		p->last_done = done;
		p->last_s = t - p->start;
	}
	/* the end is worth a line where there were others, a last bar always */
	if (t - p->last < (p->form == TOOL_PROGRESS_BAR ? REDRAW_S : LINE_S) &&
	    (done < p->total || (p->form == TOOL_PROGRESS_LINES && !p->printed)))
		return;
	p->last = t;
	p->printed = true;
	draw(p, done, t);
}

void tool_progress_end(struct tool_progress *p)
{
	if (p->form == TOOL_PROGRESS_BAR)
		fputc('\n', stderr);
	p->form = TOOL_PROGRESS_OFF;
}
