/* SPDX-License-Identifier: MIT */
/*
 * The frame of the tests that run in a guest: each case in a process of its own, and after each the module must be as
 * empty as before. `PROGRAM [CASE...]` runs all cases or those named; exit 1 if one failed.
 */
#ifndef VT_H
#define VT_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <linux/kvtier.h>

#define VT_TIMEOUT 1200 /* seconds a case: only for what hangs; guests are slow, and their host may be busy */

struct vt_case {
	const char *name;
	void (*fn)(void);
	struct vt_case *next;
};

extern struct vt_case *vt_cases;

#define CASE(_name)                                                                     \
	static void _name(void);                                                        \
	static struct vt_case vt_case_##_name = { .name = #_name, .fn = _name };        \
	__attribute__((constructor)) static void vt_add_##_name(void)                   \
	{                                                                               \
		struct vt_case **at = &vt_cases;                                        \
		while (*at)                                                             \
			at = &(*at)->next;                                              \
		*at = &vt_case_##_name;                                                 \
	}                                                                               \
	static void _name(void)

#define CHECK(cond)                                                                                     \
	do {                                                                                            \
		if (!(cond)) {                                                                          \
			printf("  %s:%d: %s (errno %d, %s)\n", __FILE__, __LINE__, #cond, errno, strerror(errno)); \
			_exit(1);                                                                       \
		}                                                                                       \
	} while (0)

#define CHECK_EQ(a, b)                                                                                        \
	do {                                                                                                  \
		long long va = (long long)(a), vb = (long long)(b);                                           \
		if (va != vb) {                                                                               \
			printf("  %s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #a, va, #b, vb);      \
			_exit(1);                                                                             \
		}                                                                                             \
	} while (0)

/* A call that must fail with this errno. */
#define CHECK_ERR(call, err)                                                                                     \
	do {                                                                                                     \
		long r_ = (long)(call);                                                                          \
		int e_ = errno;                                                                                  \
		if (r_ != -1 || e_ != (err)) {                                                                   \
			printf("  %s:%d: %s gave %ld, %s instead of %s\n", __FILE__, __LINE__, #call, r_,        \
			       r_ == -1 ? strerror(e_) : "no error", strerror(err));                             \
			_exit(1);                                                                                \
		}                                                                                                \
	} while (0)

/* Exit with the reason: the case does not apply here. */
#define SKIP(...)                      \
	do {                           \
		printf("  skipped: "); \
		printf(__VA_ARGS__);   \
		printf("\n");          \
		_exit(77);             \
	} while (0)

#define KIB 1024u
#define MIB (1024u * 1024u)

/* ---- the module ---- */

int vt_device(void);
/* A pool of @n frames; the ioctl's result, or the descriptor. */
int vt_pool(uint32_t flags, uint32_t frame_bytes, uint32_t n);
int vt_pool_named(const char *name, uint32_t mode, uint32_t frame_bytes, uint32_t n);
int vt_open(const char *name, uint32_t flags);
int vt_remove(const char *name);
struct kvtier_pool_stat vt_stat(int pool);
uint8_t *vt_map(int pool, uint32_t frame_bytes, uint32_t n);
_Atomic uint64_t *vt_words(int pool, uint32_t n);
int vt_range(int pool, unsigned long cmd, uint32_t first, uint32_t n);
int vt_queue(uint32_t depth, int eventfd);
int vt_submit(int queue, int pool, const struct kvtier_xfer *items, uint32_t n);
int vt_reap(int queue, struct kvtier_done *done, uint32_t n);
/* Wait for one completion and return its result. */
int vt_wait(int queue, uint64_t user);
long long vt_sysfs(const char *name); /* of /sys/kernel/kvtier */
void vt_set_param(const char *name, unsigned long long value);

/* ---- around it ---- */

/* A scratch file of @bytes in /mnt (ext4 where there is a disk) or /tmp; unlinked. */
int vt_file(const char *dir, int flags, off_t bytes);
void vt_fill(uint8_t *p, size_t n, uint32_t seed);
bool vt_filled(const uint8_t *p, size_t n, uint32_t seed);
/* Run fn in a child; its exit status, or -signal. */
int vt_child(void (*fn)(void *), void *arg);
/* Does touching @p end in SIGBUS? */
bool vt_sigbus(const volatile uint8_t *p);
int vt_kernel(void); /* 601 for 6.1 */
void vt_become_user(void); /* uid 1000, no capabilities */
void vt_send_fd(int sock, int fd);
int vt_recv_fd(int sock);

#endif
