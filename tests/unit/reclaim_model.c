// SPDX-License-Identifier: MIT
/*
 * The state word's protocol, explored exhaustively: every interleaving of two users, one who releases, reclaim, and one who
 * touches the frame without holding it (a debugger, a prefetch), on one frame, step by step as kmod/frame.c,
 * kmod/mmap.c, kmod/reclaim.c and a careful user program do it. No frame is both held and taken, none is lost, no
 * mapping keeps pages that the frame has lost, nobody gets stuck. Each guard is then taken away in turn, and the model
 * must find what it guards against.
 */
#include <check.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "uapi/linux/kvtier.h"

enum { USER_A, USER_B, RELEASER, RECLAIM, STRAY, THREADS };
enum { GENERATIONS = 4 };

/* A guard that is left out. */
enum guard { ALL, NO_CAS_BY_KERNEL, NO_CAS_BY_USER, NO_LOCK_IN_FAULT, NO_ZAP, WORD_BEFORE_MEMORY, NO_RECHECK, GUARDS };

struct thread {
	uint8_t pc, state, generation; /* what it saw of the word */
};

struct state {
	uint8_t word, word_generation;
	uint8_t memory, page, content; /* has pages; which (by generation); are they filled */
	uint8_t pte; /* page + 1 */
	uint8_t generation; /* the kernel's */
	uint8_t writer, readers; /* of map_lock; writer is thread + 1 */
	struct thread threads[THREADS];
};

enum {
	LOOK, /* all begin here */
	HOLD, TOUCH, FAULT, MAP, READ, LET_GO, /* users */
	LOOK_MEMORY, LOCK, INSTALL, SET_HELD, UNLOCK, FILL_TOUCH, FILL_FAULT, FILL_MAP, FILL,
	TRY_LOCK, CLAIM, ZAP, DROP, SET_FREE, UNLOCK_FREE, /* reclaim; the releaser from LOCK_RELEASE */
	LOCK_RELEASE, SET_BUSY,
	STRAY_FAULT, STRAY_MAP,
};

static const char *violation;
static enum guard without;

static void bad(const char *what)
{
	if (!violation)
		violation = what;
}

static bool word_is(const struct state *s, const struct thread *t)
{
	return s->word == t->state && s->word_generation == t->generation;
}

static bool has_frame(int i, uint8_t pc)
{
	if (i == RECLAIM)
		return pc >= ZAP && pc <= SET_FREE;
	if (i == RELEASER && pc >= ZAP && pc <= LOCK_RELEASE)
		return pc != UNLOCK_FREE;
	return (pc >= TOUCH && pc <= LET_GO) || (pc >= FILL_TOUCH && pc <= FILL) || pc == SET_BUSY;
}

/* One step of thread i. false: it cannot move, or would only look again at the same. */
static bool step(struct state *s, int i)
{
	struct thread *t = &s->threads[i];

	switch (t->pc) {
	case LOOK:
		if (i == STRAY) {
			if (s->pte || (s->writer && without != NO_LOCK_IN_FAULT))
				return false;
			s->readers += without != NO_LOCK_IN_FAULT;
			t->pc = STRAY_FAULT;
			return true;
		}
		t->state = s->word;
		t->generation = s->word_generation;
		if (s->word == KVTIER_WORD_CLEAN)
			t->pc = i == RECLAIM ? TRY_LOCK : HOLD;
		else if (s->word == KVTIER_WORD_FREE && i < RELEASER)
			t->pc = LOOK_MEMORY;
		else
			return false;
		return true;
	case HOLD:
		if (!word_is(s, t) && without != NO_CAS_BY_USER) {
			t->pc = LOOK;
			return true;
		}
		s->word = KVTIER_WORD_HELD;
		s->word_generation = t->generation;
		t->pc = i == RELEASER ? LOCK_RELEASE : TOUCH;
		return true;
	case TOUCH:
	case FILL_TOUCH:
		if (s->pte) {
			t->pc = t->pc == TOUCH ? READ : FILL;
			return true;
		}
		if (without != NO_LOCK_IN_FAULT) {
			if (s->writer)
				return false;
			s->readers++;
		}
		t->pc = t->pc == TOUCH ? FAULT : FILL_FAULT;
		return true;
	case FAULT:
	case FILL_FAULT:
		if (!s->memory)
			bad("a held frame has no memory");
		t->state = s->page; /* the page that will be mapped */
		t->pc = t->pc == FAULT ? MAP : FILL_MAP;
		return true;
	case MAP:
	case FILL_MAP:
		s->pte = t->state + 1;
		if (without != NO_LOCK_IN_FAULT)
			s->readers--;
		t->pc = t->pc == MAP ? READ : FILL;
		return true;
	case READ:
	case FILL:
		if (!s->memory || s->pte != s->page + 1)
			bad("what is touched is not the frame's memory");
		if (t->pc == READ && !s->content)
			bad("a held frame's content is lost");
		if (t->pc == FILL)
			s->content = 1;
		t->pc = LET_GO;
		return true;
	case LET_GO:
		if (s->word != KVTIER_WORD_HELD)
			bad("a held frame was taken");
		s->word = KVTIER_WORD_CLEAN;
		t->pc = LOOK;
		return true;

	case LOOK_MEMORY:
		t->pc = s->memory ? LOOK : LOCK;
		return true;
	case LOCK:
		if (s->writer || s->readers)
			return false;
		s->writer = i + 1;
		t->pc = without == WORD_BEFORE_MEMORY ? SET_HELD : INSTALL;
		return true;
	case INSTALL:
		if (s->memory && without != NO_RECHECK) {
			s->writer = 0;
			t->pc = LOOK;
			return true;
		}
		if (s->memory)
			bad("a frame got memory twice");
		s->memory = 1;
		s->page = s->generation;
		s->content = 0;
		t->pc = without == WORD_BEFORE_MEMORY ? UNLOCK : SET_HELD;
		return true;
	case SET_HELD:
		s->word = KVTIER_WORD_HELD;
		s->word_generation = s->generation;
		t->pc = without == WORD_BEFORE_MEMORY ? INSTALL : UNLOCK;
		/* Whoever believes the word may touch from here on. */
		if (!s->memory)
			bad("a word says HELD before there is memory");
		return true;
	case UNLOCK:
		s->writer = 0;
		t->pc = FILL_TOUCH;
		return true;

	case TRY_LOCK:
		if (s->writer || s->readers) {
			t->pc = LOOK;
			return true;
		}
		s->writer = i + 1;
		t->pc = CLAIM;
		return true;
	case CLAIM:
		if (!s->memory || (!word_is(s, t) && without != NO_CAS_BY_KERNEL)) {
			s->writer = 0;
			t->pc = LOOK;
			return true;
		}
		s->word = KVTIER_WORD_BUSY;
		t->pc = ZAP;
		return true;
	case ZAP:
		if (without != NO_ZAP)
			s->pte = 0;
		t->pc = DROP;
		return true;
	case DROP:
		s->memory = s->content = 0;
		s->generation = (s->generation + 1) % GENERATIONS;
		t->pc = SET_FREE;
		return true;
	case SET_FREE:
		s->word = KVTIER_WORD_FREE;
		s->word_generation = s->generation;
		t->pc = UNLOCK_FREE;
		return true;
	case UNLOCK_FREE:
		s->writer = 0;
		t->pc = LOOK;
		return true;

	case STRAY_FAULT:
		t->state = s->page;
		t->pc = s->memory ? STRAY_MAP : LOOK; /* SIGBUS, which it earned */
		s->readers -= !s->memory && without != NO_LOCK_IN_FAULT;
		return true;
	case STRAY_MAP:
		s->pte = t->state + 1;
		s->readers -= without != NO_LOCK_IN_FAULT;
		t->pc = LOOK;
		return true;

	case LOCK_RELEASE:
		if (s->writer || s->readers)
			return false;
		s->writer = i + 1;
		t->pc = SET_BUSY;
		return true;
	case SET_BUSY:
		s->word = KVTIER_WORD_BUSY;
		t->pc = ZAP;
		return true;
	}
	return false;
}

static void check_state(const struct state *s)
{
	int holders = 0;

	for (int i = 0; i < THREADS; i++)
		holders += has_frame(i, s->threads[i].pc);
	if (holders > 1)
		bad("two have the frame");
	if (!s->writer && s->pte && (!s->memory || s->pte != s->page + 1))
		bad("a mapping keeps pages that the frame has lost");
	if (!s->writer && !holders) {
		if (s->word == KVTIER_WORD_FREE && s->memory)
			bad("memory is lost: FREE, but present");
		if (s->word == KVTIER_WORD_CLEAN && (!s->memory || !s->content))
			bad("content is lost: CLEAN, but not there");
		if (s->word == KVTIER_WORD_BUSY)
			bad("BUSY, and nobody works on it");
	}
}

static uint64_t pack(const struct state *s)
{
	uint64_t key = s->word | s->word_generation << 2 | s->memory << 4 | s->page << 5 | s->content << 7 | s->pte << 8 |
		       s->generation << 11 | s->writer << 13 | s->readers << 16;

	for (int i = 0; i < THREADS; i++) {
		const struct thread *t = &s->threads[i];
		/* What it saw matters only until it is used. */
		bool saw = t->pc == HOLD || t->pc == TRY_LOCK || t->pc == CLAIM || t->pc == MAP || t->pc == FILL_MAP ||
			   t->pc == STRAY_MAP;

		key |= (uint64_t)(t->pc | (saw ? t->state << 5 | t->generation << 7 : 0)) << (19 + 9 * i);
	}
	return key;
}

/* A set of keys; a key is stored plus one, so that zero is an empty place. */
static uint64_t *seen;
static size_t seen_size, seen_n;

static bool insert(uint64_t key)
{
	size_t at = (key * 0x9e3779b97f4a7c15ull) >> 20 & (seen_size - 1);

	for (; seen[at]; at = (at + 1) & (seen_size - 1))
		if (seen[at] == key + 1)
			return false;
	seen[at] = key + 1;
	seen_n++;
	ck_assert_uint_lt(seen_n, seen_size / 2);
	return true;
}

/* Returns the number of states, or 0 with a violation. */
static size_t explore(enum guard guard)
{
	struct state *stack, s, next;
	size_t depth = 0;

	seen_size = 1 << 22;
	seen_n = 0;
	seen = calloc(seen_size, sizeof(*seen));
	stack = malloc(seen_size * sizeof(*stack));
	ck_assert(seen && stack);
	violation = NULL;
	without = guard;
	memset(&s, 0, sizeof(s));
	insert(pack(&s));
	stack[depth++] = s;
	while (depth && !violation) {
		bool moved = false;

		s = stack[--depth];
		check_state(&s);
		for (int i = 0; i < THREADS; i++) {
			next = s;
			if (!step(&next, i))
				continue;
			moved = true;
			if (insert(pack(&next)))
				stack[depth++] = next;
		}
		if (!moved)
			bad("nobody can move");
	}
	free(stack);
	free(seen);
	return violation ? 0 : seen_n;
}

START_TEST(holds)
{
	size_t n = explore(ALL);

	ck_assert_msg(n, "%s", violation ? violation : "");
	/* It did explore: generations come round, and every thread got everywhere. */
	ck_assert_uint_gt(n, 1000);
}
END_TEST

START_TEST(needs_each_guard)
{
	ck_assert_msg(!explore(_i), "the model does not notice that guard %d is missing", _i);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("reclaim_model");
	TCase *tcase = tcase_create("model");
	SRunner *runner;
	int failed;

	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, holds);
	tcase_add_loop_test(tcase, needs_each_guard, ALL + 1, GUARDS);
	suite_add_tcase(suite, tcase);
	runner = srunner_create(suite);
	srunner_run_all(runner, CK_NORMAL);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed != 0;
}
