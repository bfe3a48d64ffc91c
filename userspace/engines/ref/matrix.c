// SPDX-License-Identifier: MIT
/* Weight matrices packed into panels, so that a product reads them front to back. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "engines/ref/engine.h"

static float *element(const struct ref_matrix *m, uint32_t j, uint32_t i)
{
	return m->panels + ((uint64_t)(j / REF_PANEL) * m->k + i) * REF_PANEL + j % REF_PANEL;
}

uint64_t ref_matrix_bytes(uint32_t n, uint32_t k)
{
	return ((uint64_t)n + REF_PANEL - 1) / REF_PANEL * REF_PANEL * k * sizeof(float);
}

int ref_matrix_alloc(struct ref_matrix *m, uint32_t n, uint32_t k)
{
	uint64_t bytes = ref_matrix_bytes(n, k);

	*m = (struct ref_matrix){ .n = n, .k = k };
	m->panels = aligned_alloc(64, bytes);
	if (!m->panels)
		return kvt_fail(-ENOMEM, "no memory for a matrix of %u x %u floats, %llu bytes", n, k,
				(unsigned long long)bytes);
	if (n % REF_PANEL)
		memset(element(m, n - n % REF_PANEL, 0), 0, (uint64_t)k * REF_PANEL * sizeof(float));
	return 0;
}

void ref_matrix_free(struct ref_matrix *m)
{
	free(m->panels);
	*m = (struct ref_matrix){ 0 };
}

void ref_matrix_set(struct ref_matrix *m, uint32_t j, const float *row)
{
	float *to = element(m, j, 0);

	for (uint32_t i = 0; i < m->k; i++)
		to[(size_t)i * REF_PANEL] = row[i];
}

void ref_matrix_row(const struct ref_matrix *m, uint32_t j, float *row)
{
	const float *from = element(m, j, 0);

	for (uint32_t i = 0; i < m->k; i++)
		row[i] = from[(size_t)i * REF_PANEL];
}
