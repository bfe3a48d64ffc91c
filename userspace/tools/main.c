// SPDX-License-Identifier: MIT
/* The kvtier command: one table of commands, each with its help, and a hint for a mistyped name. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvtier.h"
#include "tools/tools.h"

struct command {
	const char *name;
	int (*run)(int argc, char **argv);
	const char *summary;
	const char *help; /* usage and options; docs/man/kvtier.1 says more */
};

static const struct command commands[] = {
	{ "run", cmd_run, "generate text with a model, its KV cache in tiers",
	  "usage: kvtier run --model DIR (--prompt TEXT | --prompt-file FILE) [options]\n"
	  "\n"
	  "  --model DIR          a model of the Llama architecture: a Hugging Face directory, or a GGUF file\n"
	  "  --tokenizer FILE     its tokenizer, where that is not found beside it\n"
	  "  --prompt TEXT        the prompt\n"
	  "  --prompt-file FILE   the prompt, read from a file\n"
	  "  --max-tokens N       stop after N new tokens; default 128\n"
	  "  --no-fast-load       load the weights through mmap, whatever the file system can do\n"
	  "  --temperature X      0, the default: always the likeliest token (greedy); above: draw\n"
	  "  --top-k N            draw among the N likeliest; 0, the default: all\n"
	  "  --top-p P            draw among the likeliest with a probability of P together; default 1: all\n"
	  "  --min-p P            draw among those at least P times as likely as the likeliest; default 0: all\n"
	  "  --top-n-sigma X      draw among logits within X standard deviations of the largest; default 0: all\n"
	  "  --repetition-penalty X, --presence-penalty X, --frequency-penalty X\n"
	  "                       make tokens of prompt and text less likely; defaults 1, 0, 0: no less\n"
	  "  --penalty-last-n N   those of the last N tokens; 0, the default: of all\n"
	  "  --logit-bias ID=X[,ID=X]...\n"
	  "                       add X to the logit of token ID; -inf: never this token\n"
	  "  --sampler-order NAME[,NAME]...\n"
	  "                       default: bias,penalties,top_n_sigma,top_k,top_p,min_p,temperature\n"
	  "  --seed N             of the draws: the same N, the same text; default 0\n"
	  "  --gpu-bytes SIZE     budget of the gpu tier; default 0\n"
	  "  --pinned-bytes SIZE  budget of the pinned tier (locked memory); default 0\n"
	  "  --ram-bytes SIZE     budget of the ram tier; metadata, scratch and stacks count too; default: the whole cache,\n"
	  "                       at most a quarter of the machine's memory; with --gpu-bytes or --pinned-bytes as little as works\n"
	  "  --disk-bytes SIZE    budget of the disk tier; default: room for the whole cache\n"
	  "  --disk-dir DIR       where the disk tier lives; default $TMPDIR, else /var/tmp\n"
	  "  --store DIR          keep the disk tier in DIR, of --disk-bytes at most: what a later run's prompt begins with\n"
	  "                       is not computed again; default of --disk-bytes then: room for eight such prompts\n"
	  "  --warm NAME          keep the ram tier in the kernel module, under NAME: also a killed run leaves it to the next\n"
	  "  --untiered           keep the whole cache in memory, for comparison; takes no budgets\n"
	  "  --block-bytes SIZE   unit of placement, 4K to 2M; default 64K\n"
	  "  --kv-type TYPE       f32, f16 (the default) or bf16\n"
	  "  --threads N          compute threads; default: all cores\n"
	  "  --prefill-chunk N    prompt tokens per step; default 512\n"
	  "  --host KIND          auto, user or module\n"
	  "  --backend KIND       auto, cpu or cuda\n"
	  "  --device N           which GPU, as kvtier doctor lists them; default 0\n"
	  "  --io KIND            auto, uring or threads\n"
	  "  --policy NAME        which blocks leave a tier: auto (the default), lru, s3fifo, cost or scan\n"
	  "  --progress WHEN      auto: on a terminal, and with CI=true a line every ten seconds; always; never\n"
	  "  --stats FILE         write counters as JSON\n"
	  "  --logits FILE        write the f32 logits of each generated position\n"
	  "\n"
	  "SIZE takes K, M, G or T (of 1024). Text goes to standard output, progress and the tier table to standard error.\n" },
	{ "doctor", cmd_doctor, "what this machine offers, and the command that mends what is missing",
	  "usage: kvtier doctor [--dir DIR]... [--json] [--root DIR]\n"
	  "\n"
	  "  --dir DIR   probe DIR for direct I/O; may be repeated; default $TMPDIR, else /var/tmp\n"
	  "  --json      print one JSON object\n"
	  "  --root DIR  read /proc, /sys, /dev and /boot below DIR (a container that sees the host's there)\n" },
	{ "bench", cmd_bench, "measure attention, streaming and bookkeeping on this machine", NULL },
	{ "inspect", cmd_inspect, "show what is in a weight file or model directory",
	  "usage: kvtier inspect FILE|DIR [--json]\n"
	  "\n"
	  "  --json  print one JSON object\n"
	  "\n"
	  "Format, metadata and tensors (name, dtype, shape, offset, bytes). Exit code 1, with the reason, for a bad file.\n" },
	{ "pools", cmd_pools, "memory that the kernel module holds, and taking a named pool away",
	  "usage: kvtier pools [--remove NAME]\n"
	  "\n"
	  "  --remove NAME  take the name away; the memory goes when nobody uses it any more\n"
	  "\n"
	  "Lists name, owner, mode, size and frames of each pool, and how many frames were taken for want of memory.\n" },
	{ "replay", cmd_replay, "what a prefix cache would have had of a trace, by policy and tier sizes",
	  "usage: kvtier replay TRACE --tier TIER=SIZE[,TIER=SIZE]... [options]\n"
	  "\n"
	  "  --tier TIER=SIZE       of gpu, pinned, ram, disk: bytes, or with a % of the trace's distinct blocks\n"
	  "  --policy NAME[,NAME]   auto (the default), cost, scan, s3fifo, lru\n"
	  "  --format FORMAT        mooncake (default), or agentic (default for a file named .json)\n"
	  "  --token-bytes SIZE     KV bytes of a token; default 128K\n"
	  "  --prefill N            tokens computed a second, in the model; default 8000\n"
	  "  --load TIER=SIZE       bytes loaded a second, in the model; default pinned 55, ram 8, disk 2 GB\n"
	  "  --json                 print one JSON object\n"
	  "  --plot FILE            draw hit rate over cache size (SVG)\n"
	  "\n"
	  "Hits, bytes moved, tokens computed, modelled time to first token, and the optimum (Belady's) for the same sizes.\n" },
	{ "sample", cmd_sample, "run the sampler on a file of cases",
	  "usage: kvtier sample --cases FILE\n"
	  "\n"
	  "  --cases FILE  a JSON list of cases: name, logits, params and, if wanted, history\n"
	  "\n"
	  "Prints a JSON list: name with kept, probs, logits_after and token, or with error.\n" },
	{ "stat", cmd_stat, "what the caches of running processes hold and do",
	  "usage: kvtier stat [PID] [--json]\n"
	  "\n"
	  "  --json  all counters, as one JSON list\n"
	  "\n"
	  "The caches of one process, or of all that are yours: kvtier run, llama.cpp with the plug-in, and programs that ask\n"
	  "for it. Exit code 1 for a process that has none.\n" },
	{ "store", cmd_store, "look after a directory that keeps chunks for later runs",
	  "usage: kvtier store ls|verify|compact|rm DIR [--json] [--force]\n"
	  "\n"
	  "  ls       what it holds, by model, adapter and tenant\n"
	  "  verify   read every block and compare it with its digest; exit code 1 if one is not what was written\n"
	  "  compact  write the log anew without what is gone\n"
	  "  rm       remove its files, and DIR if nothing else is in it\n"
	  "  --json   print one JSON object\n"
	  "  --force  rm: even if its superblock is damaged\n"
	  "\n"
	  "Refused while a process has DIR open.\n" },
};

#define COMMANDS (sizeof(commands) / sizeof(commands[0]))

static const struct command *find(const char *name)
{
	for (size_t i = 0; i < COMMANDS; i++)
		if (!strcmp(commands[i].name, name))
			return &commands[i];
	return NULL;
}

static size_t min3(size_t a, size_t b, size_t c)
{
	size_t m = a < b ? a : b;

	return m < c ? m : c;
}

/* Insertions, deletions and replacements between @a and a name of at most 15 letters. */
static size_t distance(const char *a, const char *name)
{
	size_t row[16], n = strlen(name), diagonal, above;

	for (size_t j = 0; j <= n; j++)
		row[j] = j;
	for (size_t i = 1; a[i - 1]; i++) {
		diagonal = row[0];
		row[0] = i;
		for (size_t j = 1; j <= n; j++) {
			above = row[j];
			row[j] = min3(diagonal + (a[i - 1] != name[j - 1]), above + 1, row[j - 1] + 1);
			diagonal = above;
		}
	}
	return row[n];
}

static int unknown(const char *name)
{
	const struct command *best = NULL;
	size_t d, least = 3;

	for (size_t i = 0; i < COMMANDS; i++) {
		d = distance(name, commands[i].name);
		if (d < least) {
			least = d;
			best = &commands[i];
		}
	}
	if (best)
		fprintf(stderr, "kvtier: no command \"%s\". Did you mean \"%s\"? (see: kvtier help)\n", name, best->name);
	else
		fprintf(stderr, "kvtier: no command \"%s\" (see: kvtier help)\n", name);
	return 2;
}

static void usage(FILE *to)
{
	fprintf(to, "usage: kvtier COMMAND [options]\n       kvtier help [COMMAND]\n       kvtier --version\n\ncommands:\n");
	for (size_t i = 0; i < COMMANDS; i++)
		fprintf(to, "  %-8s %s\n", commands[i].name, commands[i].summary);
}

static int help(const char *name)
{
	const struct command *c;

	if (!name) {
		usage(stdout);
		return 0;
	}
	c = find(name);
	if (!c)
		return unknown(name);
	if (!c->help)
		return c->run(2, (char *[]){ (char *)c->name, (char *)"--help", NULL });
	fputs(c->help, stdout);
	return 0;
}

static enum kvt_log_level log_level = KVT_LOG_WARN;

static void print_log(void *user, enum kvt_log_level level, const char *line)
{
	static const char *const names[] = { "error", "warning", "info", "debug" };
	char buf[800];

	(void)user;
	if (level <= log_level)
		fprintf(stderr, "kvtier: %s: %s\n", names[level], tool_message(line, buf, sizeof(buf)));
}

static int set_log(void)
{
	static const char *const levels[] = { "error", "warn", "info", "debug" };
	const char *want = getenv("KVTIER_LOG");
	size_t i;

	for (i = 0; want && i < 4 && strcmp(levels[i], want); i++)
		;
	if (want && i == 4) {
		fprintf(stderr, "kvtier: KVTIER_LOG is \"%s\": error, warn, info or debug are known\n", want);
		return 2;
	}
	if (want)
		log_level = i;
	kvt_set_log(print_log, NULL);
	return 0;
}

static bool is_help(const char *arg)
{
	return !strcmp(arg, "--help") || !strcmp(arg, "-h");
}

static int run(int argc, char **argv)
{
	const struct command *c;
	int code;

	if (argc < 2) {
		usage(stderr);
		return 2;
	}
	if (!strcmp(argv[1], "--version")) {
		if (argc > 2) {
			fprintf(stderr, "kvtier: --version takes nothing behind it, not \"%s\"\n", argv[2]);
			return 2;
		}
		printf("kvtier %s\n", kvt_version());
		return 0;
	}
	if (!strcmp(argv[1], "help") || is_help(argv[1])) {
		if (argc > 3) {
			fprintf(stderr, "kvtier help: one command at a time (see: kvtier help)\n");
			return 2;
		}
		return help(argv[2]);
	}
	c = find(argv[1]);
	if (!c)
		return unknown(argv[1]);
	if (argc == 3 && is_help(argv[2]) && c->help)
		return help(c->name);
	code = set_log();
	return code ? code : c->run(argc - 1, argv + 1);
}

/*
 * A file that is opened while a standard stream is closed gets that one's
 * number, and then what is printed. Something takes the number that can be
 * neither read nor written: EBADF, as if it were closed.
 */
static int occupy_standard(void)
{
	int fd;

	do {
		fd = open("/", O_PATH | O_CLOEXEC);
	} while (fd >= 0 && fd <= STDERR_FILENO);
	return fd < 0 ? -1 : close(fd);
}

int main(int argc, char **argv)
{
	int code, err;

	if (occupy_standard())
		return 1;
	tool_output_begin();
	code = run(argc, argv);
	err = tool_output_end();
	if (!err || code)
		return code;
	fprintf(stderr, "kvtier %s: standard output could not be written: %s\n", argv[1], strerror(-err));
	return 1;
}
