// SPDX-License-Identifier: MIT
/* Any text as cases of kvtier sample: an error, or results that are JSON. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "tools/sample.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	json_t *parsed;
	char *results;

	if (tool_sample_cases((const char *)data, size, &results)) {
		if (results)
			abort();
		return 0;
	}
	parsed = json_loads(results, 0, NULL);
	if (!json_is_array(parsed))
		abort();
	json_decref(parsed);
	free(results);
	return 0;
}
