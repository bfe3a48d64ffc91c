# SPDX-License-Identifier: MIT
# The kernel module: installed through DKMS, tested in virtual machines.

VM_KERNELS  ?= 6.1 6.12 7.3
VM_TEST_SRC := $(filter-out tests/vm/vt.c,$(wildcard tests/vm/*.c))
VM_TEST_BIN := $(patsubst tests/vm/%.c,$(BUILD)/tests/vm/%,$(VM_TEST_SRC))

# For guests: static, so that they need nothing there.
$(BUILD)/tests/vm/%: tests/vm/%.c tests/vm/vt.c tests/vm/vt.h include/uapi/linux/kvtier.h
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -O2 -g $(WARN) -D_GNU_SOURCE -Iinclude/uapi -static -pthread -o $@ $< tests/vm/vt.c -luring

.PHONY: vm-tests check-vm check-kasan
vm-tests: $(VM_TEST_BIN)

check-vm: vm-tests ## test the module in virtual machines with Debian's kernels (fetched at the first call)
	scripts/vm/check $(VM_KERNELS)

check-kasan: vm-tests ## the same with KASAN, lockdep, kmemleak and fault injection (the kernel is built at the first call)
	scripts/vm/check debug
