// SPDX-License-Identifier: GPL-2.0-only
/* Where the tracepoints' code is generated. */
#define CREATE_TRACE_POINTS
#include "trace.h"
