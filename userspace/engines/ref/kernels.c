// SPDX-License-Identifier: MIT
/* Which instruction set the engine's kernels run on. */
#include <stddef.h>

#include "engines/ref/kernels.h"

const struct ref_kernels *ref_kernels(const char *name)
{
	static const struct ref_kernels *const table[KVT_ISAS] = KVT_ISA_TABLE(&ref_kernels);
	enum kvt_isa isa = name ? kvt_isa_find(name) : kvt_isa_best();

	return isa < KVT_ISAS && kvt_isa_usable(isa) ? table[isa] : NULL;
}
