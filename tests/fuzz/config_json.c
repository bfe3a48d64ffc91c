// SPDX-License-Identifier: MIT
/* Any bytes as config.json: refused with one line, or a configuration within the limits the engine relies on. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engines/ref/engine.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void must(int holds)
{
	if (!holds)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct ref_config c;

	if (ref_config_parse((const char *)data, bytes, &c)) {
		must(kvt_last_error()[0] && !strchr(kvt_last_error(), '\n'));
		return 0;
	}
	must(c.vocab && c.vocab <= 1u << 22 && c.hidden && c.inter && c.layers && c.layers <= 1024 && c.context);
	must(c.heads && c.kv_heads && c.heads % c.kv_heads == 0 && c.heads <= 1024);
	must(c.head_dim >= 8 && c.head_dim <= 512 && c.head_dim % 2 == 0);
	must(c.eps >= 0 && c.eps <= 1 && c.rope_theta >= 1 && c.bos >= -1 && c.bos < (int64_t)c.vocab);
	must(c.n_eos <= REF_EOS_MAX);
	for (uint32_t i = 0; i < c.n_eos; i++)
		must(c.eos[i] < c.vocab);
	must(c.rope == REF_ROPE_PLAIN || c.rope_factor >= 1);
	return 0;
}
