# SPDX-License-Identifier: MIT
# kvtier: `make help` lists the targets. Everything is built under $(BUILD).
# The kernel's make reads Kbuild, never this file; this file builds user space.

VERSION := $(shell awk '/^.define KVT_VERSION_/ { v = v s $$3; s = "." } END { print v }' include/kvtier.h)
SOMAJOR := 0
SAN     ?=
BUILD   ?= build$(if $(SAN),/$(SAN))
CC      ?= cc
# V=1 shows the commands.
Q       := $(if $(V),,@)
say      = @echo "  $(1)	$(patsubst $(BUILD)/%,%,$@)"
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
else ifeq ($(SAN),fuzz)
SANFLAGS := -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
# Vector code parses nothing, and takes minutes to compile when instrumented.
SIMD_SAN := -fno-sanitize=all
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
TOOL_ALL := $(wildcard userspace/tools/*.c)
TOOL_SIMD := $(filter %.simd.c,$(TOOL_ALL))
TOOL_SRC := $(filter-out %.simd.c,$(TOOL_ALL))

simd_objs = $(foreach i,$(ISAS),$(patsubst %.simd.c,$(BUILD)/obj/%.$(i).o,$(1)))
objs      = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))

LIB_OBJ  := $(call objs,$(LIB_SRC)) $(call simd_objs,$(LIB_SIMD))
REF_OBJ  := $(call objs,$(REF_SRC)) $(call simd_objs,$(REF_SIMD))
TOOL_OBJ := $(call objs,$(TOOL_SRC)) $(call simd_objs,$(TOOL_SIMD))
MAIN_OBJ := $(BUILD)/obj/userspace/tools/main.o

# The llama.cpp plug-in needs ggml's public headers, of libggml-dev: the system's, or those of scripts/llama/fetch.
LLAMA_CACHE  ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvtier/llama
GGML_INCLUDE ?= $(patsubst %/ggml-backend.h,%,$(firstword $(wildcard \
		/usr/include/ggml-backend.h $(LLAMA_CACHE)/*/usr/include/ggml-backend.h)))
PLUGIN_SHIM  := $(call objs,userspace/engines/ggml/shim.c)
PLUGIN_OBJ   := $(call objs,$(wildcard userspace/engines/ggml/*.c))
PLUGIN       := $(if $(GGML_INCLUDE),$(BUILD)/libggml-kvtier.so)

# A test is one file and one program; tests/lib is what they share (and the mock GPU).
TESTLIB_OBJ := $(call objs,$(wildcard tests/lib/*.c) userspace/gpu/mock.c)
TEST_SRC    := $(wildcard tests/unit/*.c tests/conformance/*.c tests/gpu/*.c)
TEST_BIN    := $(patsubst tests/%.c,$(BUILD)/tests/%,$(TEST_SRC))
CHECK_LIBS  := $(shell pkg-config --libs check 2>/dev/null || echo -lcheck)

FUZZ_SRC    := $(wildcard tests/fuzz/*.c)
FUZZ_BIN    := $(patsubst tests/%.c,$(BUILD)/%,$(FUZZ_SRC))

.PHONY: all lib tests fuzzers
all: lib $(BUILD)/kvtier plugin ## build the library, the command and, with ggml's headers, the plug-in (the default)

lib: $(BUILD)/libkvtier.a $(BUILD)/libkvtier.so.$(SOMAJOR) ## build the library alone

tests: $(TEST_BIN)
fuzzers: $(FUZZ_BIN)

$(BUILD)/libkvtier.a: $(LIB_OBJ)
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/libkvtier.so.$(SOMAJOR): $(LIB_OBJ) userspace/libkvtier.map
	$(call say,LD)
	$(Q)$(CC) -shared -Wl,-soname,libkvtier.so.$(SOMAJOR) -Wl,--version-script=userspace/libkvtier.map \
		$(CFLAGS) $(LDFLAGS) -o $@ $(LIB_OBJ) $(LIBS)
	$(Q)ln -sf libkvtier.so.$(SOMAJOR) $(BUILD)/libkvtier.so

.PHONY: plugin
plugin: $(PLUGIN) ## build the llama.cpp plug-in alone
ifeq ($(PLUGIN),)
	@echo "  SKIP	libggml-kvtier.so: ggml-backend.h is nowhere: install libggml-dev, or run scripts/llama/fetch"
endif

# Alone in a directory: those beside them are another libc's.
$(BUILD)/ggml/ggml.h: $(GGML_INCLUDE)/ggml.h
	@mkdir -p $(@D)
	$(Q)ln -sf $(GGML_INCLUDE)/ggml*.h $(@D)/

$(PLUGIN_SHIM): $(BUILD)/ggml/ggml.h
$(PLUGIN_SHIM): override CPPFLAGS += -isystem $(BUILD)/ggml
$(PLUGIN_OBJ): override CFLAGS += -fvisibility=hidden

$(BUILD)/libkvtggml.a: $(filter-out $(PLUGIN_SHIM),$(PLUGIN_OBJ))
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/libggml-kvtier.so: $(PLUGIN_SHIM) $(BUILD)/libkvtggml.a $(BUILD)/libkvtier.a
	$(call say,LD)
	$(Q)$(CC) -shared -Wl,--exclude-libs,ALL -Wl,-z,defs $(CFLAGS) $(LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/libkvtref.a: $(REF_OBJ)
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/libkvttest.a: $(TESTLIB_OBJ)
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/libkvttools.a: $(filter-out $(MAIN_OBJ),$(TOOL_OBJ))
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/kvtier: $(TOOL_OBJ) $(BUILD)/libkvtref.a $(BUILD)/libkvtier.a
	$(call say,LD)
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ $(LIBS)

TEST_LIBS := $(patsubst %,$(BUILD)/libkvt%.a,test tools ggml ref ier)
$(BUILD)/tests/%: $(BUILD)/obj/tests/%.o $(TEST_LIBS)
	@mkdir -p $(@D)
	$(call say,LD)
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $< -Wl,--start-group $(TEST_LIBS) -Wl,--end-group $(CHECK_LIBS) $(LIBS)

# SAN=fuzz CC=clang; scripts/check runs them.
$(BUILD)/fuzz/%: $(BUILD)/obj/tests/fuzz/%.o $(TEST_LIBS)
	@mkdir -p $(@D)
	$(call say,LD)
	$(Q)$(CC) $(CFLAGS) -fsanitize=fuzzer $(LDFLAGS) -o $@ $< -Wl,--start-group $(TEST_LIBS) -Wl,--end-group $(LIBS)

$(BUILD)/obj/tests/%.o: override CPPFLAGS += -Itests

define simd_rule
$$(BUILD)/obj/%.$(1).o: %.simd.c
	@mkdir -p $$(@D)
	$$(call say,CC)
	$$(Q)$$(CC) $$(CPPFLAGS) -DKVT_ISA=$(1) -DKVT_ISA_$(1)=1 $$(CFLAGS) $$(SIMD_SAN) $$(ISA_$(1)) -MMD -MP -c -o $$@ $$<
endef
$(foreach i,$(ISAS),$(eval $(call simd_rule,$(i))))

$(BUILD)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c -o $@ $<

-include $(patsubst %.o,%.d,$(LIB_OBJ) $(REF_OBJ) $(TOOL_OBJ) $(PLUGIN_OBJ) $(TESTLIB_OBJ) $(call objs,$(TEST_SRC) $(FUZZ_SRC)))
.SECONDARY:

# ---- what people type -------------------------------------------------------

export BUILD

.PHONY: demo demo-llama check check-plain check-asan check-tsan fuzz lint bench kmod clean help
demo: ## install what is missing, build, answer a 32K prompt with 1/12 of its cache in memory
	@scripts/demo

demo-llama: ## the same question to Debian's llama.cpp, by itself and with its KV cache in tiers
	@scripts/demo-llama

check: ## install what is missing, build, run every test that this machine can run
	@scripts/check plain asan tsan kasan vm fuzz lint

check-plain: ## the tests alone, without sanitizers; ONLY=PATTERN picks some
	@scripts/check plain

check-asan: ## the tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/check asan

check-tsan: ## the tests under ThreadSanitizer
	@scripts/check tsan

fuzz: ## each fuzz target for KVT_FUZZ_SECONDS (10; 60 in CI)
	@scripts/check fuzz

lint: ## warnings of both compilers, sparse, style, symbols, shell, man pages, spelling
	@scripts/check lint

bench: $(BUILD)/kvtier ## measure this machine
	$(BUILD)/kvtier bench

-include scripts/kernels.mk scripts/kmod.mk

# The module is built in a copy, so that the source tree stays clean.
KDIR ?= /lib/modules/$(shell uname -r)/build
kmod: ## build kvtier.ko for the kernel at KDIR (default: the running one)
	@test -e $(KDIR)/Makefile || { echo "kmod: no kernel headers at $(KDIR). On Debian and Ubuntu:" \
		"sudo apt-get install linux-headers-$$(uname -r); or KDIR=DIR for another kernel" >&2; exit 1; }
	@mkdir -p $(BUILD)/kmod
	cp -Rpu Kbuild kmod include $(BUILD)/kmod/
	$(MAKE) -C $(KDIR) M=$(abspath $(BUILD))/kmod modules

clean: ## remove what was built
	rm -rf $(BUILD)

# ---- installation -----------------------------------------------------------

prefix       ?= /usr/local
bindir       ?= $(prefix)/bin
libdir       ?= $(prefix)/lib
includedir   ?= $(prefix)/include
mandir       ?= $(prefix)/share/man
pkgconfigdir ?= $(libdir)/pkgconfig
MAN          := $(wildcard docs/man/*.[1-9])
HEADERS      := $(wildcard include/*.h)

.PHONY: install uninstall
install: all ## install command, library, headers, pkg-config file and man pages under DESTDIR and prefix
	install -d $(addprefix $(DESTDIR),$(bindir) $(libdir) $(includedir) $(pkgconfigdir))
	install $(BUILD)/kvtier $(DESTDIR)$(bindir)/
	install -m 644 $(HEADERS) $(DESTDIR)$(includedir)/
	install -m 644 $(BUILD)/libkvtier.a $(DESTDIR)$(libdir)/
	install $(BUILD)/libkvtier.so.$(SOMAJOR) $(DESTDIR)$(libdir)/libkvtier.so.$(VERSION)
	ln -sf libkvtier.so.$(VERSION) $(DESTDIR)$(libdir)/libkvtier.so.$(SOMAJOR)
	ln -sf libkvtier.so.$(SOMAJOR) $(DESTDIR)$(libdir)/libkvtier.so
	$(if $(PLUGIN),install $(PLUGIN) $(DESTDIR)$(libdir)/)
	sed -e 's|@prefix@|$(prefix)|' -e 's|@libdir@|$(patsubst $(prefix)/%,$${prefix}/%,$(libdir))|' \
		-e 's|@includedir@|$(patsubst $(prefix)/%,$${prefix}/%,$(includedir))|' -e 's|@version@|$(VERSION)|' \
		userspace/kvtier.pc.in >$(DESTDIR)$(pkgconfigdir)/kvtier.pc
	scripts/install-man $(DESTDIR)$(mandir) $(MAN)
	@if [ -z "$(DESTDIR)" ] && [ "$$(id -u)" = 0 ]; then ldconfig; fi

uninstall: ## remove what install put there
	scripts/install-man --remove $(DESTDIR)$(mandir) $(MAN)
	rm -f $(DESTDIR)$(bindir)/kvtier $(DESTDIR)$(pkgconfigdir)/kvtier.pc
	rm -f $(patsubst include/%,$(DESTDIR)$(includedir)/%,$(HEADERS))
	rm -f $(DESTDIR)$(libdir)/libggml-kvtier.so
	rm -f $(addprefix $(DESTDIR)$(libdir)/libkvtier.,a so so.$(SOMAJOR) so.$(VERSION))
	@if [ -z "$(DESTDIR)" ] && [ "$$(id -u)" = 0 ]; then ldconfig; fi

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
