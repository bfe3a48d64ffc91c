/* SPDX-License-Identifier: MIT */
/* kvtier sample without its files: a JSON text of cases in, a JSON text of results out. */
#ifndef KVT_TOOLS_SAMPLE_H
#define KVT_TOOLS_SAMPLE_H

#include <stddef.h>

/*
 * *@results (free() it) is a list with one object a case: "name" with "kept",
 * "probs", "logits_after" and "token", or with "error". -EINVAL: @text is not a
 * list of named cases; nothing is made then.
 */
int tool_sample_cases(const char *text, size_t bytes, char **results);

#endif
