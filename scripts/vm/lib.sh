# SPDX-License-Identifier: MIT
# What the scripts of the virtual-machine rig share: where kernels are kept and what they are called.
# shellcheck shell=bash

set -euo pipefail

VM_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TREE=$(cd "$VM_DIR/../.." && pwd)
# Kernels are large and slow to make: kept outside the tree and shared by all checkouts.
CACHE=${KVT_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvtier/vm}
BUILD=${BUILD:-$TREE/build}
# shellcheck disable=SC2034
STOCK_KERNELS="6.1 6.12 7.3"

die() { echo "${0##*/}: $*" >&2; exit 1; }

# The cache of one kernel holds: root/ (unpacked packages), release, vmlinuz, modules, headers (links).
kernel_dir() { echo "$CACHE/$1"; }

need_kernel() {
	[ -e "$(kernel_dir "$1")/done" ] || die "kernel $1 is not in $CACHE: scripts/vm/fetch $1"
}
