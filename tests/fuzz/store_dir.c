// SPDX-License-Identifier: MIT
/*
 * Any bytes as a superblock and as a log. The first byte chooses which; a log is made
 * to hold by putting in the checks that a mutation broke, so that the fields behind them are reached.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"
#include "store/journal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void must(int holds)
{
	if (!holds)
		abort();
}

static void read_log(const uint8_t *log, uint64_t bytes)
{
	struct kvt_log_record r;
	uint64_t before = 0, sum = 0;

	for (uint64_t at = 0; kvt_log_next(log, bytes, 1, &at, &r); before = at) {
		must(r.at >= before && r.end == at && at <= bytes && r.end - r.at == r.head.bytes);
		if (r.head.type == KVT_LOG_ROOT)
			for (uint32_t i = 0; i < r.head.n_tokens; i++)
				sum += ((const uint8_t *)r.key)[i];
		if (r.head.type != KVT_LOG_CHUNK)
			continue;
		for (uint32_t i = 0; i < r.head.n_tokens; i++)
			sum += r.tokens[i];
		for (uint32_t i = 0; i < r.head.n_blocks; i++)
			sum += r.entries[i].slot;
	}
	must(sum != UINT64_MAX);
}

/* A record whose head is the input's, and whose checks hold. */
static void read_made(const uint8_t *data, size_t bytes)
{
	static uint64_t buf[4096];
	struct kvt_log_head h;
	uint64_t size;

	if (bytes < sizeof(h))
		return;
	memcpy(&h, data, sizeof(h));
	h.n_tokens %= 600;
	h.n_blocks %= 100;
	size = kvt_log_bytes(h.type, h.n_tokens, h.n_blocks);
	if (size > sizeof(buf) || bytes - sizeof(h) < size)
		return;
	if (h.type != KVT_LOG_ROOT && h.type != KVT_LOG_CHUNK)
		h.n_tokens = h.n_blocks = 0;
	if (h.type == KVT_LOG_ROOT)
		h.n_blocks = 0;
	kvt_log_make(buf, &h, 1, data + sizeof(h), (const void *)(data + sizeof(h)));
	read_log((const uint8_t *)buf, kvt_log_bytes(h.type, h.n_tokens, h.n_blocks));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	uint8_t *copy;

	if (!bytes)
		return 0;
	copy = malloc(bytes); /* aligned, and one byte longer than what is read */
	if (!copy)
		return 0;
	memcpy(copy, data + 1, bytes - 1);
	if (data[0] % 3 == 0)
		must(kvt_super_check(copy, bytes - 1) <= 0);
	else if (data[0] % 3 == 1)
		read_log(copy, bytes - 1);
	else
		read_made(copy, bytes - 1);
	free(copy);
	return 0;
}
