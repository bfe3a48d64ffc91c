/* SPDX-License-Identifier: MIT */
/* Run-time detection of instruction sets; base/cpu.h. */
#include "base/cpu.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/err.h"

static const char *const names[KVT_ISAS] = {
	[KVT_PORTABLE] = "portable",
	[KVT_NEON] = "neon",
	[KVT_AVX2] = "avx2",
	[KVT_AVX512] = "avx512",
};

#if defined(__x86_64__)
/* Not every compiler's __builtin_cpu_supports() knows it. */
static bool has_f16c(void)
{
	unsigned int a, b, c, d;

	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* __builtin_cpu_supports() also asks whether the kernel saves the registers. */
bool kvt_isa_usable(enum kvt_isa isa)
{
	switch (isa) {
	case KVT_PORTABLE:
		return true;
#if defined(__x86_64__)
	case KVT_AVX2:
		return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
	case KVT_AVX512:
		return kvt_isa_usable(KVT_AVX2) && __builtin_cpu_supports("avx512f") &&
		       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
		       __builtin_cpu_supports("avx512vl");
#elif defined(__aarch64__)
	case KVT_NEON:
		return true;
#endif
	default:
		return false;
	}
}

const char *kvt_isa_name(enum kvt_isa isa)
{
	return isa < KVT_ISAS ? names[isa] : NULL;
}

enum kvt_isa kvt_isa_find(const char *name)
{
	enum kvt_isa isa = 0;

	while (isa < KVT_ISAS && strcmp(name, names[isa]))
		isa++;
	return isa;
}

static enum kvt_isa choose(void)
{
	const char *want = getenv("KVTIER_ISA");
	enum kvt_isa isa;

	if (want && *want) {
		isa = kvt_isa_find(want);
		if (isa < KVT_ISAS && kvt_isa_usable(isa))
			return isa;
		kvt_log(KVT_LOG_WARN, "KVTIER_ISA=%s: this CPU or build does not have it, ignored", want);
	}
	for (isa = KVT_ISAS - 1; !kvt_isa_usable(isa); isa--)
		;
	return isa;
}

enum kvt_isa kvt_isa_best(void)
{
	static _Atomic int chosen = -1;
	int isa = atomic_load_explicit(&chosen, memory_order_relaxed);

	if (isa < 0) {
		isa = (int)choose();
		atomic_store_explicit(&chosen, isa, memory_order_relaxed);
	}
	return (enum kvt_isa)isa;
}
