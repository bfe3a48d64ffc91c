/* SPDX-License-Identifier: MIT */
/* The CUDA kernels in this binary. */
#ifndef KVT_GPU_FATBIN_H
#define KVT_GPU_FATBIN_H

/* The fatbin, or NULL in a build without. */
const void *kvt_fatbin(void);

#endif
