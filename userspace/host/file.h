/* SPDX-License-Identifier: MIT */
/* The slot file, as the host implementations share it. */
#ifndef KVT_HOST_FILE_H
#define KVT_HOST_FILE_H

#include "host/host.h"

struct kvt_file {
	int fd; /* -1: this entry of the host's table is free */
	uint32_t n_slots;
	uint64_t frame_bytes;
	int32_t fixed;	 /* index in io_uring's file table, or -1 */
	bool drop_cache; /* buffered: tell the page cache that it need not keep a slot */
	bool kept;	 /* has a name */
	struct kvt_file_info info;
	char fs[24];
	char reason[160];
};

/* Create (or, with a name, open), probe and size the file. Fills @file, but for @fixed. */
int kvt_slot_file_open(struct kvt_file *file, const struct kvt_file_params *params, uint64_t frame_bytes);

/* Gives an unnamed file's disk space back even while a child of fork() holds the descriptor. */
void kvt_slot_file_close(struct kvt_file *file);

#endif
