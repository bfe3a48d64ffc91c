// SPDX-License-Identifier: MIT
/* kvtier stat: the caches of running processes, as they say themselves (cache/publish.h). */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <jansson.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/err.h"
#include "cache/publish.h"
#include "tools/tools.h"

/* What the cache behind an abstract name says; its length, or -errno. */
static ssize_t fetch(const char *name, char *text)
{
	const struct timeval patience = { .tv_sec = 3 };
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	ssize_t n = -1;

	if (fd < 0)
		return -errno;
	strcpy(at.sun_path + 1, name);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)); /* of connect() too */
	if (!connect(fd, (struct sockaddr *)&at, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name))))
		n = recv(fd, text, KVT_PUBLISH_MAX - 1, 0);
	n = n < 0 ? -errno : n ? n : -EACCES; /* closed without a word: another user's */
	close(fd);
	return n;
}

static double number(json_t *stats, const char *tier, const char *key)
{
	return json_number_value(json_object_get(json_object_get(json_object_get(stats, "tier"), tier), key));
}

/* Bytes that hold something: what is set aside, less the empty places. */
static double filled(json_t *stats, const char *tier)
{
	return number(stats, tier, "used") - number(stats, tier, "frames_free") *
					     json_number_value(json_object_get(stats, "block_bytes"));
}

static void print_line(int pid, json_t *stats)
{
	static const char *const tiers[] = { "gpu", "pinned", "ram", "disk" };
	double hits = json_number_value(json_object_get(stats, "hits")), misses = json_number_value(json_object_get(stats, "misses"));

	printf("%7d %-16.16s", pid, json_string_value(json_object_get(stats, "name")));
	for (size_t i = 0; i < sizeof(tiers) / sizeof(tiers[0]); i++) {
		char text[32] = "-";

		if (number(stats, tiers[i], "budget") > 0)
			snprintf(text, sizeof(text), "%.1f/%.1f", filled(stats, tiers[i]) / (1 << 20),
				 number(stats, tiers[i], "budget") / (1 << 20));
		printf(" %15s", text);
	}
	printf(" %5.1f %10.1f %10.1f\n", hits + misses > 0 ? 100 * hits / (hits + misses) : 0,
	       json_number_value(json_object_get(stats, "disk_read_bytes")) / (1 << 20),
	       json_number_value(json_object_get(stats, "disk_write_bytes")) / (1 << 20));
}

/* Every cache of @pid, or of all processes for 0: a line each, or all as one JSON list. */
static int show(int pid, bool as_json)
{
	char *line = NULL, *text = malloc(KVT_PUBLISH_MAX);
	FILE *f = fopen("/proc/net/unix", "re");
	json_t *all = json_array();
	size_t room = 0;
	int seen = 0, silent = 0;

	if (!f || !text || !all) {
		if (f)
			fclose(f);
		free(text);
		json_decref(all);
		return kvt_fail(f ? -ENOMEM : -ENOENT, f ? "no memory" : "/proc/net/unix: %s", strerror(errno));
	}
	while (getline(&line, &room, f) > 0) {
		char *name = strstr(line, " @kvtier/"), exact[64];
		unsigned int number;
		json_t *stats;
		int owner;
		ssize_t n;

		/* sockets that wait for connections; those that have one bear the name too */
		if (!name || sscanf(name, " @" KVT_PUBLISH_NAME, &owner, &number) != 2 || !strstr(line, " 00010000 ") ||
		    (pid && owner != pid))
			continue;
		snprintf(exact, sizeof(exact), KVT_PUBLISH_NAME, owner, number);
		n = fetch(exact, text);
		text[n > 0 ? n : 0] = '\0';
		stats = json_loads(text, 0, NULL);
		if (!stats) {
			silent++;
			kvt_fail(n < 0 ? (int)n : -EPROTO, "process %d does not say what its cache does: %s", owner,
				 n == -EACCES ? "it is another user's" : n < 0 ? strerror((int)-n) : "another version of kvtier");
			continue;
		}
		if (!as_json && !seen)
			printf("%7s %-16s %15s %15s %15s %15s %5s %10s %10s\n", "process", "name", "gpu MiB", "pinned MiB",
			       "ram MiB", "disk MiB", "hit %", "read MiB", "written MiB");
		seen++;
		if (!as_json)
			print_line(owner, stats);
		json_object_set_new(stats, "process", json_integer(owner));
		json_array_append_new(all, stats);
	}
	fclose(f);
	if (as_json && (seen || !pid)) {
		json_dumpf(all, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
		putchar('\n');
	}
	json_decref(all);
	free(line);
	free(text);
	if (silent && (pid || !seen))
		return -EIO;
	if (pid && !seen)
		return kvt_fail(-ESRCH, "process %d has no cache that says what it does (KVT_CACHE_PUBLISH)", pid);
	if (!seen && !as_json)
		printf("no process has a cache that says what it does\n");
	return 0;
}

int cmd_stat(int argc, char **argv)
{
	static const struct option options[] = { { "json", no_argument, NULL, 'j' }, { 0 } };
	bool as_json = false;
	uint64_t pid = 0;
	int found;

	opterr = 0;
	while ((found = getopt_long(argc, argv, ":", options, NULL)) != -1) {
		if (found != 'j')
			return tool_option_error("stat", found, argv, options);
		as_json = true;
	}
	if (argc - optind > 1)
		return tool_usage_error("stat", "one process at most expected");
	if (optind < argc && tool_number("PID", argv[optind], 1, INT32_MAX, &pid))
		return tool_usage_error("stat", "%s", kvt_last_error());
	return show((int)pid, as_json) ? tool_failed("stat") : 0;
}
