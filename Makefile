# SPDX-License-Identifier: MIT
# kvtier: `make help` lists the targets. Everything is built under $(BUILD).

VERSION := 0.1.0
SOMAJOR := 0
SAN     ?=
BUILD   ?= build$(if $(SAN),/$(SAN))
CC      ?= cc
prefix  ?= /usr/local
ARCH    := $(shell $(CC) -dumpmachine | cut -d- -f1)

CFLAGS   ?= -O2 -g
WARN     := -Wall -Wextra -Werror -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla
# -ffp-contract=off: what is fused is written as fma; the bits do not depend on the compiler.
override CFLAGS += -std=gnu11 $(WARN) -ffp-contract=off -fno-math-errno -fPIC -pthread
override CPPFLAGS += -Iinclude -Iuserspace -D_GNU_SOURCE

ifeq ($(SAN),asan)
SANFLAGS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
else ifeq ($(SAN),tsan)
SANFLAGS := -fsanitize=thread -fno-omit-frame-pointer
endif
override CFLAGS += $(SANFLAGS)

LIBS := $(shell pkg-config --libs liburing jansson 2>/dev/null) -lnuma -lm -pthread

# One source, compiled once for each instruction set the machine's family has.
ISAS_x86_64  := portable avx2 avx512
ISAS_aarch64 := portable neon
ISAS         := $(or $(ISAS_$(ARCH)),portable)
ISA_avx2     := -mavx2 -mfma -mf16c
ISA_avx512   := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl

LIB_DIRS := base host gpu codec store policy cache attention runtime
LIB_ALL  := $(foreach d,$(LIB_DIRS),$(wildcard userspace/$(d)/*.c))
LIB_SIMD := $(filter %.simd.c,$(LIB_ALL))
LIB_SRC  := $(filter-out %.simd.c userspace/gpu/mock.c,$(LIB_ALL))
REF_ALL  := $(wildcard userspace/engines/ref/*.c)
REF_SIMD := $(filter %.simd.c,$(REF_ALL))
REF_SRC  := $(filter-out %.simd.c,$(REF_ALL))
TOOL_SRC := $(wildcard userspace/tools/*.c)

simd_objs = $(foreach i,$(ISAS),$(patsubst %.simd.c,$(BUILD)/obj/%.$(i).o,$(1)))
objs      = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))

LIB_OBJ  := $(call objs,$(LIB_SRC)) $(call simd_objs,$(LIB_SIMD))
REF_OBJ  := $(call objs,$(REF_SRC)) $(call simd_objs,$(REF_SIMD))
TOOL_OBJ := $(call objs,$(TOOL_SRC))

# A test is one file and one program; tests/lib is what they share (and the mock GPU).
TESTLIB_OBJ := $(call objs,$(wildcard tests/lib/*.c) userspace/gpu/mock.c)
TEST_SRC    := $(wildcard tests/unit/*.c tests/conformance/*.c)
TEST_BIN    := $(patsubst tests/%.c,$(BUILD)/tests/%,$(TEST_SRC))
CHECK_LIBS  := $(shell pkg-config --libs check 2>/dev/null || echo -lcheck)

.PHONY: all lib tests help
all: lib $(BUILD)/kvtier

lib: $(BUILD)/libkvtier.a $(BUILD)/libkvtier.so.$(SOMAJOR)

tests: $(TEST_BIN)

$(BUILD)/libkvtier.a: $(LIB_OBJ)
	rm -f $@ && ar rcs $@ $^

$(BUILD)/libkvtier.so.$(SOMAJOR): $(LIB_OBJ) userspace/libkvtier.map
	$(CC) -shared -Wl,-soname,libkvtier.so.$(SOMAJOR) -Wl,--version-script=userspace/libkvtier.map \
		$(CFLAGS) $(LDFLAGS) -o $@ $(LIB_OBJ) $(LIBS)
	ln -sf libkvtier.so.$(SOMAJOR) $(BUILD)/libkvtier.so

$(BUILD)/libkvtref.a: $(REF_OBJ)
	rm -f $@ && ar rcs $@ $^

$(BUILD)/libkvttest.a: $(TESTLIB_OBJ)
	rm -f $@ && ar rcs $@ $^

$(BUILD)/kvtier: $(TOOL_OBJ) $(BUILD)/libkvtref.a $(BUILD)/libkvtier.a
	$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/tests/%: $(BUILD)/obj/tests/%.o $(BUILD)/libkvttest.a $(BUILD)/libkvtref.a $(BUILD)/libkvtier.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $< $(BUILD)/libkvttest.a $(BUILD)/libkvtref.a $(BUILD)/libkvttest.a $(BUILD)/libkvtier.a $(CHECK_LIBS) $(LIBS)

$(BUILD)/obj/tests/%.o: override CPPFLAGS += -Itests

define simd_rule
$$(BUILD)/obj/%.$(1).o: %.simd.c
	@mkdir -p $$(@D)
	$$(CC) $$(CPPFLAGS) -DKVT_ISA=$(1) -DKVT_ISA_$(1)=1 $$(CFLAGS) $$(ISA_$(1)) -MMD -MP -c -o $$@ $$<
endef
$(foreach i,$(ISAS),$(eval $(call simd_rule,$(i))))

$(BUILD)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

-include $(patsubst %.o,%.d,$(LIB_OBJ) $(REF_OBJ) $(TOOL_OBJ) $(TESTLIB_OBJ) $(call objs,$(TEST_SRC)))
.SECONDARY:
