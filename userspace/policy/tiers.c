// SPDX-License-Identifier: MIT
/* What all policies share: their names, the cascade from tier to tier, and marks with a distance between them. */
#include <stddef.h>
#include <string.h>

#include "policy/policy.h"

const struct kvt_policy_ops *kvt_policy_find(const char *name)
{
	static const struct kvt_policy_ops *const all[] = { &kvt_policy_auto, &kvt_policy_cost, &kvt_policy_scan,
							    &kvt_policy_s3fifo, &kvt_policy_lru };

	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		if (!strcmp(all[i]->name, name))
			return all[i];
	return NULL;
}

uint32_t kvt_policy_below(const struct kvt_policy_params *p, uint32_t tier, uint32_t recompute_ns)
{
	uint32_t recompute = recompute_ns ? recompute_ns : p->recompute_ns;

	for (uint32_t t = tier + 1; t < KVT_TIERS; t++)
		if (p->frames[t] && (!recompute || p->reload_ns[t] < recompute))
			return t;
	return KVT_TIERS;
}

bool kvt_policy_between(bool *on, uint64_t level, uint64_t low, uint64_t high)
{
	if (level > high)
		*on = true;
	else if (level <= low)
		*on = false;
	return *on;
}
