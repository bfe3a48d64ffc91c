// SPDX-License-Identifier: MIT
/* The names of things that users read and write, and the version. */
#include "kvtier.h"

#define STR(x) #x
#define VERSION(a, b, c) STR(a) "." STR(b) "." STR(c)

const char *kvt_version(void)
{
	return VERSION(KVT_VERSION_MAJOR, KVT_VERSION_MINOR, KVT_VERSION_PATCH);
}

const char *kvt_tier_name(enum kvt_tier tier)
{
	static const char *const names[KVT_TIERS] = { "gpu", "pinned", "ram", "disk" };

	return (unsigned int)tier < KVT_TIERS ? names[tier] : NULL;
}

const char *kvt_codec_name(enum kvt_codec codec)
{
	static const char *const names[KVT_CODECS] = { "f32", "f16", "bf16", "q8_0", "q4_0" };

	return (unsigned int)codec < KVT_CODECS ? names[codec] : NULL;
}
