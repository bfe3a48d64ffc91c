# SPDX-License-Identifier: MIT
# CUDA kernels: one fatbin of all kernels/*.cu, with machine code for each GPU family and PTX for later ones.

NVCC       ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
NVCC_FLAGS ?= -O3 -std=c++17 --threads 0
KERNEL_SM  ?= 80 86 89 90a 100 120
KERNELS    := $(wildcard kernels/*.cu)
FATBIN     := $(BUILD)/kernels/kvtier.fatbin

# What this nvcc knows (80 to 90 since CUDA 11.8, 100 and 120 since 12.8).
kernel_sm   = $(foreach s,$(KERNEL_SM),$(if $(filter sm_$(s:a=),$(shell $(NVCC) --list-gpu-code)),$(s)))
kernel_code = $(foreach s,$(kernel_sm),-gencode arch=compute_$(s),code=sm_$(s)) -gencode arch=compute_80,code=compute_80

.PHONY: kernels
ifneq ($(NVCC),)
kernels: $(FATBIN) $(BUILD)/kernels/gpu_check ## compile the CUDA kernels (needs nvcc), and the program that checks them
else
kernels:
	@echo "kernels: nvcc is not installed, so no CUDA kernels are built. Everything else works: the gpu tier then"
	@echo "lives on the cpu backend. To build them: CUDA 11.8 or later (12.8 for sm_100, sm_120), or NVCC=/path/to/nvcc."
endif

# One translation unit: a fatbin is made of one.
$(BUILD)/kernels/kvtier.cu: $(KERNELS)
	@mkdir -p $(@D)
	$(Q)for k in $(KERNELS); do echo "#include \"$$k\""; done > $@

$(FATBIN): $(BUILD)/kernels/kvtier.cu $(wildcard kernels/*.cuh) userspace/gpu/kernels.h
	$(call say,NVCC)
	$(Q)$(NVCC) $(NVCC_FLAGS) -I. -Ikernels -Iuserspace $(kernel_code) -fatbin -o $@ $<
	$(Q)echo '"$(strip $(kernel_sm:%=sm_%) compute_80)"' > $@.archs

# Once made, or being made, they are part of the library, and kept up to date with it.
ifneq ($(wildcard $(FATBIN))$(if $(NVCC),$(filter kernels carry,$(MAKECMDGOALS))),)
FATBIN_OBJ := $(BUILD)/obj/userspace/gpu/fatbin.o
$(FATBIN_OBJ): override CPPFLAGS += -DKVT_FATBIN='"$(abspath $(FATBIN))"' -DKVT_FATBIN_ARCHS='"$(abspath $(FATBIN)).archs"'
$(FATBIN_OBJ): $(FATBIN)
endif

# Programs to carry to a machine with a GPU that has the C library and the driver and nothing else of what they need.
CARRY       := $(BUILD)/carry
CARRY_LIBS  := -Wl,-Bstatic -luring -ljansson -lnuma -lcheck_pic -lsubunit -Wl,-Bdynamic -lm -lrt -ldl -pthread
CARRY_TESTS := conformance/gpu conformance/run_gpu unit/store_gpu unit/cache_gpu unit/gpu_engine gpu/two_gpus
.PHONY: carry
carry: $(CARRY)/kvtier $(patsubst %,$(CARRY)/%,$(notdir $(CARRY_TESTS))) ## programs for a bare machine with a GPU

$(CARRY)/kvtier: $(TOOL_OBJ) $(BUILD)/libkvtref.a $(BUILD)/libkvtier.a
	@mkdir -p $(@D)
	$(call say,LD)
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -s -o $@ $^ $(CARRY_LIBS)

define carry_test
$(CARRY)/$(notdir $(1)): $(BUILD)/obj/tests/$(1).o $(TEST_LIBS)
	@mkdir -p $$(@D)
	$$(call say,LD)
	$$(Q)$$(CC) $$(CFLAGS) $$(LDFLAGS) -s -o $$@ $$< -Wl,--start-group $(TEST_LIBS) -Wl,--end-group $(CARRY_LIBS)
endef
$(foreach t,$(CARRY_TESTS),$(eval $(call carry_test,$(t))))

# The check as a program that needs nothing but the C library and the driver, to carry to a machine with a GPU.
$(BUILD)/kernels/gpu_check: $(BUILD)/obj/tests/gpu/gpu_check.o $(BUILD)/libkvttest.a $(BUILD)/libkvtier.a
	@mkdir -p $(@D)
	$(call say,LD)
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -o $@ $^ -Wl,--as-needed $(LIBS) -ldl
