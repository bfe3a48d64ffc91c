// SPDX-License-Identifier: MIT
/* The ABI's promises: sizes old and new, and each bad input alone with its errno. */
#include "vt.h"

/* A struct of a newer program: with a tail. */
struct longer {
	union {
		struct kvtier_query query;
		struct kvtier_pool_create create;
		uint8_t bytes[512];
	};
};

static struct kvtier_pool_create good_pool(void)
{
	return (struct kvtier_pool_create) { .size = sizeof(struct kvtier_pool_create), .frame_bytes = 4096,
					     .n_frames = 1, .node = -1 };
}

CASE(query)
{
	struct kvtier_query q = { .size = sizeof(q) };

	CHECK(!ioctl(vt_device(), KVTIER_IOC_QUERY, &q));
	CHECK_EQ(q.abi_version, KVTIER_ABI_VERSION);
	CHECK_EQ(q.size, sizeof(q));
	CHECK((q.features & (KVTIER_FEATURE_POOL | KVTIER_FEATURE_NAMED | KVTIER_FEATURE_RECLAIM |
			     KVTIER_FEATURE_TRANSFER | KVTIER_FEATURE_URING_CMD)) == 31);
	CHECK(!(q.features & KVTIER_FEATURE_PEER));
	CHECK_EQ(q.min_frame_bytes, 4096);
	CHECK_EQ(q.max_frame_bytes, KVTIER_MAX_FRAME_BYTES);
	CHECK(q.max_bytes >= q.max_user_bytes && q.max_user_bytes > 0);
	CHECK_EQ(q.used_bytes, 0);
}

CASE(sizes)
{
	struct longer l = { .query = { .size = sizeof(l) } };
	struct kvtier_query q = { .size = sizeof(q) };

	/* Newer, with a tail of zeros; then not. */
	CHECK(!ioctl(vt_device(), KVTIER_IOC_QUERY, &l));
	CHECK_EQ(l.query.abi_version, KVTIER_ABI_VERSION);
	l.query.size = sizeof(l);
	l.bytes[sizeof(q)] = 1;
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_QUERY, &l), E2BIG);
	/* Newer by the number too: the type and the number decide. */
	l.bytes[sizeof(q)] = 0;
	CHECK(!ioctl(vt_device(), _IOWR(KVTIER_IOC_TYPE, 0x00, struct longer), &l));
	/* Shorter than the first release, by one, and by far; larger than any struct. */
	q.size = sizeof(q) - 1;
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_QUERY, &q), EINVAL);
	q.size = 0;
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_QUERY, &q), EINVAL);
	q.size = UINT32_MAX;
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_QUERY, &q), E2BIG);
}

CASE(numbers_and_pointers)
{
	struct kvtier_query q = { .size = sizeof(q) };
	int pool = vt_pool(0, 4096, 1);
	uint8_t *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(pool >= 0 && page != MAP_FAILED);
	CHECK_ERR(ioctl(vt_device(), _IOWR(KVTIER_IOC_TYPE, 0x7f, q), &q), ENOTTY);
	CHECK_ERR(ioctl(vt_device(), _IOWR(KVTIER_IOC_TYPE + 1, 0x00, q), &q), ENOTTY);
	CHECK_ERR(ioctl(vt_device(), _IOR(KVTIER_IOC_TYPE, 0x00, q), &q), ENOTTY);
	CHECK_ERR(ioctl(pool, KVTIER_IOC_QUERY, &q), ENOTTY);
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_POOL_STAT, &q), ENOTTY);
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_QUERY, NULL), EFAULT);
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_QUERY, (void *)-8L), EFAULT);
	/* A struct whose end is not there. */
	CHECK(!munmap(page + 4096, 4096));
	memcpy(page + 4096 - 8, &q, 8);
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_QUERY, page + 4096 - 8), EFAULT);
}

/* What cannot be told is undone. */
CASE(create_undone)
{
	struct kvtier_pool_create *ro, c = good_pool();

	ro = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(ro != MAP_FAILED);
	*ro = c;
	ro->mode = 0600;
	strcpy((char *)ro->name, "undone");
	CHECK(!mprotect(ro, 4096, PROT_READ));
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, ro), EFAULT);
	CHECK_ERR(vt_open("undone", 0), ENOENT);
}

CASE(pool_create)
{
	struct kvtier_pool_create c = good_pool();
#define BAD(field, value, err)                                                         \
	do {                                                                           \
		c = good_pool();                                                       \
		c.field = value;                                                       \
		CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &c), err);        \
	} while (0)

	BAD(flags, 1u << 31, EOPNOTSUPP);
	BAD(flags, KVTIER_POOL_STRICT_NODE, EINVAL); /* on which? */
	BAD(frame_bytes, 0, EINVAL);
	BAD(frame_bytes, 4095, EINVAL);
	BAD(frame_bytes, 4097, EINVAL);
	BAD(frame_bytes, KVTIER_MAX_FRAME_BYTES + 4096, EINVAL);
	BAD(n_frames, 0, EINVAL);
	BAD(n_frames, KVTIER_MAX_FRAMES + 1, EINVAL);
	BAD(n_frames, UINT32_MAX, EINVAL);
	/* Frames that no mapping could reach. */
	c = good_pool();
	c.frame_bytes = KVTIER_MAX_FRAME_BYTES;
	c.n_frames = KVTIER_MMAP_WORDS / KVTIER_MAX_FRAME_BYTES + 1;
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &c), EINVAL);
	BAD(node, -2, EINVAL);
	BAD(node, 1 << 20, ENODEV);
	BAD(node, INT32_MAX, ENODEV);
	BAD(node, 63, ENODEV);
	BAD(mode, 0600, EINVAL); /* without a name */
	BAD(__reserved, 1, EINVAL);
	BAD(name[0], '.', EINVAL);
	BAD(name[0], '/', EINVAL);
	BAD(name[0], 0xff, EINVAL);
	BAD(name[1], 'x', EINVAL); /* behind the NUL */
	c = good_pool();
	memset(c.name, 'x', sizeof(c.name)); /* without a NUL */
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &c), EINVAL);
	c = good_pool();
	strcpy((char *)c.name, "x");
	c.mode = 0700;
	CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &c), EINVAL);
#undef BAD
	c = good_pool();
	CHECK(!ioctl(vt_device(), KVTIER_IOC_POOL_CREATE, &c));
	CHECK(fcntl(c.fd, F_GETFD) & FD_CLOEXEC);
	CHECK(c.id > 0);
}

CASE(pool_range)
{
	struct kvtier_range r = { .size = sizeof(r), .n = 1 };
	int pool = vt_pool(KVTIER_POOL_LAZY, 4096, 4);

	CHECK(pool >= 0);
	r.flags = 1;
	CHECK_ERR(ioctl(pool, KVTIER_IOC_POPULATE, &r), EOPNOTSUPP);
	CHECK_ERR(vt_range(pool, KVTIER_IOC_POPULATE, 0, 0), EINVAL);
	CHECK_ERR(vt_range(pool, KVTIER_IOC_POPULATE, 4, 1), EINVAL);
	CHECK_ERR(vt_range(pool, KVTIER_IOC_POPULATE, 1, 4), EINVAL);
	CHECK_ERR(vt_range(pool, KVTIER_IOC_RELEASE, UINT32_MAX, 2), EINVAL);
	CHECK_EQ(vt_range(pool, KVTIER_IOC_POPULATE, 1, 3), 3);
	CHECK_EQ(vt_range(pool, KVTIER_IOC_POPULATE, 0, 4), 1);
	CHECK_EQ(vt_range(pool, KVTIER_IOC_POPULATE, 0, 4), 0);
	CHECK_EQ(vt_range(pool, KVTIER_IOC_RELEASE, 0, 4), 4);
	CHECK_EQ(vt_range(pool, KVTIER_IOC_RELEASE, 0, 4), 0);
}

CASE(mapping)
{
	int pool = vt_pool(0, 8192, 3), ro;

	CHECK(pool >= 0);
#define MAP(len, flags, off) (mmap(NULL, len, PROT_READ, flags, pool, off) == MAP_FAILED ? -1 : 0)
	CHECK_ERR(MAP(4096, MAP_PRIVATE, 0), EINVAL);
	CHECK_ERR(MAP(8192 * 4, MAP_SHARED, 0), EINVAL);
	CHECK_ERR(MAP(4096, MAP_SHARED, 8192 * 3), EINVAL);
	CHECK_ERR(MAP(8192, MAP_SHARED, KVTIER_MMAP_WORDS), EINVAL);
	CHECK_ERR(MAP(4096, MAP_SHARED, KVTIER_MMAP_WORDS + 4096), EINVAL);
	CHECK_ERR(MAP(8192, MAP_SHARED, KVTIER_MMAP_HEADER), EINVAL);
	CHECK_ERR(MAP(4096, MAP_SHARED, KVTIER_MMAP_HEADER + 4096), EINVAL);
	CHECK_ERR(MAP(4096, MAP_SHARED, INT64_MAX & ~4095ll), EINVAL);
	CHECK(!MAP(8192 * 3, MAP_SHARED, 0));
	CHECK(!MAP(4096, MAP_SHARED, 4096 * 5));
	CHECK(!MAP(4096, MAP_SHARED, KVTIER_MMAP_WORDS));
	CHECK(!MAP(4096, MAP_SHARED, KVTIER_MMAP_HEADER));
#undef MAP
	/* Growing a mapping past the frames. */
	CHECK_ERR(mremap(vt_map(pool, 8192, 3), 8192 * 3, 8192 * 8, MREMAP_MAYMOVE) == MAP_FAILED ? -1 : 0, EFAULT);

	CHECK(vt_pool_named("ro", 0600, 4096, 1) >= 0);
	ro = vt_open("ro", KVTIER_OPEN_RDONLY);
	CHECK(ro >= 0);
	CHECK_ERR(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, ro, 0) == MAP_FAILED ? -1 : 0, EACCES);
	CHECK(mmap(NULL, 4096, PROT_READ, MAP_SHARED, ro, 0) != MAP_FAILED);
	CHECK_ERR(vt_range(ro, KVTIER_IOC_RELEASE, 0, 1), EBADF);
	CHECK(!vt_remove("ro"));
}

CASE(queue_create)
{
	struct kvtier_queue_create q;
#define BAD(field, value, err)                                                                             \
	do {                                                                                               \
		q = (struct kvtier_queue_create) { .size = sizeof(q), .depth = 1, .eventfd = -1 };         \
		q.field = value;                                                                           \
		CHECK_ERR(ioctl(vt_device(), KVTIER_IOC_QUEUE_CREATE, &q), err);                           \
	} while (0)

	BAD(flags, 1, EOPNOTSUPP);
	BAD(depth, 0, EINVAL);
	BAD(depth, KVTIER_MAX_DEPTH + 1, EINVAL);
	BAD(eventfd, -2, EINVAL);
	BAD(eventfd, 999, EBADF);
	BAD(eventfd, vt_device(), EINVAL);
	BAD(__reserved, 1, EINVAL);
#undef BAD
	CHECK(vt_queue(KVTIER_MAX_DEPTH, -1) >= 0);
}

CASE(submit)
{
	int pool = vt_pool(0, 8192, 2), queue = vt_queue(4, -1), file = vt_file("/tmp", 0, 1 << 20), pipes[2];
	int append = vt_file("/tmp", O_APPEND, 4096), ro = open("/init", O_RDONLY), dir = open("/", O_RDONLY);
	struct kvtier_submit s;
	struct kvtier_xfer x;
#define GOOD() (x = (struct kvtier_xfer) { .op = KVTIER_XFER_WRITE, .fd = file, .bytes = 4096 })
#define BAD(field, value, err)                                        \
	do {                                                          \
		GOOD();                                               \
		x.field = value;                                      \
		CHECK_ERR(vt_submit(queue, pool, &x, 1), err);        \
	} while (0)
#define BAD_SUBMIT(field, value, err)                                                                               \
	do {                                                                                                        \
		GOOD();                                                                                             \
		s = (struct kvtier_submit) { .size = sizeof(s), .pool_fd = pool, .n = 1, .item_bytes = sizeof(x),   \
					     .items = (uintptr_t)&x };                                              \
		s.field = value;                                                                                    \
		CHECK_ERR(ioctl(queue, KVTIER_IOC_SUBMIT, &s), err);                                                \
	} while (0)

	CHECK(pool >= 0 && queue >= 0 && ro >= 0 && dir >= 0 && !pipe(pipes));
	BAD(op, 2, EINVAL);
	BAD(fd, -1, EBADF);
	BAD(fd, ro, EBADF); /* not open for writing */
	BAD(fd, pipes[1], EINVAL);
	BAD(fd, append, EINVAL);
	BAD(fd, pool, EINVAL);
	BAD(fd, queue, EINVAL);
	BAD(frame, 2, EINVAL);
	BAD(frame, UINT32_MAX, EINVAL);
	BAD(frame_offset, 8192, EINVAL);
	BAD(frame_offset, 8192 - 4095, EINVAL);
	BAD(bytes, 0, EINVAL);
	BAD(bytes, 8193, EINVAL);
	BAD(__reserved, 1, EINVAL);
	BAD(offset, (uint64_t)INT64_MAX, EINVAL);
	BAD(offset, UINT64_MAX, EINVAL);
	GOOD();
	x.op = KVTIER_XFER_READ;
	x.fd = dir;
	CHECK_ERR(vt_submit(queue, pool, &x, 1), EINVAL);
	BAD_SUBMIT(flags, 1, EOPNOTSUPP);
	BAD_SUBMIT(pool_fd, -1, EBADF);
	BAD_SUBMIT(pool_fd, file, EBADF);
	BAD_SUBMIT(pool_fd, queue, EBADF);
	BAD_SUBMIT(n, 0, EINVAL);
	BAD_SUBMIT(item_bytes, sizeof(x) - 1, EINVAL);
	BAD_SUBMIT(item_bytes, 1 << 20, E2BIG);
	BAD_SUBMIT(__reserved, 1, EINVAL);
	BAD_SUBMIT(items, 0, EFAULT);
	/* A good item before a bad one is accepted, alone. */
	struct kvtier_xfer two[2] = { GOOD(), GOOD() };

	two[0].user = 7;
	two[1].frame = 99;
	CHECK_EQ(vt_submit(queue, pool, two, 2), 1);
	CHECK_EQ(vt_wait(queue, 7), 4096);
#undef GOOD
#undef BAD
#undef BAD_SUBMIT
}

CASE(reap_cancel_drain)
{
	int pool = vt_pool(0, 4096, 1), queue = vt_queue(2, -1), file = vt_file("/tmp", 0, 4096);
	struct kvtier_xfer x = { .op = KVTIER_XFER_WRITE, .fd = file, .bytes = 4096, .user = 5 };
	struct kvtier_reap r = { .size = sizeof(r), .n = 1 };
	struct kvtier_cancel c = { .size = sizeof(c), .flags = 1 };
	struct kvtier_drain d = { .size = sizeof(d), .flags = 1 };
	struct kvtier_done done;

	CHECK_ERR(ioctl(queue, KVTIER_IOC_CANCEL, &c), EOPNOTSUPP);
	CHECK_ERR(ioctl(queue, KVTIER_IOC_DRAIN, &d), EOPNOTSUPP);
	CHECK_ERR(vt_reap(queue, &done, 0), EINVAL);
	CHECK_EQ(vt_reap(queue, &done, 1), 0);
	CHECK_EQ(vt_submit(queue, pool, &x, 1), 1);
	d.flags = 0;
	CHECK(!ioctl(queue, KVTIER_IOC_DRAIN, &d));
	/* Told to nowhere, it is not lost. */
	CHECK_ERR(ioctl(queue, KVTIER_IOC_REAP, &r), EFAULT);
	CHECK_EQ(vt_wait(queue, 5), 4096);
	c.flags = 0;
	c.user = 5;
	CHECK_EQ(ioctl(queue, KVTIER_IOC_CANCEL, &c), 0);
}
