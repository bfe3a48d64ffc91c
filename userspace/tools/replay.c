// SPDX-License-Identifier: MIT
/* kvtier replay: the command, its report as text or JSON, and a picture of hit rate over cache size. */
#include "tools/replay.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "tools/outfile.h"
#include "tools/tools.h"

#define TOKEN_BYTES (128u << 10) /* 32 layers of 8 heads of 128 elements, K and V, of 2 bytes */
#define TOKENS_PER_S 8000
#define MAX_POLICIES 8
#define SIZES 10 /* of the picture */

struct options {
	const char *path, *plot;
	enum trace_format format;
	bool json;
	const struct kvt_policy_ops *policies[MAX_POLICIES];
	uint32_t n_policies;
	uint64_t bytes[KVT_TIERS]; /* of a tier; */
	double percent[KVT_TIERS]; /* or of the distinct blocks, where it is not negative */
	struct replay_params params;
};

/* ---- options ---- */

static int find_tier(const char *name, size_t len, uint32_t *tier)
{
	for (*tier = 0; *tier < KVT_TIERS; (*tier)++) {
		const char *known = kvt_tier_name(*tier);

		if (strlen(known) == len && !strncmp(known, name, len))
			return 0;
	}
	return kvt_fail(-EINVAL, "\"%.*s\" is no tier: gpu, pinned, ram or disk expected", (int)len, name);
}

/* "ram=10%,disk=4G": a call of @set for each. */
static int each_tier(const char *list, int (*set)(struct options *, uint32_t tier, const char *value), struct options *o)
{
	char value[64];
	uint32_t tier;
	int ret;

	do {
		size_t len = strcspn(list, ","), name = strcspn(list, "=,");

		if (name == len || len - name - 1 >= sizeof(value))
			return kvt_fail(-EINVAL, "\"%.*s\": TIER=SIZE expected", (int)len, list);
		ret = find_tier(list, name, &tier);
		if (ret)
			return ret;
		snprintf(value, sizeof(value), "%.*s", (int)(len - name - 1), list + name + 1);
		ret = set(o, tier, value);
		if (ret)
			return ret;
		list += len;
	} while (*list++);
	return 0;
}

static int set_size(struct options *o, uint32_t tier, const char *value)
{
	size_t len = strlen(value);
	char *end;

	if (o->bytes[tier] || o->percent[tier] >= 0)
		return kvt_fail(-EINVAL, "the %s tier has two sizes", kvt_tier_name(tier));
	if (!len || value[len - 1] != '%')
		return tool_size(value, &o->bytes[tier]);
	o->percent[tier] = strtod(value, &end);
	if (value[strspn(value, "0123456789.")] != '%' || end != value + len - 1 || o->percent[tier] > 100)
		return kvt_fail(-EINVAL, "\"%s\": a percentage from 0 to 100 is needed", value);
	return 0;
}

static int set_rate(struct options *o, uint32_t tier, const char *value)
{
	int ret = tool_size(value, &o->params.load_bytes_per_s[tier]);

	if (!ret && !o->params.load_bytes_per_s[tier])
		ret = kvt_fail(-EINVAL, "%s=0: a rate is needed", kvt_tier_name(tier));
	return ret;
}

static int set_policies(struct options *o, const char *list)
{
	char name[32];

	o->n_policies = 0;
	do {
		size_t len = strcspn(list, ",");

		snprintf(name, sizeof(name), "%.*s", (int)len, list);
		if (o->n_policies == MAX_POLICIES)
			return kvt_fail(-EINVAL, "at most %u policies at once", MAX_POLICIES);
		o->policies[o->n_policies] = len < sizeof(name) ? kvt_policy_find(name) : NULL;
		if (!o->policies[o->n_policies++])
			return kvt_fail(-EINVAL, "\"%.*s\" is no policy: auto, cost, scan, s3fifo or lru expected", (int)len, list);
		list += len;
	} while (*list++);
	return 0;
}

static int set_option(struct options *o, const char *name, const char *value)
{
	uint64_t number;
	int ret;

	if (!strcmp(name, "--policy"))
		return set_policies(o, value);
	if (!strcmp(name, "--tier"))
		return each_tier(value, set_size, o);
	if (!strcmp(name, "--load"))
		return each_tier(value, set_rate, o);
	if (!strcmp(name, "--plot")) {
		o->plot = value;
		return 0;
	}
	if (!strcmp(name, "--format")) {
		if (strcmp(value, "mooncake") && strcmp(value, "agentic"))
			return kvt_fail(-EINVAL, "--format \"%s\": mooncake or agentic expected", value);
		o->format = strcmp(value, "mooncake") ? TRACE_AGENTIC : TRACE_MOONCAKE;
		return 0;
	}
	if (!strcmp(name, "--token-bytes")) {
		ret = tool_size(value, &o->params.token_bytes);
		if (!ret && (!o->params.token_bytes || o->params.token_bytes > 1u << 30))
			ret = kvt_fail(-EINVAL, "--token-bytes %s: 1 to 1G expected", value);
		return ret;
	}
	ret = tool_number(name, value, 1, 1000000000, &number);
	o->params.tokens_per_s = number;
	return ret;
}

static bool takes_value(const char *name)
{
	static const char *const names[] = { "--policy", "--tier", "--load", "--plot", "--format", "--token-bytes", "--prefill" };

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (!strcmp(names[i], name))
			return true;
	return false;
}

static int parse(int argc, char **argv, struct options *o)
{
	size_t len;

	*o = (struct options){
		.policies = { &kvt_policy_auto }, .n_policies = 1, .percent = { -1, -1, -1, -1 },
		.params = { .token_bytes = TOKEN_BYTES, .tokens_per_s = TOKENS_PER_S,
			    .load_bytes_per_s = { 0, 55000000000, 8000000000, 2000000000 } },
	};
	o->format = TRACE_MOONCAKE;
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--json")) {
			o->json = true;
		} else if (takes_value(argv[i])) {
			if (i + 1 == argc)
				return tool_usage_error("replay", "%s needs a value", argv[i]);
			if (set_option(o, argv[i], argv[i + 1]))
				return tool_usage_error("replay", "%s", kvt_last_error());
			i++;
		} else if (argv[i][0] == '-' && argv[i][1]) {
			return tool_usage_error("replay", "\"%s\" is not an option", argv[i]);
		} else if (o->path) {
			return tool_usage_error("replay", "one TRACE, not \"%s\" too", argv[i]);
		} else {
			o->path = argv[i];
			/* a session is one JSON object; --format, before or behind, says otherwise */
			len = strlen(o->path);
			if (len > 5 && !strcmp(o->path + len - 5, ".json"))
				o->format = TRACE_AGENTIC;
		}
	}
	for (int i = 1; i + 1 < argc; i++)
		if (!strcmp(argv[i], "--format"))
			set_option(o, argv[i], argv[i + 1]);
	if (!o->path)
		return tool_usage_error("replay", "a TRACE is needed");
	for (uint32_t i = 0; i < KVT_TIERS; i++)
		if (o->bytes[i] || o->percent[i] > 0)
			return 0;
	return tool_usage_error("replay", "no tier has a size: --tier ram=10%%, say");
}

/* Tier sizes in blocks, once the trace is known. */
static int set_frames(struct options *o, const struct trace *t)
{
	uint64_t block_bytes = o->params.token_bytes * t->block_tokens, frames;

	for (uint32_t i = 0; i < KVT_TIERS; i++) {
		frames = o->percent[i] >= 0 ? (uint64_t)(o->percent[i] * t->n_distinct / 100) : o->bytes[i] / block_bytes;
		if (!frames && (o->bytes[i] || o->percent[i] > 0))
			frames = o->percent[i] > 0; /* a share of a small trace is a block at least */
		if (!frames && o->bytes[i])
			return kvt_fail(-EINVAL, "%s=%llu bytes holds no block: %u tokens of %llu bytes take %llu (--token-bytes)",
					kvt_tier_name(i), (unsigned long long)o->bytes[i], t->block_tokens,
					(unsigned long long)o->params.token_bytes, (unsigned long long)block_bytes);
		/* more than the trace has changes nothing */
		o->params.frames[i] = frames < t->n_distinct ? (uint32_t)frames : t->n_distinct;
	}
	return 0;
}

/* ---- the report ---- */

static uint64_t sum(const uint64_t v[KVT_TIERS])
{
	return v[0] + v[1] + v[2] + v[3];
}

static void print_text(const struct options *o, const struct trace *t, const struct replay_result *r, uint64_t best)
{
	uint64_t block_bytes = o->params.token_bytes * t->block_tokens;

	printf("%s: %u requests, %llu blocks of %u tokens (%.1f KiB each), %u of them distinct\n", o->path, t->n_requests,
	       (unsigned long long)t->n_blocks, t->block_tokens, (double)block_bytes / 1024, t->n_distinct);
	for (uint32_t p = 0; p < o->n_policies; p++) {
		uint64_t hits = sum(r[p].hits);

		printf("\npolicy %s: %.2f %% of blocks hit (%llu); the optimum is %.2f %% (%llu), of which this is %.1f %%\n",
		       o->policies[p]->name, 100.0 * (double)hits / (double)t->n_blocks, (unsigned long long)hits,
		       100.0 * (double)best / (double)t->n_blocks, (unsigned long long)best,
		       best ? 100.0 * (double)hits / (double)best : 100.0);
		printf("  tier        blocks        hits  hit rate      loaded      stored\n");
		for (uint32_t i = 0; i < KVT_TIERS; i++)
			if (o->params.frames[i])
				printf("  %-8s %9u %11llu %8.2f%% %7.1f GiB %7.1f GiB\n", kvt_tier_name(i), o->params.frames[i],
				       (unsigned long long)r[p].hits[i], 100.0 * (double)r[p].hits[i] / (double)t->n_blocks,
				       (double)r[p].loaded_bytes[i] / (1 << 30), (double)r[p].stored_bytes[i] / (1 << 30));
		printf("  %llu tokens found, %llu computed; %llu blocks dropped\n", (unsigned long long)r[p].tokens_hit,
		       (unsigned long long)r[p].tokens_computed, (unsigned long long)r[p].dropped);
		printf("  modelled time to first token: p50 %.3f s, p99 %.3f s\n", r[p].ttft_p50, r[p].ttft_p99);
	}
}

static json_t *json_tiers(const struct options *o, const struct replay_result *r)
{
	json_t *tiers = json_object();

	for (uint32_t i = 0; i < KVT_TIERS; i++)
		if (o->params.frames[i])
			json_object_set_new(tiers, kvt_tier_name(i),
					    json_pack("{s:I,s:I,s:I,s:I}", "blocks", (json_int_t)o->params.frames[i], "hits",
						      (json_int_t)r->hits[i], "loaded_bytes", (json_int_t)r->loaded_bytes[i],
						      "stored_bytes", (json_int_t)r->stored_bytes[i]));
	return tiers;
}

static int print_json(const struct options *o, const struct trace *t, const struct replay_result *r, uint64_t best)
{
	json_t *root = json_pack("{s:s,s:I,s:I,s:I,s:I,s:I,s:I,s:[]}", "trace", o->path, "requests", (json_int_t)t->n_requests,
				 "block_tokens", (json_int_t)t->block_tokens, "blocks", (json_int_t)t->n_blocks, "distinct",
				 (json_int_t)t->n_distinct, "token_bytes", (json_int_t)o->params.token_bytes, "optimum_hits",
				 (json_int_t)best, "policies");
	char decisions[20];
	int ret;

	for (uint32_t p = 0; p < o->n_policies; p++) {
		snprintf(decisions, sizeof(decisions), "%016llx", (unsigned long long)r[p].decisions);
		json_array_append_new(json_object_get(root, "policies"),
				      json_pack("{s:s,s:I,s:o,s:I,s:I,s:I,s:f,s:f,s:s}", "policy", o->policies[p]->name, "hits",
						(json_int_t)sum(r[p].hits), "tiers", json_tiers(o, &r[p]), "tokens_hit",
						(json_int_t)r[p].tokens_hit, "tokens_computed", (json_int_t)r[p].tokens_computed,
						"dropped", (json_int_t)r[p].dropped, "ttft_p50_s", r[p].ttft_p50, "ttft_p99_s",
						r[p].ttft_p99, "decisions", decisions));
	}
	ret = root ? json_dumpf(root, stdout, JSON_INDENT(1)) : -1;
	putchar('\n');
	json_decref(root);
	return ret ? kvt_fail(-ENOMEM, "no memory for the report") : 0;
}

/* ---- the picture ---- */

#define WIDTH 640
#define HEIGHT 400
#define LEFT 60
#define BOTTOM 350
#define PLOT_W 440
#define PLOT_H 310

static const double shares[SIZES] = { 0.5, 1, 2, 5, 10, 15, 25, 50, 75, 100 }; /* % of the distinct blocks; evenly spaced */

static void draw_line(FILE *f, uint32_t row, const char *name, const double rate[SIZES], const char *dash)
{
	static const char *const colours[] = { "#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999",
					       "#7f3c8d" };
	const char *colour = colours[row % (sizeof(colours) / sizeof(colours[0]))];

	fprintf(f, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s points=\"", colour, dash);
	for (uint32_t i = 0; i < SIZES; i++)
		fprintf(f, "%s%.1f,%.1f", i ? " " : "", LEFT + (double)PLOT_W * i / (SIZES - 1), BOTTOM - PLOT_H * rate[i]);
	fprintf(f, "\"/>\n<text x=\"%d\" y=\"%u\" fill=\"%s\">%s</text>\n", LEFT + PLOT_W + 15, 60 + 20 * row, colour, name);
}

/* One tier, of several sizes: how near is each policy to the optimum? */
static int plot(const struct options *o, const struct trace *t)
{
	struct replay_params p = o->params;
	double rate[MAX_POLICIES + 1][SIZES];
	struct tool_progress progress;
	struct replay_result r;
	struct outfile out;
	uint64_t best = 0;
	int ret = outfile_open(&out, o->plot);

	if (ret)
		return ret;
	p.progress = NULL;
	tool_progress_start(&progress, TOOL_PROGRESS_AUTO, "plot", "sizes", SIZES);
	for (uint32_t i = 0; i < SIZES && !ret; i++) {
		uint32_t frames = (uint32_t)(shares[i] * t->n_distinct / 100);

		memset(p.frames, 0, sizeof(p.frames));
		p.frames[KVT_TIER_RAM] = frames ? frames : 1;
		ret = replay_optimum(t, p.frames[KVT_TIER_RAM], &best);
		rate[0][i] = (double)best / (double)t->n_blocks;
		for (uint32_t k = 0; k < o->n_policies && !ret; k++) {
			p.policy = o->policies[k];
			ret = replay_run(t, &p, &r);
			rate[k + 1][i] = (double)sum(r.hits) / (double)t->n_blocks;
		}
		tool_progress_update(&progress, i + 1);
	}
	tool_progress_end(&progress);
	if (ret) {
		outfile_abort(&out);
		return ret;
	}
	fprintf(out.f, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" font-size=\"13\">\n",
		WIDTH, HEIGHT);
	fprintf(out.f, "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n<text x=\"%d\" y=\"22\">Blocks hit, by cache size in %% of the %u distinct blocks</text>\n",
		LEFT, t->n_distinct);
	for (int i = 0; i <= 4; i++)
		fprintf(out.f, "<line x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\" stroke=\"#ddd\"/><text x=\"%d\" y=\"%d\" text-anchor=\"end\">%d %%</text>\n",
			LEFT, LEFT + PLOT_W, BOTTOM - PLOT_H * i / 4, BOTTOM - PLOT_H * i / 4, LEFT - 8,
			BOTTOM - PLOT_H * i / 4 + 4, i * 25);
	for (int i = 0; i < SIZES; i++)
		fprintf(out.f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%g</text>\n", LEFT + PLOT_W * i / (SIZES - 1),
			BOTTOM + 20, shares[i]);
	draw_line(out.f, 0, "optimum", rate[0], " stroke-dasharray=\"6 4\"");
	for (uint32_t k = 0; k < o->n_policies; k++)
		draw_line(out.f, k + 1, o->policies[k]->name, rate[k + 1], "");
	fprintf(out.f, "</svg>\n");
	return outfile_commit(&out);
}

static void show_progress(void *arg, uint64_t requests)
{
	tool_progress_update(arg, requests);
}

static int replay(struct options *o, const struct trace *t)
{
	struct replay_result r[MAX_POLICIES];
	struct tool_progress progress;
	uint64_t best = 0, frames = 0;
	int ret = set_frames(o, t);

	if (ret)
		return ret;
	for (uint32_t k = 0; k < o->n_policies && !ret; k++) {
		tool_progress_start(&progress, TOOL_PROGRESS_AUTO, o->policies[k]->name, "requests", t->n_requests);
		o->params.policy = o->policies[k];
		o->params.progress = show_progress;
		o->params.arg = &progress;
		ret = replay_run(t, &o->params, &r[k]);
		tool_progress_end(&progress);
	}
	for (uint32_t i = 0; i < KVT_TIERS; i++)
		frames += o->params.frames[i];
	if (!ret)
		ret = replay_optimum(t, frames, &best);
	if (!ret && o->plot)
		ret = plot(o, t);
	if (ret)
		return ret;
	if (o->json)
		return print_json(o, t, r, best);
	print_text(o, t, r, best);
	return 0;
}

int cmd_replay(int argc, char **argv)
{
	struct options o;
	struct trace t;
	int ret = parse(argc, argv, &o);

	if (ret)
		return ret;
	if (trace_read(o.path, o.format, &t))
		return tool_failed("replay");
	ret = replay(&o, &t);
	trace_free(&t);
	return ret ? tool_failed("replay") : 0;
}
