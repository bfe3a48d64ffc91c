# SPDX-License-Identifier: MIT
# The kernel module: installed through DKMS, tested in virtual machines.

VM_KERNELS  ?= 6.1 6.12 7.3
VM_TEST_SRC := $(filter-out tests/vm/vt.c,$(wildcard tests/vm/*.c))
VM_TEST_BIN := $(patsubst tests/vm/%.c,$(BUILD)/tests/vm/%,$(VM_TEST_SRC))

# For guests: static, so that they need nothing there.
$(VM_TEST_BIN): $(BUILD)/tests/vm/%: tests/vm/%.c tests/vm/vt.c tests/vm/vt.h include/uapi/linux/kvtier.h
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) -std=gnu11 -O2 -g $(WARN) -D_GNU_SOURCE -Iinclude/uapi -static -pthread -o $@ $< tests/vm/vt.c -luring

# Engines of the tests: with the library.
VM_ENGINES := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/vm/engine/*.c))
-include $(patsubst $(BUILD)/%,$(BUILD)/obj/%.d,$(VM_ENGINES))
$(BUILD)/tests/vm/engine/%: $(BUILD)/obj/tests/vm/engine/%.o $(BUILD)/libkvtref.a $(BUILD)/libkvtier.a
	@mkdir -p $(@D)
	$(call say,LD)
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $< $(BUILD)/libkvtref.a $(BUILD)/libkvtier.a $(LIBS)

.PHONY: vm-tests check-vm check-kasan
vm-tests: $(VM_TEST_BIN) $(VM_ENGINES) $(BUILD)/kvtier $(BUILD)/tests/conformance/host

check-vm: vm-tests ## test the module in virtual machines with Debian's kernels (fetched at the first call)
	scripts/vm/check long $(VM_KERNELS)

check-kasan: vm-tests ## the same with KASAN, lockdep, kmemleak and fault injection (the kernel is built at the first call)
	scripts/vm/check long debug

DKMS_SRC   := $(DESTDIR)/usr/src/kvtier-$(VERSION)
DKMS_FILES := /etc/udev/rules.d/60-kvtier.rules /etc/modules-load.d/kvtier.conf

.PHONY: install-dkms uninstall-dkms
install-dkms: ## build kvtier.ko for this machine's kernels and install it, with its udev rule and group (as root); DESTDIR: files alone
	@test -n "$(DESTDIR)" || command -v dkms >/dev/null || \
		{ echo "install-dkms: sudo apt-get install dkms linux-headers-$$(uname -r)" >&2; exit 1; }
	@grep -q 'PACKAGE_VERSION="$(VERSION)"' dkms.conf && grep -q 'MODULE_VERSION("$(VERSION)")' kmod/main.c || \
		{ echo "install-dkms: dkms.conf or kmod/main.c is not of version $(VERSION)" >&2; exit 1; }
	rm -rf $(DKMS_SRC)
	install -d $(DKMS_SRC)/kmod $(DKMS_SRC)/include/uapi/linux
	install -m 644 Kbuild dkms.conf $(DKMS_SRC)/
	install -m 644 kmod/*.[ch] $(DKMS_SRC)/kmod/
	install -m 644 include/uapi/linux/kvtier.h $(DKMS_SRC)/include/uapi/linux/
	install -D -m 644 kmod/dist/60-kvtier.rules $(DESTDIR)/etc/udev/rules.d/60-kvtier.rules
	install -D -m 644 kmod/dist/modules-load.conf $(DESTDIR)/etc/modules-load.d/kvtier.conf
	test -e $(DESTDIR)/etc/modprobe.d/kvtier.conf || \
		install -D -m 644 kmod/dist/modprobe.conf $(DESTDIR)/etc/modprobe.d/kvtier.conf
ifeq ($(DESTDIR),)
	getent group kvtier >/dev/null || groupadd --system kvtier
	dkms status -m kvtier -v $(VERSION) | grep -q . && dkms remove -m kvtier -v $(VERSION) --all || true
	dkms add -m kvtier -v $(VERSION)
	dkms install -m kvtier -v $(VERSION)
	udevadm control --reload || true
	modprobe kvtier
endif

uninstall-dkms: ## unload the module and remove what install-dkms installed; the group stays (as root)
ifeq ($(DESTDIR),)
	! test -e /sys/module/kvtier || modprobe -r kvtier
	dkms status -m kvtier -v $(VERSION) | grep -q . && dkms remove -m kvtier -v $(VERSION) --all || true
endif
	rm -rf $(DKMS_SRC) $(addprefix $(DESTDIR),$(DKMS_FILES) /etc/modprobe.d/kvtier.conf)
